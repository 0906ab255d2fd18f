"""What the assembly of ``wgmma_sdpa`` computes, in Triton's interpreter, where ``ptx`` runs it; on a card its tests are
in ``test_splitk_sdpa``.
"""

import pytest
import torch
from card import INTERPRETED

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
from ptx import assembly_runs
from torch import Tensor
from triton.runtime.errors import InterpreterError

from eyas.kernels import wgmma_sdpa

SCALE = 0.05
SHARED_BYTES = wgmma_sdpa.QUERY_BYTES + 2 * wgmma_sdpa.TURN_BYTES


def problem(heads: int, kv_heads: int, rows: int, last: int, size: int) -> tuple[Tensor, ...]:
    """Queries at the positions up to ``last``, and caches of ``size`` rows that hold rubbish after it."""
    options = {"generator": torch.Generator().manual_seed(rows + last)}
    q = torch.randn(1, rows, heads, 512, **options).bfloat16().transpose(1, 2)
    k, v = (torch.randn(1, kv_heads, size, 512, **options).bfloat16() for _ in range(2))
    k[:, :, last + 1 :], v[:, :, last + 1 :] = float("nan"), float("inf")
    return q, k, v, torch.arange(last + 1 - rows, last + 1)


def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, splits: int = 1) -> Tensor:
    """float64 ``[H, M, 512]`` of the sums that a kernel stores for the splits of a key head."""
    heads, rows, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    sums, state = (
        torch.full((splits, heads, rows, 512), float("nan")),
        torch.full((2, splits, heads, rows), float("nan")),
    )
    with assembly_runs(q, k, v, dynamic=SHARED_BYTES):
        wgmma_sdpa.wide_kernel[(-(-rows * heads // kv_heads // 64), splits, kv_heads)](
            q, k, v, positions, sums, state, rows, q.stride(1), q.stride(2), SCALE * 1.4426950408889634,
            HEADS=heads, KV_HEADS=kv_heads, L=k.shape[2], SPLITS=splits, num_warps=wgmma_sdpa.WARPS,
        )  # fmt: skip
    turns = int(positions.max()) // wgmma_sdpa.KEYS + 1
    sums, (highest, weights) = (
        sums[:turns].double(),
        state[:, :turns].double(),
    )  # further ones have none, and store none
    share = (highest - highest.amax(0)).exp2()
    return (sums * share[..., None]).sum(0) / (weights * share).sum(0)[..., None]


def exact(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    live = int(positions.max()) + 1
    group = q.shape[1] // k.shape[1]
    k, v = (t[:, :, :live].double().repeat_interleave(group, 1) for t in (k, v))
    seen = torch.arange(live) <= positions[:, None]
    return (q.double() @ k.transpose(-1, -2) * SCALE).masked_fill(~seen, float("-inf")).softmax(-1)[0] @ v[0]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "last", "size", "number"),
    [
        (8, 1, 5, 70, 100, 1),  # three turns, the last of seven keys
        (8, 2, 3, 95, 96, 2),  # two splits, of two turns and one; two key heads
        (8, 1, 16, 20, 33, 2),  # two blocks of rows; a split without a turn; rows that see few keys
        (4, 1, 1, 0, 1, 1),  # one key
    ],
)
def test_attention(heads, kv_heads, rows, last, size, number):
    operands = problem(heads, kv_heads, rows, last, size)
    made, want = attention(*operands, number), exact(*operands)
    assert made.shape == want.shape and (made - want).abs().max() < 2**-9 * want.abs().max().clamp_min(1)


def test_a_row_has_the_bits_that_it_has_alone():
    q, k, v, positions = problem(8, 1, 9, 40, 48)
    among = attention(q, k, v, positions)
    for first, last in ((0, 1), (2, 7)):
        rows = slice(first, last)
        assert torch.equal(attention(q[:, :, rows], k, v, positions[rows]), among[:, rows])


def test_scores_that_grow():
    """The sums so far are scaled down when a later turn has a higher score."""
    q, k, v, positions = problem(8, 1, 2, 95, 96)
    k[:, :, 32:64] *= 20
    k[:, :, 64:] *= 400
    made, want = attention(q, k, v, positions), exact(q, k, v, positions)
    assert (made - want).abs().max() < 2**-8 * want.abs().max()


@pytest.mark.parametrize(
    ("text", "instead", "what"),
    [
        ("cp.async.wait_group 2;", "cp.async.wait_group 3;", None),  # keys are read before they are there
        ("setp.le.s32 p, x, pos1;", "setp.eq.s32 p, x, x;", None),  # keys after the query are seen
        ("selp.s32 size, 16, 0, p;", "mov.u32 size, 16;", "are of no operand"),  # what is not live is read
        ("@!p bra KEPT;", "bra KEPT;", None),  # sums are not scaled down
        ("xor.b32 z, z, 64;", "xor.b32 z, z, 65;", "not aligned"),
        ("1, 1, 1;", "1, 1, 0;", "are not of the program's shared memory"),  # values are read as keys are
    ],
    ids=str,
)
def test_a_mistake_is_noticed(text, instead, what, monkeypatch):
    """Of the assembly, where it is run so."""
    stock = wgmma_sdpa.ASSEMBLY
    assert text in stock.value
    monkeypatch.setattr(wgmma_sdpa, "ASSEMBLY", type(stock)(stock.value.replace(text, instead)))
    operands = problem(8, 1, 5, 70, 71)
    operands[1][:, :, 40:71] *= 20
    if what is None:
        assert not (attention(*operands) - exact(*operands)).abs().max() < 2**-5
    else:
        with pytest.raises(InterpreterError, match=what):
            attention(*operands)

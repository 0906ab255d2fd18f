"""What the assembly of ``mma_linear`` computes, in Triton's interpreter, where ``ptx`` runs it; on a card its tests are
in ``test_fragment_linear``.
"""

import pytest
import torch
from card import INTERPRETED

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
from ptx import Block, Fault, Program, assembly_runs
from test_fragment_linear import Weight, randn, weight
from torch import Tensor
from triton.runtime.errors import InterpreterError

from eyas.kernels import fragment_linear, mma_linear

CASES = [
    # tiles a program, programs, splits, K, group, dtypes of scales and offsets, rows
    (2, 2, 2, 640, 32, torch.bfloat16, torch.bfloat16, 16),  # the last split has two steps of three
    (3, 1, 3, 640, 64, torch.bfloat16, torch.bfloat16, 5),  # two, one and one step
    (2, 1, 1, 384, 128, torch.bfloat16, torch.bfloat16, 9),
    (16, 1, 1, 384, 128, torch.bfloat16, None, 16),  # all warps have a tile
    (13, 2, 1, 256, 128, torch.float16, None, 3),
    (2, 1, 2, 512, 64, torch.float32, torch.float32, 1),
    (2, 1, 1, 256, 32, torch.float16, torch.bfloat16, 12),
    (2, 1, 1, 256, 32, torch.bfloat16, torch.float16, 8),
    (2, 1, 1, 1536, 32, torch.float32, torch.float32, 16),  # no room for a third slot
    (2, 1, 1, 2048, 32, torch.bfloat16, torch.bfloat16, 10),  # as many steps as warps
    (4, 1, 1, 128, 32, torch.bfloat16, None, 16),  # one step
]


@pytest.fixture
def layout(monkeypatch):
    """Weights whose tiles lie together, so many a program, and are split so often."""

    def chosen(tiles: int, splits: int) -> None:
        monkeypatch.setattr(fragment_linear, "program_tiles", lambda *_: tiles)
        monkeypatch.setattr(fragment_linear, "mma_splits", lambda *_: splits)
        monkeypatch.setattr(fragment_linear, "has_mma", lambda: True)

    return chosen


def large(tiles, programs, k, group, scales, offsets) -> Weight:
    """A random weight; a dtype of offsets: with zero points."""
    w = weight(64 * tiles * programs, k, group, offsets=offsets is not None, dtype=torch.bfloat16)
    words, s, o, *facts = w.operands
    return Weight((words, s.to(scales), None if offsets is None else o.to(offsets), *facts), w.numbers)


def sums(x: Tensor, w: Weight, max_rows: int = 16) -> Tensor:
    """float32 ``[S, M, N]``."""
    operands = [t for t in (x, *w.operands[:3]) if t is not None]
    with assembly_runs(*operands, dynamic=mma_linear.SHARED_BYTES):
        return fragment_linear.launch_splits(x, *w.operands, max_rows=max_rows)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case, layout):
    tiles, programs, splits, k, group, scales, offsets, rows = case
    layout(tiles, splits)
    w, x = large(tiles, programs, k, group, scales, offsets), randn(rows, k)
    made = sums(x, w, 8 if rows <= 8 else 16)
    assert made.shape == (splits, rows, 64 * tiles * programs)
    size = ((x.double() ** 2) @ (w.numbers.T**2)).sqrt()
    assert ((made.double().sum(0) - x.double() @ w.numbers.T).abs() / size).max() < 4e-6
    steps = -(-k // 128 // splits)
    for split in range(splits):
        part = slice(split * steps * 128, (split + 1) * steps * 128)
        want = x[:, part].double() @ w.numbers[:, part].T
        assert ((made[split].double() - want).abs() / size).max() < 4e-6, split


@pytest.mark.parametrize("offsets", [torch.bfloat16, torch.float32])
def test_a_row_has_the_bits_that_it_has_alone(offsets, layout):
    layout(2, 2)
    w, x = large(2, 1, 512, 32, torch.bfloat16, offsets), randn(16, 512)
    among = sums(x, w)
    assert torch.equal(sums(x[:7], w, 8), among[:, :7]) and torch.equal(sums(x[9:], w), among[:, 9:])
    for row in (0, 6, 15):
        assert torch.equal(sums(x[row : row + 1], w, 8), among[:, row : row + 1])


def test_warps_without_a_tile_store_nothing(layout):
    """Of two programs, only the first is run."""
    layout(3, 1)
    w, x = large(3, 2, 256, 32, torch.bfloat16, None), randn(5, 256)
    words, scales, _, group, n = w.operands
    out = torch.full((1, 5, n), float("nan"))
    with assembly_runs(x, words, scales, dynamic=mma_linear.SHARED_BYTES):
        mma_linear.mma_kernel[(1, 1)](
            x, words, scales, scales, out, 5, N=n, K=256, GROUP=group, ROWS=8, TILES=3, SPLITS=1,
            ASSEMBLY=mma_linear.assembly(8, group, "bf16", None, 2, 3), CONSTRAINTS=mma_linear.constraints(8),
        )  # fmt: skip
    assert out[:, :, : n // 2].isfinite().all() and out[:, :, n // 2 :].isnan().all()


def test_offsets_times_large_and_small_sums(layout):
    """Three bfloat16 hold a float32 sum: where offsets are nearly all of a weight, products are as exact as float32."""
    layout(2, 1)
    w, x = large(2, 1, 256, 32, torch.bfloat16, torch.bfloat16), (4 * randn(3, 256).float()).exp2().bfloat16()
    x[1] *= 2.0**-100
    words, scales, offsets, *facts = w.operands
    spread = fragment_linear.unpack_scales(offsets, 128, 256, 32).double().repeat_interleave(32, 1)
    numbers = (w.numbers - spread) * 2.0**-20 + spread.abs()
    made = sums(x, Weight((words, scales * 2.0**-20, offsets.abs(), *facts), numbers))[0].double()
    exact = x.double() @ numbers.T
    assert ((made - exact) / exact).abs().max() < 2**-21


def test_what_is_not_finite_stays_in_its_row(layout):
    layout(2, 1)
    w, x = large(2, 1, 256, 32, torch.bfloat16, torch.bfloat16), randn(9, 256)
    want = sums(x, w)
    x[3, 7], x[8, 9] = float("nan"), float("inf")
    made = sums(x, w)
    rest = [row for row in range(9) if row not in (3, 8)]
    assert torch.equal(made[:, rest], want[:, rest]) and not made[:, [3, 8]].isfinite().any()


@pytest.mark.parametrize(
    ("text", "instead", "what"),
    [
        ("@!p bra WAIT1;", "", "more arrivals than its phase expects"),  # words are read before they are there
        ("expect_tx.shared.b64 _, [t], 2560;", "expect_tx.shared.b64 _, [t], 2576;", "wait forever"),
        ("xor.b32 phase, phase, 1", "xor.b32 phase, phase, 0", "more arrivals than its phase expects"),
        ("bar.sync 0;", "", None),  # x of other warps
        ("@idle bra DONE;", "", "wait forever"),
        ("add.s64 words, words, 4096;", "add.s64 words, words, 8192;", "are of no operand"),
        ("setp.le.s32 p, left, 0;", "setp.le.s32 p, left, -1;", "are of no operand"),
        ("add.u32 slots, x, 8704;", "add.u32 slots, x, 188416;", "are not of the program's shared memory"),
        ("st.shared.v2.b32 [into + 16]", "st.shared.v2.b32 [into + 20]", "are not aligned"),
    ],
    ids=str,
)
def test_a_mistake_is_noticed(text, instead, what, layout, monkeypatch):
    """Of the assembly, where it is run so."""
    layout(2, 1)
    w, x = large(2, 1, 512, 32, torch.bfloat16, torch.bfloat16), randn(5, 512)
    stock = mma_linear.assembly
    assert text in stock(8, 32, "bf16", "bf16", 4, 2)
    monkeypatch.setattr(mma_linear, "assembly", lambda *args: stock(*args).replace(text, instead))
    if what is None:
        assert not sums(x, w, 8).isfinite().all()
    else:
        with pytest.raises(InterpreterError, match=what):
            sums(x, w, 8)


def test_threads_part_and_meet():
    """What is run here besides: lanes take two ways, and one is elected."""
    code = """{ .reg .pred p; .reg .b32 t, lane; mov.u32 lane, $1; and.b32 lane, lane, 31; mov.u32 t, 5;
        setp.lt.u32 p, lane, 8; @p bra LOW; add.u32 t, t, 10; bra BOTH; LOW: add.u32 t, t, lane;
        BOTH: bar.warp.sync -1; elect.sync _|p, -1; @p add.u32 t, t, 100; mov.b32 $0, t; }"""
    threads = torch.arange(64).numpy()
    (made,) = Block(Program(code), [threads], 1).run()
    want = [105, 6, 7, 8, 9, 10, 11, 12] + [15] * 24
    assert made.tolist() == 2 * want
    with pytest.raises(Fault, match=r"only 8 threads of a warp reach bar\.warp\.sync"):
        Block(Program(code.replace("LOW:", "LOW: bar.warp.sync -1;")), [threads], 1).run()
    with pytest.raises(Fault, match="branches to BOTH, which is nowhere"):
        Program(code.replace("BOTH:", ""))

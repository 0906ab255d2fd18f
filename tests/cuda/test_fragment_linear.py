"""Products with int4 fragments against float64, and bits of a row whatever else is in the call."""

from dataclasses import dataclass

import pytest
import torch
from card import DEVICE, GPU, compiled, gpu
from torch import Tensor

from eyas.kernels import fragment_linear
from eyas.kernels.fragment_linear import launch_linear, launch_matmul, pack_fragments, pack_scales
from eyas.kernels.int4_linear import dequantize

ROUNDING = 2**-8 if fragment_linear.ASM else 2**-7  # of a bfloat16 result; the interpreter cuts digits off


@dataclass(frozen=True)
class Weight:
    """A random weight, the operands it is packed into, and its numbers ``[N, K]`` in float64."""

    operands: tuple
    numbers: Tensor


def weight(n, k, group, *, offsets=False, dtype=torch.bfloat16, seed=0) -> Weight:
    groups = -(-k // group)
    options = {"generator": torch.Generator(DEVICE).manual_seed(seed), "device": DEVICE}
    qweight = torch.randint(0, 256, (n, groups * group // 2), dtype=torch.uint8, **options)
    scales = (torch.rand(n, groups, **options) * 0.02 + 0.001).to(dtype)
    offset = (torch.randn(n, groups, **options) * 0.1).to(dtype) if offsets else None
    numbers = dequantize(qweight, scales.float(), None if offset is None else offset.float(), group, k).double()
    operands = (
        pack_fragments(qweight, k, group),
        pack_scales(scales, k, group),
        None if offset is None else pack_scales(offset, k, group),
    )
    return Weight((*operands, group, n), numbers)


def randn(*shape, seed=1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def error(out: Tensor, x: Tensor, numbers: Tensor) -> float:
    """Largest error of a result, relative to what its terms could sum to at random."""
    expected = x.double() @ numbers.T
    size = ((x.double() ** 2) @ (numbers.T**2)).sqrt().clamp_min(1e-30)
    return ((out.double() - expected).abs() / torch.maximum(size, expected.abs())).max().item()


SMALL = [
    # N, K, group, offsets, dtype of scales, rows
    (64, 256, 128, False, torch.bfloat16, 5),
    (130, 320, 64, True, torch.float16, 16),
    (40, 200, 32, True, torch.float32, 3),  # K is not a multiple of a group, nor N of a tile
    (70, 330, 32, False, torch.bfloat16, 1),  # rows of x are not aligned
    (192, 512, 256, True, torch.bfloat16, 8),
    (70, 320, 128, True, torch.bfloat16, 9),  # the last step has one unit of two
]
REAL = [
    (n, k, group, offsets, torch.bfloat16, rows)
    for n, k in ((16384, 5376), (8192, 5376), (5376, 8192), (5376, 16384), (5376, 21504), (21504, 5376), (43008, 5376))
    for group, offsets, rows in ((128, False, 5), (32, True, 16))
]
REAL += [
    (n, k, 32, True, torch.bfloat16, 5) for n, k in ((1024, 640), (256, 640), (640, 1024), (4096, 640), (640, 2048))
]
LARGE = [  # by the kernel of mma_linear: groups and dtypes of scales, a last split that is shorter, one split, warps
    # without a tile
    *((16384, 1792, group, True, dtype, 9) for group in (32, 64, 128) for dtype in fragment_linear.SCALE_DTYPES),
    *((18432, 5376, group, False, torch.bfloat16, rows) for group in (32, 64, 128) for rows in (1, 8, 16)),
    (135168, 1024, 64, True, torch.float16, 3),
    (26624, 5376, 128, True, torch.bfloat16, 16),
    (32768, 8192, 32, False, torch.bfloat16, 8),
    (6144, 4096, 64, True, torch.bfloat16, 16),
    (30720, 3840, 32, True, torch.bfloat16, 5),
    *(
        (5376, k, group, True, dtype, 16)
        for k in (8192, 21504)
        for group, dtype in ((32, torch.float32), (128, torch.bfloat16))
    ),
]


@pytest.mark.parametrize(
    ("n", "k", "group", "offsets", "dtype", "rows"),
    [*SMALL, *(pytest.param(*case, marks=gpu) for case in REAL + LARGE)],
    ids=str,
)
def test_products(n, k, group, offsets, dtype, rows):
    w = weight(n, k, group, offsets=offsets, dtype=dtype)
    x = randn(rows, k)
    out = launch_linear(x, *w.operands)
    assert out.shape == (rows, n) and out.dtype == torch.bfloat16
    assert error(out, x, w.numbers) < ROUNDING
    if rows <= 8:
        assert torch.equal(launch_linear(x, *w.operands, max_rows=8), out)
    many = launch_matmul(x, *w.operands) if GPU else None
    if many is not None:
        assert error(many, x, w.numbers) < 4 * ROUNDING  # weights are rounded to bfloat16


TOGETHER = [(256, 256, 128, False), (384, 384, 64, True), (256, 320, 32, True), (512, 128, 32, False)]


@pytest.mark.parametrize("case", TOGETHER, ids=str)
def test_tiles_that_lie_together(case, monkeypatch):
    """By the kernels of Triton, as where a card has no ``mma_linear``."""
    n, k, group, offsets = case
    x = randn(9, k)
    apart = weight(n, k, group, offsets=offsets)
    want = launch_linear(x, *apart.operands)
    monkeypatch.setattr(fragment_linear, "program_tiles", lambda *_: n // 128)
    monkeypatch.setattr(fragment_linear, "has_mma", lambda: False)
    w = weight(n, k, group, offsets=offsets)
    assert not torch.equal(w.operands[0], apart.operands[0])
    assert torch.equal(launch_linear(x, *w.operands), want) and error(want, x, w.numbers) < ROUNDING
    out = w.numbers.new_empty(n, k, dtype=torch.float32)
    words, scales, offset, *_ = w.operands
    fragment_linear.dequantize_kernel[(words.shape[0], 1)](
        words, scales, scales if offset is None else offset, out, n, k, group, fragment_linear.TILE,
        1 << (words.shape[1] - 1).bit_length(), n // 128, offset is not None, fragment_linear.ASM,
    )  # fmt: skip
    assert torch.equal(out, w.numbers.float())


@gpu
def test_large_weights_have_a_kernel_of_their_own(monkeypatch):
    """Which adds in another order than Triton's."""
    for n, k, group, offsets, dtype, rows in LARGE:
        w, x = weight(n, k, group, offsets=offsets, dtype=dtype), randn(rows, k)
        assert fragment_linear.plan(n, k, group).mma
        parts = fragment_linear.launch_splits(x, *w.operands)
        with monkeypatch.context() as patch:
            patch.setattr(fragment_linear, "has_mma", lambda: False)
            other = fragment_linear.launch_splits(x, *w.operands)
        assert parts.shape[0] == fragment_linear.plan(n, k, group).splits
        torch.testing.assert_close(parts.sum(0), other.sum(0), rtol=1e-4, atol=1e-4 * other.abs().max().item())


@gpu
@pytest.mark.parametrize("group", [32, 128])
def test_scales_and_offsets_of_two_dtypes(group):
    """Offsets in bfloat16 are multiplied by the tensor core, others are not: their sums differ in the last bits."""
    w, x = weight(16384, 1792, group, offsets=True, dtype=torch.bfloat16), randn(5, 1792)
    words, scales, offsets, *facts = w.operands
    both = [fragment_linear.launch_splits(x, words, scales, o, *facts) for o in (offsets, offsets.float())]
    assert torch.equal(fragment_linear.launch_splits(x, words, scales.float(), offsets, *facts), both[0])
    assert torch.equal(fragment_linear.launch_splits(x, words, scales.float(), offsets.float(), *facts), both[1])
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5 * both[0].abs().max().item())


@gpu
def test_a_row_that_16_bytes_cannot_be_loaded_from():
    w, x = weight(16384, 1792, 128), randn(5, 1793).flatten()
    odd = x[5:].view(5, 1792)
    assert torch.equal(launch_linear(odd, *w.operands), launch_linear(odd.clone(), *w.operands))


@gpu
def test_the_head_of_gemma():
    w = weight(262144, 640, 32, offsets=True)
    x = randn(5, 640)
    assert error(launch_linear(x, *w.operands), x, w.numbers) < ROUNDING


UNUSUAL = ("large", "outlier channels", "equal rows", "zeros", "one hot")


def unusual(kind: str) -> Tensor:
    """Six rows of 384 columns that are not as activations mostly are."""
    x = randn(6, 384)
    if kind == "large":
        x = x * 2.0**60
    elif kind == "outlier channels":
        x[:, ::37] *= 1000
    elif kind == "equal rows":
        x[:] = x[0]
    elif kind == "zeros":
        x[:] = 0
    else:
        x[:] = torch.eye(384, dtype=x.dtype)[:6]
    return x


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_activations(kind):
    w = weight(96, 384, 64, offsets=True)
    x = unusual(kind)
    out = launch_linear(x, *w.operands)
    assert error(out, x, w.numbers) < ROUNDING
    if kind == "equal rows":
        assert torch.equal(out, out[:1].expand_as(out))


def test_a_row_has_the_bits_that_it_has_alone():
    """For every number of rows, at every place among them."""
    cases = [(130, 320, 64, True), (64, 256, 128, False)]
    if GPU:
        cases = [(16384, 5376, 128, False), (5376, 8192, 32, True), (43008, 5376, 32, True), (1024, 640, 32, True)]
        cases += [(43008, 5376, 128, False), (5376, 21504, 64, True)]
    for n, k, group, offsets in cases:
        w = weight(n, k, group, offsets=offsets)
        x = randn(16, k)
        alone = torch.cat([launch_linear(row[None], *w.operands) for row in x])
        for rows in range(1, 17) if GPU else (2, 7, 9, 16):
            for first in range(17 - rows) if GPU else (0, 16 - rows):
                among = x[first : first + rows]
                assert torch.equal(launch_linear(among, *w.operands), alone[first : first + rows]), (n, k, rows, first)
        assert torch.equal(launch_linear(x.flip(0), *w.operands), alone.flip(0))


@gpu
@pytest.mark.parametrize(("n", "k"), [(1024, 640), (16384, 1792)])
def test_a_hundred_thousand_rows(n, k):
    """In calls of 16 and of 7, by both kernels."""
    w = weight(n, k, 32, offsets=True)
    for x in randn(100_000, k).split(10_000):
        first = torch.cat([launch_linear(part, *w.operands) for part in x.split(16)])
        again = torch.cat([launch_linear(part, *w.operands, max_rows=8) for part in x.split(7)])
        assert torch.equal(first, again)


def test_what_is_not_finite_stays_in_its_row():
    w = weight(64, 256, 64)
    x = randn(4, 256)
    alone = launch_linear(x, *w.operands)
    x[2, 7] = float("nan")
    x[3, 9] = float("inf")
    out = launch_linear(x, *w.operands)
    assert torch.equal(out[:2], alone[:2]) and not out[2:].isfinite().any()


def test_rows_of_a_larger_tensor():
    w = weight(64, 256, 64)
    wide = randn(5, 512)
    assert torch.equal(launch_linear(wide[:, :256], *w.operands), launch_linear(wide[:, :256].clone(), *w.operands))


def test_many_rows_dequantize_what_few_rows_multiply():
    """The weight as numbers, by products with unit vectors."""
    for n, k, group, offsets in ((96, 128, 32, True), (64, 128, 64, False)):
        w = weight(n, k, group, offsets=offsets)
        out = w.numbers.new_empty(n, k, dtype=torch.float32)
        words, scales, offset, group_size, _ = w.operands
        fragment_linear.dequantize_kernel[(words.shape[0], 1)](
            words, scales, scales if offset is None else offset, out, n, k, group_size, fragment_linear.TILE,
            -(-words.shape[1] // 4) * 4, 1, offset is not None, fragment_linear.ASM,
        )  # fmt: skip
        assert torch.equal(out, w.numbers.float())


@gpu
def test_a_graph_is_captured_once():
    w = weight(4096, 640, 32, offsets=True)
    x = randn(5, 640)
    launch_linear(x, *w.operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch_linear(x, *w.operands)
    for seed in range(3):
        x.copy_(randn(5, 640, seed=seed))
        graph.replay()
        assert torch.equal(out, launch_linear(x, *w.operands))


@gpu
def test_a_program_embeds_the_kernels(tmp_path):
    """AOTInductor takes the op as it is, with any number of rows, and gives the same bits."""

    class Layer(torch.nn.Module):
        def __init__(self, operands):
            super().__init__()
            for name, tensor in zip(("words", "scales", "offsets"), operands):
                self.register_buffer(name, tensor)
            self.facts = operands[3:]

        def forward(self, x):
            return torch.ops.eyas.fragment_int4_linear(x, self.words, self.scales, self.offsets, *self.facts) * 2

    for n, k in ((1024, 640), (16384, 1792)):
        w = weight(n, k, 32, offsets=True)
        layer = Layer(w.operands)
        rows = torch.export.Dim("rows", min=1, max=16)
        program = torch.export.export(layer, (randn(5, k),), dynamic_shapes=({0: rows},))
        native = compiled(program, (randn(5, k),), tmp_path / str(n))
        for count in (1, 2, 7, 16):
            x = randn(count, k, seed=count)
            assert torch.equal(native(x), layer(x))

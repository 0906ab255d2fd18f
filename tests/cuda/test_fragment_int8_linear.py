"""Products with int8 fragments against float64, rows of a table, and bits of a row whatever else is in the call."""

import pytest
import torch
from card import DEVICE, GPU, compiled, gpu
from test_fragment_linear import ROUNDING, UNUSUAL, error, randn, unusual
from torch import Tensor

from eyas.kernels import fragment_int8_linear
from eyas.kernels.fragment_int8_linear import (
    launch_int8_embedding,
    launch_int8_linear,
    launch_int8_matmul,
    pack_int8_fragments,
)


def weight(n, k, seed=0) -> tuple[tuple[Tensor, Tensor, int], Tensor]:
    """The operands of a random weight with every value from -128 to 127, and its numbers ``[N, K]`` in float64."""
    options = {"generator": torch.Generator(DEVICE).manual_seed(seed), "device": DEVICE}
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8, **options)
    scales = torch.rand(n, **options) * 0.02 + 0.001
    return (pack_int8_fragments(q), scales, n), q.double() * scales.double()[:, None]


SMALL = [(64, 256, 5), (130, 320, 16), (40, 200, 3), (70, 330, 1), (192, 32, 8)]
REAL = [(262144, 640, 5), (262144, 640, 16), (16384, 5376, 8), (5376, 21504, 16), (1024, 640, 1), (32000, 5376, 5)]


@pytest.mark.parametrize(("n", "k", "rows"), [*SMALL, *(pytest.param(*case, marks=gpu) for case in REAL)], ids=str)
def test_products(n, k, rows):
    operands, numbers = weight(n, k)
    x = randn(rows, k)
    out = launch_int8_linear(x, *operands)
    assert out.shape == (rows, n) and out.dtype == torch.bfloat16
    assert error(out, x, numbers) < ROUNDING
    if rows <= 8:
        assert torch.equal(launch_int8_linear(x, *operands, max_rows=8), out)


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_activations(kind):
    operands, numbers = weight(96, 384)
    x = unusual(kind)
    if kind == "one hot":
        numbers /= operands[1].double()[:, None]
        operands[1][:] = 1
    out = launch_int8_linear(x, *operands)
    assert error(out, x, numbers) < ROUNDING
    if kind == "equal rows":
        assert torch.equal(out, out[:1].expand_as(out))
    if kind == "one hot":  # the weights themselves
        assert torch.equal(out.double(), numbers[:, :6].T.round())


def test_a_row_has_the_bits_that_it_has_alone():
    """For every number of rows, at every place among them."""
    for n, k in [(16384, 5376), (262144, 640), (1024, 640)] if GPU else [(130, 320)]:
        operands, _ = weight(n, k)
        x = randn(16, k)
        alone = torch.cat([launch_int8_linear(row[None], *operands) for row in x])
        for rows in range(1, 17) if GPU else (2, 7, 9, 16):
            for first in range(17 - rows) if GPU else (0, 16 - rows):
                among = x[first : first + rows]
                assert torch.equal(launch_int8_linear(among, *operands), alone[first : first + rows]), (n, k, rows)


@pytest.mark.parametrize(("n", "k"), [(70, 330), (128, 64), (1, 32)], ids=str)
def test_many_rows_dequantize_what_few_rows_multiply(n, k):
    """The weight as numbers, float32 products of two exact ones; units past the last one are written nowhere."""
    (words, scales, _), numbers = weight(n, k)
    out = numbers.new_full((n + 1, k), 7, dtype=torch.float32)
    for at_once in (2, 8):
        fragment_int8_linear.dequantize_int8_kernel[(words.shape[0], -(-words.shape[1] // at_once))](
            words, scales, out, n, k, fragment_int8_linear.TILE, at_once, fragment_int8_linear.ASM,
        )  # fmt: skip
        assert torch.equal(out[:n], numbers.float()) and (out[n] == 7).all()


@gpu
@pytest.mark.parametrize(("n", "k", "rows"), [(70, 330, 40), (1024, 640, 512), (32000, 5376, 64)], ids=str)
def test_products_of_many_rows(n, k, rows):
    """Two roundings to bfloat16, of the weight and of the result."""
    operands, numbers = weight(n, k)
    x = randn(rows, k)
    out = launch_int8_matmul(x, *operands)
    assert out.shape == (rows, n) and out.dtype == torch.bfloat16
    assert error(out, x, numbers) < 2 * ROUNDING


@pytest.mark.parametrize(("n", "k"), [(70, 330), (130, 64), pytest.param(262144, 640, marks=gpu)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_table(n, k, dtype):
    operands, numbers = weight(n, k)
    ids = torch.randint(0, n, (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ids[0, 0], ids[0, 1] = 0, n - 1
    out = launch_int8_embedding(ids, *operands[:2], k, dtype)
    assert out.shape == (2, 9, k) and out.dtype == dtype
    if GPU or dtype == torch.float32:  # the interpreter cuts digits off
        assert torch.equal(out, numbers[ids].to(torch.float32).to(dtype))
    else:
        torch.testing.assert_close(out.double(), numbers[ids], rtol=2**-7, atol=0)


@gpu
def test_a_graph_is_captured_once():
    operands, _ = weight(4096, 640)
    x = randn(5, 640)
    launch_int8_linear(x, *operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch_int8_linear(x, *operands)
    for seed in range(3):
        x.copy_(randn(5, 640, seed=seed))
        graph.replay()
        assert torch.equal(out, launch_int8_linear(x, *operands))


@gpu
def test_a_program_embeds_the_kernels(tmp_path):
    """A table that is embedding and head at once, with any number of rows, and the same bits."""

    class Tied(torch.nn.Module):
        def __init__(self, words, scales):
            super().__init__()
            self.register_buffer("words", words)
            self.register_buffer("scales", scales)

        def forward(self, ids):
            x = torch.ops.eyas.fragment_int8_embedding(ids, self.words, self.scales, 640, torch.bfloat16)
            return torch.ops.eyas.fragment_int8_linear(x * 2, self.words, self.scales, self.scales.shape[0])

    (words, scales, n), _ = weight(4096, 640)
    tied = Tied(words, scales)
    ids = torch.randint(0, n, (16,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows = torch.export.Dim("rows", min=1, max=16)
    program = torch.export.export(tied, (ids[:5],), dynamic_shapes=({0: rows},))
    native = compiled(program, (ids[:5],), tmp_path)
    for count in (1, 2, 7, 16):
        assert torch.equal(native(ids[:count]), tied(ids[:count]))

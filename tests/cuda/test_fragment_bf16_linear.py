"""Products with bfloat16 fragments against float64, rows of a table, and bits of a row whatever else is in the call."""

import pytest
import torch
from card import DEVICE, GPU, compiled, gpu
from test_fragment_linear import ROUNDING, UNUSUAL, error, randn, unusual
from torch import Tensor

from eyas.kernels.fragment_bf16_linear import (
    TILE,
    launch_bf16_embedding,
    launch_bf16_linear,
    launch_bf16_matmul,
    pack_bf16_fragments,
    rows_bf16_kernel,
)


def weight(n, k, seed=0) -> tuple[Tensor, Tensor]:
    """The fragments of a random weight, and its numbers ``[N, K]``."""
    numbers = torch.randn(n, k, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).bfloat16()
    return pack_bf16_fragments(numbers), numbers


SMALL = [(64, 256, 5), (130, 320, 16), (40, 200, 3), (70, 330, 1), (192, 32, 8), (65, 33, 9)]
REAL = [(262144, 640, 5), (262144, 640, 16), (16384, 5376, 8), (5376, 21504, 16), (1536, 640, 1), (640, 2048, 5)]


@pytest.mark.parametrize(("n", "k", "rows"), [*SMALL, *(pytest.param(*case, marks=gpu) for case in REAL)], ids=str)
def test_products(n, k, rows):
    words, numbers = weight(n, k)
    x = randn(rows, k)
    out = launch_bf16_linear(x, words, n)
    assert out.shape == (rows, n) and out.dtype == torch.bfloat16
    assert error(out, x, numbers.double()) < ROUNDING
    if rows <= 8:
        assert torch.equal(launch_bf16_linear(x, words, n, max_rows=8), out)


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_activations(kind):
    words, numbers = weight(96, 384)
    x = unusual(kind)
    out = launch_bf16_linear(x, words, 96)
    assert error(out, x, numbers.double()) < ROUNDING
    if kind == "equal rows":
        assert torch.equal(out, out[:1].expand_as(out))
    if kind == "one hot":  # the weights themselves
        assert torch.equal(out, numbers[:, :6].T)


@pytest.mark.parametrize(("n", "k"), [(70, 200), (64, 33)], ids=str)
def test_every_weight_is_where_its_column_is(n, k):
    """Products with unit vectors are the weights, whatever their place."""
    words, numbers = weight(n, k)
    made = [launch_bf16_linear(x, words, n) for x in torch.eye(k, dtype=torch.bfloat16, device=DEVICE).split(16)]
    assert torch.equal(torch.cat(made), numbers.T)


def test_a_row_has_the_bits_that_it_has_alone():
    """For every number of rows, at every place among them."""
    for n, k in [(2048, 640), (262144, 640), (640, 2048), (1000, 5000)] if GPU else [(130, 320)]:
        words, _ = weight(n, k)
        x = randn(16, k)
        alone = torch.cat([launch_bf16_linear(row[None], words, n, max_rows=1) for row in x])
        for rows in range(1, 17):
            for first in range(17 - rows) if GPU else (0, 16 - rows):
                among = x[first : first + rows]
                assert torch.equal(launch_bf16_linear(among, words, n), alone[first : first + rows]), (n, k, rows)


def test_what_is_not_finite_stays_in_its_row():
    words, _ = weight(70, 200)
    x = randn(5, 200)
    alone = launch_bf16_linear(x, words, 70)
    x[2, 7], x[3, 9] = float("nan"), float("inf")
    out = launch_bf16_linear(x, words, 70)
    assert torch.equal(out[[0, 1, 4]], alone[[0, 1, 4]]) and not out[2:4].isfinite().any()


@pytest.mark.parametrize(("n", "k"), [(70, 200), (70, 224), (100, 33)], ids=str)  # 7 units: the last split has less
def test_what_lies_beside_the_operands_is_not_read(n, k):
    """NaN behind the rows of x, and around the words: in what they are a part of, and nowhere in the result."""
    words, _ = weight(n, k)
    around = torch.full((words.numel() + 3 * 4096,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    inside = around[4096:][: words.numel()].view(words.shape).copy_(words)
    x = torch.full((16, k), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    x[:3] = randn(3, k)
    out = launch_bf16_linear(x[:3], inside, n)
    assert torch.equal(out, launch_bf16_linear(x[:3].clone(), words, n)) and out.isfinite().all()


def test_rows_of_a_larger_tensor():
    words, _ = weight(64, 256)
    x = randn(5, 512)[:, :256]
    assert torch.equal(launch_bf16_linear(x, words, 64), launch_bf16_linear(x.clone(), words, 64))


@pytest.mark.parametrize(("n", "k"), [(70, 330), (128, 64), (1, 32), (65, 33)], ids=str)
def test_many_rows_multiply_the_same_weight(n, k):
    """To the bit; units past the last one are written nowhere."""
    words, numbers = weight(n, k)
    out = numbers.new_full((n + 1, k), 7)
    for at_once in (2, 8):
        rows_bf16_kernel[(words.shape[0], -(-words.shape[1] // at_once))](words, out, n, k, TILE, at_once)
        assert torch.equal(out[:n], numbers) and (out[n] == 7).all()
        out[:n] = 0


@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [(70, 330, 40), pytest.param(2048, 640, 512, marks=gpu), pytest.param(32000, 5376, 64, marks=gpu)],
    ids=str,
)
def test_products_of_many_rows(n, k, rows):
    words, numbers = weight(n, k)
    x = randn(rows, k)
    assert torch.equal(launch_bf16_matmul(x, words, n), x @ numbers.T)


@pytest.mark.parametrize(("n", "k"), [(70, 330), (130, 64), (65, 1100), pytest.param(262144, 640, marks=gpu)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_rows_of_a_table(n, k, dtype):
    words, numbers = weight(n, k)
    ids = torch.randint(0, n, (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ids[0, 0], ids[0, 1] = 0, n - 1
    out = launch_bf16_embedding(ids.to(dtype), words, k)
    assert out.shape == (2, 9, k) and torch.equal(out, numbers[ids])


def test_a_table_of_more_weights_than_32_bits_count():
    """Only its last tile is written, so that a machine need not have the memory."""
    tiles = 2**19 + 1  # of two units of 2048
    tile = torch.randn(TILE, 64, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    words = torch.empty(tiles, 2, 4, 2, 32, 8, dtype=torch.bfloat16, device=DEVICE)
    words[-1:] = pack_bf16_fragments(tile)
    ids = (tiles - 1) * TILE + torch.tensor([5, 63], device=DEVICE)
    assert torch.equal(launch_bf16_embedding(ids, words, 64), tile[[5, 63]])
    if GPU:
        x = randn(2, 64)
        last = launch_bf16_linear(x, words, tiles * TILE)[:, -TILE:]
        assert torch.equal(last, launch_bf16_linear(x, words[-1:], TILE))
        assert torch.equal(launch_bf16_matmul(x, words, tiles * TILE)[:, -TILE:], x @ tile.T)


@gpu
def test_a_graph_is_captured_once():
    words, _ = weight(4096, 640)
    x = randn(5, 640)
    launch_bf16_linear(x, words, 4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch_bf16_linear(x, words, 4096)
    for seed in range(3):
        x.copy_(randn(5, 640, seed=seed))
        graph.replay()
        assert torch.equal(out, launch_bf16_linear(x, words, 4096))


@gpu
def test_a_program_embeds_the_kernels(tmp_path):
    """A table that is embedding and head at once, with any number of rows, and the same bits."""

    class Tied(torch.nn.Module):
        def __init__(self, words):
            super().__init__()
            self.register_buffer("words", words)

        def forward(self, ids):
            x = torch.ops.eyas.fragment_bf16_embedding(ids, self.words, 640)
            return torch.ops.eyas.fragment_bf16_linear(x * 2, self.words, 4096)

    words, _ = weight(4096, 640)
    tied = Tied(words)
    ids = torch.randint(0, 4096, (16,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows = torch.export.Dim("rows", min=1, max=16)
    program = torch.export.export(tied, (ids[:5],), dynamic_shapes=({0: rows},))
    native = compiled(program, (ids[:5],), tmp_path)
    for count in (1, 2, 7, 16):
        assert torch.equal(native(ids[:count]), tied(ids[:count]))

"""Attention split over the keys against float64, and bits of a row whatever else is in the call and the cache."""

from dataclasses import dataclass

import pytest
import torch
from card import DEVICE, GPU, INTERPRETED, compiled, gpu
from torch import Tensor

from eyas.kernels import splitk_sdpa
from eyas.kernels.splitk_sdpa import launch, plan

ROUNDING = 2**-7


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Few splits, so that small problems give each several turns; and products that do not depend on a row's place,
    which numpy's in float32 do.
    """
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def product(self, a, b, d, *precision):
        made = a.data.astype("float64") @ b.data.astype("float64")
        return TensorHandle(made.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)
    monkeypatch.setattr(splitk_sdpa, "MULTIPROCESSORS", 6)


@dataclass(frozen=True)
class Problem:
    """Heads over key heads of a width, a window (0: none), the highest position and the number of rows."""

    heads: int
    kv_heads: int
    width: int
    window: int
    last: int
    rows: int
    size: int  # rows of the cache

    def history(self, seed=0) -> tuple[Tensor, Tensor, Tensor]:
        """A query ``[1, H, M, D]`` and every key and value so far ``[KV, last + 1, D]``."""
        options = {"generator": torch.Generator(DEVICE).manual_seed(seed), "device": DEVICE}
        q = torch.randn(1, self.rows, self.heads, self.width, **options).bfloat16().transpose(1, 2)
        k, v = (torch.randn(self.kv_heads, self.last + 1, self.width, **options).bfloat16() for _ in range(2))
        return q, k, v

    @property
    def input_pos(self) -> Tensor:
        return torch.arange(self.last + 1 - self.rows, self.last + 1, device=DEVICE)

    def cache(self, history: Tensor, rubbish: float = float("nan")) -> Tensor:
        """The cache that holds a history; what it does not hold is ``rubbish``."""
        held = history[:, -self.size :]
        cache = torch.full((1, self.kv_heads, self.size, self.width), rubbish, dtype=history.dtype, device=DEVICE)
        slots = torch.arange(self.last + 1 - held.shape[1], self.last + 1, device=DEVICE)
        cache[0, :, slots % self.size if self.window else slots] = held
        return cache


def expected(problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention over the history, row by row, in float64."""
    group = problem.heads // problem.kv_heads
    rows = []
    for i, pos in enumerate(problem.input_pos.tolist()):
        first = max(0, pos - problem.window + 1) if problem.window else 0
        keys, values = (t[:, first : pos + 1].double().repeat_interleave(group, 0) for t in (k, v))
        weights = (keys @ q[0, :, i].double()[..., None] * scale)[..., 0].softmax(-1)
        rows.append((weights[:, None] @ values)[:, 0])
    return torch.stack(rows, 1)[None]


def attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor, scale: float, **options) -> Tensor:
    return launch(q, problem.cache(k), problem.cache(v), problem.input_pos, scale, problem.window, **options)


def error(out: Tensor, want: Tensor, v: Tensor) -> float:
    """Largest error of a result, relative to the largest value."""
    return ((out.double() - want).abs().max() / v.double().abs().max()).item()


SMALL = [
    Problem(4, 2, 64, 0, 200, 3, 256),
    Problem(2, 2, 128, 0, 63, 1, 64),  # the last row of a full cache, and of a tile
    Problem(4, 1, 64, 0, 64, 5, 300),  # one key in the last tile
    Problem(6, 2, 64, 0, 0, 1, 64),  # one key alone; three heads a key head
    Problem(4, 2, 64, 70, 333, 7, 140),  # a ring that has gone round
    Problem(2, 1, 64, 16, 5, 4, 32),  # one that has not
    Problem(8, 1, 64, 0, 150, 16, 256),  # several blocks of rows
    Problem(8, 1, 512, 0, 70, 2, 96),
    Problem(4, 1, 512, 0, 300, 2, 320),  # several turns a split
]
REAL = [
    *(Problem(32, 4, 512, 0, last, rows, 8192) for last, rows in ((31, 1), (1023, 5), (8191, 8), (5000, 16))),
    Problem(32, 4, 512, 0, 131071, 8, 131072),
    *(Problem(32, 4, 512, 0, keys - 1, 1, 8192) for keys in (1, 31, 32, 33, 1056, 1057)),  # a tile, and one a split
    *(Problem(heads, 4, 512, 0, last, rows, 8192) for heads in (12, 4) for last, rows in ((1056, 1), (5000, 16))),
    Problem(32, 4, 512, 0, 15, 16, 8192),  # two blocks of rows, and not a tile of keys
    Problem(32, 4, 512, 512, 5000, 8, 1024),
    *(Problem(32, 16, 256, 1024, last, rows, 2048) for last, rows in ((0, 1), (500, 5), (1024, 8), (70001, 16))),
    *(Problem(4, 1, 256, window, 1500, rows, 2048) for window in (0, 512) for rows in (1, 5, 16)),
    Problem(32, 8, 128, 0, 3000, 5, 4096),
    Problem(24, 8, 64, 0, 3000, 5, 4096),
]


@pytest.mark.parametrize(
    "problem", [*SMALL, *(pytest.param(one, marks=gpu) for one in REAL)], ids=lambda one: str(one)[7:]
)
def test_attention(problem):
    """What the cache holds beside the history is not a number."""
    q, k, v = problem.history()
    out = attend(problem, q, k, v, 0.1)
    assert out.shape == q.shape and out.dtype == torch.bfloat16 and out.transpose(1, 2).is_contiguous()
    assert error(out, expected(problem, q, k, v, 0.1), v) < ROUNDING


@pytest.mark.parametrize(
    "problem", [SMALL[0], SMALL[7], pytest.param(REAL[3], marks=gpu)], ids=lambda one: str(one)[7:]
)
def test_where_the_query_lies_does_not_matter(problem):
    """Where its rows or all of it lie so that 16 bytes at a time cannot be copied, too."""
    q, k, v = problem.history()
    want = attend(problem, q, k, v, 0.1)
    rows, heads, width = problem.rows, problem.heads, problem.width
    for gap, offset in ((3, 0), (0, 1), (8, 8), (5, 4)):
        row = heads * width + gap
        odd = torch.zeros(offset + rows * row, dtype=q.dtype, device=DEVICE)
        odd = odd.as_strided((1, heads, rows, width), (rows * row, width, row, 1), offset)
        odd.copy_(q)
        assert torch.equal(attend(problem, odd, k, v, 0.1), want), (gap, offset)
    assert torch.equal(attend(problem, q.contiguous(), k, v, 0.1), want)


UNUSUAL = ["large scores", "equal keys", "one key stands out", "falling", "rising", "zeros"]


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("width", [64, pytest.param(512, marks=gpu)])
def test_unusual_scores(kind, width):
    problem = Problem(4, 2, width, 0, 300, 4, 320) if width == 64 else Problem(32, 4, width, 0, 3000, 4, 4096)
    q, k, v = problem.history()
    if kind == "large scores":
        q = q * (1e4 if width == 64 else 1e3)  # two of many keys may be close: no further apart than float32 tells
    elif kind == "equal keys":
        k[:] = k[:, :1]
    elif kind == "one key stands out":
        k[:, 130] = q[0, 0, 0] * 50
    elif kind == "zeros":
        q, v = torch.zeros_like(q), torch.ones_like(v)
    else:
        order = torch.arange(problem.last + 1, device=DEVICE) * (0.05 if kind == "rising" else -0.05)
        q[:] = q[:, :1, :1]
        k[:] = (order[None, :, None] * q[0, 0, 0]).bfloat16()
    out = attend(problem, q, k, v, 0.125)
    assert out.isfinite().all() and error(out, expected(problem, q, k, v, 0.125), v) < ROUNDING


CASES = [Problem(4, 2, 64, 0, 200, 16, 256), Problem(4, 2, 64, 70, 333, 16, 140)]
if GPU:
    CASES = [
        Problem(32, 4, 512, 0, 5000, 16, 8192),
        Problem(32, 16, 256, 1024, 70001, 16, 2048),
        Problem(4, 1, 256, 0, 1500, 16, 2048),
        Problem(4, 1, 256, 512, 1500, 16, 2048),
    ]


@pytest.mark.parametrize("problem", CASES, ids=lambda one: str(one)[7:])
def test_a_row_has_the_bits_that_it_has_alone(problem):
    """For every number of rows, at every place among them, before later rows are written."""
    q, k, v = problem.history()
    positions = problem.input_pos
    caches = problem.cache(k), problem.cache(v)
    rows = q.unbind(2)
    alone = [launch(row[:, :, None], *caches, positions[i : i + 1], 0.1, problem.window) for i, row in enumerate(rows)]
    alone = torch.cat(alone, 2)
    for n in range(1, 17) if GPU else (2, 9, 16):
        for first in range(17 - n) if GPU else sorted({0, 16 - n}):
            among = slice(first, first + n)
            out = launch(q[:, :, among], *caches, positions[among], 0.1, problem.window)
            assert torch.equal(out, alone[:, :, among]), (n, first)
    early = Problem(**{**vars(problem), "last": problem.last - 8, "rows": 8})
    before = early.cache(k[:, :-8]), early.cache(v[:, :-8])
    out = launch(q[:, :, :8], *before, positions[:8], 0.1, problem.window)
    assert torch.equal(out, alone[:, :, :8]), "what is written later does not matter"
    flipped = launch(q.flip(2), *caches, positions.flip(0), 0.1, problem.window)
    assert torch.equal(flipped, alone.flip(2))


@pytest.mark.parametrize("window", [0, 40])
def test_the_buffers_length_does_not_matter(window):
    problem = Problem(4, 2, 64, window, 100, 5, 128)
    q, k, v = problem.history()
    longer = Problem(**{**vars(problem), "size": 192})
    assert torch.equal(attend(problem, q, k, v, 0.1), attend(longer, q, k, v, 0.1))


def test_fewer_rows_at_most_are_another_tile_and_nearly_the_same():
    problem = Problem(8, 1, 64, 0, 100, 2, 128)
    q, k, v = problem.history()
    out = attend(problem, q, k, v, 0.1, max_rows=2)
    assert plan(8, 1, 64, 2).rows < plan(8, 1, 64, 16).rows
    assert error(out, expected(problem, q, k, v, 0.1), v) < ROUNDING


@gpu
def test_a_graph_replays_at_every_length():
    problem = Problem(32, 4, 512, 0, 8191, 5, 8192)
    q, k, v = problem.history()
    caches = problem.cache(k), problem.cache(v)
    positions = problem.input_pos.clone()
    launch(q, *caches, positions, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(q, *caches, positions, 0.1)
    for last in (4, 31, 32, 1000, 8191):
        positions.copy_(torch.arange(last - 4, last + 1))
        graph.replay()
        assert torch.equal(out, launch(q, *caches, positions, 0.1)), last


@gpu
@pytest.mark.parametrize(
    "problem", [Problem(4, 1, 256, 0, 4095, 16, 4096), Problem(32, 4, 512, 0, 4095, 16, 4096)], ids=str
)
def test_a_hundred_thousand_rows(problem):
    """Of many positions, in calls of 16 and of 7."""
    _, k, v = problem.history()
    caches = problem.cache(k), problem.cache(v)
    options = {"generator": torch.Generator(DEVICE).manual_seed(3), "device": DEVICE}
    q = torch.randn(1, problem.heads, 100_000, problem.width, **options).bfloat16()
    positions = torch.randint(0, 4096, (100_000,), **options)
    made = [
        torch.cat([launch(a, *caches, p, 0.1) for a, p in zip(q.split(n, 2), positions.split(n))], 2) for n in (16, 7)
    ]
    assert torch.equal(*made)


@gpu
@pytest.mark.parametrize(
    "problem", [Problem(4, 1, 256, 0, 1000, 5, 2048), Problem(32, 4, 512, 0, 3000, 5, 4096)], ids=str
)
def test_a_program_embeds_the_kernels(problem, tmp_path):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, input_pos):
            return torch.ops.eyas.splitk_sdpa(q, k, v, input_pos, 0.1, 0, 8)

    q, k, v = problem.history()
    inputs = (q.contiguous(), problem.cache(k), problem.cache(v), problem.input_pos)
    rows = torch.export.Dim("rows", min=1, max=8)
    ep = torch.export.export(Attention(), inputs, dynamic_shapes=({2: rows}, None, None, {0: rows}))
    run = compiled(ep, inputs, tmp_path)
    for rows in (1, 5):
        arguments = (q[:, :, :rows].contiguous(), inputs[1], inputs[2], inputs[3][:rows])
        assert torch.equal(run(*arguments), launch(*arguments, 0.1, 0, 8))

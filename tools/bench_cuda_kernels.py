"""Times the CUDA kernels against others', as replays of CUDA graphs, weights rotated so that they come from memory."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eyas.kernels import fragment_int8_linear as int8
from eyas.kernels.fragment_linear import TILE, launch_matmul, launch_splits, unit_columns
from eyas.tools.bench_cuda_attention import bench_attention
from eyas.tools.cuda_timing import REPLAYS, copy_rate, executorch_kernels, graph_us, method_rows, rotated

KINDS = ("int4", "int8", "attention")
# (out, in) of Gemma 4 31B's projections, and how many of each a step reads: q, k and v of a sliding or a global layer
# in one, the outputs of both, gate and up in one, down, the head; then some of them apart
GEMMA4 = {
    (16384, 5376): 50,
    (18432, 5376): 10,
    (5376, 8192): 50,
    (5376, 16384): 10,
    (43008, 5376): 60,
    (5376, 21504): 60,
    (262144, 5376): 1,
    (21504, 5376): 0,
    (8192, 5376): 0,
}
GEMMA3_270M = ((1024, 640), (256, 640), (640, 1024), (4096, 640), (640, 2048), (262144, 640))
HEADS = ((262144, 5376), (262144, 640), (32000, 5376))  # the last: a draft vocabulary
RECIPES = ((128, False), (32, True))  # group size, zero points


@dataclass(frozen=True)
class Weight:
    """A random weight as fragments. ``nbytes``: what one pass over it reads."""

    words: Tensor
    scales: Tensor
    offsets: Tensor | None
    group_size: int
    out_features: int

    @classmethod
    def random(cls, n: int, k: int, group: int, offsets: bool, device: str = "cuda") -> "Weight":
        tiles, units = -(-n // TILE), -(-k // unit_columns(group))
        words = torch.empty(tiles, units, TILE * unit_columns(group) // 1024, 32, 4, dtype=torch.int32, device=device)
        words.random_(-(2**31), 2**31)
        scales = torch.rand(tiles, -(-k // group), 8, TILE // 8, device=device).bfloat16()
        return cls(words, scales, torch.randn_like(scales) if offsets else None, group, n)

    @property
    def operands(self) -> tuple:
        return self.words, self.scales, self.offsets, self.group_size, self.out_features

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.words, self.scales, self.offsets) if t is not None)


def dense_us(x: Tensor, n: int) -> float:
    """Microseconds of torch's product with a bfloat16 weight ``[n, K]``."""
    copies = rotated(2 * n * x.shape[1])
    dense = [torch.randn(n, x.shape[1], device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    return graph_us(lambda i: x @ dense[i % copies].T, max(8, copies))


def tinygemm_us(x: Tensor, packed: list[Tensor], group: int) -> float:
    """Microseconds of torch's own int4 product."""
    weights = [torch._convert_weight_to_int4pack(w, 8) for w in packed]
    both = torch.rand(x.shape[1] // group, packed[0].shape[0], 2, device="cuda").bfloat16()
    call = torch.ops.aten._weight_int4pack_mm
    return graph_us(lambda i: call(x, weights[i % len(weights)], group, both), max(8, len(weights)))


def peers(n: int, k: int, group: int, rows: int, peer: ModuleType | None) -> dict[str, float | None]:
    """Microseconds of other kernels for the same product; None where one does not take it."""
    x = torch.randn(rows, k, device="cuda").bfloat16()
    copies = rotated(n * k // 2)
    times: dict[str, float | None] = {"cuBLAS bf16": dense_us(x, n)}
    if rows > 16:
        return times
    packed = [torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda") for _ in range(copies)]
    times["_weight_int4pack_mm"] = tinygemm_us(x, packed, group)
    times["executorch int4"] = None
    if peer is not None:
        scales = torch.rand(n, k // group, device="cuda").bfloat16()
        signed = [w.view(torch.int8) for w in packed]
        kernel = peer.int4_matvec if rows == 1 else peer.int4_matmul  # the latter tries its layouts for each shape
        times["executorch int4"] = graph_us(lambda i: kernel(x, signed[i % copies], scales, group), max(8, copies))
    return times


def product_us(launch: Callable[..., Tensor], x: Tensor, weights: list[tuple]) -> tuple[float, float]:
    """Microseconds of a product of few rows: its kernel alone, as in a program where the operation that follows adds
    the splits, and with one of torch's kernels that adds them.
    """
    most, times = method_rows(len(x)), max(8, len(weights))
    alone = graph_us(lambda i: launch(x, *weights[i % len(weights)], max_rows=most), times)
    added = graph_us(lambda i: launch(x, *weights[i % len(weights)], max_rows=most).sum(0), times)
    return alone, added


def bench_int4(rows: list[int], rate: float, console: Console, others: bool) -> tuple[list[dict], dict]:
    figures, shares = [], {}
    names = ("cuBLAS bf16", "_weight_int4pack_mm", "executorch int4")
    peer = executorch_kernels("int4_matmul") if others else None
    for group, offsets in RECIPES:
        spent: dict[int, list[float]] = {}
        table = Table(title=f"int4 products, µs, groups of {group}{', zero points' if offsets else ''}")
        for column in ("out x in", "rows", "floor", "eyas", "of the copy rate", "with the sum", *names):
            table.add_column(column, justify="right")
        for n, k in (*GEMMA4, *GEMMA3_270M):
            nbytes = Weight.random(n, k, group, offsets).nbytes
            weights = [Weight.random(n, k, group, offsets).operands for _ in range(rotated(nbytes))]
            for m in rows:
                x, floor = torch.randn(m, k, device="cuda").bfloat16(), 1e6 * nbytes / rate
                if m <= 16:
                    own, added = product_us(launch_splits, x, weights)
                else:
                    call = lambda i, x=x: launch_matmul(x, *weights[i % len(weights)])  # noqa: B023, E731
                    own = added = graph_us(call, max(8, len(weights)))
                compared = GEMMA4.get((n, k)) and group == 128 and (m in (1, 5, 16) or m > 16)
                theirs = peers(n, k, group, m, peer) if compared else {}
                figures.append({"out": n, "in": k, "group": group, "zero_points": offsets, "rows": m, "us": own,
                                "us_with_sum": added, "floor_us": floor, **theirs})  # fmt: skip
                if (n, k) in GEMMA4 and m <= 16:
                    total = spent.setdefault(m, [0.0, 0.0, 0.0])
                    for i, us in enumerate((floor, own, added)):
                        total[i] += us * GEMMA4[n, k]
                shown = [f"{theirs[name]:.1f}" if theirs.get(name) else "" for name in names]
                cells = f"{n}x{k}", str(m), f"{floor:.1f}", f"{own:.1f}", f"{floor / own:.0%}", f"{added:.1f}", *shown
                table.add_row(*cells)
                print(*cells, file=sys.stderr, flush=True)  # a run that is cut short shows what it has
        console.print(table)
        for m, (floor, own, added) in spent.items():
            alone, with_sums = shares[f"group {group}, {m} rows"] = floor / own, floor / added
            console.print(
                f"Gemma 4 31B, all projections of a step, group {group}, {m} rows: {alone:.1%} of the copy rate, "
                f"{with_sums:.1%} with the sums"
            )
    return figures, shares


def bench_int8(rows: list[int], rate: float, console: Console) -> list[dict]:
    figures = []
    table = Table(title="int8 products of heads, µs, a scale a row")
    for column in ("out x in", "rows", "floor", "eyas", "of the copy rate", "with the sum", "cuBLAS bf16"):
        table.add_column(column, justify="right")
    for n, k in HEADS:
        nbytes = n * k + 4 * n
        shape = -(-n // TILE), -(-k // int8.COLUMNS), TILE // 16, 32, 4
        words = [
            torch.empty(shape, dtype=torch.int32, device="cuda").random_(-(2**31), 2**31)
            for _ in range(rotated(nbytes))
        ]
        scales = torch.rand(n, device="cuda")
        for m in (m for m in rows if m <= 16):
            x = torch.randn(m, k, device="cuda").bfloat16()
            own, added = product_us(int8.launch_int8_splits, x, [(w, scales, n) for w in words])
            floor, dense = 1e6 * nbytes / rate, dense_us(x, n)
            figures.append({"out": n, "in": k, "rows": m, "us": own, "us_with_sum": added, "floor_us": floor,
                            "cuBLAS bf16": dense})  # fmt: skip
            cells = (
                f"{n}x{k}",
                str(m),
                f"{floor:.1f}",
                f"{own:.1f}",
                f"{floor / own:.0%}",
                f"{added:.1f}",
                f"{dense:.1f}",
            )
            table.add_row(*cells)
            print(*cells, file=sys.stderr, flush=True)
    console.print(table)
    return figures


def bench_cuda_kernels(rows: list[int], kinds: tuple[str, ...] = KINDS, others: bool = True) -> dict[str, object]:
    """Prints a table a recipe and kind. ``others``: with ExecuTorch's kernels beside. Raises ``RuntimeError`` without a
    GPU, ``ValueError`` for a kind that is not one of ``KINDS``.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"unknown kind {unknown[0]!r} of cuda kernels; allowed: {', '.join(KINDS)}")
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device was found; --device cpu times the cpu kernels")
    console = Console(width=140)
    rate = copy_rate()
    console.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy rate {rate / 1e12:.2f} TB/s; "
        f"medians of {REPLAYS - 2} graph replays"
    )
    made: dict[str, object] = {"device": torch.cuda.get_device_name(), "copy_rate": rate}
    if "attention" in kinds:
        made["attention"] = bench_attention(rows, rate, console, others)
    if "int8" in kinds:
        made["int8"] = bench_int8(rows, rate, console)
    if "int4" in kinds:
        made["int4"], made["gemma4_31b"] = bench_int4(rows, rate, console, others)
    return made

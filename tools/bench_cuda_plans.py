"""Times a kernel's plan against others on the card at hand: what ``plan`` of a kernel says was found so."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.runtime.errors import OutOfResources

from eyas.kernels import fragment_linear, splitk_sdpa
from eyas.tools.bench_cuda_attention import CASES, Case
from eyas.tools.bench_cuda_kernels import RECIPES, Weight
from eyas.tools.cuda_timing import REPLAYS, copy_rate, graph_us, method_rows, rotated

KINDS = ("int4", "attention")
SHAPE = (43008, 5376)  # of an int4 weight
WIDE = CASES[3]  # the longest cache at the largest width
CLOSE = 2**-6  # two orders of sums, of the largest number


def int4_plans(
    base: fragment_linear.Plan, other: fragment_linear.Plan, group_size: int
) -> Iterator[fragment_linear.Plan]:
    """``base``, then ``other``, that of Triton's kernel, and what differs from it in steps in flight, warps a program,
    splits or units a step.
    """
    yield base
    if base != other:
        yield other
    yield from (replace(other, stages=stages) for stages in (2, 3, 4, 5) if stages != other.stages)
    yield from (replace(other, tiles=tiles) for tiles in (1, 2, 4) if tiles != other.tiles)
    yield replace(other, splits=2 * other.splits)
    if group_size >= 128:
        for splits in {other.splits, max(1, other.splits - 1)}:
            for tiles in (1, 2):
                yield from (fragment_linear.Plan(tiles, splits, 3 - other.units, stages) for stages in (2, 3, 4))


def attention_plans(base: splitk_sdpa.Plan) -> Iterator[splitk_sdpa.Plan]:
    """``base``, then one with more turns in flight; for products by ``wgmma_sdpa``, Triton's, and other splits."""
    yield base
    if not base.wgmma:
        yield replace(base, stages=base.stages + 1)
        return
    yield from (replace(base, keys=16, stages=stages, wgmma=False) for stages in (3, 4))
    yield from (replace(base, splits=splits) for splits in (max(1, base.splits - 1), 2 * base.splits))


def time_plans(
    kernels: ModuleType,
    plans: Sequence[object],
    calls: dict[int, tuple[Callable[[int], Tensor], int]],
    title: str,
    console: Console,
    timed: Callable[[Callable[[int], object], int], float] = graph_us,
) -> list[dict[str, object]]:
    """Prints and returns microseconds of each plan by number of rows. ``calls``: by that number, what is called and how
    many operands it takes in turns. Results are held against those of the first plan. Raises ``ValueError`` where that
    does not fit.
    """
    table, found, expected = Table(title=title), [], {}
    for column in ("plan", *(f"M={rows}" for rows in calls), "differs"):
        table.add_column(column, justify="right")
    for layout in plans:
        times, differences = {}, [0.0]
        with patch.object(kernels, "plan", lambda *_, layout=layout: layout):
            for rows, (call, copies) in calls.items():
                try:
                    result = call(0).float()
                    result = result.sum(0) if result.dim() == 3 else result  # of splits
                    times[rows] = timed(call, max(8, copies))
                except OutOfResources as error:
                    if layout == plans[0]:
                        raise ValueError(f"the plan that others are held against does not fit: {error}") from error
                    times[rows] = None
                    continue
                want = expected.setdefault(rows, result)
                differences.append(float((result - want).abs().max() / want.abs().max()))
        shown = ", ".join(f"{name}={value}" for name, value in vars(layout).items())
        apart = float(np.max(differences))  # not a number, if one of them is not
        ok = apart < CLOSE
        found.append({"plan": shown, "us": times, "apart": apart, "ok": ok})
        cells = ["does not fit" if us is None else f"{us:.1f}" for us in times.values()]
        table.add_row(shown, *cells, f"{apart:.4f}" + ("" if ok else " WRONG"))
    console.print(table)
    return found


def int4_calls(shape: tuple[int, int], group: int, offsets: bool, rows: Sequence[int], device: str) -> dict:
    """Products of a random weight, before the splits are added."""
    n, k = shape
    first = Weight.random(n, k, group, offsets, device)
    weights = [first, *(Weight.random(n, k, group, offsets, device) for _ in range(rotated(first.nbytes) - 1))]
    made = {}
    for m in rows:
        x = torch.randn(m, k, device=device).bfloat16()

        def call(i: int, x=x) -> Tensor:
            return fragment_linear.launch_splits(x, *weights[i % len(weights)].operands, max_rows=method_rows(len(x)))

        made[m] = call, len(weights)
    return made


def attention_calls(case: Case, rows: Sequence[int], device: str) -> dict:
    caches, made = case.caches(device), {}
    for m in rows:
        q = torch.randn(1, m, case.heads, case.width, device=device).bfloat16().transpose(1, 2)
        positions = torch.arange(case.live - m, case.live, device=device)

        def call(i: int, q=q, positions=positions) -> Tensor:
            most = method_rows(q.shape[2])
            return splitk_sdpa.launch(q, *caches[i % len(caches)], positions, 0.05, case.window, most)

        made[m] = call, len(caches)
    return made


def bench_cuda_plans(kinds: tuple[str, ...], shape: tuple[int, int], rows: list[int]) -> dict[str, object]:
    """A table for each recipe of an int4 weight ``(outputs, inputs)``, and one for attention over a long cache. Raises
    ``RuntimeError`` without a GPU, ``ValueError`` for what has no plan.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"kind {unknown[0]!r} has no plans to try; allowed: {', '.join(KINDS)}")
    if bad := [m for m in rows if m > fragment_linear.MAX_ROWS]:
        raise ValueError(f"--rows must lie in 1..{fragment_linear.MAX_ROWS} for these kernels, got {bad[0]}")
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device was found; plans are for the card that they are tried on")
    console = Console(width=140)
    console.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy rate {copy_rate() / 1e12:.2f} TB/s; µs, "
        f"medians of {REPLAYS - 2} graph replays"
    )
    made: dict[str, object] = {"device": torch.cuda.get_device_name()}
    if "attention" in kinds:
        base = splitk_sdpa.plan(WIDE.heads, WIDE.kv_heads, WIDE.width, method_rows(max(rows)), WIDE.window)
        title = f"{WIDE.model}: {WIDE.live} keys of width {WIDE.width}"
        calls = attention_calls(WIDE, rows, "cuda")
        made["attention"] = time_plans(splitk_sdpa, list(attention_plans(base)), calls, title, console)
    if "int4" in kinds:
        for group, offsets in RECIPES:
            base = fragment_linear.plan(*shape, group)
            other = fragment_linear.triton_plan(*shape, group)
            title = f"int4 products, {shape[0]}x{shape[1]}, groups of {group}{', zero points' if offsets else ''}"
            calls = int4_calls(shape, group, offsets, rows, "cuda")
            made[f"int4, {group}"] = time_plans(
                fragment_linear, list(int4_plans(base, other, group)), calls, title, console
            )
    made["ok"] = all(row["ok"] for rows in made.values() if isinstance(rows, list) for row in rows)
    return made

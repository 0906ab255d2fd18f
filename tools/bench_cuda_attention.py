"""Times attention of a few rows over long caches on CUDA against others' kernels."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eyas.kernels.splitk_sdpa import launch
from eyas.tools.cuda_timing import executorch_kernels, graph_us, method_rows, rotated

PEERS = ("torch SDPA", "triton::sdpa", "triton split-K")


@dataclass(frozen=True)
class Case:
    """A layer's attention with ``live`` keys in a cache of ``size`` rows; ``window`` 0: all of them are seen."""

    model: str
    heads: int
    kv_heads: int
    width: int
    window: int
    live: int
    size: int

    @property
    def seen(self) -> int:
        return min(self.live, self.window) if self.window else self.live

    @property
    def nbytes(self) -> int:
        """Of the keys and values that a row sees."""
        return 4 * self.kv_heads * self.width * self.seen

    def caches(self, device: str = "cuda") -> list[tuple[Tensor, Tensor]]:
        """As many as are needed to come from memory each time."""
        made = []
        for _ in range(rotated(self.nbytes)):
            shape = 1, self.kv_heads, self.size, self.width
            pair = tuple(torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
            for cache in pair:
                cache[:, :, : self.live].normal_()
            made.append(pair)
        return made


CASES = [
    *(Case("Gemma 4 31B, global", 32, 4, 512, 0, live, 131072) for live in (1024, 4096, 32768, 131072)),
    Case("Gemma 4 31B, global", 32, 4, 512, 0, 1024, 1024),
    Case("Gemma 4 31B, sliding", 32, 16, 256, 1024, 5000, 2048),
    Case("Gemma 3 270M, global", 4, 1, 256, 0, 2048, 2048),
    Case("Gemma 3 270M, sliding", 4, 1, 256, 512, 2000, 1024),
]


def peers(
    case: Case, q: Tensor, positions: Tensor, caches: list, kernels: ModuleType | None
) -> dict[str, float | None]:
    """Microseconds of other kernels for the same attention, with the mask that they need; None where one does not take
    it.
    """
    rows = q.shape[2]
    mask = (torch.arange(case.size, device="cuda") <= positions[:, None])[None, None]
    length = torch.tensor([case.live], dtype=torch.int32, device="cuda")
    times: dict[str, float | None] = dict.fromkeys(PEERS)
    n = len(caches)

    def timed(call: Callable[[Tensor, Tensor], object]) -> float:
        return graph_us(lambda i: call(*caches[i % n]), max(2, n))

    sdpa = torch.nn.functional.scaled_dot_product_attention
    times["torch SDPA"] = timed(lambda k, v: sdpa(q, k, v, mask, scale=0.05, enable_gqa=True))
    if kernels is not None:
        options = {"attn_mask": mask, "scale": 0.05, "enable_gqa": True, "kv_len": length}
        times["triton::sdpa"] = timed(lambda k, v: kernels.sdpa(q, k, v, **options))
        if rows == 1:
            times["triton split-K"] = timed(lambda k, v: kernels.sdpa_decode_splitk(q, k, v, **options))
        elif rows <= 4:
            times["triton split-K"] = timed(lambda k, v: kernels.sdpa_small_query_splitk(q, k, v, **options))
    return times


def bench_attention(rows: list[int], rate: float, console: Console, others: bool) -> list[dict[str, object]]:
    """Prints the table. ``others``: with ExecuTorch's kernels, which try their layouts at the first call, beside."""
    kernels = executorch_kernels("sdpa") if others else None
    table = Table(title="attention, µs; triton: ExecuTorch's, the split-K ones take 1 and 2 to 4 rows")
    for column in ("layer", "live", "of", "rows", "floor", "eyas", "of the copy rate", *PEERS):
        table.add_column(column, justify="right")
    figures = []
    for case in CASES:
        caches = case.caches()
        for m in (m for m in rows if m <= 16):
            q = torch.randn(1, m, case.heads, case.width, device="cuda").bfloat16().transpose(1, 2)
            positions, most = torch.arange(case.live - m, case.live, device="cuda"), method_rows(m)

            def call(i: int, case=case, q=q, positions=positions, caches=caches, most=most) -> Tensor:
                return launch(q, *caches[i % len(caches)], positions, 0.05, case.window, most)

            own, floor = graph_us(call, max(8, len(caches))), 1e6 * case.nbytes / rate
            # a mask says which keys are live, not where a ring has them; layouts are tried for each number of rows
            theirs = {} if case.window or m not in (1, 4, 5) else peers(case, q, positions, caches, kernels)
            figures.append({**vars(case), "rows": m, "us": own, "floor_us": floor, **theirs})
            shown = [f"{theirs[name]:.1f}" if theirs.get(name) else "" for name in PEERS]
            cells = (
                case.model,
                str(case.live),
                str(case.size),
                str(m),
                f"{floor:.1f}",
                f"{own:.1f}",
                f"{floor / own:.0%}",
            )
            table.add_row(*cells, *shown)
            print(*cells, *shown, file=sys.stderr, flush=True)  # a run that is cut short shows what it has
        del caches
    console.print(table)
    return figures

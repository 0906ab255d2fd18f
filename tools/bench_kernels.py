"""Times the cpu kernels against torch's own, weights rotated so that they come from memory as in a model."""

import statistics
import time
from collections.abc import Callable
from ctypes import byref, c_double, c_int64, c_void_p

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from eyas.kernels import panel_linear
from eyas.lowering.content_cache import ContentCache, default_root
from eyas.lowering.cpu_kernels import build_libraries
from eyas.runtime.native import Host, Tensor, load_apart

ROTATED_BYTES = 96 << 20  # more than the caches of the machines we know
SECONDS = 0.4
GROUP = 32
# (out, in) of Gemma 3 270M: query, key or value, output, gate or up, down, and a quarter of the head
SHAPES = ((1024, 640), (256, 640), (640, 1024), (2048, 640), (640, 2048), (65536, 640))
HEADS, KV_HEADS, WIDTH, RING = 4, 1, 256, 1024


class KernelLibrary:
    """The C++ kernels as functions of ``Tensor``s, without a program around them."""

    def __init__(self):
        libraries = build_libraries(ContentCache(default_root()))
        self.host = Host.load(libraries.host)
        self._lib = load_apart(libraries.kernels)

    def __call__(self, name: str, *arguments: Tensor | int | float) -> Tensor:
        """Calls ``aoti_torch_cpu_<name>``. Raises ``RuntimeError`` where the kernel refuses its arguments."""
        converted = [
            c_void_p(a.handle) if isinstance(a, Tensor) else c_double(a) if isinstance(a, float) else c_int64(a)
            for a in arguments
        ]
        out = c_void_p()
        if getattr(self._lib, f"aoti_torch_cpu_{name}")(*converted, byref(out)):
            raise RuntimeError(f"kernel {name} refused its arguments")
        return Tensor(self.host, out.value)

    def tensor(self, value: torch.Tensor) -> Tensor:
        """A dense torch tensor as one that kernels take, over the same memory."""
        return Tensor.of(self.host, value.contiguous().numpy())


def median_us(call: Callable[[], object]) -> float:
    """Median time of a call in microseconds, after two that do not count."""
    call(), call()
    times, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def rotating(make: Callable[[], object], nbytes: int) -> Callable[[], object]:
    """Gives one of several equal-sized operands in turn, together larger than the caches."""
    items = [make() for _ in range(max(2, ROTATED_BYTES // nbytes))]
    state = iter(range(1 << 60))
    return lambda: items[next(state) % len(items)]


def bench_kernels(rows: list[int]) -> dict[str, object]:
    kernels, console, figures = KernelLibrary(), Console(), []
    table = Table(title=f"µs a call, {torch.get_num_threads()} threads, weights from memory")
    for column in ("out x in", "rows", "f32 panels", "F.linear", "int8 panels", "_weight_int8pack_mm bf16",
                   "int4 panels", "_weight_int4pack_mm bf16"):  # fmt: skip
        table.add_column(column, justify="right")
    generator = torch.Generator().manual_seed(0)
    for n, k in SHAPES:
        operands = make_operands(kernels, n, k, generator)
        for m in rows:
            times = {name: median_us(call) for name, call in calls(kernels, operands, n, k, m, generator).items()}
            figures.append({"out": n, "in": k, "rows": m, **times})
            table.add_row(f"{n} x {k}", str(m), *(f"{t:.0f}" for t in times.values()))
    console.print(table)
    attention = Table(title=f"attention: {HEADS} heads, {KV_HEADS} key head, width {WIDTH}, ring of {RING}; µs a call")
    for column in ("live keys", "rows", "masked_sdpa", "torch SDPA"):
        attention.add_column(column, justify="right")
    for live in (64, 512):
        for m in rows:
            times = attention_times(kernels, live, m)
            figures.append({"live_keys": live, "rows": m, **times})
            attention.add_row(str(live), str(m), *(f"{t:.0f}" for t in times.values()))
    console.print(attention)
    return {"figures": figures}


def make_operands(
    kernels: KernelLibrary, n: int, k: int, generator: torch.Generator
) -> dict[str, Callable[[], object]]:
    dense = torch.randn(n, k, generator=generator)
    int8 = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    nibbles = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.int32)
    packed4 = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    bytes4 = (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).to(torch.uint8)
    tensor = kernels.tensor
    return {
        "f32": rotating(lambda: tensor(panel_linear.pack_panels(dense)), 4 * n * k),
        "linear": rotating(dense.clone, 4 * n * k),
        "int8": rotating(lambda: tensor(panel_linear.pack_panels(int8)), n * k),
        "int8pack": rotating(int8.clone, n * k),
        "int4": rotating(lambda: tensor(panel_linear.pack_panels(bytes4)), n * k // 2),
        "int4pack": rotating(packed4.clone, n * k // 2),
    }


def calls(kernels, operands, n: int, k: int, m: int, generator) -> dict[str, Callable[[], object]]:
    x = torch.randn(m, k, generator=generator)
    xb, xt = x.bfloat16(), kernels.tensor(x)
    scales = torch.rand(n, generator=generator)
    groups = torch.rand(n, k // GROUP, generator=generator)
    scale_offset = kernels.tensor(panel_linear.pack_scale_offset(groups))
    stock = torch.stack([groups.T, groups.T], dim=-1).bfloat16().contiguous()
    row_scales, stock_scales = kernels.tensor(panel_linear.pack_scales(scales)), scales.bfloat16()
    return {
        "f32_panels": lambda: kernels("panel_linear", xt, operands["f32"](), n),
        "f_linear": lambda: F.linear(x, operands["linear"]()),
        "int8_panels": lambda: kernels("panel_int8_linear", xt, operands["int8"](), row_scales, n),
        "weight_int8pack_mm": lambda: torch.ops.aten._weight_int8pack_mm(xb, operands["int8pack"](), stock_scales),
        "int4_panels": lambda: kernels("panel_int4_linear", xt, operands["int4"](), scale_offset, GROUP, n),
        "weight_int4pack_mm": lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(
            xb, operands["int4pack"](), GROUP, stock
        ),
    }


def attention_times(kernels, live: int, m: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, HEADS, m, WIDTH, generator=generator)
    k, v = (torch.randn(1, KV_HEADS, RING, WIDTH, generator=generator) for _ in range(2))
    mask = torch.arange(RING)[None] < live + torch.arange(m)[:, None] - m + 1
    arrays = [kernels.tensor(t) for t in (q, k, v, mask)]
    return {
        "masked_sdpa": median_us(lambda: kernels("masked_sdpa", *arrays, WIDTH**-0.5)),
        "sdpa": median_us(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)),
    }

"""What timings of CUDA kernels have in common: replays of graphs, operands that come from memory, the copy rate."""

import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

ROTATED_BYTES = 300 << 20  # five times the L2 of an H200
REPLAYS = 15
LONG_US = 20_000.0  # a replay that takes longer is not repeated as often


def method_rows(rows: int) -> int:
    """The most rows of the method that a call of ``rows`` is one of: kernels are made for up to 8, and for up to 16."""
    return 8 if rows <= 8 else 16


def rotated(nbytes: int) -> int:
    """How many copies of something that is read are used in turns, so that none is still in the cache."""
    return max(2, -(-ROTATED_BYTES // nbytes))


def graph_us(call: Callable[[int], object], times: int) -> float:
    """Median microseconds of ``call(i)`` within a CUDA graph of ``times`` calls."""
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(times):
            call(i)
    samples: list[float] = []
    while len(samples) < (REPLAYS if not samples or samples[-1] < LONG_US else 4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end))
    return statistics.median(samples[2:]) / times


def copy_rate() -> float:
    """Bytes a second of a pass that reads 1 GiB and writes as much."""
    source, target = (torch.rand(1 << 28, device="cuda") for _ in range(2))
    return 2e6 * source.nbytes / graph_us(lambda i: torch.add(source, 1, out=target), 8)


def executorch_kernels(name: str) -> ModuleType | None:
    """A file of Triton kernels of an installed ExecuTorch, without the packages that its other backends need."""
    found = importlib.util.find_spec("executorch")
    if found is None:
        return None
    (root,) = found.submodule_search_locations
    path = Path(root, "backends/cuda/triton/kernels", name + ".py")
    spec = importlib.util.spec_from_file_location("executorch_" + name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

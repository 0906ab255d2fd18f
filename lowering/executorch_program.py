"""Puts compiled methods into one ExecuTorch program: each method is a chain of calls of the stock AOTInductor delegate.

The delegates are lowered over a stub of each method, one opaque node a call with its inputs and outputs, so that
nothing of a model passes through ExecuTorch's own copies of the graph.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from eyas.kernels.block import Shapes
from eyas.lowering.chains import Chain

# Stands for a call of a block that is compiled already; it exists only between a stub and its delegate.
LIBRARY = torch.library.Library("eyas", "FRAGMENT")
LIBRARY.define("compiled_block(str call, Tensor[] inputs) -> Tensor[]")
_shapes: dict[str, Shapes] = {}


@torch.library.register_fake("eyas::compiled_block", lib=LIBRARY)
def _(call: str, inputs: list[Tensor]) -> list[Tensor]:
    return _shapes[call].like(inputs)


class Stub(torch.nn.Module):
    """A module whose forward is one ``compiled_block`` node a step of a chain."""

    def __init__(self, method: str, chain: Chain):
        super().__init__()
        self.method, self.chain = method, chain

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for i, step in enumerate(self.chain.steps):
            values += torch.ops.eyas.compiled_block(call_name(self.method, i), [values[v] for v in step.inputs])
        return tuple(values[v] for v in self.chain.outputs)


def call_name(method: str, step: int) -> str:
    return f"{method}:{step}"


def stub_of(method: str, chain: Chain, max_rows: int) -> ExportedProgram:
    """The stub of a method, over 1..``max_rows`` rows."""
    upper = max(max_rows, 4)
    rows = Dim("rows", min=1, max=upper)
    values = chain.values[: chain.n_inputs]
    example = [torch.zeros([d if isinstance(d, int) else 3 for d in v.shape], dtype=v.dtype) for v in values]
    dynamic = tuple({i: rows for i, d in enumerate(v.shape) if not isinstance(d, int)} for v in values)
    at = chain.n_inputs
    for i, step in enumerate(chain.steps):
        made = chain.values[at : at + step.n_results]
        _shapes[call_name(method, i)] = Shapes([chain.values[v] for v in step.inputs], list(made))
        at += step.n_results
    return torch.export.export(Stub(method, chain), tuple(example), dynamic_shapes=(dynamic,), strict=False)


def write_program(
    path: Path,
    chains: Mapping[str, tuple[Chain, int]],
    code: Mapping[str, Path],
    constant_methods: Mapping[str, object],
    host: Path | None,
) -> None:
    """Writes the ``.pte``. ``chains``: method -> (its chain, its largest number of rows). ``code``: block -> its native
    code. ``host``: the library that implements AOTInductor's interface for them, None where that is torch's.
    """
    from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig

    from eyas.lowering.delegate import CpuPartitioner, payloads

    stubs = {name: stub_of(name, chain, rows) for name, (chain, rows) in chains.items()}
    calls = {
        call_name(name, i): (code[step.block], step.constants)
        for name, (chain, _) in chains.items()
        for i, step in enumerate(chain.steps)
    }
    with payloads(calls, host):
        # no operator of a stub is left for ExecuTorch to decompose or check, so it counts as an edge program as it is
        config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
        edge = EdgeProgramManager(stubs, dict(constant_methods), config)
        edge = edge.to_backend({name: CpuPartitioner() for name in stubs})
        program = edge.to_executorch(ExecutorchBackendConfig(extract_delegate_segments=True))
    with open(path, "wb") as file:
        program.write_to_file(file)

"""Puts compiled methods into one ExecuTorch program: each method is one call of the stock AOTInductor delegate.

The delegate is lowered over a stub of each method, a single opaque node with the method's inputs and outputs, so that
nothing of a model passes through ExecuTorch's own copies of the graph.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from eyas.lowering.aoti_cpu import CompiledMethod


@torch.library.custom_op("eyas::compiled_method", mutates_args=())
def compiled_method(method: str, inputs: list[Tensor]) -> list[Tensor]:
    """Stands for a method that is compiled already; it exists only between a stub and its delegate."""
    raise RuntimeError(f"method {method!r} is a stub; it runs only as part of a program")


_outputs: dict[str, "Outputs"] = {}


@compiled_method.register_fake
def _(method: str, inputs: list[Tensor]) -> list[Tensor]:
    return _outputs[method].like(inputs)


class Outputs:
    """Shapes of a method's outputs in terms of its inputs' dynamic dimension."""

    def __init__(self, ep: ExportedProgram):
        nodes = {node.name: node for node in ep.graph.nodes}
        self.shapes = [
            (tuple(v.shape), v.dtype) for v in (nodes[n].meta["val"] for n in ep.graph_signature.user_outputs)
        ]

    def like(self, inputs: list[Tensor]) -> list[Tensor]:
        rows = inputs[0].shape[1]
        return [
            inputs[0].new_empty([d if isinstance(d, int) else rows for d in shape], dtype=dtype)
            for shape, dtype in self.shapes
        ]


class Stub(torch.nn.Module):
    """A module whose forward is one ``compiled_method`` node."""

    def __init__(self, method: str):
        super().__init__()
        self.method = method

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.ops.eyas.compiled_method(self.method, list(inputs)))


def stub_of(method: str, ep: ExportedProgram, max_rows: int) -> ExportedProgram:
    """The stub of a traced method, over 1..``max_rows`` rows."""
    nodes = {node.name: node.meta["val"] for node in ep.graph.nodes if node.op == "placeholder"}
    values = [nodes[name] for name in ep.graph_signature.user_inputs]
    upper = max(max_rows, 4)
    rows = Dim("rows", min=1, max=upper)
    example = [torch.zeros([d if isinstance(d, int) else 3 for d in v.shape], dtype=v.dtype) for v in values]
    dynamic = tuple({i: rows for i, d in enumerate(v.shape) if not isinstance(d, int)} for v in values)
    _outputs[method] = Outputs(ep)
    return torch.export.export(Stub(method), tuple(example), dynamic_shapes=(dynamic,), strict=False)


def write_program(
    path: Path,
    methods: Mapping[str, tuple[ExportedProgram, int]],
    compiled: Mapping[str, CompiledMethod],
    constant_methods: Mapping[str, object],
    host: Path | None,
) -> None:
    """Writes the ``.pte``. ``methods``: name -> (traced method, its largest number of rows). ``host``: the library that
    implements AOTInductor's interface for them, None where that is torch's."""
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower

    from eyas.lowering.delegate import CpuPartitioner, payloads

    stubs = {name: stub_of(name, ep, rows) for name, (ep, rows) in methods.items()}
    with payloads({name: (method.code, method.constants) for name, method in compiled.items()}, host):
        edge = to_edge_transform_and_lower(
            stubs,
            partitioner={name: [CpuPartitioner(name)] for name in stubs},
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods=dict(constant_methods),
        )
        program = edge.to_executorch(ExecutorchBackendConfig(extract_delegate_segments=True))
    with open(path, "wb") as file:
        program.write_to_file(file)

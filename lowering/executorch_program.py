"""Puts compiled methods into one ExecuTorch program: each method is a chain of calls of the stock AOTInductor delegate.

Nothing of a model passes through ExecuTorch: a method is a stub, one opaque node a call with its inputs and outputs,
and each such node becomes the call of a delegate. ExecuTorch's own way there, a partitioner, copies and sorts the whole
graph of a method once for every call.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig
from executorch.exir.delegate import executorch_call_delegate
from torch import Tensor
from torch.export import Dim, ExportedProgram

from eyas.kernels.block import Shapes
from eyas.lowering.chains import Chain, Step
from eyas.lowering.delegate import NativeCode

# Stands for a call of a block that is compiled already; it exists only in stubs.
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
        for step in self.chain.steps:
            values += torch.ops.eyas.compiled_block(call_name(self.method, step), [values[v] for v in step.inputs])
        return tuple(values[v] for v in self.chain.outputs)


def call_name(method: str, step: Step) -> str:
    """The steps of a method that call one block have the same shapes."""
    return f"{method}:{step.block}"


def stub_of(method: str, chain: Chain, max_rows: int) -> ExportedProgram:
    """The stub of a chain of a method, over 1..``max_rows`` rows."""
    upper = max(max_rows, 4)
    rows = Dim("rows", min=1, max=upper)
    values = chain.values[: chain.n_inputs]
    example = [torch.zeros([d if isinstance(d, int) else 3 for d in v.shape], dtype=v.dtype) for v in values]
    dynamic = tuple({i: rows for i, d in enumerate(v.shape) if not isinstance(d, int)} for v in values)
    for step, inputs, made in chain.calls():
        _shapes[call_name(method, step)] = Shapes(inputs, made)
    return torch.export.export(Stub(method, chain), tuple(example), dynamic_shapes=(dynamic,), strict=False)


def delegated(method: str, chain: Chain, max_rows: int, code: Mapping[str, NativeCode]) -> ExportedProgram:
    """A method as calls of delegates: its stub with each node replaced by one."""
    ep = stub_of(method, chain, max_rows)
    module, graph = ep.graph_module, ep.graph
    nodes = [node for node in graph.nodes if node.target is torch.ops.eyas.compiled_block.default]
    alone: dict[str, ExportedProgram] = {}
    for i, (node, (step, inputs, made)) in enumerate(zip(nodes, chain.calls(), strict=True)):
        if step.block not in alone:
            numbers = tuple(range(len(inputs) + len(made)))
            one = replace(step, inputs=numbers[: len(inputs)])
            only = Chain(len(inputs), (one,), numbers[len(inputs) :], (*inputs, *made))
            alone[step.block] = stub_of(method, only, max_rows)
        name = f"lowered_module_{i}"
        setattr(module, name, code[step.block].delegate(alone[step.block], step.constants))
        with graph.inserting_before(node):
            call = graph.call_function(executorch_call_delegate, (graph.get_attr(name), *node.args[1]))
        call.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    module.recompile()
    return ep


def write_program(
    path: Path,
    chains: Mapping[str, tuple[Chain, int]],
    code: Mapping[str, Path],
    constant_methods: Mapping[str, object],
    host: Path | None,
    device: str = "cpu",
) -> None:
    """Writes the ``.pte``. ``chains``: method -> (its chain, its largest number of rows). ``code``: block -> its native
    code. ``host``: the library that implements AOTInductor's interface for them, None where that is torch's.
    ``device``: what the code runs on.
    """
    native = {block: NativeCode(file, host, device) for block, file in code.items()}
    methods = {name: delegated(name, chain, rows, native) for name, (chain, rows) in chains.items()}
    # no operator is left for ExecuTorch to decompose or check, so each counts as an edge program as it is
    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    edge = EdgeProgramManager(methods, dict(constant_methods), config)
    program = edge.to_executorch(ExecutorchBackendConfig(extract_delegate_segments=True))
    with open(path, "wb") as file:
        program.write_to_file(file)

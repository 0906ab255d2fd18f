"""Hands a pass to ExecuTorch: ``to_edge_transform_and_lower(..., transform_passes=[ExecutorchPass(one)])``.

Our own runner stays thinner than ExecuTorch's manager: it checks only what changed and keeps facts between passes. An
edge graph calls the same operators under other objects, so a pass sees it in the ATen form, and what it leaves is put
back into the edge form.
"""

import torch
from executorch.exir.dialects._ops import ops as edge_ops
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult
from torch.export import ExportedProgram
from torch.fx import Node

from eyas.passes.base import Outcome, Pass
from eyas.passes.pipeline import PassError, nearest
from eyas.passes.program import Program


class ExecutorchPass(ExportedProgramPassBase):
    """``one`` as a pass of ExecuTorch's manager, over a program of one method. ``outcome`` is what its last run did.

    Raises ``PassError`` for a pass that must fire and does not; what a pass itself raises goes through.
    """

    def __init__(self, one: Pass):
        self.one, self.outcome = one, Outcome()

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        edge = any(isinstance(node.target, EdgeOpOverload) for node in exported_program.graph.nodes)
        for node in exported_program.graph.nodes:
            if isinstance(node.target, EdgeOpOverload):
                node.target = node.target._op
        try:
            self.outcome = self.one.run(Program.of(exported_program))
        finally:
            for node in exported_program.graph.nodes if edge else ():
                node.target = edge_form(node)
        if self.one.must_fire and not self.outcome.rewrites:
            raise PassError(f"pass {self.one} must fire and did not: {nearest(self.outcome.refusals)}")
        exported_program.graph.lint()
        exported_program.graph_module.recompile()
        return ExportedProgramPassResult(exported_program, self.outcome.rewrites > 0)


def edge_form(node: Node) -> object:
    """What an edge graph calls in place of a node's operator."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return target
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(edge_ops.edge, namespace), name)
    return getattr(packet, target._overloadname)

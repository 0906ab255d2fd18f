"""Tables that follow from positions alone (rotary angles, masks, cache slots) are computed once a call, not once a
layer.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from eyas.passes.base import MethodPass, Outcome
from eyas.passes.program import constant_specs, storage_root, written_roots


@dataclass(frozen=True)
class MaterializeTables(MethodPass):
    """Pins each table that several nodes read and that no token, feature or weight matrix flows into.

    Before::

        %cos: f32[s0,256] = aten.cos.default(%angles)
        %a: f32[1,4,s0,256] = aten.mul.Tensor(%q0, %cos)
        %b: f32[1,4,s0,256] = aten.mul.Tensor(%q1, %cos)

    After::

        %cos: f32[s0,256] = aten.cos.default(%angles)
        %table: f32[s0,256] = eyas.materialize.default(%cos)
        %a: f32[1,4,s0,256] = aten.mul.Tensor(%q0, %table)
        %b: f32[1,4,s0,256] = aten.mul.Tensor(%q1, %table)

    A table is a value that depends on int64 vectors (positions) and constant vectors only. Left alone: tables that one
    node reads, those that are written in place (a copy would miss what comes later), and those that are pinned already.
    """

    name: ClassVar[str] = "materialize_tables"

    def run_method(self, method: str, ep: ExportedProgram) -> Outcome:
        tables, written = position_only(ep), written_roots(ep)
        outcome = Outcome()
        for node in tables:
            readers = [user for user in node.users if user not in tables and computes(user)]
            if node.op != "call_function" or len(readers) < 2 or is_pin(node) or storage_root(node) in written:
                continue
            with ep.graph.inserting_after(node):
                pinned = ep.graph.call_function(torch.ops.eyas.materialize.default, (node,))
            pinned.meta = dict(node.meta)
            pinned.meta["val"] = torch.empty_like(node.meta["val"], memory_format=torch.contiguous_format)
            for reader in readers:
                reader.replace_input_with(node, pinned)
            outcome.rewrites += 1
        return outcome


def computes(node: Node) -> bool:
    """Whether a node makes tensors, rather than checking one or reading its size."""
    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else [values]
    return node.op == "call_function" and any(isinstance(value, torch.Tensor) for value in values)


def is_pin(node: Node) -> bool:
    return node.target is torch.ops.eyas.materialize.default


def position_only(ep: ExportedProgram) -> dict[Node, None]:
    """Nodes that no token, feature, cache or weight matrix flows into, in graph order."""
    constants = {spec.arg.name for _, spec in constant_specs(ep)}
    known: dict[Node, None] = {}
    for node in ep.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            vector = isinstance(value, torch.Tensor) and value.ndim == 1
            if vector and (node.name in constants or value.dtype == torch.int64):
                known[node] = None
        elif node.op == "call_function" and isinstance(value, torch.Tensor):
            tensors = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
            known |= dict.fromkeys([node] if all(source in known for source in tensors) else [])
    return known

"""What nobody reads goes: masks that no attention takes any more, and the constants that only they read."""

from dataclasses import dataclass
from typing import ClassVar

from torch.export import ExportedProgram
from torch.fx import Node

from eyas.passes.base import MethodPass, Outcome
from eyas.passes.program import remove_unused_constants, schema_arguments


@dataclass(frozen=True)
class DeadCode(MethodPass):
    """Removes nodes without users that write nothing and check nothing, and constants that no node reads.

    Before::

        %ge: bool[s0,2048] = aten.ge.Tensor(%unsqueeze, %unsqueeze_1)
        %y: f32[1,4,s0,256] = eyas.sdpa_midm.default(%q, %k, %v, %input_pos, 0.06)

    After::

        %y: f32[1,4,s0,256] = eyas.sdpa_midm.default(%q, %k, %v, %input_pos, 0.06)

    Left alone: writes in place, checks, operators without a schema, and the inputs of a method.
    """

    name: ClassVar[str] = "dead_code"

    def run_method(self, method: str, ep: ExportedProgram) -> Outcome:
        outcome, before = Outcome(), len(ep.graph.nodes)
        for node in reversed(list(ep.graph.nodes)):
            if not node.users and is_pure(node):
                ep.graph.erase_node(node)
        remove_unused_constants(ep)
        outcome.rewrites = before - len(ep.graph.nodes)
        return outcome


def is_pure(node: Node) -> bool:
    """Whether a node only makes a value: it has a result, and writes to none of its arguments."""
    if node.op != "call_function" or node.is_impure():
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__module__", "") in ("_operator", "math")  # pieces of lists, sums of sizes
    written = (a.alias_info is not None and a.alias_info.is_write for a, _ in schema_arguments(node))
    return bool(schema.returns) and not any(written)

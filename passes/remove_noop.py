"""Operators that change nothing go: casts to the type a value has, expands to its shape, checks that cannot fail."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from eyas.passes.base import MethodPass, Outcome
from eyas.passes.program import Edits, given, known_equal, storage_root, written_roots

aten = torch.ops.aten

CASTS = (aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout, aten.to.device)
SHAPES = (aten.expand.default, aten.view.default, aten.reshape.default, aten.alias.default)
CHECKS = (aten._assert_tensor_metadata.default,)


@dataclass(frozen=True)
class RemoveNoop(MethodPass):
    """Removes the casts, expands and views whose result is their argument, and the checks of what is known.

    Before::

        %_assert: none = aten._assert_tensor_metadata.default(%x, None, None, f32, device=cpu, layout=torch.strided)
        %to: f32[1,s0,640] = aten.to.dtype(%x, f32)
        %y: f32[1,s0,640] = aten.pow.Tensor_Scalar(%to, 2)

    After::

        %y: f32[1,s0,640] = aten.pow.Tensor_Scalar(%x, 2)

    The tracer writes both lines for each ``x.float()``. Left alone: results of another dtype, shape, stride or device;
    copies (``copy=True``, ``_to_copy``) of what is written in place somewhere or handed out, also through a view, for
    those are two tensors; and results that the method gives out beside their argument.
    """

    name: ClassVar[str] = "remove_noop"

    def run_method(self, method: str, ep: ExportedProgram) -> Outcome:
        outcome, kept = Outcome(), written_roots(ep) | handed_out(ep)
        with Edits(ep) as edits:
            for node in list(ep.graph.nodes):
                if node.op != "call_function":
                    continue
                if node.target in CHECKS and known(node):
                    ep.graph.erase_node(node)
                elif (node.target in CASTS or node.target in SHAPES) and is_identity(node, kept):
                    edits.replace(node, given(node, 0))
                else:
                    continue
                outcome.rewrites += 1
        return outcome


def known(node: Node) -> bool:
    """Whether a check compares a tensor with the very type that is recorded for it."""
    value = given(node, 0).meta["val"]
    size, stride, dtype, device, layout = (given(node, i) for i in range(1, 6))
    return (
        (size is None or known_equal(size, value.shape))
        and (stride is None or known_equal(stride, value.stride()))
        and dtype in (None, value.dtype)
        and device in (None, value.device)
        and layout in (None, value.layout)
    )


def handed_out(ep: ExportedProgram) -> set[Node]:
    """The nodes that made the storages which a method's results lie in."""
    output = next(node for node in ep.graph.nodes if node.op == "output")
    return {storage_root(node) for node in output.all_input_nodes}


def is_identity(node: Node, kept: set[Node]) -> bool:
    """Whether a node's result can be its argument itself; ``kept``: whose copies are two tensors to the eye."""
    source = given(node, 0)
    got, had = node.meta["val"], source.meta["val"]
    if (got.dtype, got.device, got.layout) != (had.dtype, had.device, had.layout):
        return False
    if not (known_equal(got.shape, had.shape) and known_equal(got.stride(), had.stride())):
        return False
    if any(user.op == "output" for user in node.users):  # its argument may be an input, a buffer or another result
        return False
    copies = node.target is aten._to_copy.default or copy_argument(node)
    return not (copies and (storage_root(source) in kept or storage_root(node) in kept))


def copy_argument(node: Node) -> bool:
    names = [argument.name for argument in node.target._schema.arguments]
    return "copy" in names and bool(given(node, names.index("copy")))

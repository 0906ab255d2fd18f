"""Splits become slices.

AOTInductor's CUDA path has no kernel for ``split_copy``, which is what ``chunk`` and ``split`` turn into there; slices
are views.
"""

import operator
import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from eyas.passes.base import MethodPass, Outcome, Refusal, source_line
from eyas.passes.program import given, replace_node

aten = torch.ops.aten

SPLITS = {
    aten.split.Tensor: aten.slice.Tensor,
    aten.split_with_sizes.default: aten.slice.Tensor,
    aten.unsafe_split.Tensor: aten.slice.Tensor,
    aten.chunk.default: aten.slice.Tensor,
    aten.split_copy.Tensor: aten.slice_copy.Tensor,
    aten.split_with_sizes_copy.default: aten.slice_copy.Tensor,
}


@dataclass(frozen=True)
class SplitCopyToSlice(MethodPass):
    """Rewrites each piece of a split that has a user into a slice.

    Before::

        %split: (f32[1,4,s0,8], f32[1,4,s0,8]) = aten.split.Tensor(%x, 8, -1)
        %low: f32[1,4,s0,8] = getitem(%split, 0)
        %high: f32[1,4,s0,8] = getitem(%split, 1)

    After::

        %low: f32[1,4,s0,8] = aten.slice.Tensor(%x, 3, 0, 8)
        %high: f32[1,4,s0,8] = aten.slice.Tensor(%x, 3, 8, 16)

    Left alone: a split along a dimension whose pieces have symbolic lengths other than the last one's, and one whose
    list of pieces is used as a whole (a graph output).
    """

    name: ClassVar[str] = "split_copy_to_slice"
    ensures: ClassVar[frozenset[str]] = frozenset({"no_splits"})

    def run_method(self, method: str, ep: ExportedProgram) -> Outcome:
        outcome = Outcome()
        for node in list(ep.graph.nodes):
            if node.op != "call_function" or node.target not in SPLITS:
                continue
            if reason := check(node):
                outcome.refusals.append(Refusal(method, source_line(node), reason))
                continue
            rewrite(ep, node)
            outcome.rewrites += 1
        return outcome


def check(node: Node) -> str | None:
    """Why this split cannot become slices, or None."""
    users = [user for user in node.users if not (user.op == "call_function" and user.target is operator.getitem)]
    if users:
        return f"its list of pieces is used as a whole by {users[0].name}"
    lengths = [piece.shape[dimension(node)] for piece in node.meta["val"]]
    if any(not isinstance(length, int) for length in lengths[:-1]):
        return f"the pieces' lengths are symbolic: {', '.join(map(str, lengths))}"
    return None


def dimension(node: Node) -> int:
    """The dimension that is split, counted from the front."""
    return (given(node, 2) or 0) % node.args[0].meta["val"].ndim


def rewrite(ep: ExportedProgram, node: Node) -> None:
    dim, pieces = dimension(node), node.meta["val"]
    starts = [0]
    for piece in pieces[:-1]:
        starts.append(starts[-1] + piece.shape[dim])
    for user in list(node.users):
        index = user.args[1] % len(pieces)
        end = starts[index + 1] if index + 1 < len(pieces) else starts[index] + pieces[index].shape[dim]
        end = end if isinstance(end, int) else sys.maxsize  # the last piece of a symbolic length: to the end
        with ep.graph.inserting_before(user):
            piece = ep.graph.call_function(SPLITS[node.target], (node.args[0], dim, starts[index], end))
        piece.meta = dict(user.meta)
        replace_node(ep, user, piece)
    ep.graph.erase_node(node)

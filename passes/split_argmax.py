"""A long argmax becomes two short ones.

A generated kernel reduces a row in one program, so one row keeps one of a card's processors busy; in parts it keeps
many.
"""

from dataclasses import dataclass
from math import isqrt
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from eyas.passes.base import MethodPass, Outcome, Refusal, source_line
from eyas.passes.program import Edits, given
from eyas.passes.types import Types

aten = torch.ops.aten
LEAST = 16  # parts, and elements of a part


@dataclass(frozen=True)
class SplitArgmax(MethodPass):
    """Finds the largest element of each part of a row, and then the part, for rows of ``min_width`` elements or more.

    Before::

        %ids: i64[1,s0] = aten.argmax.default(%logits, -1)

    After::

        %parts: f32[1,s0,512,512] = aten.reshape.default(%logits, [1, -1, 512, 512])
        %inner: i64[1,s0,512] = aten.argmax.default(%parts, -1)
        %best: f32[1,s0,512] = aten.amax.default(%parts, [-1])
        %outer: i64[1,s0,1] = aten.argmax.default(%best, -1, True)
        %within: i64[1,s0,1] = aten.gather.default(%inner, -1, %outer)
        %start: i64[1,s0,1] = aten.mul.Tensor(%outer, 512)
        %index: i64[1,s0,1] = aten.add.Tensor(%start, %within)
        %ids: i64[1,s0] = aten.squeeze.dim(%index, -1)

    Exact: both levels take the first of equal elements, and the first NaN where there is one, which ``amax`` hands on.
    The parts are as many as the divisor of the width nearest to its square root. One that is still long is split again.
    Left alone, with a reason: widths that are symbolic or have no divisor that leaves 16 parts of 16 elements, and rows
    in several symbolic dimensions. Not candidates: shorter rows, and an argmax along another dimension or over all.
    """

    name: ClassVar[str] = "split_argmax"
    min_width: int = 4096

    def __post_init__(self):
        super().__post_init__()
        if self.min_width < LEAST * LEAST:
            raise ValueError(
                f"option 'min_width' of pass {self.name!r} is {self.min_width}; allowed: {LEAST * LEAST} or more, the "
                f"shortest row that can be split"
            )

    def run_method(self, method: str, ep: ExportedProgram) -> Outcome:
        outcome, types = Outcome(), Types()
        left = [node for node in reversed(ep.graph.nodes) if self.is_candidate(node)]
        with Edits(ep) as edits:
            while left:
                node = left.pop()
                if reason := check(node):
                    outcome.refusals.append(Refusal(method, source_line(node), reason))
                    continue
                made = rewrite(edits, node, types)
                left += [shorter for shorter in reversed(made) if self.is_candidate(shorter)]
                outcome.rewrites += 1
        return outcome

    def is_candidate(self, node: Node) -> bool:
        """Whether a node is an argmax along the last dimension that may be a long one."""
        if node.op != "call_function" or node.target is not aten.argmax.default or given(node, 1) is None:
            return False
        shape = given(node, 0).meta["val"].shape
        if not shape or given(node, 1) % len(shape) != len(shape) - 1:
            return False
        return not isinstance(shape[-1], int) or shape[-1] >= self.min_width


def check(node: Node) -> str | None:
    """Why this argmax stays as it is, or None."""
    *lead, width = given(node, 0).meta["val"].shape
    if not isinstance(width, int):
        return f"its width is symbolic: {width}"
    if parts_of(width) is None:
        return f"its width {width} has no divisor that leaves {LEAST} parts or more of {LEAST} elements or more"
    symbolic = [size for size in lead if not isinstance(size, int)]
    if len(symbolic) > 1:
        return f"its rows lie in several symbolic dimensions: {', '.join(map(str, symbolic))}"
    return None


def parts_of(width: int) -> int | None:
    """The divisor of a width that is nearest to its square root, never above it; None below ``LEAST``."""
    return next((parts for parts in range(isqrt(width), LEAST - 1, -1) if width % parts == 0), None)


def rewrite(edits: Edits, node: Node, types: Types) -> tuple[Node, Node]:
    """Puts an argmax in two levels in the place of a node. Returns the inner and the outer argmax."""
    graph = edits.ep.graph
    emit = types.emitter(graph, node)
    x, keepdim = given(node, 0), given(node, 2)
    *lead, width = x.meta["val"].shape
    parts = parts_of(width)
    length = width // parts
    with graph.inserting_before(node):
        shape = [*(size if isinstance(size, int) else -1 for size in lead), parts, length]
        split = emit(aten.reshape.default, x, shape)
        inner = emit(aten.argmax.default, split, -1)
        best = emit(aten.amax.default, split, [-1])
        outer = emit(aten.argmax.default, best, -1, True)
        within = emit(aten.gather.default, inner, -1, outer)
        index = emit(aten.add.Tensor, emit(aten.mul.Tensor, outer, length), within)
        edits.replace(node, index if keepdim else emit(aten.squeeze.dim, index, -1))
    return inner, outer

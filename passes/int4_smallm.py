"""The kernel of each INT4 projection follows from the rows that its method takes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram

from eyas.kernels.int4_linear import MAX_SMALL_ROWS, supports
from eyas.passes.base import MethodPass, Outcome, Refusal, source_line
from eyas.passes.program import given
from eyas.passes.ranges import bounds

eyas = torch.ops.eyas


@dataclass(frozen=True)
class Int4Smallm(MethodPass):
    """Sends projections of up to ``max_m`` rows to the small-M kernel, and all others to the one for any M.

    Before (s0 in [1, 8])::

        %y: f32[1,s0,2048] = eyas.int4_linear.default(%x, %w, %scales, %offsets, 32)

    After::

        %y: f32[1,s0,2048] = eyas.int4_smallm.default(%x, %w, %scales, %offsets, 32)

    The rows are all dimensions of x but the last. A range that straddles ``max_m`` gets ``eyas.int4_anym``, which is
    valid over all of it: nothing in the graph asks how many rows there are. Both read the same bytes, and neither
    narrows the range. Left alone, with a reason: group sizes without a kernel. Not candidates: other weight formats (an
    INT8 head), and the addition of a bias, which stays a node of its own.
    """

    name: ClassVar[str] = "int4_smallm"
    requires: ClassVar[frozenset[str]] = frozenset({"no_blocks", "unpacked_weights"})
    max_m: int = MAX_SMALL_ROWS

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.max_m <= MAX_SMALL_ROWS:
            raise ValueError(
                f"option 'max_m' of pass {self.name!r} is {self.max_m}; allowed: 1 to {MAX_SMALL_ROWS}, the rows that "
                f"its kernel takes"
            )

    def run_method(self, method: str, ep: ExportedProgram) -> Outcome:
        outcome = Outcome()
        for node in ep.graph.nodes:
            if node.op != "call_function" or node.target is not eyas.int4_linear.default:
                continue
            if reason := supports(given(node, 4)):
                outcome.refusals.append(Refusal(method, source_line(node), reason))
                continue
            _, rows = bounds(ep, given(node, 0).meta["val"].shape[:-1])
            small = rows is not None and rows <= self.max_m
            node.target = eyas.int4_smallm.default if small else eyas.int4_anym.default
            outcome.rewrites += 1
        return outcome

"""A first pass: a product of a value with itself becomes its square."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from eyas.passes.base import MethodPass, Outcome, Refusal, source_line

aten = torch.ops.aten


@dataclass(frozen=True)
class Square(MethodPass):
    """Before::

        %y: f32[2,s0] = aten.mul.Tensor(%x, %x)

    After::

        %y: f32[2,s0] = aten.square.default(%x)

    Left alone, with a reason: booleans, whose product is a boolean and whose square is a number.
    """

    name: ClassVar[str] = "square"

    def run_method(self, method, ep):
        outcome = Outcome()
        for node in ep.graph.nodes:
            if node.target is not aten.mul.Tensor or node.args[0] is not node.args[1]:
                continue
            if node.meta["val"].dtype == torch.bool:
                outcome.refusals.append(Refusal(method, source_line(node), "the square of booleans is a number"))
                continue
            node.target, node.args = aten.square.default, node.args[:1]
            outcome.rewrites += 1
        return outcome

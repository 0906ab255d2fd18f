"""Attention under a boolean mask goes to the cpu kernel whose rows do not depend on each other."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from eyas.kernels import masked_sdpa
from eyas.passes.base import MethodPass, Outcome, Refusal, source_line
from eyas.passes.program import known_equal, replace_node

aten = torch.ops.aten


@dataclass(frozen=True)
class MaskedSdpa(MethodPass):
    """Rewrites masked attention to ``eyas.masked_sdpa``: the same function, with the same bits for a row in any
    company.

    Before::

        %y: f32[1,4,s0,256] = aten.scaled_dot_product_attention.default(%q, %k, %v, %mask, scale=0.06, enable_gqa=True)

    After::

        %y: f32[1,4,s0,256] = eyas.masked_sdpa.default(%q, %k, %v, %mask, 0.06)

    Left alone, with a reason: no mask or an additive one, ``is_causal``, dropout, a mask that differs by head or that
    one row of must serve all, other dtypes, batches and head widths than the kernel takes. Not exact: sums run in
    another order than in the stock kernel.
    """

    name: ClassVar[str] = "masked_sdpa"
    exact: ClassVar[bool] = False
    ensures: ClassVar[frozenset[str]] = frozenset({"row_invariant_attention"})
    breaks: ClassVar[frozenset[str]] = frozenset({"visible_masks"})

    def run_method(self, method: str, ep: ExportedProgram) -> Outcome:
        outcome = Outcome()
        for node in list(ep.graph.nodes):
            if node.op != "call_function" or node.target is not aten.scaled_dot_product_attention.default:
                continue
            call = Call.of(node)
            if reason := call.refuse():
                outcome.refusals.append(Refusal(method, source_line(node), reason))
                continue
            args = (call.q, call.k, call.v, call.mask, call.scale)
            put_kernel(ep, node, torch.ops.eyas.masked_sdpa.default, args)
            outcome.rewrites += 1
        return outcome


@dataclass(frozen=True)
class Call:
    """The arguments of one attention node, defaults filled in."""

    q: Node
    k: Node
    v: Node
    mask: Node | None
    dropout: float
    causal: bool
    scale: float
    gqa: bool

    @classmethod
    def of(cls, node: Node) -> "Call":
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, node.args)), **node.kwargs}
        q = given["query"]
        scale = given.get("scale")
        return cls(
            q=q,
            k=given["key"],
            v=given["value"],
            mask=given.get("attn_mask"),
            dropout=given.get("dropout_p", 0.0),
            causal=given.get("is_causal", False),
            scale=q.meta["val"].shape[-1] ** -0.5 if scale is None else scale,
            gqa=given.get("enable_gqa", False),
        )

    def refuse(self) -> str | None:
        """Why this call has no row-invariant kernel, or None."""
        q, k, v = (node.meta["val"] for node in (self.q, self.k, self.v))
        if self.mask is None:
            return "it has no mask" + (" but is_causal" if self.causal else "")
        mask = self.mask.meta["val"]
        if self.causal or self.dropout:
            return f"is_causal={self.causal}, dropout_p={self.dropout}; the kernel has neither"
        if mask.dtype != torch.bool:
            return f"the mask is additive ({mask.dtype}); the kernel takes a boolean one"
        if mask.ndim != 2:
            return f"the mask has shape {list(mask.shape)}; the kernel takes one [rows, keys] mask for all heads"
        if q.ndim != 4:
            return f"the query has {q.ndim} dimensions, not 4"
        if not all(isinstance(q.shape[i], int) for i in (0, 1, 3)):
            return f"the query has shape {list(q.shape)}; the kernel takes dynamic rows only"
        if q.shape[1] != k.shape[1] and not self.gqa:
            return f"{q.shape[1]} query heads over {k.shape[1]} key heads without enable_gqa"
        if not known_equal(v.shape, k.shape):
            return f"values have shape {list(v.shape)}, keys {list(k.shape)}; the kernel takes equal ones"
        if not known_equal(mask.shape, (q.shape[2], k.shape[2])):
            return f"the mask has shape {list(mask.shape)}; the kernel takes {[q.shape[2], k.shape[2]]}, a row a query"
        return masked_sdpa.supports(q.shape[3], q.dtype, max(q.shape[0], k.shape[0]))


def put_kernel(ep: ExportedProgram, node: Node, kernel: torch._ops.OpOverload, args: tuple) -> None:
    """Puts a kernel in the place of an attention; ``args`` begin with the query. Its result is laid out by rows."""
    with ep.graph.inserting_before(node):
        new = ep.graph.call_function(kernel, args)
    new.meta = dict(node.meta)
    q = args[0].meta["val"]
    new.meta["val"] = q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3])).transpose(1, 2)
    replace_node(ep, node, new)

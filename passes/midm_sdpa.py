"""Attention of a few rows over a flat cache reads the live keys only, and needs no mask."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from eyas.kernels import sdpa_midm
from eyas.passes.base import MethodPass, Outcome, Refusal, source_line
from eyas.passes.cache_proof import Caches, Written
from eyas.passes.mask_proof import changed_by, why_not_causal
from eyas.passes.masked_sdpa import Call, put_kernel
from eyas.passes.program import (
    constant_nodes,
    constant_specs,
    constant_value,
    known_equal,
    mutated_buffers,
)
from eyas.passes.ranges import bounds

aten = torch.ops.aten
MODULO = (aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar)


@dataclass(frozen=True)
class MidmSdpa(MethodPass):
    """Rewrites attention whose mask says ``key <= position`` over a flat cache just written at those positions.

    Before (s0 in [1, 8])::

        %put: f32[1,1,2048,256] = aten.index_copy_.default(%cache_k, 2, %input_pos, %k)
        %ge: bool[s0,2048] = aten.ge.Tensor(%unsqueeze, %unsqueeze_1)
        %y: f32[1,4,s0,256] = aten.scaled_dot_product_attention.default(%q, %cache_k, %cache_v, %ge, scale=0.06)

    After::

        %y: f32[1,4,s0,256] = eyas.sdpa_midm.default(%q, %cache_k, %cache_v, %input_pos, 0.06)

    What the mask says is proved from its graph (``mask_proof``), and that the cache holds position j in row j from the
    write that came before (``cache_proof``). Keys and values may be repeated for the query heads, and the mask may be
    additive, cast or broadcast. Left alone, with a reason: more rows than ``max_m``, sliding and other masks, dropout,
    ring caches, keys that are no cache. Not exact: sums run in another order than in the stock kernel. The mask's own
    nodes stay; ``dead_code`` removes them.
    """

    name: ClassVar[str] = "midm_sdpa"
    requires: ClassVar[frozenset[str]] = frozenset({"no_blocks", "visible_masks"})
    exact: ClassVar[bool] = False
    max_m: int = sdpa_midm.MAX_ROWS

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.max_m <= sdpa_midm.MAX_ROWS:
            raise ValueError(
                f"option 'max_m' of pass {self.name!r} is {self.max_m}; allowed: 1 to {sdpa_midm.MAX_ROWS}, the rows "
                f"that its kernel takes"
            )

    def run_method(self, method: str, ep: ExportedProgram) -> Outcome:
        outcome, specs = Outcome(), dict(constant_specs(ep))
        written = mutated_buffers(ep)
        constants = {n: constant_value(ep, specs[c]) for c, n in constant_nodes(ep).items() if c not in written}
        caches, changed = Caches(ep), changed_by(ep.graph.nodes)
        for node in list(ep.graph.nodes):
            if node.op != "call_function" or node.target is not aten.scaled_dot_product_attention.default:
                continue
            call = Call.of(node)
            proof = prove(ep, call, node, caches, constants, changed, self.max_m)
            if isinstance(proof, str):
                outcome.refusals.append(Refusal(method, source_line(node), proof))
                continue
            args = (call.q, proof.keys, proof.values, proof.positions, call.scale)
            put_kernel(ep, node, torch.ops.eyas.sdpa_midm.default, args)
            outcome.rewrites += 1
        return outcome


def prove(
    ep: ExportedProgram, call: Call, node: Node, caches: Caches, constants: Mapping[Node, Tensor], changed: set[Node],
    max_m: int,
) -> "Proof | str":  # fmt: skip
    """The proof that the kernel computes what ``node`` does, or the reason why there is none."""
    if reason := refuse_call(call):
        return reason
    _, rows = bounds(ep, [call.q.meta["val"].shape[2]])
    if rows is None or rows > max_m:
        return f"a call has up to {'any number of' if rows is None else rows} rows; max_m is {max_m}"
    proof = cached(call, node, caches)
    if isinstance(proof, str):
        return proof
    if proof.positions.op == "call_function" and proof.positions.target in MODULO:
        return f"its cache is a ring: it is written at %{proof.positions.name} = {proof.positions.target}"
    if reason := why_not_causal(call.mask, proof.positions, constants, changed):
        return reason
    return proof.refuse_dtype(call.q) or sdpa_midm.supports(*proof.problem(call.q), rows) or proof


def refuse_call(call: Call) -> str | None:
    """Why an attention is none under a mask alone, or None."""
    if call.dropout:
        return f"dropout_p={call.dropout}; the kernel has none"
    if call.mask is None:
        return "it has no mask" + (" but is_causal, which counts rows and not positions" if call.causal else "")
    if call.causal:
        return "it has a mask and is_causal"
    dims = call.q.meta["val"].ndim
    return None if dims == 4 else f"the query has {dims} dimensions, not 4"


@dataclass(frozen=True)
class Proof:
    """The caches behind an attention's keys and values, and the rows of them that were just written."""

    keys: Node
    values: Node
    positions: Node

    def refuse_dtype(self, query: Node) -> str | None:
        dtype = query.meta["val"].dtype
        alike = all(cache.meta["val"].dtype == dtype for cache in (self.keys, self.values))
        return None if alike else f"the query is {dtype}, its caches are not"

    def problem(self, query: Node) -> tuple[int, torch.dtype, int]:
        """What a kernel's ``supports`` wants to know: head width, dtype and batch."""
        q = query.meta["val"]
        return q.shape[3], q.dtype, max(q.shape[0], self.keys.meta["val"].shape[0])


def cached(call: Call, node: Node, caches: Caches) -> Proof | str:
    """The caches that ``node`` reads, written before it at one position a row; or why there are none."""
    q = call.q.meta["val"]
    found: list[Written] = []
    for what, value in (("keys", call.k), ("values", call.v)):
        cache = caches.behind(value, node)
        if isinstance(cache, str):
            return f"its {what} are not a cache: {cache}"
        found.append(cache)
    k, v = found
    if k.positions is not v.positions:
        return f"its keys were written at %{k.positions.name}, its values at %{v.positions.name}"
    shapes = [cache.value.meta["val"].shape for cache in found]
    if not known_equal(*shapes):
        return f"its caches have shapes {list(shapes[0])} and {list(shapes[1])}; the kernel takes equal ones"
    if q.shape[1] % shapes[0][1]:
        return f"{q.shape[1]} query heads over {shapes[0][1]} key heads"
    repeated = call.k.meta["val"].shape[1] != q.shape[1]
    if repeated and not call.gqa:
        return f"{q.shape[1]} query heads over {call.k.meta['val'].shape[1]} key heads without enable_gqa"
    if not known_equal(k.positions.meta["val"].shape, [q.shape[2]]):
        return f"the cache was written at {list(k.positions.meta['val'].shape)} positions for {q.shape[2]} rows"
    return Proof(k.value, v.value, k.positions)

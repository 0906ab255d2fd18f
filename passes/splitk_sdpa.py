"""Attention of a few rows over a cache, flat or a ring with a window, goes to the CUDA kernel that reads live keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from eyas.kernels import register_triton_operators
from eyas.passes.base import MethodPass, Outcome, Refusal, source_line
from eyas.passes.cache_proof import Caches
from eyas.passes.mask_proof import changed_by, window_of
from eyas.passes.masked_sdpa import Call, put_kernel
from eyas.passes.midm_sdpa import MODULO, Proof, cached, refuse_call
from eyas.passes.program import constant_nodes, constant_specs, constant_value, given, mutated_buffers, storage_root
from eyas.passes.ranges import bounds

aten, eyas = torch.ops.aten, torch.ops.eyas


@dataclass(frozen=True)
class SplitkSdpa(MethodPass):
    """Rewrites attention that sees positions ``p - window < j <= p``, or all up to p, over a cache just written there.

    Before (s0 in [1, 8])::

        %slots: i64[s0] = aten.remainder.Scalar(%input_pos, 1024)
        %put: bf16[1,1,1024,256] = aten.index_copy_.default(%cache_k, 2, %slots, %k)
        %mask: bool[s0,1024] = aten.__and__.Tensor(%exists_and_not_later, %within_the_window)
        %y: bf16[1,4,s0,256] = aten.scaled_dot_product_attention.default(%q, %put, %put_v, %mask, scale=0.06)

    After::

        %y: bf16[1,4,s0,256] = eyas.splitk_sdpa.default(%q, %put, %put_v, %input_pos, 0.06, 512, 8)

    What the mask says is proved from its graph (``mask_proof``), where the cache was written from the write before it
    (``cache_proof``). A flat cache holds position j in row j, a ring of L rows in row ``j % L``: there the mask must
    show what the newest positions in the rows are, and L must hold a window and a call's rows. As such a mask does, the
    kernel counts on positions that go up by one within a call. ``eyas.sdpa_midm``, which says as much itself, is
    rewritten too. Left alone, with a reason: more rows than the kernel takes, other masks, dropout, keys that are no
    cache, other dtypes and head widths. Not exact: sums run in another order. The mask's own nodes stay for
    ``dead_code``.
    """

    name: ClassVar[str] = "splitk_sdpa"
    requires: ClassVar[frozenset[str]] = frozenset({"no_blocks", "visible_masks"})
    ensures: ClassVar[frozenset[str]] = frozenset({"row_invariant_attention"})
    exact: ClassVar[bool] = False

    def run_method(self, method: str, ep: ExportedProgram) -> Outcome:
        if not register_triton_operators():
            raise RuntimeError("the kernels of splitk_sdpa need triton, which is not installed: pip install triton")
        outcome, specs = Outcome(), dict(constant_specs(ep))
        written = mutated_buffers(ep)
        constants = {n: constant_value(ep, specs[c]) for c, n in constant_nodes(ep).items() if c not in written}
        caches, changed = Caches(ep), changed_by(ep.graph.nodes)
        for node in list(ep.graph.nodes):
            if node.target is aten.scaled_dot_product_attention.default:
                found = prove(ep, Call.of(node), node, caches, constants, changed)
            elif node.target is eyas.sdpa_midm.default:
                found = of_midm(ep, node)
            else:
                continue
            if isinstance(found, str):
                outcome.refusals.append(Refusal(method, source_line(node), found))
                continue
            put_kernel(ep, node, eyas.splitk_sdpa.default, found)
            outcome.rewrites += 1
        return outcome


def of_midm(ep: ExportedProgram, node: Node) -> tuple | str:
    """The kernel's arguments for what ``midm_sdpa`` leaves, or why it takes none."""
    q, keys, values, positions, scale = (given(node, i) for i in range(5))
    return fitting(ep, q, Proof(keys, values, positions), positions, scale, 0)


def prove(
    ep: ExportedProgram, call: Call, node: Node, caches: Caches, constants: Mapping[Node, Tensor], changed: set[Node]
) -> tuple | str:
    """The kernel's arguments with which it computes what ``node`` does, or the reason why there are none."""
    if reason := refuse_call(call):
        return reason
    proof = cached(call, node, caches)
    if isinstance(proof, str):
        return proof
    slots, size = proof.positions, proof.keys.meta["val"].shape[2]
    ring = slots.op == "call_function" and slots.target in MODULO
    if ring and (slots.target is not aten.remainder.Scalar or slots.args[1] != size):
        return f"its ring of {size} rows is written at %{slots.name} = {slots.target}(.., {slots.args[1]})"
    if ring and storage_root(slots) in changed:
        return f"its ring is written at %{slots.name}, which is written in place"
    positions = slots.args[0] if ring else slots
    window = window_of(call.mask, positions, constants, changed, ring)
    if isinstance(window, str):
        return window
    return fitting(ep, call.q, proof, positions, call.scale, window)


def fitting(ep: ExportedProgram, q: Node, proof: Proof, positions: Node, scale: float, window: int) -> tuple | str:
    """The kernel's arguments, or why it does not take so many rows, or such heads and caches."""
    from eyas.kernels.splitk_sdpa import supports  # here: it imports triton

    size, (_, rows) = proof.keys.meta["val"].shape[2], bounds(ep, [q.meta["val"].shape[2]])
    if rows is None:
        return "a call has up to any number of rows"
    if reason := proof.refuse_dtype(q) or supports(*proof.problem(q), rows):
        return reason
    if window and size < window + rows - 1:
        return f"a cache of {size} rows; a window of {window} and {rows} rows a call need {window + rows - 1}"
    if q.meta["val"].stride(3) != 1 or positions.meta["val"].stride(0) != 1:
        return "the query's vectors or the positions are not dense"
    return q, proof.keys, proof.values, positions, scale, window, rows

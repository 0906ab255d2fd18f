"""Linear layers on cpu read their weights in panels, once for all rows, with bits that do not depend on the number of
rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from eyas.kernels import panel_linear
from eyas.passes.base import Outcome, Pass
from eyas.passes.packed_weights import Form, Use, packed_by, product, repack
from eyas.passes.program import Derived, Program, given

aten, eyas = torch.ops.aten, torch.ops.eyas


@dataclass(frozen=True)
class PanelLinear(Pass):
    """Repacks the weight of each linear layer, once for all methods, and calls the panel kernels.

    Before::

        %w: i8[2048,640] = buffer target.layers.0.mlp.up_proj.qweight
        %y: f32[1,s0,2048] = eyas.int8_linear.default(%x, %w, %scales)

    After::

        %w: i8[128,640,16] = buffer target.layers.0.mlp.up_proj.qweight.panels
        %rows: f32[s0,640] = aten.reshape.default(%x, [-1, 640])
        %out: f32[s0,2048] = eyas.panel_int8_linear.default(%rows, %w, %scales, 2048)
        %y: f32[1,s0,2048] = aten.reshape.default(%out, [1, -1, 2048])

    A table that also serves as an embedding is read from its panels there too, so it exists once. Left alone: tables
    that are only looked up, weights that are not constants, that some method writes or that something else in any
    method reads, activations that are not float32, and inputs with more than one symbolic dimension. Not exact: sums
    run in another order than in the stock kernel.
    """

    name: ClassVar[str] = "panel_linear"
    exact: ClassVar[bool] = False
    ensures: ClassVar[frozenset[str]] = frozenset({"row_invariant_linear"})
    breaks: ClassVar[frozenset[str]] = frozenset({"unpacked_weights", "shared_buffers"})

    def run(self, program: Program) -> Outcome:
        return repack(program, FORMS)


def refuse(use: Use) -> str | None:
    return panel_linear.supports(use.node.meta["val"].dtype)


def panels(function: Callable, *sources: str) -> tuple[str, Derived]:
    return packed_by(f"{function.__module__}:{function.__name__}", "panels", *sources)


def pack_dense(use):
    return [panels(panel_linear.pack_panels, use.tensors["weight"])]


def pack_int8(use):
    return [*pack_dense(use), panels(panel_linear.pack_scales, use.tensors["scales"])]


def pack_int4(use):
    sources = [use.tensors[role] for role in ("scales", "offsets") if role in use.tensors]
    return [*pack_dense(use), panels(panel_linear.pack_scale_offset, *sources)]


def emit_dense(emit, use, constants, shape):
    out = product(emit, use.node, shape[0], eyas.panel_linear.default, *constants, shape[0])
    bias = given(use.node, 2)
    return out if bias is None else emit(aten.add.Tensor, out, bias)


def emit_int8(emit, use, constants, shape):
    return product(emit, use.node, shape[0], eyas.panel_int8_linear.default, *constants, shape[0])


def emit_int4(emit, use, constants, shape):
    group = given(use.node, 4)
    return product(emit, use.node, shape[0], eyas.panel_int4_linear.default, *constants, group, shape[0])


def lookup(emit, ids: Node, panels: Node) -> Node:
    panel = emit(aten.floor_divide.default, ids, panel_linear.PANEL)
    lane = emit(aten.remainder.Scalar, ids, panel_linear.PANEL)
    return emit(aten.index.Tensor, emit(aten.permute.default, panels, [0, 2, 1]), [panel, lane])


def emit_dense_rows(emit, use, constants, shape):
    return lookup(emit, given(use.node, 1), constants[0])


def emit_int8_rows(emit, use, constants, shape):
    ids, dtype = given(use.node, 0), given(use.node, 3)
    rows = emit(aten.to.dtype, lookup(emit, ids, constants[0]), torch.float32)
    scales = emit(aten.unsqueeze.default, emit(aten.index.Tensor, constants[1], [ids]), -1)
    out = emit(aten.mul.Tensor, rows, scales)
    return out if dtype == torch.float32 else emit(aten.to.dtype, out, dtype)


FORMS = {
    aten.linear.default: Form({"weight": 1}, pack_dense, emit_dense, refuse),
    eyas.int8_linear.default: Form({"weight": 1, "scales": 2}, pack_int8, emit_int8, refuse),
    **{
        target: Form({"weight": 1, "scales": 2, "offsets": 3}, pack_int4, emit_int4, refuse)
        for target in (eyas.int4_linear.default, eyas.int4_smallm.default, eyas.int4_anym.default)
    },
    aten.embedding.default: Form({"weight": 0}, pack_dense, emit_dense_rows, refuse, product=False),
    eyas.int8_embedding.default: Form({"weight": 1, "scales": 2}, pack_int8, emit_int8_rows, refuse, product=False),
}

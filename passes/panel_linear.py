"""Linear layers on cpu read their weights in panels, once for all rows, with bits that do not depend on the number of
rows.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from eyas.kernels import panel_linear
from eyas.passes.base import Outcome, Pass, Refusal, source_line
from eyas.passes.program import (
    Derived,
    Edits,
    Program,
    constant_nodes,
    given,
    mutated_buffers,
)
from eyas.passes.types import Types

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
        outcome = Outcome()
        nodes = {method: constant_nodes(ep) for method, ep in program.methods.items()}
        written = {name: method for method, ep in program.methods.items() for name in mutated_buffers(ep)}
        values = program.constants()
        types: dict[str, Types] = defaultdict(Types)
        groups, outcome.refusals = tables(program)
        with ExitStack() as stack:
            edits = {method: stack.enter_context(Edits(ep)) for method, ep in program.methods.items()}
            for weight, group in groups.items():
                if not any(use.form.product for use in group):
                    continue
                shared = refuse_table(weight, group, nodes, written)
                reasons = [(use, reason) for use in group for reason in [shared or use.refuse()] if reason]
                if reasons:
                    outcome.refusals += [Refusal(use.method, source_line(use.node), reason) for use, reason in reasons]
                    continue
                for use in group:
                    use.rewrite(program, edits[use.method], nodes[use.method], values, types[use.method])
                    outcome.rewrites += 1
                for method, edit in edits.items():  # at once: no weight stays in memory beside its panels
                    old = {name for use in group if use.method == method for name in use.tensors.values()}
                    edit.remove_unused({name: nodes[method][name] for name in old})
                for name in {name for use in group for name in use.tensors.values()}:
                    if not any(name in ep.state_dict or name in ep.constants for ep in program.methods.values()):
                        del values[name]
        return outcome


@dataclass(frozen=True)
class Use:
    """One node that reads a weight: ``form`` is its row in ``FORMS``; ``tensors`` names the constants of the format."""

    method: str
    node: Node
    form: "Form"
    tensors: dict[str, str]  # role -> constant's name

    def refuse(self) -> str | None:
        """Why this use keeps the stock kernel, or None."""
        value = self.node.meta["val"]
        if self.form.product:
            x = given(self.node, 0).meta["val"]
            if sum(not isinstance(d, int) for d in x.shape) > 1:
                return f"its input {list(x.shape)} has more than one symbolic dimension"
        return panel_linear.supports(value.dtype)

    def rewrite(
        self, program: Program, edits: Edits, nodes: dict[str, Node], values: dict[str, Tensor], types: Types
    ) -> None:
        """Puts the panel kernel in the node's place. ``nodes``: placeholders of the method's constants; ``values``: of
        the program's. Both gain the packed constants. ``edits``, ``types``: the method's.
        """
        graph, node = edits.ep.graph, self.node
        old, new = {role: nodes[name] for role, name in self.tensors.items()}, []
        for name, derived in self.form.pack(self.tensors):
            if name not in values:
                values[name] = derived.compute(values)
                program.derived[name] = derived
            if name not in nodes:
                nodes[name] = edits.add_constant(name, values[name], old["weight"])
            new.append(nodes[name])
        mode = node.meta["val"].fake_mode
        with graph.inserting_before(node):

            def emit(target: Callable, *args) -> Node:
                made = graph.call_function(target, args)
                made.meta = {k: v for k, v in node.meta.items() if k != "val"}
                made.meta["val"] = types.result(target, args, {}, mode)
                return made

            result = self.form.emit(emit, node, new, old["weight"].meta["val"].shape)
        edits.replace(node, result)


@dataclass(frozen=True)
class Form:
    """How an operator's weight is packed and what replaces the operator.

    ``roles``: argument index of each constant. ``pack``: their names by role -> the packed constants, in order.
    ``emit``: builds the replacement. ``product``: multiplies, rather than looks rows up.
    """

    roles: dict[str, int]
    pack: Callable[[dict[str, str]], list[tuple[str, Derived]]]
    emit: Callable[..., Node]
    product: bool = True


def packed_by(function: Callable, *sources: str) -> tuple[str, Derived]:
    """A packed constant: named after its first source."""
    return f"{sources[0]}.panels", Derived(f"{function.__module__}:{function.__name__}", sources)


def pack_dense(names):
    return [packed_by(panel_linear.pack_panels, names["weight"])]


def pack_int8(names):
    return [
        packed_by(panel_linear.pack_panels, names["weight"]),
        packed_by(panel_linear.pack_scales, names["scales"]),
    ]


def pack_int4(names):
    sources = [names[role] for role in ("scales", "offsets") if role in names]
    return [
        packed_by(panel_linear.pack_panels, names["weight"]),
        packed_by(panel_linear.pack_scale_offset, *sources),
    ]


def product(target: Callable, emit, node: Node, constants: list[Node], *tail) -> Node:
    x = given(node, 0)
    shape, width = list(x.meta["val"].shape), x.meta["val"].shape[-1]
    rows = x if len(shape) == 2 else emit(aten.reshape.default, x, [-1, width])
    out = emit(target, rows, *constants, *tail)
    if len(shape) != 2:
        lead = [d if isinstance(d, int) else -1 for d in shape[:-1]]
        out = emit(aten.reshape.default, out, [*lead, tail[-1]])
    return out


def emit_dense(emit, node, constants, shape):
    out = product(eyas.panel_linear.default, emit, node, constants, shape[0])
    bias = given(node, 2)
    return out if bias is None else emit(aten.add.Tensor, out, bias)


def emit_int8(emit, node, constants, shape):
    return product(eyas.panel_int8_linear.default, emit, node, constants, shape[0])


def emit_int4(emit, node, constants, shape):
    return product(eyas.panel_int4_linear.default, emit, node, constants, given(node, 4), shape[0])


def lookup(emit, ids: Node, panels: Node) -> Node:
    panel = emit(aten.floor_divide.default, ids, panel_linear.PANEL)
    lane = emit(aten.remainder.Scalar, ids, panel_linear.PANEL)
    return emit(aten.index.Tensor, emit(aten.permute.default, panels, [0, 2, 1]), [panel, lane])


def emit_dense_rows(emit, node, constants, shape):
    return lookup(emit, given(node, 1), constants[0])


def emit_int8_rows(emit, node, constants, shape):
    ids, dtype = given(node, 0), given(node, 3)
    rows = emit(aten.to.dtype, lookup(emit, ids, constants[0]), torch.float32)
    scales = emit(aten.unsqueeze.default, emit(aten.index.Tensor, constants[1], [ids]), -1)
    out = emit(aten.mul.Tensor, rows, scales)
    return out if dtype == torch.float32 else emit(aten.to.dtype, out, dtype)


FORMS = {
    aten.linear.default: Form({"weight": 1}, pack_dense, emit_dense),
    eyas.int8_linear.default: Form({"weight": 1, "scales": 2}, pack_int8, emit_int8),
    **{
        target: Form({"weight": 1, "scales": 2, "offsets": 3}, pack_int4, emit_int4)
        for target in (eyas.int4_linear.default, eyas.int4_smallm.default, eyas.int4_anym.default)
    },
    aten.embedding.default: Form({"weight": 0}, pack_dense, emit_dense_rows, product=False),
    eyas.int8_embedding.default: Form({"weight": 1, "scales": 2}, pack_int8, emit_int8_rows, product=False),
}


def tables(program: Program) -> tuple[dict[str, list[Use]], list[Refusal]]:
    """Every use of every weight that a form covers, by the weight's name, over all methods; and the products whose
    weight is no constant.
    """
    groups: dict[str, list[Use]] = defaultdict(list)
    refusals = []
    for method, ep in program.methods.items():
        names = {node: name for name, node in constant_nodes(ep).items()}
        for node in ep.graph.nodes:
            form = FORMS.get(node.target) if node.op == "call_function" else None
            if form is None:
                continue
            arguments = {role: given(node, i) for role, i in form.roles.items()}
            arguments = {role: value for role, value in arguments.items() if value is not None}
            computed = [role for role, value in arguments.items() if value not in names]
            if not computed:
                tensors = {role: names[value] for role, value in arguments.items()}
                groups[tensors["weight"]].append(Use(method, node, form, tensors))
            elif form.product:
                refusals.append(Refusal(method, source_line(node), f"its {computed[0]} is computed, not a constant"))
    return groups, refusals


def refuse_table(
    weight: str, group: list[Use], nodes: Mapping[str, Mapping[str, Node]], written: Mapping[str, str]
) -> str | None:
    """Why the weight that ``group`` uses must stay as it is, or None.

    ``nodes``: placeholders of each method's constants. ``written``: a method that writes it, for each written constant.
    """
    for name in {name: None for use in group for name in use.tensors.values()}:
        if name in written:
            return f"its {name} is written by method {written[name]!r}"
    uses = {use.node for use in group}
    for method, placeholders in nodes.items():
        others = (
            [user.name for user in placeholders[weight].users if user not in uses] if weight in placeholders else []
        )
        if others:
            return f"its weight {weight} is also read by {others[0]} of method {method!r}"
    return None

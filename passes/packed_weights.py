"""What passes that repack weights share: all uses of a weight, over all methods, read one packed copy, or none does."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from eyas.passes.base import Outcome, Refusal, source_line
from eyas.passes.program import Derived, Edits, Program, constant_nodes, given, mutated_buffers
from eyas.passes.ranges import bounds
from eyas.passes.types import Types

aten = torch.ops.aten


@dataclass(frozen=True)
class Form:
    """How an operator's weight is packed and what replaces the operator.

    ``roles``: argument index of each constant. ``pack``: the constants of the replacement, in order, each with how it
    is made, None for one that is read as it is. ``emit``: builds the replacement. ``refuse``: why a use has no kernel,
    or None. ``product``: multiplies, rather than looks rows up.
    """

    roles: dict[str, int]
    pack: Callable[["Use"], list[tuple[str, Derived | None]]]
    emit: Callable[..., Node]
    refuse: Callable[["Use"], str | None]
    product: bool = True


@dataclass(frozen=True)
class Use:
    """One node that reads a weight: ``tensors`` names the constants of the format; ``rows``: the most rows that a
    product has in a call, None where there is no limit.
    """

    method: str
    node: Node
    form: Form
    tensors: dict[str, str]  # role -> constant's name
    rows: int | None

    def refuse(self) -> str | None:
        """Why this use keeps the stock kernel, or None."""
        if self.form.product:
            x = given(self.node, 0).meta["val"]
            if sum(not isinstance(d, int) for d in x.shape) > 1:
                return f"its input {list(x.shape)} has more than one symbolic dimension"
        return self.form.refuse(self)

    def rewrite(
        self, program: Program, edits: Edits, nodes: dict[str, Node], values: dict[str, Tensor], types: Types
    ) -> None:
        """Puts the kernel in the node's place. ``nodes``: placeholders of the method's constants; ``values``: of the
        program's. Both gain the packed constants. ``edits``, ``types``: the method's.
        """
        graph, node = edits.ep.graph, self.node
        old, new = {role: nodes[name] for role, name in self.tensors.items()}, []
        for name, derived in self.form.pack(self):
            if name not in values:
                values[name] = derived.compute(values)
                program.derived[name] = derived
            if name not in nodes:
                nodes[name] = edits.add_constant(name, values[name], old["weight"])
            new.append(nodes[name])
        with graph.inserting_before(node):
            shape = old["weight"].meta["val"].shape
            result = self.form.emit(types.emitter(graph, node), self, new, shape)
        edits.replace(node, result)


def repack(program: Program, forms: Mapping[object, Form]) -> Outcome:
    """Packs every weight that some product of ``forms`` reads, once, and rewrites all of its uses; a weight of which
    one use is refused stays as it is.
    """
    outcome = Outcome()
    nodes = {method: constant_nodes(ep) for method, ep in program.methods.items()}
    written = {name: method for method, ep in program.methods.items() for name in mutated_buffers(ep)}
    values = program.constants()
    types: dict[str, Types] = defaultdict(Types)
    groups, outcome.refusals = tables(program, forms)
    with ExitStack() as stack:
        edits = {method: stack.enter_context(Edits(ep)) for method, ep in program.methods.items()}
        for weight, group in groups.items():
            if not any(use.form.product for use in group):
                continue
            shared = refuse_table(weight, group, nodes, written)
            reasons = [(use, reason) for use in group for reason in [shared or use.refuse()] if reason]
            if not reasons and (reason := refuse_packing(group, program.derived)):
                reasons = [(use, reason) for use in group]
            if reasons:
                outcome.refusals += [Refusal(use.method, source_line(use.node), reason) for use, reason in reasons]
                continue
            for use in group:
                use.rewrite(program, edits[use.method], nodes[use.method], values, types[use.method])
                outcome.rewrites += 1
            for method, edit in edits.items():  # at once: no weight stays in memory beside its packed form
                old = {name for use in group if use.method == method for name in use.tensors.values()}
                edit.remove_unused({name: nodes[method][name] for name in old})
            for name in {name for use in group for name in use.tensors.values()}:
                if not any(name in ep.state_dict or name in ep.constants for ep in program.methods.values()):
                    del values[name]
    return outcome


def tables(program: Program, forms: Mapping[object, Form]) -> tuple[dict[str, list[Use]], list[Refusal]]:
    """Every use of every weight that a form covers, by the weight's name, over all methods; and the products whose
    weight is no constant.
    """
    groups: dict[str, list[Use]] = defaultdict(list)
    refusals = []
    for method, ep in program.methods.items():
        names = {node: name for name, node in constant_nodes(ep).items()}
        for node in ep.graph.nodes:
            form = forms.get(node.target) if node.op == "call_function" else None
            if form is None:
                continue
            arguments = {role: given(node, i) for role, i in form.roles.items()}
            arguments = {role: value for role, value in arguments.items() if value is not None}
            computed = [role for role, value in arguments.items() if value not in names]
            if not computed:
                tensors = {role: names[value] for role, value in arguments.items()}
                rows = bounds(ep, given(node, 0).meta["val"].shape[:-1])[1] if form.product else None
                groups[tensors["weight"]].append(Use(method, node, form, tensors, rows))
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


def refuse_packing(group: list[Use], derived: Mapping[str, Derived]) -> str | None:
    """Why the uses of a weight cannot share what is packed of it, or None. ``derived``: what has been packed."""
    known = dict(derived)
    for use in group:
        for name, made in use.form.pack(use):
            if made is not None and known.setdefault(name, made) != made:
                return f"its {made.sources[0]} would be packed in two ways: {made} and {known[name]}"
    return None


def packed_by(function: str, suffix: str, *sources: str, options: tuple[int, ...] = ()) -> tuple[str, Derived]:
    """A packed constant, named after its first source. ``function``: ``module:name``."""
    return f"{sources[0]}.{suffix}", Derived(function, sources, options)


def product(emit: Callable[..., Node], node: Node, out_features: int, target: Callable, *operands: object) -> Node:
    """``target(rows, *operands)``, ``[rows, out_features]``, for the input of ``node``, in the shape of its result."""
    x = given(node, 0)
    shape, width = list(x.meta["val"].shape), x.meta["val"].shape[-1]
    rows = x if len(shape) == 2 else emit(aten.reshape.default, x, [-1, width])
    out = emit(target, rows, *operands)
    if len(shape) != 2:
        lead = [d if isinstance(d, int) else -1 for d in shape[:-1]]
        out = emit(aten.reshape.default, out, [*lead, out_features])
    return out

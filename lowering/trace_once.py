"""Traces equal submodules once, so that a decoder of many layers is traced about as fast as one of few.

Members of a ``ModuleList`` are equal where classes, the shapes of their tensors and plain attributes are, less those
that a class lists as ``untraced``: what its ``forward`` does not read. The first one of each kind is traced by itself;
in the trace of the whole, each stands as one node, and what it consists of is put in its place afterwards, with its own
tensors. Whatever does not fit is traced as it is.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from eyas.kernels.block import GRAPHS
from eyas.passes.program import constant_nodes, mutated_buffers, replace_node
from eyas.passes.types import Types, key_of

BLOCK = torch.ops.eyas.block.default
PLAIN = frozenset(vars(nn.Module()))  # what every module has
HOOKS = [name for name in PLAIN if name.endswith("_hooks")]
INNER = "inner."
WORTH = 12  # submodules that need not be traced


@dataclass(frozen=True)
class Call:
    """One call of a module: its arguments' leaves, and how they and the results were nested."""

    leaves: tuple[object, ...]
    spec: TreeSpec
    results: tuple[object, ...]
    results_spec: TreeSpec


@dataclass(frozen=True)
class Kind:
    """What equal modules are: a traced ``graph`` of ``constants`` and those that it writes (by names within the module)
    and inputs.
    """

    key: str
    graph: GraphModule
    constants: tuple[str, ...]
    written: tuple[str, ...]
    results_spec: TreeSpec


def export_once(
    module: nn.Module, args: Sequence[Tensor], shapes: Sequence[Mapping], rows: Dim
) -> ExportedProgram | None:
    """As ``torch.export.export(module, args, dynamic_shapes=shapes, strict=False)``; None where no part of ``module``
    repeats. ``rows``: the only dynamic dimension. The graph is yet to be recompiled. Raises what tracing raises.
    """
    groups = equal_members(module)
    if not groups:
        return None
    kinds: dict[nn.Module, Kind] = {}
    try:
        for i, (group, call, dynamic) in enumerate(observe(module, groups, args, shapes)):
            kind = trace_kind(f"traced_{i}", group[0], call, dynamic, rows)
            kinds |= dict.fromkeys(group, kind) if kind is not None else {}
        if not kinds:
            return None
        for kind in kinds.values():
            GRAPHS[kind.key] = kind.graph
        with replaced({member: stub_of(member, kind) for member, kind in kinds.items()}):
            ep = torch.export.export(module, tuple(args), dynamic_shapes=tuple(shapes), strict=False)
    finally:
        for kind in kinds.values():
            GRAPHS.pop(kind.key, None)
    inline(ep, {kind.key: kind for kind in kinds.values()})
    return ep


def equal_members(module: nn.Module) -> list[list[nn.Module]]:
    """Members of the outermost lists that are equal, where there are several."""
    found, covered = [], set()
    for owner in module.modules():
        if not isinstance(owner, nn.ModuleList) or owner in covered:
            continue
        kinds: list[tuple[object, list[nn.Module]]] = []
        for member in owner:
            covered.update(member.modules())
            known = description(member)
            group = next((members for other, members in kinds if known is not None and other == known), None)
            if group is None:
                kinds.append((known, [member]))
            elif member not in group:
                group.append(member)
        found += [members for known, members in kinds if known is not None and is_worth_it(members)]
    return found


def is_worth_it(members: Sequence[nn.Module]) -> bool:
    """Whether tracing all but the first costs more than tracing that one by itself."""
    return (len(members) - 1) * sum(1 for _ in members[0].modules()) >= WORTH


def description(module: nn.Module) -> object | None:
    """What decides a module's trace, to be compared; None where that cannot be told."""
    parts, tensors = [], []
    for name, one in module.named_modules(remove_duplicate=False):
        apart = PLAIN.union(getattr(one, "untraced", ()))
        plain = {key: value for key, value in vars(one).items() if key not in apart}
        leaves = tree_flatten(plain)[0]
        if any(getattr(one, hooks) for hooks in HOOKS) or any(isinstance(v, (Tensor, nn.Module)) for v in leaves):
            return None
        held = {**one._parameters, **one._buffers}
        tensors += [tensor for tensor in held.values() if tensor is not None]
        types = {key: None if t is None else (type(t), *key_of(t)) for key, t in held.items()}
        parts.append((name, type(one), plain, types, one.training))
    if len({tensor.untyped_storage()._cdata for tensor in tensors}) != len(tensors):
        return None
    return parts


@contextlib.contextmanager
def replaced(forwards: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Modules whose ``forward`` is another one for a while."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


def observe(
    module: nn.Module, groups: Sequence[Sequence[nn.Module]], args: Sequence[Tensor], shapes: Sequence[Mapping]
) -> Iterator[tuple[list[nn.Module], Call, list[dict[int, None]]]]:
    """For each group the members that are called once with equal types, one such call, and the dynamic dimensions of
    each of its leaves. Nothing is computed.
    """
    (rows,) = {value.shape[d] for value, dynamic in zip(args, shapes) for d in dynamic}
    runs = [run_fake(module, groups, args, shapes, n) for n in (rows, rows + 1)]
    for group in groups:
        calls, other = ([run[member] for member in group if len(run.get(member, ())) == 1] for run in runs)
        members = [member for member in group if all(len(run.get(member, ())) == 1 for run in runs)]
        types = [key_of(call[0].leaves) for call in calls]
        members = [member for member, known in zip(members, types) if known == types[0]]
        if len(members) < 2:
            continue
        first, second = calls[0][0], other[0][0]
        dynamic = [differing(a, b, rows) for a, b in zip(first.leaves, second.leaves)]
        if None not in dynamic and all(isinstance(result, Tensor) for result in first.results):
            yield members, first, dynamic


def differing(a: object, b: object, rows: int) -> dict[int, None] | None:
    """Dimensions that follow the number of rows; None where two calls differ in another way."""
    if not isinstance(a, Tensor):
        return {} if type(a) is type(b) and a == b else None
    found = {d: None for d, (m, n) in enumerate(zip(a.shape, b.shape)) if m != n}
    return found if all((a.shape[d], b.shape[d]) == (rows, rows + 1) for d in found) else None


def run_fake(
    module: nn.Module,
    groups: Sequence[Sequence[nn.Module]],
    args: Sequence[Tensor],
    shapes: Sequence[Mapping],
    rows: int,
) -> dict[nn.Module, list[Call]]:
    """Every call of every member, with ``rows`` rows. Only the first member of a group does anything."""
    calls: dict[nn.Module, list[Call]] = {}

    def watched(member: nn.Module, first: nn.Module) -> Callable:
        original = type(member).forward

        def forward(*args, **kwargs):
            leaves, spec = tree_flatten((args, kwargs))
            known = calls.get(first)
            if member is first or not known or key_of(known[0].leaves) != key_of(tuple(leaves)):
                out = original(member, *args, **kwargs)
            else:
                out = tree_unflatten(list(known[0].results), known[0].results_spec)
                out = tree_map(lambda v: torch.empty_like(v) if isinstance(v, Tensor) else v, out)
            results, results_spec = tree_flatten(out)
            calls.setdefault(member, []).append(Call(tuple(leaves), spec, tuple(results), results_spec))
            return out

        return forward

    forwards = {member: watched(member, group[0]) for group in groups for member in group}
    sized = []
    for value, dynamic in zip(args, shapes):
        shape = [rows if d in dynamic else size for d, size in enumerate(value.shape)]
        sized.append(torch.zeros(shape, dtype=value.dtype))
    with replaced(forwards), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        module(*(torch.empty(value.shape, dtype=value.dtype) for value in sized))
    return calls


class Alone(nn.Module):
    """A module over the tensors among its call's leaves."""

    def __init__(self, inner: nn.Module, call: Call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.call.leaves]
        args, kwargs = tree_unflatten(leaves, self.call.spec)
        return tuple(tree_flatten(self.inner(*args, **kwargs))[0])


def trace_kind(key: str, member: nn.Module, call: Call, dynamic: Sequence[dict], rows: Dim) -> Kind | None:
    """One module by itself; None for one that does not stay within what a block can be."""
    tensors = [(leaf, dims) for leaf, dims in zip(call.leaves, dynamic) if isinstance(leaf, Tensor)]
    example = tuple(torch.zeros(leaf.shape, dtype=leaf.dtype) for leaf, _ in tensors)
    shapes = (tuple(dict.fromkeys(dims, rows) for _, dims in tensors),)
    with torch.no_grad():
        ep = torch.export.export(Alone(member, call), example, dynamic_shapes=shapes, strict=False)
    nodes = {name: node for name, node in constant_nodes(ep).items() if node.users}
    bounds = {(int(r.lower), int(r.upper)) for r in ep.range_constraints.values()}
    if bounds != {(rows.min, rows.max)} or any(not name.startswith(INNER) for name in nodes):
        return None
    if any(node.op == "get_attr" for node in ep.graph.nodes):
        return None
    changed = mutated_buffers(ep)
    constants = [name for name in nodes if name not in changed]
    written = [name for name in nodes if name in changed]
    given = [
        node for node in ep.graph.nodes if node.op == "placeholder" and node.name in ep.graph_signature.user_inputs
    ]
    graph, new = Graph(), {}
    for node in (*(nodes[name] for name in (*constants, *written)), *given):
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in ep.graph.nodes:
        if node.op == "call_function":
            new[node] = graph.node_copy(node, new.__getitem__)
        elif node.op == "output":
            graph.output(torch.fx.node.map_arg(node.args[0], new.__getitem__))
    names = [tuple(name.removeprefix(INNER) for name in group) for group in (constants, written)]
    return Kind(key, GraphModule(ep.graph_module, graph), *names, call.results_spec)


def stub_of(member: nn.Module, kind: Kind) -> Callable:
    """A ``forward`` that is one node."""

    def tensor(name: str) -> Tensor:
        owner, _, attribute = name.rpartition(".")
        return getattr(member.get_submodule(owner), attribute)

    def forward(*args, **kwargs):
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        out = BLOCK(kind.key, list(map(tensor, kind.constants)), list(map(tensor, kind.written)), inputs)
        return tree_unflatten(list(out), kind.results_spec)

    return forward


def inline(ep: ExportedProgram, kinds: Mapping[str, Kind]) -> None:
    """Puts the nodes of a kind in the place of each node that stands for one."""
    types = Types()
    known: dict[object, list[object]] = {}  # what a kind makes of inputs of some types, node by node
    for call in [node for node in ep.graph.nodes if node.target is BLOCK]:
        key, *groups = call.args
        graph = kinds[key].graph.graph
        given = iter([node for group in groups for node in group])
        new: dict[Node, Node] = {}
        mode = groups[-1][0].meta["val"].fake_mode
        alike = (key, key_of([[node.meta["val"] for node in group] for group in groups]))
        values, made_before = [], iter(known.get(alike, ()))
        with ep.graph.inserting_before(call):
            for node in graph.nodes:
                if node.op == "placeholder":
                    new[node] = next(given)
                elif node.op == "call_function":
                    made = new[node] = ep.graph.node_copy(node, new.__getitem__)
                    made.meta = {"nn_module_stack": call.meta.get("nn_module_stack")}
                    made.meta |= {k: v for k, v in node.meta.items() if k == "stack_trace"}
                    if alike in known:
                        made.meta["val"] = next(made_before)
                    else:
                        made.meta["val"] = types.result(made.target, made.args, made.kwargs, mode)
                    values.append(made.meta["val"])
                else:
                    results = [new[result] for result in node.args[0]]
        for piece in list(call.users):
            replace_node(ep, piece, results[piece.args[1]])
        ep.graph.erase_node(call)
        known[alike] = values

"""What a pass must leave as it was, and what must be true of every graph that it leaves behind.

A ``Snapshot`` is taken before a pass; ``verify`` compares the program with it afterwards. Only nodes that are new, or
whose operator, arguments or inputs changed, are looked at closely, so its time follows the change and not the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from eyas.passes.base import source_line
from eyas.passes.printer import Symbols, value_type
from eyas.passes.program import Program, constant_specs, mutated_buffers, storage_root, written_roots
from eyas.passes.types import Types, fake_mode


class VerifyError(RuntimeError):
    """A graph that a pass left broken; the message names method, node and source line."""


@dataclass(frozen=True)
class MethodSnapshot:
    """A method before a pass: ``interface`` in words, and each node with what it called on what."""

    interface: Mapping[str, object]
    calls: Mapping[Node, tuple]
    unread: frozenset[str]

    @classmethod
    def of(cls, ep: ExportedProgram) -> "MethodSnapshot":
        calls = {n: call_of(n) for n in ep.graph.nodes if n.op == "call_function"}
        return cls(interface(ep), calls, frozenset(unread_constants(ep)))


@dataclass(frozen=True)
class Snapshot:
    """A program before a pass."""

    methods: Mapping[str, MethodSnapshot]

    @classmethod
    def of(cls, program: Program) -> "Snapshot":
        return cls({name: MethodSnapshot.of(ep) for name, ep in program.methods.items()})


def call_of(node: Node) -> tuple:
    return node.target, node.args, dict(node.kwargs), node.meta.get("val")


def interface(ep: ExportedProgram) -> dict[str, object]:
    """What callers of a method see, in words: its inputs, results, what it writes, aliases and ranges."""
    symbols, signature = Symbols(), ep.graph_signature
    nodes = {node.name: node for node in ep.graph.nodes}
    output = next(node for node in ep.graph.nodes if node.op == "output")
    results = [leaf for leaf in tree_leaves(output.args[0])]
    inputs = {name: value_type(nodes[name].meta.get("val"), symbols) for name in signature.user_inputs if name in nodes}
    constants = {spec.arg.name: name for name, spec in constant_specs(ep)}
    roots = [storage_root(leaf) if isinstance(leaf, Node) else leaf for leaf in results]
    return {
        "inputs": inputs,
        "results": [
            value_type(leaf.meta.get("val"), symbols) if isinstance(leaf, Node) else repr(leaf) for leaf in results
        ],
        "aliases": [
            constants.get(root.name, root.name) if isinstance(root, Node) and root.op == "placeholder" else None
            for root in roots
        ],
        "written buffers": sorted(mutated_buffers(ep)),
        "written inputs": sorted(root.name for root in written_roots(ep) if root.name in inputs),
        "ranges": sorted((symbols.rename(str(s)), str(r)) for s, r in ep.range_constraints.items()),
    }


def unread_constants(ep: ExportedProgram) -> set[str]:
    """Constants that no node reads: dead weight of a program."""
    names = {spec.arg.name: name for name, spec in constant_specs(ep)}
    return {names[n.name] for n in ep.graph.nodes if n.op == "placeholder" and n.name in names and not n.users}


def verify(program: Program, before: Snapshot) -> Snapshot:
    """The program as it is now. Raises ``VerifyError`` for one that a pass broke; what torch's own checks raise passes
    through.
    """
    if set(program.methods) != set(before.methods):
        raise VerifyError(f"the methods were {', '.join(before.methods)} and are {', '.join(program.methods)}")
    for method, ep in program.methods.items():
        ep.graph.lint()
        check_types(method, ep, before.methods[method].calls)
        ep.validate()
    after = Snapshot.of(program)
    for method, now in after.methods.items():
        then = before.methods[method]
        for what, was in then.interface.items():
            if now.interface[what] != was:
                raise VerifyError(f"the {what} of method {method!r} were {was} and are {now.interface[what]}")
        if left := sorted(now.unread - then.unread):
            raise VerifyError(f"nothing in method {method!r} reads its constant {left[0]!r} any more, yet it is there")
    return after


def check_types(method: str, ep: ExportedProgram, calls: Mapping[Node, tuple]) -> None:
    """Runs the nodes that changed on fake tensors, and compares the types with those that are recorded."""
    changed: set[Node] = set()
    types = Types()
    for node in ep.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        where = f"%{node.name} of method {method!r} ({source_line(node)})"
        if node.op not in ("call_function", "get_attr"):
            raise VerifyError(f"{where} is a {node.op}; an exported graph has functions only")
        recorded = node.meta.get("val")
        if recorded is None and has_result(node):
            raise VerifyError(f"{where} has no type: meta['val'] is missing")
        then = calls.get(node)
        same = then is not None and then[3] is recorded and then[:3] == (node.target, node.args, dict(node.kwargs))
        if same and not changed.intersection(node.all_input_nodes):
            continue
        if then is None or then[3] is not recorded:
            changed.add(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        made, want = (value_type(value, Symbols()) for value in (propagate(node, where, types), recorded))
        if made != want:
            raise VerifyError(f"{where} makes {made}, but {want} is recorded for it")


def has_result(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or bool(schema.returns)


def propagate(node: Node, where: str, types: Types) -> object:
    """What an operator makes of its arguments' recorded types."""
    mode = fake_mode(node)
    if mode is None:
        return node.meta.get("val")
    try:
        return types.result(node.target, node.args, node.kwargs, mode)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise VerifyError(f"{where} cannot be called on the types of its arguments: {error}") from error

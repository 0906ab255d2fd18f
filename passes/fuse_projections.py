"""Projections of one input become one projection: fewer calls, each large enough to fill a machine."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from eyas.passes.base import Outcome, Pass, Refusal, source_line
from eyas.passes.program import Derived, Edits, Program, constant_nodes, given, mutated_buffers
from eyas.passes.types import Types

aten, eyas = torch.ops.aten, torch.ops.eyas
CONSTANTS = {  # of an operator, by the number of the argument; all of them have a row an output
    aten.linear.default: (1,),
    eyas.int8_linear.default: (1, 2),
    eyas.int4_linear.default: (1, 2, 3),
}
GROUP_SIZE = 4  # the number of ``int4_linear``'s argument


@dataclass(frozen=True)
class FuseProjections(Pass):
    """Concatenates the weights of projections that read one value, and slices the result of the one that is left.

    Before::

        %q: bf16[1,s0,1024] = eyas.int8_linear.default(%x, %wq, %sq)
        %k: bf16[1,s0,256] = eyas.int8_linear.default(%x, %wk, %sk)

    After::

        %wq: i8[1280,640] = buffer target.layers.0.self_attn.q_proj.qweight.fused
        %all: bf16[1,s0,1280] = eyas.int8_linear.default(%x, %wq, %sq)
        %q: bf16[1,s0,1024] = aten.slice.Tensor(%all, 2, 0, 1024)
        %k: bf16[1,s0,256] = aten.slice.Tensor(%all, 2, 1024, 1280)

    Left alone: projections of another format, group size or type than the others of their input, and those with a bias;
    with a reason, weights that are no constants, that some method writes, or that are not read together in every method
    that reads one of them. Not exact: a kernel may add in another order for another number of outputs.
    """

    name: ClassVar[str] = "fuse_projections"
    requires: ClassVar[frozenset[str]] = frozenset({"no_blocks", "unpacked_weights"})
    breaks: ClassVar[frozenset[str]] = frozenset({"shared_buffers"})
    exact: ClassVar[bool] = False

    def run(self, program: Program) -> Outcome:
        outcome, values = Outcome(), program.constants()
        found = {method: groups(ep) for method, ep in program.methods.items()}
        written = {name for ep in program.methods.values() for name in mutated_buffers(ep)}
        readers = readers_of_constants(program)
        nodes = {method: constant_nodes(ep) for method, ep in program.methods.items()}
        with ExitStack() as stack:
            edits = {method: stack.enter_context(Edits(ep)) for method, ep in program.methods.items()}
            for method, group in ((method, group) for method, all_ in found.items() for group in all_):
                if reason := refuse(group, found, written, readers):
                    outcome.refusals.append(Refusal(method, source_line(group.nodes[0]), reason))
                    continue
                rewrite(program, edits[method], nodes[method], group, values)
                outcome.rewrites += 1
        return outcome


@dataclass(frozen=True)
class Group:
    """Projections of one value in one method; ``names``: their constants, a tuple for each argument."""

    nodes: tuple[Node, ...]
    names: tuple[tuple[str, ...], ...]


def groups(ep: torch.export.ExportedProgram) -> list[Group]:
    """The projections that could be one, in the order of the graph."""
    names = {node: name for name, node in constant_nodes(ep).items()}
    alike: dict[tuple, list[Node]] = defaultdict(list)
    for node in ep.graph.nodes:
        if node.op != "call_function" or node.target not in CONSTANTS:
            continue
        constants = [given(node, i) for i in CONSTANTS[node.target]]
        if node.target is aten.linear.default and given(node, 2) is not None:
            continue
        if any(value is not None and value not in names for value in constants):
            continue
        kinds = tuple(None if value is None else value.meta["val"].dtype for value in constants)
        group_size = given(node, GROUP_SIZE) if node.target is eyas.int4_linear.default else None
        alike[node.target, given(node, 0), kinds, group_size].append(node)
    made = []
    for (target, *_), nodes in alike.items():
        if len(nodes) > 1 and len({given(node, 1) for node in nodes}) == len(nodes):
            roles = [i for i in CONSTANTS[target] if given(nodes[0], i) is not None]
            made.append(Group(tuple(nodes), tuple(tuple(names[given(node, i)] for node in nodes) for i in roles)))
    return made


def readers_of_constants(program: Program) -> dict[str, set[Node]]:
    """The nodes of all methods that read each constant."""
    readers: dict[str, set[Node]] = defaultdict(set)
    for ep in program.methods.values():
        for name, node in constant_nodes(ep).items():
            readers[name].update(node.users)
    return readers


def refuse(group: Group, found: dict[str, list[Group]], written: set[str], readers: dict[str, set[Node]]) -> str | None:
    """Why the projections of a group stay apart, or None."""
    together = {node for groups in found.values() for one in groups if one.names == group.names for node in one.nodes}
    for name in (name for names in group.names for name in names):
        if name in written:
            return f"its {name} is written"
        if others := [node for node in readers[name] if node not in together]:
            return f"its {name} is also read by {others[0].name}, without the others of the group"
    return None


def concatenate(*parts: Tensor) -> Tensor:
    """Constants with a row an output, one after the other."""
    return torch.cat(parts)


def rewrite(program: Program, edits: Edits, nodes: dict[str, Node], group: Group, values: dict[str, Tensor]) -> None:
    """One projection and its slices in the place of a group's. ``nodes``: placeholders of the method's constants;
    ``values``: of the program's, gains what is fused.
    """
    first, graph = group.nodes[0], edits.ep.graph
    fused = []
    for names in group.names:
        name = f"{names[0]}.fused"
        if name not in values:
            program.derived[name] = Derived(f"{__name__}:{concatenate.__name__}", names)
            values[name] = program.derived[name].compute(values)
        fused.append(edits.add_constant(name, values[name], nodes[names[0]]))
    arguments = [given(first, i) for i in range(len(first.target._schema.arguments))]
    while arguments[-1] is None:
        arguments.pop()
    for place, node in zip(places(first), fused, strict=True):
        arguments[place] = node
    emit, x = Types().emitter(graph, first), given(first, 0).meta["val"]
    with graph.inserting_before(first):
        whole, start, slices = emit(first.target, *arguments), 0, []
        for node in group.nodes:
            end = start + node.meta["val"].shape[-1]
            slices.append(emit(aten.slice.Tensor, whole, x.ndim - 1, start, end))
            start = end
    for node, part in zip(group.nodes, slices, strict=True):
        edits.replace(node, part)
    edits.remove_unused({name: nodes[name] for names in group.names for name in names})


def places(node: Node) -> Iterator[int]:
    """The arguments of a projection that are constants."""
    return (i for i in CONSTANTS[node.target] if given(node, i) is not None)

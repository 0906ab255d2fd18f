"""Parts of a method that repeat, such as a decoder's layers, become calls of one block each, to be compiled once."""

import difflib
import hashlib
import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_flatten

from eyas.kernels.block import GRAPHS
from eyas.passes.base import Outcome, Pass, Refusal, source_line
from eyas.passes.blocks import Flow, Part, Parts, Uncut, best_cut, find_size, is_dense, symbols_of, whole
from eyas.passes.program import Block, Program, constant_nodes

aten = torch.ops.aten
SIMILAR = 0.5  # share of equal lines from which a difference between two blocks is worth telling


@dataclass(frozen=True)
class OutlineBlocks(Pass):
    """Takes a method apart where its values pass a bottleneck, and calls parts that are equal but for their constants
    as one block.

    Before::

        %x0: f32[1,s0,640] = aten.mul.Tensor(%embedding, 25.3)
        %x1: f32[1,s0,640] = aten.add.Tensor(%x0, %o_proj)
        %x2: f32[1,s0,640] = aten.add.Tensor(%x1, %o_proj_1)
        %ids: i64[1,s0] = aten.argmax.default(%logits, -1)

    After::

        %block: (f32[1,s0,640], i64[s0]) = eyas.block.default(5a1e03c7, [%embed], [], [%tokens, %input_pos])
        %block_1: (f32[1,s0,640]) = eyas.block.default(90b2d4e8, [%q, %o], [%k_cache], [%getitem, %getitem_1])
        %block_2: (f32[1,s0,640]) = eyas.block.default(90b2d4e8, [%q_1, %o_1], [%k_cache_1], [%getitem_2, %getitem_1])
        %block_3: (i64[1,s0]) = eyas.block.default(c07d11fa, [%norm, %head], [], [%getitem_3])

    Where layers are is found, not told: a bottleneck is a value that everything computed from the ones before it goes
    through. Blocks are one where operators, attributes, types, ranges and data flow are equal; what tells two similar
    ones apart is reported. A method is one block, with a reason, where nothing repeats, where it holds graphs of its
    own or writes into what it computes; with ``unrolled``; and where its blocks would take as long to compile, each
    with ``overhead`` nodes more than it has.
    """

    name: ClassVar[str] = "outline_blocks"
    requires: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset({"no_blocks"})
    unrolled: bool = False  # one block a method
    overhead: int = 0  # what compiling any block takes, in nodes

    def run(self, program: Program) -> Outcome:
        outcome = Outcome()
        for method, ep in program.methods.items():
            if any(node.target is torch.ops.eyas.block.default for node in ep.graph.nodes):
                continue
            parts, reason = cut(ep, self.unrolled, self.overhead)
            if reason:
                outcome.refusals.append(Refusal(method, "the method", reason))
            outcome.refusals += [Refusal(method, node, text) for node, text in differences(parts)]
            for part in parts:
                key = block_key(part.text)
                if key not in program.blocks:
                    program.blocks[key] = block_of(part, ep)
                GRAPHS[key] = program.blocks[key].program.graph_module
            call_blocks(ep, parts)
            outcome.rewrites += len(parts)
        return outcome


def cut(ep: ExportedProgram, unrolled: bool, overhead: int) -> tuple[list[Part], str | None]:
    """The parts of a method; where that is the whole method, why it is."""
    if unrolled:
        return [whole(ep)], None
    try:
        parts = Parts(Flow(ep), constant_nodes(ep).values())
        found = [parts.part(*span) for span in best_cut(parts)]
    except Uncut as error:
        return [whole(ep)], f"it stays whole: {error}"
    if len({part.text for part in found}) == len(found):
        return [whole(ep)], "it stays whole: no part of it repeats"
    apart = sum(overhead + size for size in {part.text: part.size for part in found}.values())
    if apart >= (together := overhead + sum(part.size for part in found)):
        return [whole(ep)], f"it stays whole: compiling its blocks takes as long as {apart} nodes, it has {together}"
    return found, None


def block_key(text: str) -> str:
    """12 hex digits that tell one block from another."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def block_of(part: Part, ep: ExportedProgram) -> Block:
    """A part as a method of its own: its inputs are the constants it reads, those it writes, and its inputs."""
    graph = Graph()
    new: dict[Node, Node] = {}
    groups = {"constant": part.constants, "written": part.written, "input": part.inputs}
    for kind, nodes in groups.items():
        for i, node in enumerate(nodes):
            new[node] = graph.placeholder(f"{kind}_{i}")
            new[node].meta["val"] = dense(node.meta["val"]) if kind == "input" else node.meta["val"]

    def map_number(node: Node) -> Node:
        """A number that the part reads, from a size of what it has or computed anew."""
        found = find_size(node, new)
        if found is not None:
            made = graph.call_function(aten.sym_size.int, (new[found[0]], found[1]))
        else:
            made = graph.node_copy(node, mapped)
        made.meta["val"] = node.meta["val"]
        return made

    def mapped(node: Node) -> Node:
        if node not in new:
            new[node] = map_number(node)
        return new[node]

    relaid = any(not is_dense(node.meta["val"]) for node in part.inputs)
    for node in part.order:
        new[node] = graph.node_copy(node, mapped)
        if relaid and node.target is aten.view.default:
            new[node].target = aten.reshape.default  # an input was laid out anew, so that a view may not do
        new[node].meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace", "nn_module_stack")}
    results = []
    for node in part.results:
        result = new[node]
        if not is_dense(node.meta["val"]):
            result = graph.call_function(aten.clone.default, (result,), {"memory_format": torch.contiguous_format})
            result.meta["val"] = dense(node.meta["val"])
        results.append(result)
    graph.output(tuple(results))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for i, node in enumerate(n for n in graph.nodes if n.op == "call_function"):
        node._rename(f"v{i}")  # names of the method would tell equal blocks apart
    module = GraphModule(ep.graph_module, graph)
    inputs = [TensorArgument(node.name) for node in placeholders]
    outputs = [TensorArgument(node.name) for node in results]
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, argument, None) for argument in inputs],
        [OutputSpec(OutputKind.USER_OUTPUT, argument, None) for argument in outputs],
    )
    in_spec = tree_flatten((tuple(inputs), {}))[1]
    call = ModuleCallSignature(list(inputs), list(outputs), in_spec, tree_flatten(tuple(outputs))[1])
    symbols = set().union(*map(symbols_of, placeholders))
    ranges = {s: r for s, r in ep.range_constraints.items() if str(s) in symbols}
    made = ExportedProgram(
        module, module.graph, signature, {}, ranges, [ModuleCallEntry("", call)], verifiers=ep.verifiers
    )
    return Block(block_key(part.text), made, len(part.constants), len(part.written), part.size)


def dense(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same shape, dense in row-major order."""
    if is_dense(value):
        return value
    with value.fake_mode:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def call_blocks(ep: ExportedProgram, parts: Sequence[Part]) -> None:
    """Leaves of a method its inputs, one call for each of ``parts``, and the pieces of their results."""
    graph = ep.graph
    output = next(node for node in graph.nodes if node.op == "output")
    old = [node for node in graph.nodes if node.op == "call_function"]
    made: dict[Node, Node] = {}
    for part in parts:
        with graph.inserting_before(output):
            groups = [[made.get(node, node) for node in group] for group in (part.constants, part.written, part.inputs)]
            call = graph.call_function(torch.ops.eyas.block.default, (block_key(part.text), *groups))
            call.meta = {k: v for k, v in part.order[0].meta.items() if k in ("stack_trace", "nn_module_stack")}
            call.meta["val"] = [dense(node.meta["val"]) for node in part.results]
            for i, node in enumerate(part.results):
                made[node] = graph.call_function(operator.getitem, (call, i))
                made[node].meta = {**node.meta, "val": call.meta["val"][i]}
    output.args = torch.fx.node.map_arg(output.args, lambda node: made.get(node, node))
    for node, new in made.items():
        ep.graph_signature.replace_all_uses(node.name, new.name)
    for node in reversed(old):
        graph.erase_node(node)


def differences(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """(source line, reason) for each kind of part that is similar to one that occurs more often, or earlier: by what
    the two differ.
    """
    times = Counter(part.text for part in parts)
    kinds = list({part.text: part for part in parts}.values())
    kinds.sort(key=lambda part: -times[part.text])
    found = []
    for i, part in enumerate(kinds):
        lines = numberless(part.text)
        matches = [difflib.SequenceMatcher(None, numberless(other.text), lines, False) for other in kinds[:i]]
        if not matches or max(match.ratio() for match in matches) < SIMILAR:
            continue
        nearest = max(range(i), key=lambda j: matches[j].ratio())
        theirs, ours = kinds[nearest].text.splitlines(), part.text.splitlines()
        # without numbers, two that differ only in which values they read are equal
        match = matches[nearest] if matches[nearest].ratio() < 1 else difflib.SequenceMatcher(None, theirs, ours, False)
        changes = [change for change in match.get_opcodes() if change[0] != "equal"]
        _, a, b, c, d = changes[0]
        node = part.order[min(max(c - (len(ours) - 1 - part.size), 0), part.size - 1)]
        reason = (
            f"block {block_key(part.text)} (x{times[part.text]}) is not block {block_key(kinds[nearest].text)} "
            f"(x{times[kinds[nearest].text]}), from which it differs in {len(changes)} places, first: "
            f"{' '.join(ours[c:d]) or 'nothing'} instead of {' '.join(theirs[a:b]) or 'nothing'}"
        )
        found.append((source_line(node), reason))
    return found


def numberless(text: str) -> list[str]:
    """A block's lines without the numbers of its values, so that one more line does not change all those after it."""
    return [re.sub(r"%(v|constant_|input_|written_)\d+", r"%\1", line) for line in text.splitlines()]

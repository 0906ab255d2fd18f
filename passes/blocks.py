"""Finds the parts of a method that repeat: where it can be cut, what each part is but for its constants, and which cut
makes few distinct parts of it.

A method is cut at its bottlenecks: values that everything computed from an earlier one of them goes through, such as
the residual stream between a decoder's layers. They are a chain of immediate post-dominators; positions, masks and
other values that do not come from the stream may be read anywhere.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import networkx as nx
import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from eyas.kernels.block import expression
from eyas.passes.printer import Symbols, argument, size_text, target, value_type
from eyas.passes.program import constant_nodes, may_write, schema_arguments, storage_root, viewed, written_roots

aten = torch.ops.aten


class Uncut(ValueError):
    """A method that cannot be taken apart; the message says why."""


def is_number(node: Node) -> bool:
    """Whether a node's value is no tensor but a number, such as the size of a dimension."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def reads_values(number: Node) -> bool:
    """Whether a number is taken from the values of a tensor, not from its shape."""
    shape = getattr(number.target, "overloadpacket", None) in (aten.sym_size, aten.sym_numel, aten.sym_stride)
    return not shape and any(not is_number(source) for source in number.all_input_nodes)


def is_written(node: Node, index_of: Node) -> bool:
    """Whether ``node`` writes its argument ``index_of`` in place."""
    if not may_write(node.target):
        return False
    hits: list[Node] = []
    for formal, value in schema_arguments(node):
        if formal.alias_info is not None and formal.alias_info.is_write:
            torch.fx.node.map_arg(value, hits.append)
    return index_of in hits


class Flow:
    """What must come before what in a method: values before their users, and writes to a storage in their order."""

    def __init__(self, ep: ExportedProgram):
        self.ep = ep
        self.output = next(n for n in ep.graph.nodes if n.op == "output")
        needed = needed_nodes(ep)
        self.nodes = [n for n in ep.graph.nodes if n.op == "call_function" and not is_number(n) and n in needed]
        if other := next((n for n in ep.graph.nodes if n.op == "get_attr"), None):
            raise Uncut(f"%{other.name} is a graph of its own")
        if other := next((n for n in ep.graph.nodes if is_number(n) and reads_values(n)), None):
            raise Uncut(f"%{other.name} is a number that depends on values")
        self.views = {n for n in self.nodes if viewed(n) is not None and storage_root(n).op == "placeholder"}
        self.writers: set[Node] = set()
        self.last_writer: dict[Node, Node] = {}  # of each storage that is written
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(self.nodes)
        own = set(self.nodes)
        for node in self.nodes:
            sized = [t for number in node.all_input_nodes if is_number(number) for t in sized_by(number)]
            self.graph.add_edges_from((source, node) for source in [*node.all_input_nodes, *sized] if source in own)
        self._order_writes()

    def _order_writes(self) -> None:
        accesses: dict[Node, list[tuple[Node, bool]]] = defaultdict(list)
        for node in self.nodes:
            for source in node.all_input_nodes:
                accesses[storage_root(source)].append((node, is_written(node, source)))
        for root, uses in accesses.items():
            writers = {node for node, writes in uses if writes}
            if not writers:
                continue
            if root.op != "placeholder":
                raise Uncut(f"%{next(iter(writers)).name} writes into %{root.name}, which the method computes")
            self.writers |= writers
            self.views -= {n for n in self.views if storage_root(n) is root}
            readers: list[Node] = []
            last: Node | None = None
            for node in dict.fromkeys(node for node, _ in uses):
                if last is not None and node is not last:
                    self.graph.add_edge(last, node)
                if node in writers:
                    self.graph.add_edges_from((reader, node) for reader in readers if reader is not node)
                    last, readers = node, []
                else:
                    readers.append(node)
            self.last_writer[root] = last

    def chain(self) -> list[Node]:
        """A chain of bottlenecks to one of the method's results: the one that leaves the fewest nodes between two of
        them; of several, one from whose start most nodes come.
        """
        best: list[Node] = []
        least: tuple[int, int] | None = None
        flow = self.graph.reverse(copy=False)
        for sink in dict.fromkeys(n for n in self.output.all_input_nodes if n in self.graph):
            dominator = {sink: sink, **nx.immediate_dominators(flow, sink)}
            cost, start = self._origin(dominator)
            if least is None or cost < least:
                least, best = cost, [start]
                while best[-1] is not sink:
                    best.append(dominator[best[-1]])
        return best

    def _origin(self, dominator: Mapping[Node, Node]) -> tuple[tuple[int, int], Node]:
        """Where a chain to one result starts, after what counts: the most nodes between two bottlenecks, or beside all,
        and how many do not come from the start.
        """
        position = {node: i for i, node in enumerate(self.nodes)}
        order = [node for node in nx.topological_sort(self.graph) if node in dominator]
        through = dict.fromkeys(order, 1)  # how many lead to the result by way of a node
        for node in order[:-1]:
            through[dominator[node]] += through[node]
        between = {order[-1]: len(self.nodes) - len(order)}  # the most between two bottlenecks after a node
        reached: dict[Node, int] = {}  # bit i: node i comes from it
        for node in reversed(order):
            after = dominator[node]
            between.setdefault(node, max(between[after], through[after] - through[node]))
            reached[node] = 1 << position[node]
            for user in self.graph.successors(node):
                reached[node] |= reached.get(user, 0)

        def cost(node: Node) -> tuple[int, int]:
            return max(through[node], between[node]), len(self.nodes) - reached[node].bit_count()

        start = min(sorted(order, key=position.get), key=cost)
        return cost(start), start

    def pieces(self) -> list[list[Node]]:
        """Every node, in the order of the method, by the bottleneck that it leads to: first what several pieces read,
        last what comes after all bottlenecks. Numbers and views of the method's inputs belong to whoever reads them.
        """
        chain = self.chain()
        place = {node: i for i, node in enumerate(chain)}
        order = list(nx.lexicographical_topological_sort(self.graph, key={n: i for i, n in enumerate(self.nodes)}.get))
        level: dict[Node, int] = {}
        for node in order:
            before = max((level[source] for source in self.graph.predecessors(node)), default=-1)
            level[node] = place.get(node, before)
        piece: dict[Node, int] = {}
        last = len(chain) - 1
        for node in reversed(order):
            users = [piece[user] for user in self.graph.successors(node)]
            if any(user is self.output for user in node.users):
                users.append(last)
            if node in place:
                piece[node] = place[node] - 1
            elif node in self.writers or level[node] >= 0:
                piece[node] = level[node] if node in self.writers else min(users, default=last)
            else:
                piece[node] = users[0] if len(set(users)) == 1 else -1
        found: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            if node not in self.views:
                found[piece[node]].append(node)
        return [found[i] for i in sorted(found)]


@dataclass(frozen=True)
class Part:
    """Consecutive nodes of a method, and what they are but for names: ``text`` is equal for equal parts.

    ``order``: the nodes as the text has them; ``inputs``, ``constants`` and ``written`` (those that it writes in
    place): what it reads from elsewhere; ``results``: what others read of it; ``stale``: why it must not be apart from
    what makes its inputs.
    """

    text: str
    order: tuple[Node, ...]
    inputs: tuple[Node, ...]
    constants: tuple[Node, ...]
    written: tuple[Node, ...]
    results: tuple[Node, ...]
    stale: str | None = None

    @property
    def size(self) -> int:
        return len(self.order)


class Parts:
    """The parts of one method, each looked at once."""

    def __init__(self, flow: Flow, constants: Iterable[Node]):
        self.flow, self.constants = flow, set(constants)
        self.pieces = flow.pieces()
        self.rank = {node: i for i, node in enumerate(flow.ep.graph.nodes)}
        self.sized = [n for n in self.rank if n.op == "placeholder" and plain_sizes(n)]
        self._known: dict[tuple[int, int], Part] = {}
        # what is asked of a node for each part that it is in
        self._needed, self._plain, self._symbols = Known(self._find_needed), Known(plain_sizes), Known(symbols_of)
        self._words = Known(words_of)

    def part(self, start: int, end: int) -> Part:
        """Pieces ``start`` to ``end`` (excluded) as one part."""
        if (start, end) not in self._known:
            self._known[start, end] = self._part([node for piece in self.pieces[start:end] for node in piece])
        return self._known[start, end]

    def _part(self, nodes: Sequence[Node]) -> Part:
        own = set(nodes)
        results = [n for n in nodes if any(self._is_read_outside(user, own) for user in n.users)]
        results.sort(key=self.rank.get)
        order = tuple(self._sorted(own, [*results, *sorted(self.flow.writers & own, key=self.rank.get)]))
        inside = set(order)
        read: dict[Node, None] = {}
        for node in order:
            for source in node.all_input_nodes:
                if source not in inside and not is_number(source):
                    read.setdefault(source)
        inputs = [n for n in read if n not in self.constants]
        stale = next(filter(None, map(self._written_later, inputs)), None)
        self._supply_sizes(order, inputs, inside)
        writers = [n for n in order if n in self.flow.writers]
        written_in = {storage_root(s) for n in writers for s in n.all_input_nodes if is_written(n, s)}
        if other := next((root for root in written_in if root not in self.constants), None):
            raise Uncut(f"an input of the method, %{other.name}, is written in place")
        constants = [n for n in read if n in self.constants and n not in written_in]
        written = [n for n in read if n in written_in]
        text = describe(order, inputs, constants, written, results, self.flow.ep, self._words)
        return Part(text, order, tuple(inputs), tuple(constants), tuple(written), tuple(results), stale)

    def _find_needed(self, node: Node) -> list[Node]:
        """What must come before a node, its arguments first."""
        needed = list(node.all_input_nodes)
        known = set(needed)
        if node in self.flow.graph:
            needed += sorted((n for n in self.flow.graph.predecessors(node) if n not in known), key=self.rank.get)
        return needed

    def _written_later(self, node: Node) -> str | None:
        """Why a value cannot be handed on: what it shows is written afterwards, and a block may hand on a copy."""
        writer = self.flow.last_writer.get(storage_root(node))
        if node.op == "placeholder" or writer is None or self.rank[writer] <= self.rank[node]:
            return None
        return f"%{writer.name} writes into what %{node.name} shows, which several parts read"

    def _is_read_outside(self, user: Node, own: set[Node]) -> bool:
        if user is self.flow.output:
            return True
        # a size is taken from a value at hand, a view of the method's inputs made anew, by each part that needs it
        return user in self.flow.graph and user not in self.flow.views and user not in own

    def _sorted(self, own: set[Node], roots: Sequence[Node]) -> Iterator[Node]:
        """The nodes that ``roots`` need, those of the part and the views it makes for itself, each after what it needs;
        the order follows the arguments, not the method.
        """
        done: set[Node] = set()
        stack = [(root, False) for root in reversed(roots)]
        while stack:
            node, ready = stack.pop()
            if node in done:
                continue
            if ready:
                done.add(node)
                yield node
                continue
            stack.append((node, True))
            for source in reversed(self._needed[node]):
                if source in own or source in self.flow.views:
                    stack.append((source, False))

    def _supply_sizes(self, order: Sequence[Node], inputs: list[Node], inside: set[Node]) -> None:
        """Adds to ``inputs`` a tensor for each dynamic size that the part names and none of its inputs has, and one for
        each that the sizes of its values are made of.
        """
        had = set().union(*map(self._plain.__getitem__, inputs))
        named = set().union(*map(self._symbols.__getitem__, [*inputs, *order]))
        at_hand = had.union(*map(self._plain.__getitem__, inside))

        def supply(tensor: Node) -> None:
            inputs.append(tensor)
            had.update(self._plain[tensor])
            at_hand.update(self._plain[tensor])
            named.update(self._symbols[tensor])

        for node in order:
            for source in self._needed[node]:
                if is_number(source) and str(source.meta["val"]) not in at_hand:
                    for tensor in sized_by(source):
                        if tensor not in inputs and tensor not in inside:
                            supply(tensor)
        for tensor in self.sized:
            if self._plain[tensor] & named - had:
                supply(tensor)


def whole(ep: ExportedProgram) -> Part:
    """A method as one part."""
    output = next(n for n in ep.graph.nodes if n.op == "output")
    order = [n for n in ep.graph.nodes if n.op in ("call_function", "get_attr") and not is_number(n)]
    held = {node for node in constant_nodes(ep).values() if node.users}
    written = {root for root in written_roots(ep) if root in held}
    placeholders = [n for n in ep.graph.nodes if n.op == "placeholder"]
    inputs = [n for n in placeholders if n not in constant_nodes(ep).values()]
    constants = [n for n in placeholders if n in held and n not in written]
    kept = [n for n in placeholders if n in written]
    results = [n for n in dict.fromkeys(output.all_input_nodes) if n.op == "call_function"]
    text = describe(order, inputs, constants, kept, results, ep, Known(words_of))
    return Part(text, tuple(order), tuple(inputs), tuple(constants), tuple(kept), tuple(results))


def needed_nodes(ep: ExportedProgram) -> set[Node]:
    """What a method's results and its writes in place come from, and they themselves."""
    stack = [n for n in ep.graph.nodes if n.op == "output" or any(is_written(n, s) for s in n.all_input_nodes)]
    found = set(stack)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


class Known(dict):
    """What a function says of each key, asked once."""

    def __init__(self, function: Callable):
        super().__init__()
        self._function = function

    def __missing__(self, key):
        self[key] = found = self._function(key)
        return found


def symbols_of(node: Node) -> set[str]:
    """The dynamic sizes that the shapes of a value are made of."""
    values = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
    return {str(s) for v in values for d in v.shape if isinstance(d, torch.SymInt) for s in d.node.expr.free_symbols}


def plain_sizes(node: Node) -> set[str]:
    """The dynamic sizes that are a dimension of a value, as they are."""
    return {str(d) for d in getattr(node.meta.get("val"), "shape", ()) if isinstance(d, torch.SymInt)}


def sized_by(number: Node) -> list[Node]:
    """The tensors whose sizes a number is computed from."""
    found: list[Node] = []
    stack = [number]
    while stack:
        node = stack.pop()
        for source in node.all_input_nodes:
            (stack if is_number(source) else found).append(source)
    return found


def find_size(number: Node, tensors: Iterable[Node]) -> tuple[Node, int] | None:
    """A (tensor, dimension) whose size is the number of the node ``number``."""
    for tensor in tensors:
        value = tensor.meta.get("val")
        for d, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and str(size) == str(number.meta["val"]):
                return tensor, d
    return None


def describe(
    order: Sequence[Node], inputs: Sequence[Node], constants: Sequence[Node], written: Sequence[Node],
    results: Sequence[Node], ep: ExportedProgram, words: Mapping[Node, tuple[str | Node, ...]],
) -> str:  # fmt: skip
    """A part in words, with names that count from 0: equal parts have equal texts. ``words``: of each node."""
    symbols = Symbols()
    names: dict[Node, str] = {}
    lines = []
    for kind, group in (("constant", constants), ("written", written), ("input", inputs)):
        for i, node in enumerate(group):
            names[node] = f"{kind}_{i}"
            lines.append(f"%{names[node]}: {words[node][0]}")
    for i, node in enumerate(order):
        names[node] = f"v{i}"

    def text(word: str | Node) -> str:
        if isinstance(word, str):
            return word
        return f"%{names[word]}" if word in names else argument(word.meta["val"], PLAIN)

    for node in order:
        if node.op == "get_attr":
            held = getattr(ep.graph_module, node.target)
            lines.append(f"%{names[node]} = {getattr(held, 'code', held)}")
        else:
            lines.append(f"%{names[node]}: {''.join(map(text, words[node]))}")
    lines.append(f"return {', '.join(map(text, results))}")
    body = symbols.rename("\n".join(lines))
    ranges = [
        f"{symbols.names[str(s)]} in [{r.lower}, {r.upper}]"
        for s, r in ep.range_constraints.items()
        if str(s) in symbols.names
    ]
    return f"block where {', '.join(sorted(ranges))}\n{body}\n" if ranges else f"block\n{body}\n"


def words_of(node: Node) -> tuple[str | Node, ...]:
    """A node's type, and what it calls on what; the nodes that it reads stand for their names."""
    words: list[str | Node] = [layout_of(node.meta.get("val"))]

    def say(value: object) -> None:
        if isinstance(value, Node):
            words.append(value)
        elif isinstance(value, (list, tuple)):
            words.append("[")
            say_all(("", one) for one in value)
            words.append("]")
        else:
            words.append(argument(value, PLAIN))

    def say_all(values: Iterable[tuple[str, object]]) -> None:
        for i, (label, value) in enumerate(values):
            words.append(f", {label}" if i else label)
            say(value)

    if node.op == "call_function":
        words.append(f" = {target(node)}(")
        say_all([*(("", one) for one in node.args), *((f"{key}=", value) for key, value in node.kwargs.items())])
        words.append(")")
    return tuple(words)


class TracersNames(Symbols):
    """Dynamic sizes as the tracer names them; a block's text renames them all at once."""

    def rename(self, text: str) -> str:
        return text


PLAIN = TracersNames()


def layout_of(value: object) -> str:
    """A value's type, with its strides where it is a tensor that is not dense in row-major order."""
    if isinstance(value, torch.Tensor) and not is_dense(value):
        return f"{value_type(value, PLAIN)} strides [{','.join(map(size_text, value.stride()))}]"
    return value_type(value, PLAIN)


def is_dense(value: torch.Tensor) -> bool:
    """Whether a fake tensor is known to be dense in row-major order, whatever its dynamic sizes are."""
    return dense_strides(tuple(map(expression, value.shape)), tuple(map(expression, value.stride())))


@lru_cache(maxsize=4096)
def dense_strides(shape: tuple[int | sympy.Expr, ...], strides: tuple[int | sympy.Expr, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected = expected * size
    return True


def best_cut(parts: Parts) -> list[tuple[int, int]]:
    """Where to cut a method, as (first piece, end) of each part, in order.

    Starts with every piece by itself and joins pieces while that makes the product of distinct nodes and the square
    root of the number of calls smaller: nodes stand for time to compile, calls for time to run. Deeper models have more
    calls of the same parts, so neither outweighs the other as they grow. One kind of piece at a time is joined to
    whatever stands before each of its occurrences, or after. Before all that counts how many parts are stale; raises
    ``Uncut`` where one stays so.
    """
    spans = [(i, i + 1) for i in range(len(parts.pieces))]

    def cost(spans: Sequence[tuple[int, int]]) -> tuple[int, float]:
        made = [parts.part(*span) for span in spans]
        sizes = {part.text: part.size for part in made}
        return sum(part.stale is not None for part in made), sum(sizes.values()) * len(spans) ** 0.5

    def joined(spans: Sequence[tuple[int, int]], kind: str, step: int) -> list[tuple[int, int]] | None:
        made: list[tuple[int, int]] = []
        texts = [parts.part(*span).text for span in spans]
        for span, text in list(zip(spans, texts))[::-step]:
            if made and made[-1][2] == kind and text == kind:
                return None  # one that follows itself is a loop of its own
            if made and made[-1][2] == kind:
                other = made.pop()
                made.append((min(span[0], other[0]), max(span[1], other[1]), ""))
            else:
                made.append((*span, text))
        return [span[:2] for span in made[::-step]]

    best = cost(spans)
    while True:
        options = []
        for kind in dict.fromkeys(parts.part(*span).text for span in spans):
            for step in (1, -1):  # to the one before, to the one after
                candidate = joined(spans, kind, step)
                if candidate is not None and len(candidate) < len(spans):
                    options.append((cost(candidate), candidate))
        if not options or min(options)[0] >= best:
            break
        best, spans = min(options)
    if stale := next(filter(None, (parts.part(*span).stale for span in spans)), None):
        raise Uncut(stale)
    return spans


def repeats(parts: Sequence[Part]) -> Counter[str]:
    """How often each text occurs."""
    return Counter(part.text for part in parts)

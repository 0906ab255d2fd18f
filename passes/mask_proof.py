"""Reads an attention mask's graph as a statement about positions: which keys j does the row at position p see?

In a ring of L rows, row j holds the newest position that is congruent to j, up to the last one of the call: ``last -
age`` with ``age = (last - j) % L``. So masks of rings are statements about ``last`` and ``age``.

Nothing is recognised by its name or its shape alone: each operator between the positions and the mask is read for what
it does to ``a p + b j + c``, and an operator that is not understood is a reason to give up.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from eyas.passes.cache_proof import written_by
from eyas.passes.program import given, storage_root

aten = torch.ops.aten
HARMLESS = (aten.detach_.default,)  # by its schema it writes, but no value changes
HIDDEN = -1e9  # an additive mask hides what it lowers by as much as this, or more


@dataclass(frozen=True, order=True)
class Affine:
    """``p * position + j * key + c + last * (last position of the call) + age * (age of the key in its ring)``."""

    p: int
    j: int
    c: int
    last: int = 0
    age: int = 0

    def __add__(self, other: "Affine") -> "Affine":
        return Affine(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def __neg__(self) -> "Affine":
        return Affine(*(-a for a in astuple(self)))

    def __sub__(self, other: "Affine") -> "Affine":
        return self + -other

    def __str__(self) -> str:
        terms = [(self.p, "position"), (self.j, "key"), (self.last, "last"), (self.age, "age"), (self.c, "")]
        shown = [(k, name) for k, name in terms if k] or [(0, "")]
        sizes = [name if name and abs(k) == 1 else f"{abs(k)} {name}".strip() for k, name in shown]
        return " ".join(f"{'-' if k < 0 else '+'} {size}" for (k, _), size in zip(shown, sizes)).removeprefix("+ ")


@dataclass(frozen=True)
class Seen:
    """The keys with every term of ``terms`` at least 0; ``additive``: given as 0 where seen and a huge negative number
    elsewhere.
    """

    terms: frozenset[Affine]
    additive: bool = False

    @property
    def always(self) -> bool:
        return not self.terms


@dataclass(frozen=True)
class Axes:
    """What a tensor says (``value``), and the dimension that runs over rows and over keys, None where none does."""

    value: "Affine | Seen | float"
    row: int | None = None
    key: int | None = None


class NotUnderstood(Exception):
    """Why a mask cannot be read; caught where the pass gives its reason."""


CAUSAL = Affine(1, -1, 0)
MISPLACED = "its mask has not rows and keys as its last dimensions"


def why_not_causal(
    mask: Node, positions: Node, constants: Mapping[Node, Tensor], written: Collection[Node] | None = None
) -> str | None:
    """None where row i of ``mask`` shows exactly the keys j <= ``positions[i]``; else what it shows, in words.

    ``constants``: the values of the method's constant tensors; ``written``: what ``changed_by`` finds in the method,
    None to look now.
    """
    try:
        terms, placed = terms_of(mask, positions, constants, written)
    except NotUnderstood as error:
        return str(error)
    if terms == [CAUSAL]:
        return None if placed else MISPLACED
    for term in terms:
        if replace(term, c=0) == -CAUSAL:
            return f"its mask is a sliding window of {term.c + 1} keys"
    return what_else(terms, CAUSAL, "key <= position")


def window_of(
    mask: Node, positions: Node, constants: Mapping[Node, Tensor], written: Collection[Node], ring: bool
) -> int | str:
    """W where row i of ``mask`` shows exactly the keys at positions p with ``positions[i] - W < p <= positions[i]``,
    and 0 where it shows all with p <= ``positions[i]``; else what it shows, in words.

    In a flat cache row j holds position j; in a ring, which needs a window, position ``last - age``, and nothing where
    that is negative. Arguments as for ``why_not_causal``.
    """
    try:
        terms, placed = terms_of(mask, positions, constants, written)
    except NotUnderstood as error:
        return str(error)
    held, text = (Affine(0, 0, 0, 1, -1), "last - age") if ring else (Affine(0, 1, 0), "key")
    upto, since = Affine(1, 0, 0) - held, held - Affine(1, 0, 0)
    windows = [term.c + 1 for term in terms if replace(term, c=0) == since and term.c >= 0]
    wanted = {upto, *([held] if ring else []), *(since + Affine(0, 0, window - 1) for window in windows)}
    if set(terms) != wanted:
        return what_else(terms, upto, f"{text} <= position" + f" and {text} >= 0" * ring)
    if ring and not windows:
        return "its mask has no window, and a ring forgets"
    if not placed:
        return MISPLACED
    return windows[0] if windows else 0


def terms_of(
    mask: Node, positions: Node, constants: Mapping[Node, Tensor], written: Collection[Node] | None
) -> tuple[list[Affine], bool]:
    """What must be at least 0 where ``mask`` shows a key, but for what always is; and whether rows and keys are its
    last dimensions. Raises ``NotUnderstood``.
    """
    written = changed_by(mask.graph.nodes) if written is None else written
    read = Reader(positions, constants, written).read(mask)
    if not isinstance(read.value, Seen):
        raise NotUnderstood("its mask is no mask of keys, but a number")
    last = mask.meta["val"].ndim - 1
    return sorted(t for t in read.value.terms if min(astuple(t)) < 0), (read.row, read.key) == (last - 1, last)


def what_else(terms: Iterable[Affine], upto: Affine, wanted: str) -> str:
    """What a mask shows, in words, that does not show what is ``wanted``; ``upto``: the term of its last key."""
    if not terms:
        return "its mask hides nothing"
    for term in terms:
        if replace(term, c=0) == upto and term.c:
            return f"its mask shows keys up to position {term.c:+d}, not up to the position itself"
    return f"its mask shows keys where {' and '.join(f'{term} >= 0' for term in terms)}, not where {wanted}"


def changed_by(nodes: Iterable[Node]) -> set[Node]:
    """The storages that some nodes write in place, and may change."""
    return set().union(*(written_by(node) for node in nodes if node.target not in HARMLESS))


class Reader:
    """Reads nodes as functions of the row's position and the key's index."""

    def __init__(self, positions: Node, constants: Mapping[Node, Tensor], written: Collection[Node]):
        self.positions, self.constants, self.written = positions, constants, written
        self.known: dict[Node, Axes] = {positions: Axes(Affine(1, 0, 0), row=0)}

    def read(self, node: object) -> Axes:
        if isinstance(node, bool):
            return Axes(Seen(frozenset() if node else frozenset({Affine(0, 0, -1)})))
        if isinstance(node, int):
            return Axes(Affine(0, 0, node))
        if isinstance(node, float):
            return Axes(node)
        if not isinstance(node, Node):
            raise NotUnderstood(f"its mask depends on {node!r}")
        if storage_root(node) in self.written:
            raise NotUnderstood(f"its mask depends on %{node.name}, which is written in place")
        if node not in self.known:
            self.known[node] = self.constant(node) if node.op == "placeholder" else self.operator(node)
        return self.known[node]

    def constant(self, node: Node) -> Axes:
        if node not in self.constants:
            raise NotUnderstood(f"its mask depends on %{node.name}; the cache was written at %{self.positions.name}")
        return self.table(node, self.constants[node])

    def table(self, node: Node, value: Tensor) -> Axes:
        """A constant: one number, or numbers that count up."""
        if value.numel() == 1:
            return self.read(value.flatten()[0].item())
        flat = value.flatten()
        counts = value.dtype in (torch.int64, torch.int32) and max(value.shape) == value.numel()
        if counts and torch.equal(flat, flat[0] + torch.arange(len(flat), dtype=flat.dtype)):
            return Axes(Affine(0, 1, int(flat[0])), key=list(value.shape).index(value.numel()))
        raise NotUnderstood(f"its mask depends on the values of %{node.name}, which do not count up")

    def operator(self, node: Node) -> Axes:
        rule = RULES.get(getattr(node.target, "overloadpacket", None))
        if rule is None:
            raise NotUnderstood(f"its mask depends on %{node.name} = {node.target}, which says nothing of positions")
        return rule(self, node)

    def not_understood(self, node: Node) -> NotUnderstood:
        return NotUnderstood(f"its mask depends on %{node.name} = {node.target} in a way that is not understood")


def align(reader: Reader, node: Node, *sources: object) -> tuple[list, Axes]:
    """The values of broadcast arguments, and the axes of their result."""
    rank = node.meta["val"].ndim
    row = key = None
    values = []
    for source in sources:
        read = reader.read(source)
        shift = rank - (source.meta["val"].ndim if isinstance(source, Node) else 0)
        for name, at in (("row", read.row), ("key", read.key)):
            if at is None:
                continue
            if name == "row":
                row = at + shift if row in (None, at + shift) else -1
            else:
                key = at + shift if key in (None, at + shift) else -1
        values.append(read.value)
    if -1 in (row, key) or (row is not None and row == key):
        raise reader.not_understood(node)  # a diagonal, say
    return values, Axes(0.0, row, key)


def affine(op):
    def rule(reader: Reader, node: Node) -> Axes:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
            raise reader.not_understood(node)
        (a, b), axes = align(reader, node, node.args[0], node.args[1])
        if not (isinstance(a, Affine) and isinstance(b, Affine)):
            raise reader.not_understood(node)
        return Axes(op(a, b), axes.row, axes.key)

    return rule


def compare(op):
    """``op(a, b)``: the term that must be at least 0, for integers."""

    def rule(reader: Reader, node: Node) -> Axes:
        (a, b), axes = align(reader, node, node.args[0], node.args[1])
        if not (isinstance(a, Affine) and isinstance(b, Affine)):
            raise reader.not_understood(node)
        return Axes(Seen(frozenset({op(a, b)})), axes.row, axes.key)

    return rule


def both(reader: Reader, node: Node) -> Axes:
    (a, b), axes = align(reader, node, node.args[0], node.args[1])
    if not all(isinstance(x, Seen) and not x.additive for x in (a, b)):
        raise reader.not_understood(node)
    return Axes(Seen(strictest(a.terms | b.terms)), axes.row, axes.key)


def strictest(terms: frozenset[Affine]) -> frozenset[Affine]:
    """Without the terms that another one implies: those that differ from it by a larger constant."""
    return frozenset(t for t in terms if not any(replace(t, c=u.c) == u and u.c < t.c for u in terms))


def invert(reader: Reader, node: Node) -> Axes:
    read = reader.read(node.args[0])
    if not isinstance(read.value, Seen) or read.value.additive or len(read.value.terms) != 1:
        raise reader.not_understood(node)
    (term,) = read.value.terms
    return Axes(Seen(frozenset({-term + Affine(0, 0, -1)})), read.row, read.key)


def choose(reader: Reader, node: Node) -> Axes:
    """``where(seen, 0, hidden)``, or the other way round; also of two booleans."""
    (seen, yes, no), axes = align(reader, node, *node.args[:3])
    return reader_of_choice(reader, node, seen, yes, no, axes)


def fill(reader: Reader, node: Node) -> Axes:
    (old, where, new), axes = align(reader, node, *node.args[:3])
    return reader_of_choice(reader, node, where, new, old, axes)


def reader_of_choice(reader: Reader, node: Node, seen: object, yes: object, no: object, axes: Axes) -> Axes:
    if not isinstance(seen, Seen) or seen.additive:
        raise reader.not_understood(node)
    if is_zero(yes) and is_hidden(no):
        return Axes(Seen(seen.terms, additive=True), axes.row, axes.key)
    if is_hidden(yes) and is_zero(no) and len(seen.terms) == 1:
        (term,) = seen.terms
        return Axes(Seen(frozenset({-term + Affine(0, 0, -1)}), additive=True), axes.row, axes.key)
    raise reader.not_understood(node)


def is_zero(value: object) -> bool:
    return value == 0.0 or value == Affine(0, 0, 0)


def is_hidden(value: object) -> bool:
    return isinstance(value, float) and value <= HIDDEN


def cast(reader: Reader, node: Node) -> Axes:
    """To another dtype: integers stay what they are, booleans booleans, and additive masks additive."""
    read, dtype = reader.read(node.args[0]), node.meta["val"].dtype
    kept = {
        Affine: dtype in (torch.int64, torch.int32),
        float: dtype.is_floating_point,
        Seen: dtype.is_floating_point if isinstance(read.value, Seen) and read.value.additive else dtype == torch.bool,
    }
    if not kept[type(read.value)]:
        raise reader.not_understood(node)
    return read


def same(reader: Reader, node: Node) -> Axes:
    return reader.read(node.args[0])


def reshaped(reader: Reader, node: Node) -> Axes:
    """A view that only adds or drops dimensions of size 1."""
    read, source = reader.read(node.args[0]), node.args[0].meta["val"].shape
    moved = {}
    targets = [i for i, size in enumerate(node.meta["val"].shape) if not is_one(size)]
    sources = [i for i, size in enumerate(source) if not is_one(size)]
    if [str(source[i]) for i in sources] != [str(node.meta["val"].shape[i]) for i in targets]:
        raise reader.not_understood(node)
    moved = dict(zip(sources, targets))
    if any(at is not None and at not in moved for at in (read.row, read.key)):
        raise reader.not_understood(node)
    return Axes(read.value, moved.get(read.row), moved.get(read.key))


def is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def expanded(reader: Reader, node: Node) -> Axes:
    read = reader.read(node.args[0])
    shift = node.meta["val"].ndim - node.args[0].meta["val"].ndim
    return Axes(read.value, *(None if at is None else at + shift for at in (read.row, read.key)))


def unsqueezed(reader: Reader, node: Node) -> Axes:
    read, at = reader.read(node.args[0]), node.args[1] % node.meta["val"].ndim
    return Axes(read.value, *(x if x is None or x < at else x + 1 for x in (read.row, read.key)))


def sliced(reader: Reader, node: Node) -> Axes:
    """Part of the keys, or all of the rows."""
    read = reader.read(node.args[0])
    dim, start, step = (given(node, i) for i in (1, 2, 4))
    dim, start = (dim or 0) % node.meta["val"].ndim, start or 0
    whole = str(node.meta["val"].shape[dim]) == str(node.args[0].meta["val"].shape[dim])
    if whole or dim not in (read.row, read.key):
        return read
    aged = any(term.age for term in ([read.value] if isinstance(read.value, Affine) else read.value.terms))
    if dim == read.row or not isinstance(start, int) or start < 0 or step not in (None, 1) or aged:
        raise reader.not_understood(node)

    one = is_one(node.meta["val"].shape[dim])  # of which nothing counts any more

    def move(term: Affine) -> Affine:
        return Affine(term.p, 0 if one else term.j, term.c + term.j * start)

    value = read.value
    value = move(value) if isinstance(value, Affine) else Seen(frozenset(map(move, value.terms)), value.additive)
    return Axes(value, read.row, None if one else read.key)


def last_of(reader: Reader, node: Node) -> Axes:
    """The last of the rows."""
    read, (dim, index) = reader.read(node.args[0]), node.args[1:]
    size, rank = node.args[0].meta["val"].shape[dim], node.args[0].meta["val"].ndim
    of_rows = isinstance(read.value, Affine) and read.key is None and read.row == dim % rank and rank == 1
    if not of_rows or index not in (-1, size - 1):
        raise reader.not_understood(node)
    return Axes(replace(read.value, p=0, last=read.value.last + read.value.p))


def aged(reader: Reader, node: Node) -> Axes:
    """``(last - key) % L`` of a ring's L rows."""
    read, size = reader.read(node.args[0]), node.args[1]
    if read.value != Affine(0, -1, 0, 1) or read.key is None or size != node.meta["val"].shape[read.key]:
        raise reader.not_understood(node)
    return Axes(Affine(0, 0, 0, 0, 1), read.row, read.key)


def counting(reader: Reader, node: Node) -> Axes:
    start, step = 0, 1
    if node.target in (aten.arange.start, aten.arange.start_step):
        start = node.args[0]
        step = node.args[2] if len(node.args) > 2 else 1
    if not isinstance(start, int) or step != 1 or node.meta["val"].dtype not in (torch.int64, torch.int32):
        raise reader.not_understood(node)
    if is_one(node.meta["val"].shape[0]):  # one number, which is broadcast over all keys
        return Axes(Affine(0, 0, start))
    return Axes(Affine(0, 1, start), key=0)


def filled(value_at: int | None, fixed: object = None):
    def rule(reader: Reader, node: Node) -> Axes:
        value = fixed if value_at is None else given(node, value_at)
        if isinstance(value, Node):
            raise reader.not_understood(node)
        dtype = node.meta["val"].dtype
        if dtype == torch.bool:
            return reader.read(bool(value))
        return Axes(float(value)) if dtype.is_floating_point else reader.read(int(value))

    return rule


RULES = {
    aten.add: affine(lambda a, b: a + b),
    aten.sub: affine(lambda a, b: a - b),
    aten.ge: compare(lambda a, b: a - b),
    aten.le: compare(lambda a, b: b - a),
    aten.gt: compare(lambda a, b: a - b + Affine(0, 0, -1)),
    aten.lt: compare(lambda a, b: b - a + Affine(0, 0, -1)),
    aten.logical_and: both,
    aten.bitwise_and: both,
    aten.__and__: both,
    aten.mul: both,
    aten.logical_not: invert,
    aten.bitwise_not: invert,
    aten.where: choose,
    aten.masked_fill: fill,
    aten.to: cast,
    aten._to_copy: cast,
    aten.clone: same,
    aten.contiguous: same,
    aten.alias: same,
    aten.detach: same,
    aten.detach_: same,
    aten.lift_fresh_copy: same,
    aten.view: reshaped,
    aten.reshape: reshaped,
    aten.squeeze: reshaped,
    aten.expand: expanded,
    aten.unsqueeze: unsqueezed,
    aten.slice: sliced,
    aten.select: last_of,
    aten.remainder: aged,
    aten.arange: counting,
    aten.full: filled(1),
    aten.full_like: filled(1),
    aten.new_full: filled(2),
    aten.scalar_tensor: filled(0),
    aten.zeros: filled(None, 0),
    aten.zeros_like: filled(None, 0),
    aten.new_zeros: filled(None, 0),
    aten.ones: filled(None, 1),
    aten.new_ones: filled(None, 1),
    aten.ones_like: filled(None, 1),
}

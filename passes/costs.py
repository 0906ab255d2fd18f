"""Bytes moved and floating-point work of each operator, from the types that a graph records.

What is counted is what an operator must read and write once: each tensor argument and each result, except where a
kernel reads less than its argument (the rows of a table that are looked up, the live keys of a cache). Views move
nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

import eyas.kernels  # noqa: F401  registers the operators
from eyas.kernels.block import graph_of
from eyas.passes.program import given, viewed

aten, own = torch.ops.aten, torch.ops.eyas


@dataclass(frozen=True)
class Cost:
    """``moved`` in bytes, ``work`` in floating-point operations, ``count`` nodes."""

    count: int = 0
    moved: int = 0
    work: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.count + other.count, self.moved + other.moved, self.work + other.work)

    def seconds(self, bandwidth: float, peak: float) -> float:
        """The roofline's bound, for ``bandwidth`` in bytes and ``peak`` in operations a second."""
        return max(self.moved / bandwidth, self.work / peak)


class Sizes:
    """Sizes of values for calls of ``rows`` rows over caches with ``live`` rows in use."""

    def __init__(self, rows: int, live: int):
        self.rows, self.live = rows, live

    def shape(self, node: Node) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else self.rows for size in node.meta["val"].shape)

    def nbytes(self, value: object) -> int:
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        shapes = [[size if isinstance(size, int) else self.rows for size in leaf.shape] for leaf in leaves]
        return sum(prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, leaves))


def linear(s: Sizes, node: Node) -> int:
    x, out = s.shape(given(node, 0)), s.shape(node)
    return 2 * prod(x) * out[-1]


def matmul(s: Sizes, node: Node) -> int:
    a, out = s.shape(given(node, 0)), s.shape(node)
    return 2 * prod(out) * a[-1]


def attention(s: Sizes, node: Node) -> int:
    q, k = s.shape(given(node, 0)), s.shape(given(node, 1))
    return 4 * prod(q) * min(k[-2], s.live)


WORK: dict[object, Callable[[Sizes, Node], int]] = {
    aten.linear: linear, own.int8_linear: linear, own.int4_linear: linear, own.int4_smallm: linear,
    own.int4_anym: linear, own.panel_linear: linear, own.panel_int8_linear: linear, own.panel_int4_linear: linear,
    aten.matmul: matmul, aten.mm: matmul, aten.bmm: matmul,
    aten.scaled_dot_product_attention: attention, own.masked_sdpa: attention, own.sdpa_midm: attention,
    # by name: those of Triton need not be registered
    "eyas.fragment_int4_linear": linear, "eyas.fragment_int4_matmul": linear, "eyas.fragment_int8_linear": linear,
    "eyas.fragment_int8_matmul": linear, "eyas.fragment_bf16_linear": linear, "eyas.fragment_bf16_matmul": linear,
    "eyas.splitk_sdpa": attention,
}  # fmt: skip
LOOKUPS = {
    aten.embedding: 0, own.int8_embedding: 1, aten.index: 0, aten.index_select: 0, "eyas.fragment_int8_embedding": 1,
    "eyas.fragment_bf16_embedding": 1,
}  # fmt: skip
WRITES = {aten.index_copy_: 3, aten.index_copy: 3, aten.index_put_: 2, aten.index_put: 2}
FREE = (aten._assert_tensor_metadata,)


def cost_of(node: Node, sizes: Sizes) -> Cost:
    """What one node costs; nothing for views, placeholders and checks."""
    packet = getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None
    if packet is None or packet in FREE:
        return Cost()
    made = sizes.nbytes(node.meta.get("val"))
    if packet in WRITES:
        return Cost(1, 2 * sizes.nbytes(given(node, WRITES[packet]).meta["val"]))
    if viewed(node) is not None:
        return Cost(1)
    lookup, rule = (table.get(packet, table.get(str(packet))) for table in (LOOKUPS, WORK))
    read = 0
    for source in node.all_input_nodes:
        nbytes = sizes.nbytes(source.meta.get("val"))
        if lookup is not None and given(node, lookup) is source:
            nbytes = min(nbytes, made)
        elif rule is attention and source in (given(node, 1), given(node, 2)):
            keys = sizes.shape(source)[-2]
            nbytes = nbytes * min(keys, sizes.live) // keys
        read += nbytes
    elements = made // max(1, node.meta["val"].dtype.itemsize) if isinstance(node.meta.get("val"), Tensor) else 0
    return Cost(1, read + made, elements if rule is None else rule(sizes, node))


def nodes_of(graph: Graph) -> Iterator[Node]:
    """The nodes of a graph, those of a block in the place of each of its calls."""
    for node in graph.nodes:
        if node.target is own.block.default:
            yield from nodes_of(graph_of(node.args[0]).graph)
        else:
            yield node


def costs(ep: ExportedProgram, rows: int, live: int) -> dict[str, Cost]:
    """The cost of each operator of a method, the dearest in bytes first."""
    sizes, found = Sizes(rows, live), defaultdict(Cost)
    for node in nodes_of(ep.graph):
        cost = cost_of(node, sizes)
        if cost.count:
            found[str(node.target)] += cost
    return dict(sorted(found.items(), key=lambda item: (-item[1].moved, item[0])))

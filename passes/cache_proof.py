"""Finds the cache behind an attention's keys or values, and proves where it was last written."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from eyas.passes.program import constant_nodes, given, known_equal, may_write, schema_arguments, storage_root

aten = torch.ops.aten
KEYS = 2  # the dimension of a cache [1, G, L, D] that counts its rows
SAME = (aten.alias.default, aten.contiguous.default, aten.clone.default, aten.detach.default)
REPEATS = (aten.repeat_interleave.self_int,)


@dataclass(frozen=True)
class Written:
    """A cache as an attention reads it (``value``, ``[1, G, L, D]``), with ``positions`` the rows just written."""

    value: Node
    positions: Node


class Caches:
    """The buffers of a method and the nodes that write them, looked up once for all of its attentions."""

    def __init__(self, ep: ExportedProgram):
        self.buffers = {node: name for name, node in constant_nodes(ep).items()}
        self.order = {node: i for i, node in enumerate(ep.graph.nodes)}
        self.writes: dict[Node, list[Node]] = defaultdict(list)
        for node in ep.graph.nodes:
            for root in written_by(node):
                self.writes[root].append(node)

    def behind(self, value: Node, reader: Node) -> Written | str:
        """The cache that ``value`` shows to ``reader``, or why it is none."""
        node = unrepeated(value)
        if node.op == "call_function" and node.target in (aten.index_copy.default, aten.index_put.default):
            if node.args[0] not in self.buffers:
                return f"%{node.args[0].name}, which is written, is no buffer"
            return positions_of(node, node)
        root = storage_root(node)
        if root not in self.buffers:
            return f"they come from %{node.name}, which is no buffer"
        name, writes = self.buffers[root], self.writes[root]
        if node is not root and node.target not in (aten.index_copy_.default, aten.index_put_.default):
            return f"%{node.name} is only a part or another view of the buffer {name}"
        if not writes:
            return f"no node writes the buffer {name}"
        if len(writes) > 1:
            return f"the buffer {name} is written {len(writes)} times"
        if self.order[writes[0]] > self.order[reader]:
            return f"the buffer {name} is written after it is read"
        while value is not node:  # on the way there may be copies, which do not see a later write
            if self.order[value] < self.order[writes[0]]:
                return f"%{value.name} is made of the buffer {name} before it is written"
            value = value.args[0]
        return positions_of(writes[0], node)


def written_by(node: Node) -> set[Node]:
    """The storages that a node writes in place."""
    roots: set[Node] = set()
    if not may_write(node.target):
        return roots
    for argument, value in schema_arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            torch.fx.node.map_arg(value, lambda n: roots.add(storage_root(n)))
    return roots


def positions_of(write: Node, cache: Node) -> Written | str:
    """The rows that ``write`` puts its values into."""
    if not keeps_type(given(write, 0), cache):
        return f"%{write.name} writes a view of it"
    if write.target in (aten.index_copy_.default, aten.index_copy.default):
        dim, index = given(write, 1), given(write, 2)
        dims = cache.meta["val"].ndim
        if dims != 4 or dim % dims != KEYS:
            return f"%{write.name} writes along dimension {dim} of {dims}, not along rows of [1, G, L, D]"
    elif write.target in (aten.index_put_.default, aten.index_put.default):
        indices = list(given(write, 1))
        if given(write, 3) or cache.meta["val"].ndim != 4 or len(indices) != KEYS + 1 or any(indices[:KEYS]):
            return f"%{write.name} does not write whole rows of [1, G, L, D]"
        index = indices[KEYS]
    else:
        return f"%{write.name} = {write.target} writes it, at positions that are not understood"
    if index.meta["val"].ndim != 1:
        return f"it is written at %{index.name} of {index.meta['val'].ndim} dimensions"
    return Written(cache, index)


def unrepeated(node: Node) -> Node:
    """``node`` before it was repeated for the query heads of a group, and before what keeps its type."""
    while node.op == "call_function":
        source = given(node, 0) if node.args else None
        if not isinstance(source, Node):
            break
        if node.target in (*SAME, aten.to.dtype, aten._to_copy.default, aten.slice.Tensor, aten.expand.default):
            if not keeps_type(node, source):
                break
            node = source
        elif node.target in REPEATS and given(node, 2) == 1 and node.meta["val"].ndim == 4:
            node = source
        elif (group := repeated_by_expand(node)) is not None:
            node = group
        else:
            break
    return node


def keeps_type(node: Node, source: Node) -> bool:
    a, b = node.meta["val"], source.meta["val"]
    return a.dtype == b.dtype and known_equal(a.shape, b.shape)


def repeated_by_expand(node: Node) -> Node | None:
    """``x`` of ``x[:, :, None].expand(1, G, n, L, D).reshape(1, G n, L, D)``: each head n times in a row."""
    if node.target not in (aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return None
    expand = node.args[0]
    while expand.op == "call_function" and expand.target in (aten.clone.default, aten.contiguous.default):
        expand = expand.args[0]
    if expand.op != "call_function" or expand.target is not aten.expand.default:
        return None
    unsqueeze = expand.args[0]
    while (
        unsqueeze.op == "call_function"
        and unsqueeze.target is aten.slice.Tensor
        and keeps_type(unsqueeze, unsqueeze.args[0])
    ):
        unsqueeze = unsqueeze.args[0]
    if unsqueeze.op != "call_function" or unsqueeze.target is not aten.unsqueeze.default:
        return None
    source, dim = unsqueeze.args
    shape, wide = source.meta["val"].shape, expand.meta["val"].shape
    if len(shape) != 4 or dim % 5 != KEYS:
        return None
    expected = [shape[0], shape[1] * wide[2], *shape[2:]]
    return source if known_equal(node.meta["val"].shape, expected) else None

"""What passes work on: the methods of one program, and the constants that they share by name."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

CONSTANT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class Derived:
    """How a pass made a constant: ``function`` (``module:name``) of the constants ``sources``, in order, and of the
    numbers ``options`` after them.
    """

    function: str
    sources: tuple[str, ...]
    options: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.function.partition(':')[2]}({', '.join(map(str, (*self.sources, *self.options)))})"

    def compute(self, constants: Mapping[str, Tensor]) -> Tensor:
        """The constant's value, which like the constants of a program wants no gradient."""
        module, _, name = self.function.partition(":")
        with torch.no_grad():
            return getattr(import_module(module), name)(*(constants[source] for source in self.sources), *self.options)


@dataclass
class Program:
    """Methods by name, the constant methods, and the device they are for.

    Constants (weights, tables, caches) go by fully qualified name. Methods are traced from one module, so an equal name
    means an equal tensor; ``share_buffers`` checks it and fills in ``sharing``. ``derived`` records the constants that
    passes made from others, so that they can be made again without running the passes. ``blocks``: what the nodes
    ``eyas.block`` of the methods call, by key.
    """

    methods: dict[str, ExportedProgram]
    constant_methods: dict[str, object] = field(default_factory=dict)
    device: str = "cpu"
    sharing: "Mapping[str, SharedBuffer] | None" = None
    derived: dict[str, Derived] = field(default_factory=dict)
    blocks: "dict[str, Block]" = field(default_factory=dict)

    @classmethod
    def of(cls, program: "Program | ExportedProgram") -> "Program":
        """A bare ``ExportedProgram`` as a program of one method, ``forward``."""
        return program if isinstance(program, Program) else cls({"forward": program})

    def constants(self) -> dict[str, Tensor]:
        """Every constant of every method, by name."""
        return {name: constant_value(ep, spec) for ep in self.methods.values() for name, spec in constant_specs(ep)}


@dataclass(frozen=True)
class SharedBuffer:
    """One storage of the program: who reads it and who writes it. ``mutable``: some method writes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    readers: tuple[str, ...]
    writers: tuple[str, ...]

    @property
    def mutable(self) -> bool:
        return bool(self.writers)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Block:
    """A part of a method that stands at one or several places, as a method of its own without constants.

    ``program``: its inputs are first ``n_constants`` that it reads and ``n_written`` that it writes in place, all of
    them constants of the method it came from, then values. ``size``: its nodes.
    """

    key: str
    program: ExportedProgram
    n_constants: int
    n_written: int
    size: int


def constant_specs(ep: ExportedProgram) -> Iterator[tuple[str, InputSpec]]:
    """(name, input spec) of the parameters, buffers and lifted tensors of a method, in graph order."""
    for spec in ep.graph_signature.input_specs:
        if spec.kind in CONSTANT_KINDS:
            yield spec.target, spec


def constant_value(ep: ExportedProgram, spec: InputSpec) -> Tensor:
    """The tensor behind a constant's input spec."""
    return ep.constants[spec.target] if spec.target in ep.constants else ep.state_dict[spec.target]


def mutated_buffers(ep: ExportedProgram) -> set[str]:
    """Names of the buffers that a method writes, whether in place in the graph or through its output signature."""
    signature, in_place = ep.graph_signature, {root.name for root in written_roots(ep)}
    written = {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}
    return written | {name for name, spec in constant_specs(ep) if spec.arg.name in in_place}


def written_roots(ep: ExportedProgram) -> set[Node]:
    """The nodes that made the storages which the graph writes in place."""
    roots = set()
    for node in ep.graph.nodes:
        if may_write(node.target):
            for argument, value in schema_arguments(node):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    torch.fx.node.map_arg(value, lambda written: roots.add(storage_root(written)))
    return roots


@cache
def may_write(target: object) -> bool:
    """Whether an operator's schema lets it write one of its arguments."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


def storage_root(node: Node) -> Node:
    """The node that made the storage of a node's value: where its chain of views and in-place results starts."""
    while node.op == "call_function":
        source = node.args[0] if node.target is operator.getitem else viewed(node)
        if source is None:
            break
        node = source
    return node


def viewed(node: Node) -> Node | None:
    """The argument whose storage an operator's result lies in, None where the result has its own."""
    schema = getattr(node.target, "_schema", None)
    result = schema.returns[0].alias_info if schema is not None and schema.returns else None
    for argument, value in schema_arguments(node):
        source = argument.alias_info
        if result is None or source is None or not isinstance(value, Node):
            continue
        if source.before_set & result.before_set or not result.before_set:  # a list of views carries no names
            return value
    return None


def schema_arguments(node: Node) -> Iterator[tuple[torch.Argument, object]]:
    """(what the operator's schema says of it, value) of each argument that a node gives; none without a schema."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if i < len(node.args):
            yield argument, node.args[i]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def given(node: Node, index: int) -> object:
    """An operator's argument by its place in the schema, by position or by name; None where a node does not give it."""
    name = node.target._schema.arguments[index].name
    return node.args[index] if index < len(node.args) else node.kwargs.get(name)


def constant_nodes(ep: ExportedProgram) -> dict[str, Node]:
    """Placeholder node of each constant, by the constant's name."""
    nodes = {node.name: node for node in ep.graph.nodes if node.op == "placeholder"}
    return {name: nodes[spec.arg.name] for name, spec in constant_specs(ep)}


class Edits:
    """Many changes of one method. Its signatures, each as long as the method, follow once: when the ``with`` ends."""

    def __init__(self, ep: ExportedProgram):
        self.ep = ep
        self._added: dict[str, InputSpec] = {}
        self._removed: set[str] = set()
        self._renamed: dict[str, str] = {}

    def __enter__(self) -> "Edits":
        return self

    def __exit__(self, *_) -> None:
        if self._added or self._removed:
            specs = {spec.arg.name: spec for spec in self.ep.graph_signature.input_specs} | self._added
            placeholders = [node.name for node in self.ep.graph.nodes if node.op == "placeholder"]
            self.ep.graph_signature.input_specs[:] = [specs[name] for name in placeholders]
        for call in self.ep.module_call_graph:  # of submodules whose signature was to be preserved
            for argument in (*call.signature.inputs, *call.signature.outputs) if call.signature is not None else ():
                while getattr(argument, "name", None) in self._renamed:
                    argument.name = self._renamed[argument.name]

    def add_constant(self, name: str, value: Tensor, before: Node) -> Node:
        """A new buffer, as a placeholder just before ``before`` (a constant's). Returns its node."""
        with self.ep.graph.inserting_before(before):
            node = self.ep.graph.placeholder("b_" + name.replace(".", "_"))
        node.target = node.name  # the graph makes a node's name unique, not that of the function's argument
        with before.meta["val"].fake_mode:
            node.meta["val"] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )  # fmt: skip
        self._added[node.name] = InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, persistent=True)
        self.ep.state_dict[name] = value
        return node

    def replace(self, old: Node, new: Node) -> None:
        """Puts ``new`` in the place of ``old``, and erases ``old``."""
        if any(user.op == "output" for user in old.users):
            self.ep.graph_signature.replace_all_uses(old.name, new.name)
        old.replace_all_uses_with(new)
        self._renamed[old.name] = new.name
        self.ep.graph.erase_node(old)

    def remove_unused(self, nodes: Mapping[str, Node]) -> None:
        """Drops those of some constants, by name, that nothing in the method reads."""
        for name, node in nodes.items():
            if not node.users:
                self.ep.graph.erase_node(node)
                self.ep.state_dict.pop(name, None)
                self.ep.constants.pop(name, None)
                self._removed.add(node.name)


def replace_node(ep: ExportedProgram, old: Node, new: Node) -> None:
    """Puts ``new`` in the place of ``old``, in the graph and in the method's signatures, and erases ``old``."""
    with Edits(ep) as edits:
        edits.replace(old, new)


def remove_unused_constants(ep: ExportedProgram) -> None:
    """Drops the constants that nothing in the method reads."""
    with Edits(ep) as edits:
        edits.remove_unused(constant_nodes(ep))


def known_equal(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Whether two shapes are equal whatever the dynamic dimensions are."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b))

"""Reads ExecuTorch's two container files without ExecuTorch: the program (``.pte``) and its data (``.ptd``).

Both are flatbuffers with a header that says where the segments begin; only the tables are read, segments are mapped.
Field numbers follow the public schemas ``program.fbs`` and ``flat_tensor.fbs``, which only ever grow.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from flatbuffers import number_types as N
from flatbuffers.table import Table


class ContainerError(ValueError):
    """A container file that is damaged, cut off or of another kind. The message names the file."""


@dataclass(frozen=True)
class TensorSpec:
    """What a method takes or gives: torch's scalar type code, and sizes, of which dynamic ones are upper bounds."""

    dtype: int
    sizes: tuple[int, ...]
    dynamic: bool


@dataclass(frozen=True)
class DelegateCall:
    """One step of a method. ``payload``: what its delegate was given; ``inputs`` and ``outputs``: the method's values
    that it takes and sets.
    """

    backend: str
    payload: bytes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class MethodSpec:
    """One delegated method of a program file: its ``calls`` in order. ``input_values`` and ``output_values``: which
    values its inputs and outputs are.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    input_values: tuple[int, ...]
    output_values: tuple[int, ...]
    calls: tuple[DelegateCall, ...]


class MappedFile:
    """A file mapped for reading. ``writable``: pages may be written in memory, never in the file."""

    def __init__(self, path: Path, writable: bool = False):
        self.path = Path(path)
        try:
            with open(path, "rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY if writable else mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ContainerError(f"{path} is missing; the artifact is incomplete") from None
        except ValueError:
            raise ContainerError(f"{path} is empty") from None

    def slice(self, start: int, size: int) -> memoryview:
        """``size`` bytes from ``start``. Raises ``ContainerError`` where the file ends before."""
        if start < 0 or size < 0 or start + size > len(self.data):
            raise ContainerError(
                f"{self.path} is cut off: bytes {start} to {start + size} wanted, it has {len(self.data)}"
            )
        return memoryview(self.data)[start : start + size]


class Fields:
    """One flatbuffer table; fields by their number in the schema."""

    def __init__(self, table: Table):
        self.table = table

    @classmethod
    def root(cls, data, offset: int = 0) -> "Fields":
        (position,) = struct.unpack_from("<I", data, offset)
        return cls(Table(data, offset + position))

    def _at(self, field: int) -> int:
        relative = self.table.Offset(4 + 2 * field)
        return self.table.Pos + relative if relative else 0

    def number(self, field: int, kind, default: int | float | bool = 0):
        at = self._at(field)
        return self.table.Get(kind, at) if at else default

    def text(self, field: int) -> str:
        at = self._at(field)
        return self.table.String(at).decode() if at else ""

    def child(self, field: int) -> "Fields | None":
        at = self._at(field)
        return Fields(Table(self.table.Bytes, self.table.Indirect(at))) if at else None

    def length(self, field: int) -> int:
        at = self._at(field)
        return self.table.VectorLen(at - self.table.Pos) if at else 0

    def _vector(self, field: int) -> int:
        return self.table.Vector(self._at(field) - self.table.Pos)

    def children(self, field: int) -> list["Fields"]:
        n = self.length(field)
        start = self._vector(field) if n else 0
        return [Fields(Table(self.table.Bytes, self.table.Indirect(start + 4 * i))) for i in range(n)]

    def numbers(self, field: int, kind) -> tuple:
        n = self.length(field)
        start = self._vector(field) if n else 0
        return tuple(self.table.Get(kind, start + kind.bytewidth * i) for i in range(n))

    def raw(self, field: int) -> bytes:
        n = self.length(field)
        start = self._vector(field) if n else 0
        return bytes(self.table.Bytes[start : start + n])

    def union(self, kind_field: int) -> tuple[int, "Fields | None"]:
        """(which member, its table) of a union whose type is field ``kind_field`` and value the next one."""
        return self.number(kind_field, N.Uint8Flags), self.child(kind_field + 1)


INT, BOOL, DOUBLE, TENSOR, STRING = 2, 3, 4, 5, 6  # members of the union KernelTypes that methods use
DELEGATE_CALL = 2  # member of InstructionArguments
DYNAMIC_BOUND = 1


class ProgramFile:
    """A ``.pte``: ``methods`` that consist of delegate calls, ``constants`` (the constant methods), and named data.

    Raises ``ContainerError`` for a file that is not such a program.
    """

    def __init__(self, path: Path):
        self.file = MappedFile(path)
        data = self.file.data
        if len(data) < 64 or data[4:8] != b"ET12" or data[8:12] != b"eh00":
            raise ContainerError(
                f"{path} is not an ExecuTorch program (identifier {bytes(data[4:12])!r}, expected b'ET12eh00')"
            )
        _, size, self._base = struct.unpack_from("<IQQ", data, 12)
        self.file.slice(0, size)
        try:
            self._read(Fields.root(data))
        except (struct.error, IndexError, UnicodeDecodeError, TypeError, AttributeError) as error:
            raise ContainerError(f"{path} is damaged: its tables cannot be read ({error})") from error

    def _read(self, root: Fields) -> None:
        self._segments = [(s.number(0, N.Uint64Flags), s.number(1, N.Uint64Flags)) for s in root.children(4)]
        self._inline = root.children(3)
        self.named_data = {d.text(0): d.number(1, N.Uint32Flags) for d in root.children(7)}
        self.methods: dict[str, MethodSpec] = {}
        self.constants: dict[str, object] = {}
        for plan in root.children(1):
            name, delegates = plan.text(0), plan.children(7)
            values = [v.union(0) for v in plan.children(2)]
            outputs = [values[i] for i in plan.numbers(4, N.Int32Flags)]
            if not delegates:
                read = [constant(kind, table) for kind, table in outputs]
                self.constants[name] = read[0] if len(read) == 1 else read
                continue
            ends = [plan.numbers(field, N.Int32Flags) for field in (3, 4)]
            inputs, outputs = (tuple(tensor_spec(values[i]) for i in numbers) for numbers in ends)
            self.methods[name] = MethodSpec(name, inputs, outputs, *ends, self._calls(name, plan, delegates))

    def _calls(self, name: str, plan: Fields, delegates: list[Fields]) -> tuple[DelegateCall, ...]:
        """The calls that a method consists of; it must have nothing else."""
        payloads = [self._processed(delegate) for delegate in delegates]
        set_by: set[int] = set(plan.numbers(3, N.Int32Flags))
        calls = []
        for chain in plan.children(5):
            for instruction in chain.children(2):
                kind, call = instruction.union(0)
                if kind != DELEGATE_CALL:
                    raise ContainerError(
                        f"{self.file.path}: method {name!r} has an instruction of kind {kind}; expected delegates only"
                    )
                index, arguments = call.number(0, N.Int32Flags), call.numbers(1, N.Int32Flags)
                inputs = tuple(value for value in arguments if value in set_by)
                outputs = tuple(value for value in arguments if value not in set_by)
                if arguments != inputs + outputs:
                    raise ContainerError(f"{self.file.path}: method {name!r} reads a value that no call has set")
                set_by.update(outputs)
                calls.append(DelegateCall(delegates[index].text(0), payloads[index], inputs, outputs))
        return tuple(calls)

    def _processed(self, delegate: Fields) -> bytes:
        reference = delegate.child(1)
        index = reference.number(1, N.Uint32Flags)
        if reference.number(0, N.Int8Flags) == 0:
            return self._inline[index].raw(0)
        return bytes(self.segment(index))

    def segment(self, index: int) -> memoryview:
        if index >= len(self._segments):
            raise ContainerError(f"{self.file.path} is damaged: it has {len(self._segments)} segments, none {index}")
        offset, size = self._segments[index]
        return self.file.slice(self._base + offset, size)

    def named(self, key: str) -> memoryview:
        """The bytes of a named data entry."""
        if key not in self.named_data:
            raise ContainerError(f"{self.file.path} has no data named {key!r}")
        return self.segment(self.named_data[key])


def tensor_spec(value: tuple[int, Fields | None]) -> TensorSpec:
    kind, table = value
    if kind != TENSOR:
        raise ContainerError(f"a method's input or output is not a tensor (kind {kind})")
    return TensorSpec(
        table.number(0, N.Int8Flags), table.numbers(2, N.Int32Flags), table.number(8, N.Int8Flags) == DYNAMIC_BOUND
    )


def constant(kind: int, table: Fields | None) -> object:
    if kind == INT:
        return table.number(0, N.Int64Flags)
    if kind == BOOL:
        return bool(table.number(0, N.BoolFlags, False))
    if kind == DOUBLE:
        return table.number(0, N.Float64Flags, 0.0)
    if kind == STRING:
        return table.text(0)
    raise ContainerError(f"a constant method gives a value of kind {kind}; expected a number, a flag or a text")


class DataFile:
    """A ``.ptd``: named tensors' bytes. ``entries``: key -> (offset, size) in the file."""

    def __init__(self, path: Path, writable: bool = False):
        self.file = MappedFile(path, writable)
        data = self.file.data
        if len(data) < 48 or data[4:8] != b"FT01" or data[8:12] != b"FH01":
            raise ContainerError(
                f"{path} is not an ExecuTorch data file (identifier {bytes(data[4:12])!r}, expected b'FT01FH01')"
            )
        offset, size, base, total = struct.unpack_from("<QQQQ", data, 16)
        self.file.slice(base, total)
        self.file.slice(offset, size)
        try:
            root = Fields.root(data)
            segments = [(base + s.number(0, N.Uint64Flags), s.number(1, N.Uint64Flags)) for s in root.children(1)]
            self.entries = {d.text(0): segments[d.number(1, N.Uint32Flags)] for d in root.children(2)}
        except (struct.error, IndexError, UnicodeDecodeError, TypeError, AttributeError) as error:
            raise ContainerError(f"{path} is damaged: its tables cannot be read ({error})") from error

    def bytes_of(self, key: str) -> memoryview:
        """The bytes of one entry."""
        if key not in self.entries:
            raise ContainerError(f"{self.file.path} has no entry {key!r}")
        return self.file.slice(*self.entries[key])

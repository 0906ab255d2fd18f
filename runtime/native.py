"""Tensors and compiled methods over AOTInductor's C interface, without importing torch.

A compiled method needs some thirty functions of that interface. A program whose operators are all the compiler's own
loops and our kernels gets them from a small library that travels with it; others get them from torch's.
"""

import ctypes
import importlib.util
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_bool, c_char_p, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

# name -> (torch's ScalarType code, numpy's type); bfloat16 is carried as its 16 bits
DTYPES: dict[str, tuple[int, type]] = {
    "uint8": (0, np.uint8),
    "int8": (1, np.int8),
    "int16": (2, np.int16),
    "int32": (3, np.int32),
    "int64": (4, np.int64),
    "float16": (5, np.float16),
    "float32": (6, np.float32),
    "float64": (7, np.float64),
    "bool": (11, np.bool_),
    "bfloat16": (15, np.uint16),
}
NAMES = {code: name for name, (code, _) in DTYPES.items()}
CPU = 0


class Host:
    """Who implements AOTInductor's C interface: torch's own library, or ``aoti_host.cpp``, which needs no torch.

    Tensor handles of one host mean nothing to another, so a program and its tensors keep to one.
    """

    def __init__(self, library: ctypes.CDLL):
        self._library = library  # not unloaded: a tensor may outlive every program
        for name, arguments in HOST_FUNCTIONS.items():
            function = getattr(library, "aoti_torch_" + name)
            function.argtypes, function.restype, function.errcheck = arguments, c_int32, _check
            setattr(self, name, function)
        self.run_chain = getattr(library, "eyas_run_chain", None)  # the small host's alone
        if self.run_chain is not None:
            self.run_chain.argtypes, self.run_chain.restype = [c_void_p, c_int64, POINTER(c_void_p)], c_int64

    @classmethod
    @cache
    def torch(cls) -> "Host":
        """torch's CPU library, without its Python package. Raises ``RuntimeError`` where torch is not installed."""
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError("this program needs PyTorch's libraries, and torch is not installed; pip install torch")
        folder = Path(spec.submodule_search_locations[0]) / "lib"
        for name in ("libc10.so", "libtorch_cpu.so"):  # methods find them by name once they are loaded
            library = ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        return cls(library)

    @classmethod
    def load(cls, path: Path) -> "Host":
        """The host library at ``path``; one with the same name that is loaded already is taken instead."""
        if path.name not in _hosts:
            _hosts[path.name] = cls(ctypes.CDLL(str(path)))
        return _hosts[path.name]


_hosts: dict[str, Host] = {}
HOST_FUNCTIONS = {
    "create_tensor_from_blob": [
        c_void_p, c_int64, POINTER(c_int64), POINTER(c_int64), c_int64, c_int32, c_int32, c_int32, POINTER(c_void_p),
    ],
    "delete_tensor_object": [c_void_p],
    "new_tensor_handle": [c_void_p, POINTER(c_void_p)],
    "get_data_ptr": [c_void_p, POINTER(c_void_p)],
    "get_dim": [c_void_p, POINTER(c_int64)],
    "get_dtype": [c_void_p, POINTER(c_int32)],
    "get_sizes": [c_void_p, POINTER(POINTER(c_int64))],
    "get_strides": [c_void_p, POINTER(POINTER(c_int64))],
}  # fmt: skip


def _check(result: int, function, arguments) -> int:
    if result != 0:
        raise RuntimeError(f"{function.__name__} failed with code {result}")
    return result


class _Owner:
    """Holds a tensor handle, and whatever else its memory needs, until nothing refers to it."""

    def __init__(self, host: Host, handle: int, keep: object):
        self.host, self.handle, self.keep = host, handle, keep

    def __del__(self):
        self.host.delete_tensor_object(self.handle)


class Tensor:
    """A tensor on the host that a program reads or wrote. ``array`` is a view of its memory, which lives as long as the
    tensor or any such view. bfloat16 elements appear as uint16."""

    def __init__(self, host: Host, handle: int, keep: object = None):
        """Takes over ``handle``; ``keep`` is what the memory behind it belongs to, if not the handle itself."""
        self._owner = _Owner(host, handle, keep)
        data, ndim, code = c_void_p(), c_int64(), c_int32()
        sizes, strides = POINTER(c_int64)(), POINTER(c_int64)()
        host.get_data_ptr(handle, byref(data))
        host.get_dim(handle, byref(ndim))
        host.get_dtype(handle, byref(code))
        host.get_sizes(handle, byref(sizes))
        host.get_strides(handle, byref(strides))
        self.dtype = NAMES[code.value]
        self.shape = tuple(sizes[: ndim.value])
        kind = np.dtype(DTYPES[self.dtype][1])
        steps = tuple(step * kind.itemsize for step in strides[: ndim.value])
        if 0 in self.shape:
            self.array = np.empty(self.shape, kind)
            return
        extent = sum((n - 1) * step for n, step in zip(self.shape, steps)) + kind.itemsize
        memory = (ctypes.c_char * extent).from_address(data.value)
        memory.owner = self._owner
        self.array = np.ndarray(self.shape, kind, memory, 0, steps)

    @classmethod
    def of(cls, host: Host, array: np.ndarray, dtype: str | None = None) -> "Tensor":
        """A tensor over ``array``'s memory, not a copy. ``dtype``: torch's name, where numpy has none (bfloat16)."""
        if dtype is None:
            dtype = next((name for name, (_, kind) in DTYPES.items() if np.dtype(kind) == array.dtype), None)
        if dtype is None or np.dtype(DTYPES[dtype][1]) != array.dtype:
            raise TypeError(f"no tensor of {array.dtype} as {dtype}; allowed: {', '.join(DTYPES)}")
        sizes = (c_int64 * array.ndim)(*array.shape)
        strides = (c_int64 * array.ndim)(*(step // array.dtype.itemsize for step in array.strides))
        handle = c_void_p()
        host.create_tensor_from_blob(
            array.ctypes.data, array.ndim, sizes, strides, 0, DTYPES[dtype][0], CPU, 0, byref(handle)
        )
        return cls(host, handle.value, keep=array)

    def part(self, index: object) -> "Tensor":
        """The tensor of ``array[index]``, over the same memory; a slice, not a single element."""
        return Tensor.of(self.host, self.array[index], self.dtype)

    def new_handle(self) -> c_void_p:
        """Another handle of the same memory, for a call that takes its handles over."""
        handle = c_void_p()
        self.host.new_tensor_handle(self.handle, byref(handle))
        return handle

    @property
    def handle(self) -> int:
        return self._owner.handle

    @property
    def host(self) -> Host:
        return self._owner.host


def load_apart(path: Path) -> ctypes.CDLL:
    """Loads a library that finds its own host before what the process has loaded: a torch that happens to be there must
    not mix with another host's tensors.
    """
    return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0))


class Container:
    """One compiled method: a shared library that AOTInductor made, with constants that the caller owns.

    ``constants``: fully qualified name of each constant -> the name the library knows it by.
    """

    device = b"cpu"

    def __init__(self, host: Host | None, path: Path):
        self.host = host
        self._lib = self.load(path)
        self._handle = c_void_p()
        self._bound: list[Tensor] = []
        signatures = {
            "CreateWithDevice": [POINTER(c_void_p), c_size_t, c_char_p, c_char_p],
            "GetNumConstants": [c_void_p, POINTER(c_size_t)],
            "GetConstantName": [c_void_p, c_size_t, POINTER(c_char_p)],
            "GetConstantOriginalFQN": [c_void_p, c_size_t, POINTER(c_char_p)],
            "GetNumOutputs": [c_void_p, POINTER(c_size_t)],
            "UpdateUserManagedConstantBufferPairs": [c_void_p, POINTER(_Pair), c_size_t, c_bool, c_bool],
            "RunSingleThreaded": [
                c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_void_p), c_size_t, c_void_p, c_void_p,
            ],
        }  # fmt: skip
        for name, arguments in signatures.items():
            function = getattr(self._lib, "AOTInductorModelContainer" + name)
            function.argtypes, function.restype, function.errcheck = arguments, c_int32, self._check
            setattr(self, "_" + name, function)
        self._CreateWithDevice(byref(self._handle), 1, self.device, None)
        count = c_size_t()
        self._GetNumConstants(self._handle, byref(count))
        self.constants = {
            self._text(self._GetConstantOriginalFQN, i): self._text(self._GetConstantName, i)
            for i in range(count.value)
        }
        self._GetNumOutputs(self._handle, byref(count))
        self.n_outputs = count.value

    @staticmethod
    def load(path: Path) -> ctypes.CDLL:
        """The library itself."""
        return load_apart(path)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives the method its constants by fully qualified name; they are used in place and kept alive."""
        self._bound = self.needed(tensors)
        self.bind_handles([tensor.handle for tensor in self._bound])

    def needed(self, tensors: Mapping[str, object]) -> list:
        """Those of ``tensors``, by fully qualified name, that the method needs. Raises ``ValueError`` where one is
        missing.
        """
        missing = sorted(set(self.constants) - set(tensors))
        if missing:
            raise ValueError(
                f"the compiled method needs constants that the program does not have: {', '.join(missing[:5])}"
            )
        return [tensors[name] for name in self.constants]

    def bind_handles(self, handles: Sequence[int]) -> None:
        """Gives the method its constants, in the order of ``constants``; the handles stay the caller's."""
        named = zip(self.constants.values(), handles, strict=True)
        pairs = (_Pair * len(handles))(*(_Pair(name.encode(), handle) for name, handle in named))
        self._UpdateUserManagedConstantBufferPairs(self._handle, pairs, len(pairs), False, True)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """One call; the outputs are new memory."""
        handles = (c_void_p * len(inputs))(*(tensor.new_handle() for tensor in inputs))
        return [Tensor(self.host, handle) for handle in self.run_handles(handles)]

    def run_handles(self, handles: ctypes.Array, stream: int | None = None) -> ctypes.Array:
        """One call, which takes its input handles over; the outputs' are the caller's. ``stream``: a card's."""
        outputs = (c_void_p * self.n_outputs)()
        self._RunSingleThreaded(self._handle, handles, len(handles), outputs, self.n_outputs, stream, None)
        return outputs

    @property
    def entry(self) -> tuple[int, int]:
        """Addresses of the function that runs it and of what that function takes first."""
        return ctypes.cast(self._RunSingleThreaded, c_void_p).value, self._handle.value

    def last_error(self) -> str:
        """What the library says of the latest failure."""
        text = c_char_p()
        self._lib.AOTInductorGetLastError(byref(text))
        return (text.value or b"no detail").decode(errors="replace").strip()

    def _text(self, function, index: int) -> str:
        text = c_char_p()
        function(self._handle, index, byref(text))
        return text.value.decode()

    def _check(self, result: int, function, arguments) -> int:
        if result != 0:
            raise RuntimeError(f"{function.__name__} failed: {self.last_error()}")
        return result

    def __del__(self):
        if getattr(self, "_handle", None):
            self._lib.AOTInductorModelContainerDelete(self._handle)


@dataclass(frozen=True)
class Call:
    """One step of a chain. ``inputs``: which values it takes, by number."""

    container: Container
    inputs: tuple[int, ...]


class Chain:
    """Compiled blocks that make up a method, called in order.

    Values are numbered: first the method's ``n_inputs``, then what each call gives, in order; ``outputs`` are the
    method's results. A call takes its inputs' handles over: those of values that nobody reads later are given away,
    others get a handle more.
    """

    def __init__(self, host: Host, n_inputs: int, calls: Sequence[Call], outputs: Sequence[int]):
        self._host, self._n_inputs, self._outputs = host, n_inputs, tuple(outputs)
        last = {value: (i, k) for i, call in enumerate(calls) for k, value in enumerate(call.inputs)}
        kept, self._size = set(outputs), n_inputs
        self._steps: list[tuple[Container, list[tuple[int, bool]]]] = []
        self._calls, self._numbers = (_ChainCall * len(calls))(), []
        for i, call in enumerate(calls):
            given = [(v, v >= n_inputs and v not in kept and last[v] == (i, k)) for k, v in enumerate(call.inputs)]
            self._steps.append((call.container, given))
            numbers = (c_int64 * len(given))(*(~v if moves else v for v, moves in given))
            n_outputs = call.container.n_outputs
            self._numbers.append(numbers)
            self._calls[i] = _ChainCall(*call.container.entry, numbers, len(given), self._size, n_outputs)
            self._size += n_outputs

    @property
    def n_calls(self) -> int:
        return len(self._steps)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """One call of the method; the outputs are new memory, or share an input's. Raises ``RuntimeError`` with what
        the call that failed says.
        """
        values = (c_void_p * self._size)(*(tensor.handle for tensor in inputs))
        try:
            if self._host.run_chain is None:
                self._run_steps(values)
            elif failed := self._host.run_chain(self._calls, len(self._steps), values):
                container, _ = self._steps[failed - 1]
                raise RuntimeError(f"call {failed} of {len(self._steps)} failed: {container.last_error()}")
            return [self._result(values, i) for i in range(len(self._outputs))]
        finally:
            for handle in values[self._n_inputs :]:
                if handle is not None:
                    self._host.delete_tensor_object(handle)

    def _run_steps(self, values: ctypes.Array) -> None:
        """What the small host does in native code: the calls, over the handles of all values."""
        at, fresh = self._n_inputs, c_void_p()
        for container, given in self._steps:
            handles = (c_void_p * len(given))()
            for k, (value, moves) in enumerate(given):
                if moves:
                    handles[k], values[value] = values[value], None
                else:
                    self._host.new_tensor_handle(values[value], byref(fresh))
                    handles[k] = fresh
            for handle in container.run_handles(handles):
                values[at] = handle
                at += 1

    def _result(self, values: ctypes.Array, index: int) -> Tensor:
        value = self._outputs[index]
        if value >= self._n_inputs and value not in self._outputs[index + 1 :]:
            handle, values[value] = values[value], None
            return Tensor(self._host, handle)
        fresh = c_void_p()
        self._host.new_tensor_handle(values[value], byref(fresh))
        return Tensor(self._host, fresh.value)


class _ChainCall(ctypes.Structure):
    """``ChainCall`` of ``aoti_host.cpp``."""

    _fields_ = [
        ("run", c_void_p), ("container", c_void_p), ("inputs", POINTER(c_int64)), ("n_inputs", c_int64),
        ("first_output", c_int64), ("n_outputs", c_int64),
    ]  # fmt: skip


class _Pair(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("handle", c_void_p)]

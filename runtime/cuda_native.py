"""Compiled methods on a CUDA card over AOTInductor's C interface, with torch's libraries and its tensors."""

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_void_p, py_object
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from eyas.runtime.native import Call, Container

CUDART = ("libcudart.so.13", "libcudart.so.12")


@cache
def load_libraries() -> None:
    """Makes the functions that native code calls known to the loader: torch's, and those of CUDA's runtime."""
    lib = Path(torch.__file__).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so", "libtorch.so"):
        if (lib / name).is_file():  # a build without CUDA has only some
            ctypes.CDLL(str(lib / name), ctypes.RTLD_GLOBAL)
    packaged = find_spec("nvidia")
    roots = [Path(root) for root in packaged.submodule_search_locations] if packaged else []
    for path in (*(p for root in roots for p in root.glob("*/lib/libcudart.so.*")), *map(Path, CUDART)):
        try:
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return


_pointer = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_capsule = ctypes.PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))


def handles_of(tensors: Sequence[torch.Tensor]) -> ctypes.Array:
    """New handles of tensors, for a call that takes them over."""
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return (c_void_p * len(capsules))(*(_pointer(capsule, None) for capsule in capsules))


def tensors_of(handles: Sequence[int]) -> list[torch.Tensor]:
    """The tensors behind handles, which are taken over."""
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(h, None, None) for h in handles])


@dataclass(frozen=True, eq=False)
class CudaTensor:
    """A tensor on the card, seen as ``eyas.runtime.native.Tensor``: ``array`` is a copy of it on the host, with the
    bits of bfloat16 elements as uint16.
    """

    value: torch.Tensor

    @property
    def dtype(self) -> str:
        return str(self.value.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def array(self) -> np.ndarray:
        value = self.value.view(torch.int16) if self.value.dtype == torch.bfloat16 else self.value
        array = value.cpu().numpy()
        return array.view(np.uint16) if self.value.dtype == torch.bfloat16 else array

    def part(self, index: object) -> "CudaTensor":
        """The tensor of ``value[index]``, over the same memory."""
        return CudaTensor(self.value[index])


class CudaContainer(Container):
    """One compiled block on the card. Calls run on torch's current stream and give tensors of its allocator, so that
    they can be captured in a CUDA graph.
    """

    device = b"cuda"

    def __init__(self, path: Path):
        load_libraries()
        super().__init__(None, path)

    @staticmethod
    def load(path: Path) -> ctypes.CDLL:
        return ctypes.CDLL(str(path))  # torch is the host of all such code, so nothing has to be kept apart

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Gives the block its constants by fully qualified name; they are used in place and kept alive."""
        self._bound = self.needed(tensors)
        handles = handles_of(self._bound)
        weakref.finalize(self, tensors_of, list(handles)).atexit = False  # they stay ours, and serve until it is gone
        self.bind_handles(handles)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One call; the outputs are new memory."""
        return tensors_of(self.run_handles(handles_of(inputs), torch.cuda.current_stream().cuda_stream))


class CudaChain:
    """Compiled blocks that make up a method, called in order; values are numbered as in ``native.Chain``."""

    def __init__(self, n_inputs: int, calls: Sequence[Call], outputs: Sequence[int]):
        self._n_inputs, self._calls, self._outputs = n_inputs, tuple(calls), tuple(outputs)
        last = {value: i for i, call in enumerate(calls) for value in call.inputs}
        made, self._dead = n_inputs, []  # the values that nobody needs after each call
        for i, call in enumerate(calls):
            own = range(made, made + call.container.n_outputs)
            made = own.stop
            ended = dict.fromkeys((*call.inputs, *own))
            self._dead.append([v for v in ended if last.get(v, i) == i and v not in outputs])

    @property
    def n_calls(self) -> int:
        return len(self._calls)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One call of the method. Raises ``RuntimeError`` with what the call that failed says."""
        values: list[torch.Tensor | None] = list(inputs)
        for call, dead in zip(self._calls, self._dead):
            values += call.container.run([values[v] for v in call.inputs])
            for v in dead:  # its memory serves what comes next
                values[v] = None
        return [values[v] for v in self._outputs]


def check_card(made_for: Mapping[str, object]) -> str | None:
    """Why code for ``made_for``, the manifest's device, does not run on the card here; None where it does."""
    if not torch.cuda.is_available():
        return "no CUDA device was found here"
    facts = torch.cuda.get_device_properties(0)
    found = f"{facts.major}.{facts.minor}"
    if found != made_for["capability"]:
        return f"it was lowered for capability {made_for['capability']} ({made_for['name']}), this card has {found}"
    if facts.shared_memory_per_block_optin < made_for["shared_memory"]:
        return (
            f"it may need {made_for['shared_memory']} bytes of shared memory, this card gives a program "
            f"{facts.shared_memory_per_block_optin}"
        )
    return None

"""A loaded artifact on a CUDA card: weights and caches once, and methods that run on torch's current stream."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from eyas.runtime.artifact import DATA, Method, Program
from eyas.runtime.buffers import BufferPool
from eyas.runtime.container_files import ContainerError, MethodSpec, ProgramFile
from eyas.runtime.cuda_native import CudaChain, CudaContainer, CudaTensor
from eyas.runtime.native import NAMES, Call
from eyas.runtime.payload import Constant, name_of


class CudaBufferPool(BufferPool):
    """Tensors on the card, by storage key: each entry of the data file that a method asks for is copied there once."""

    in_place = False

    def __init__(self, path: Path, mutable: Iterable[str]):
        super().__init__(None, path, mutable)

    def _make(self, constant: Constant) -> torch.Tensor:
        """Raises ``ContainerError`` where the card has no room."""
        try:
            return self._initial(constant).cuda()
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            whole = sum(size for _, size in self._file.entries.values())
            raise ContainerError(
                f"the card has no room for {name_of(constant.storage_key)!r}: {constant.nbytes} bytes, {free} of "
                f"{total} are free; the program's weights and caches take {whole}"
            ) from error

    def _initial(self, constant: Constant) -> torch.Tensor:
        """A constant's values on the host, in memory of their own."""
        return tensor_of(self._values(constant).copy(), NAMES[constant.dtype])

    def reset(self) -> None:
        """Gives every mutable buffer its initial values back."""
        for key in self._mutable & set(self._tensors):
            constant, tensor = self._tensors[key]
            tensor.copy_(self._initial(constant))

    def arrays(self) -> dict[str, np.ndarray]:
        """A copy of every buffer by its name; for tests and tools."""
        return {name_of(key): CudaTensor(tensor).array for key, (_, tensor) in self._tensors.items()}


def tensor_of(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor over an array's memory; bfloat16 elements are given as uint16."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class CudaMethod(Method):
    """One method: as ``Method`` with arrays of the host or tensors of the card, and ``run`` for the latter alone."""

    def run(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Runs the method on tensors of the card, whose shapes and values are not looked at."""
        return self._chain.run(inputs)

    def _own(self, value: CudaTensor | np.ndarray) -> CudaTensor:
        if isinstance(value, CudaTensor):
            own = value.value.contiguous()
            return CudaTensor(own.clone() if own.data_ptr() % 16 else own)  # native code counts on alignment
        array = np.ascontiguousarray(value)
        return CudaTensor(tensor_of(array, "bfloat16" if array.dtype == np.uint16 else str(array.dtype)).cuda())

    def _run(self, tensors: list[CudaTensor]) -> list[CudaTensor]:
        return [CudaTensor(value) for value in self._chain.run([tensor.value for tensor in tensors])]


class CudaProgram(Program):
    """A loaded artifact whose ``methods`` run on the card; ``buffers``: the one pool they share."""

    device = "cuda"

    def _open(self, file: ProgramFile, mutable: list[str], folder: Path) -> None:
        self.buffers = CudaBufferPool(self.artifact.path / DATA, mutable)

    def _container(self, path: Path) -> CudaContainer:
        return CudaContainer(path)

    def _method(self, spec: MethodSpec, steps: list[Call], outputs: list[int]) -> CudaMethod:
        return CudaMethod(spec, *self._bounds(spec.name), None, CudaChain(len(spec.inputs), steps, outputs))

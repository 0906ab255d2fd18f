"""A loaded artifact on a CUDA card: weights and caches once, and methods that run on torch's current stream."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from eyas.runtime.artifact import DATA, Method, Program
from eyas.runtime.container_files import ContainerError, DataFile, MethodSpec, ProgramFile
from eyas.runtime.cuda_native import CudaChain, CudaContainer, CudaTensor
from eyas.runtime.native import NAMES, Call
from eyas.runtime.payload import Constant, name_of


class CudaBufferPool:
    """Tensors on the card, by storage key: each entry of the data file that a method asks for is copied there once."""

    def __init__(self, path: Path, mutable: Iterable[str]):
        """``mutable``: storage keys of the buffers that some method writes."""
        self._file = DataFile(path)
        self._tensors: dict[str, tuple[Constant, torch.Tensor]] = {}
        self._mutable = frozenset(mutable)
        if unknown := self._mutable - set(self._file.entries):
            raise ContainerError(f"{path} lacks the buffers {', '.join(sorted(unknown)[:3])} that the manifest lists")

    def tensor(self, constant: Constant) -> torch.Tensor:
        """The tensor of one constant. Raises ``ContainerError`` where the file holds another size for it, or the card
        has no room.
        """
        key = constant.storage_key
        if key in self._tensors:
            known, tensor = self._tensors[key]
            if (known.dtype, known.sizes, known.strides) != (constant.dtype, constant.sizes, constant.strides):
                raise ContainerError(
                    f"two calls mean different tensors by {name_of(key)!r}: {known.sizes} and {constant.sizes}"
                )
            return tensor
        if constant.dtype not in NAMES:
            raise ContainerError(f"constant {name_of(key)!r} has scalar type {constant.dtype}, which is not supported")
        if len(self._file.bytes_of(key)) != constant.nbytes:
            raise ContainerError(
                f"{key} has {len(self._file.bytes_of(key))} bytes, its method expects {constant.nbytes}"
            )
        try:
            tensor = self._initial(key, constant).cuda()
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            raise ContainerError(
                f"the card has no room for {name_of(key)!r}: {constant.nbytes} bytes, {free} of {total} are free; the "
                f"program's weights and caches take {sum(size for _, size in self._file.entries.values())}"
            ) from error
        self._tensors[key] = constant, tensor
        return tensor

    def _initial(self, key: str, constant: Constant) -> torch.Tensor:
        """An entry's values on the host, over a copy of the file's bytes."""
        raw = np.frombuffer(self._file.bytes_of(key), np.uint8).copy()
        values = torch.from_numpy(raw).view(getattr(torch, NAMES[constant.dtype]))
        return values.as_strided(constant.sizes, constant.strides, constant.offset)

    def reset(self) -> None:
        """Gives every mutable buffer its initial values back."""
        for key in self._mutable & set(self._tensors):
            constant, tensor = self._tensors[key]
            tensor.copy_(self._initial(key, constant))

    @property
    def nbytes(self) -> int:
        """Bytes of all the tensors that methods have asked for."""
        return sum(constant.nbytes for constant, _ in self._tensors.values())

    @property
    def mutable_nbytes(self) -> int:
        """Bytes of the buffers that methods write."""
        return sum(self._file.entries[key][1] for key in self._mutable)

    def arrays(self) -> dict[str, np.ndarray]:
        """A copy of every buffer by its name; for tests and tools."""
        return {name_of(key): CudaTensor(tensor).array for key, (_, tensor) in self._tensors.items()}


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
        bits = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
        return CudaTensor((bits.view(torch.bfloat16) if array.dtype == np.uint16 else bits).cuda())

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

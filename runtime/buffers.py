"""Every weight and cache of a program, once, however many methods use it."""

import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from eyas.runtime.container_files import ContainerError, DataFile
from eyas.runtime.native import DTYPES, NAMES, Host, Tensor
from eyas.runtime.payload import Constant, name_of


class BufferPool:
    """Tensors over one private mapping of the data file, by storage key.

    Weights are read where the file lies; what a method writes goes to memory of this process alone. ``reset`` drops
    that memory, so that the next read sees the file's initial values again.
    """

    in_place = True  # tensors are the mapping's own memory

    def __init__(self, host: Host | None, path: Path, mutable: Iterable[str]):
        """``mutable``: storage keys of the buffers that some method writes."""
        self._host = host
        self._file = DataFile(path, writable=self.in_place)
        self._tensors: dict[str, tuple[Constant, Tensor]] = {}
        self._mutable = frozenset(mutable)
        unknown = self._mutable - set(self._file.entries)
        if unknown:
            raise ContainerError(f"{path} lacks the buffers {', '.join(sorted(unknown)[:3])} that the manifest lists")

    def tensor(self, constant: Constant) -> Tensor:
        """The tensor of one constant. Raises ``ContainerError`` where the file holds another size for it."""
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
        size = len(self._file.bytes_of(key))
        if size != constant.nbytes:
            raise ContainerError(f"{key} has {size} bytes, its method expects {constant.nbytes}")
        tensor = self._make(constant)
        self._tensors[key] = constant, tensor
        return tensor

    def _make(self, constant: Constant) -> Tensor:
        """The tensor over an entry that fits the constant."""
        return Tensor.of(self._host, self._values(constant), NAMES[constant.dtype])

    def _values(self, constant: Constant) -> np.ndarray:
        """What the file holds of a constant, not a copy."""
        kind = np.dtype(DTYPES[NAMES[constant.dtype]][1])
        steps = tuple(step * kind.itemsize for step in constant.strides)
        data = self._file.bytes_of(constant.storage_key)
        return np.ndarray(constant.sizes, kind, data, constant.offset * kind.itemsize, steps)

    def reset(self) -> None:
        """Gives every mutable buffer its initial values back."""
        for key in self._mutable:
            offset, size = self._file.entries[key]
            if offset % mmap.PAGESIZE:
                raise ContainerError(f"buffer {key} does not start at a page of the data file, so it cannot be reset")
            self._file.file.data.madvise(mmap.MADV_DONTNEED, offset, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)

    @property
    def nbytes(self) -> int:
        """Bytes of all the tensors that methods have asked for."""
        return sum(constant.nbytes for constant, _ in self._tensors.values())

    @property
    def mutable_nbytes(self) -> int:
        """Bytes of the buffers that methods write."""
        return sum(self._file.entries[key][1] for key in self._mutable)

    def arrays(self) -> dict[str, np.ndarray]:
        """Every buffer by its name; for tests and tools."""
        return {name_of(key): tensor.array for key, (_, tensor) in self._tensors.items()}

"""A loaded artifact on a CUDA card: weights and caches once, and methods that run on torch's current stream."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from eyas.runtime.artifact import DATA, Method, Program
from eyas.runtime.buffers import BufferPool
from eyas.runtime.container_files import ContainerError, MethodSpec, ProgramFile
from eyas.runtime.cuda_native import CudaChain, CudaContainer, CudaTensor
from eyas.runtime.native import NAMES, Call
from eyas.runtime.payload import Constant, name_of


class Upload:
    """Copies bytes of the host to the card in pieces: one is put into pinned memory while the one before crosses."""

    PIECE = 1 << 24

    def __init__(self):
        self._pieces = [torch.empty(self.PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._crossed = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def copy(self, source: np.ndarray, target: torch.Tensor) -> None:
        """``source``: uint8 ``[N]``; ``target``: uint8 ``[N]`` on the card, complete once its stream is."""
        for start in range(0, len(source), self.PIECE):
            part = source[start : start + self.PIECE]
            piece, crossed = self._pieces[self._turn], self._crossed[self._turn]
            crossed.synchronize()
            np.copyto(piece.numpy()[: len(part)], part)
            target[start : start + len(part)].copy_(piece[: len(part)], non_blocking=True)
            crossed.record()
            self._turn = 1 - self._turn


class CudaBufferPool(BufferPool):
    """The data file's tensors on the card, by storage key: one allocation, laid out as the file is. Buffers that start
    as zeros are not copied there.
    """

    in_place = False

    def __init__(self, path: Path, mutable: Iterable[str]):
        """Raises ``ContainerError`` where the card has no room."""
        super().__init__(None, path, mutable)
        self._first = min((offset for offset, _ in self._file.entries.values()), default=0)
        size = max((offset + size for offset, size in self._file.entries.values()), default=0) - self._first
        try:
            self._memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            raise ContainerError(
                f"the card has no room for the program's weights and caches: they take {size} bytes, {free} of {total} "
                f"are free"
            ) from error
        self._zeros = {key for key in self._mutable if not self._bytes(key).any()}
        self._fill(self._file.entries)

    def _bytes(self, key: str) -> np.ndarray:
        """What the file holds of an entry, uint8, not a copy."""
        return np.frombuffer(self._file.bytes_of(key), np.uint8)

    def _on_card(self, key: str) -> torch.Tensor:
        """An entry's bytes on the card."""
        offset, size = self._file.entries[key]
        return self._memory[offset - self._first : offset - self._first + size]

    def _fill(self, keys: Iterable[str]) -> None:
        """Gives entries their initial values."""
        upload = None
        for key in keys:
            if key in self._zeros:
                self._on_card(key).zero_()
                continue
            upload = upload or Upload()
            upload.copy(self._bytes(key), self._on_card(key))
        torch.cuda.current_stream().synchronize()  # the pieces are let go; other streams may read

    def _make(self, constant: Constant) -> torch.Tensor:
        values = self._on_card(constant.storage_key).view(getattr(torch, NAMES[constant.dtype]))
        return values.as_strided(constant.sizes, constant.strides, values.storage_offset() + constant.offset)

    def reset(self) -> None:
        """Gives every mutable buffer its initial values back, after all that the card was asked to do before."""
        torch.cuda.synchronize()
        self._fill(self._mutable)

    def arrays(self) -> dict[str, np.ndarray]:
        """A copy of every buffer by its name; for tests and tools."""
        return {name_of(key): CudaTensor(tensor).array for key, (_, tensor) in self._tensors.items()}


def tensor_of(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor over an array's memory; bfloat16 elements are given as uint16."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Workspace:
    """The memory of what is computed on a stream of the card: CUDA graphs share it, since one runs after the other, and
    calls may, whose results nobody keeps while a graph runs. It goes with the last graph, but for what cuBLAS keeps for
    the stream.
    """

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream
        self.pool = torch.cuda.graph_pool_handle()
        torch.zeros(1, device="cuda")
        self._kept = self.capture(lambda: torch.zeros(1, device="cuda"))  # torch drops a pool with its last graph

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Has this thread's calls run on the stream and allocate in the pool."""
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(SimpleNamespace(id=self.pool)):
            yield

    def capture(self, calls: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The graph of what ``calls`` does. What it calls must have run before."""
        graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            calls()
        return graph


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

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """On which all its decoders compute."""
        return torch.cuda.Stream()

    @cached_property
    def workspace(self) -> Workspace:
        """Where those of its decoders that have CUDA graphs compute."""
        return Workspace(self.stream)

    def _container(self, path: Path) -> CudaContainer:
        return CudaContainer(path)

    def _method(self, spec: MethodSpec, steps: list[Call], outputs: list[int]) -> CudaMethod:
        return CudaMethod(spec, *self._bounds(spec.name), None, CudaChain(len(spec.inputs), steps, outputs))

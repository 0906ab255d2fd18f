"""Writes a ``.ptd``: ExecuTorch's container of named tensors, a tensor at a time, so that no weight exists twice in
memory.
"""

import ctypes
import hashlib
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import flatbuffers
from torch import Tensor

SEGMENT_ALIGNMENT = 4096  # a page, so that a reader can map and reset each tensor on its own
HEADER_BYTES = 48  # the header's 40, padded to the flatbuffer's alignment of 16
CHUNK = 1 << 24


def write_data_file(path: Path, keys: list[tuple[str, int]], tensors: Iterable[Tensor]) -> str:
    """Writes one entry a key, in order. ``keys``: (key, bytes); ``tensors``: dense, in the same order, read one by one.

    Returns the file's sha256 in hexadecimal. Raises ``ValueError`` for a tensor whose bytes do not match its key's.
    """
    segments, end = [], 0
    for _, nbytes in keys:
        start = -(-end // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
        segments.append((start, nbytes))
        end = start + nbytes
    head = header([key for key, _ in keys], segments, end)
    digest = hashlib.sha256(head)
    with open(path, "wb") as file:
        file.write(head)
        at = 0
        for (key, nbytes), (start, _), tensor in zip(keys, segments, tensors, strict=True):
            if tensor.numel() * tensor.element_size() != nbytes or not tensor.is_contiguous():
                raise ValueError(f"{key}: expected {nbytes} dense bytes, got {list(tensor.shape)} {tensor.dtype}")
            padding = bytes(start - at)
            digest.update(padding)
            file.write(padding)
            for chunk in raw_chunks(tensor):
                digest.update(chunk)
                file.write(chunk)
            at = start + nbytes
    return digest.hexdigest()


def raw_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a dense tensor, in pieces."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return
    memory = memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
    for start in range(0, size, CHUNK):
        yield memory[start : start + CHUNK]


def header(keys: list[str], segments: list[tuple[int, int]], data_size: int) -> bytes:
    """Everything before the first segment: the flatbuffer with the extended header, padded to the alignment."""
    builder = flatbuffers.Builder(1 << 16)
    named = []
    for i, key in enumerate(keys):
        text = builder.CreateString(key)
        builder.StartObject(3)  # NamedData: key, segment_index, tensor_layout
        builder.PrependUOffsetTRelativeSlot(0, text, 0)
        builder.PrependUint32Slot(1, i, 0)
        named.append(builder.EndObject())
    placed = []
    for start, size in segments:
        builder.StartObject(2)  # DataSegment: offset, size
        builder.PrependUint64Slot(0, start, 0)
        builder.PrependUint64Slot(1, size, 0)
        placed.append(builder.EndObject())
    vectors = []
    for items in (placed, named):
        builder.StartVector(4, len(items), 4)
        for item in reversed(items):
            builder.PrependUOffsetTRelative(item)
        vectors.append(builder.EndVector())
    builder.StartObject(3)  # FlatTensor: version, segments, named_data
    builder.PrependUint32Slot(0, 0, 0)
    builder.PrependUOffsetTRelativeSlot(1, vectors[0], 0)
    builder.PrependUOffsetTRelativeSlot(2, vectors[1], 0)
    builder.Finish(builder.EndObject(), file_identifier=b"FT01")
    tables = bytes(builder.Output())
    (root,) = struct.unpack_from("<I", tables, 0)
    base = -(-(len(tables) + HEADER_BYTES) // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
    extended = b"FH01" + struct.pack("<IQQQQ", 40, HEADER_BYTES, len(tables), base, data_size)
    extended += bytes(HEADER_BYTES - len(extended))
    out = struct.pack("<I", root + HEADER_BYTES) + tables[4:8] + extended + tables[8:]
    return out + bytes(base - len(out))

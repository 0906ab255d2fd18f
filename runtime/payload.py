"""What a delegate of the program file says about its method: the key of its native code, and its constants.

The format is the one that ExecuTorch's CUDA delegate defines (magic ``ETCUDAFQN3``), so that a stock runtime that has
the delegate can read it. All numbers little-endian. ``dtype`` is ExecuTorch's scalar type, which counts as torch does.
"""

import struct
from dataclasses import dataclass

MAGIC = b"ETCUDAFQN3"
DEVICE_TYPES = {"cpu": 0, "cuda": 1}
KEY_PREFIX = "cuda_fqn_weight"


@dataclass(frozen=True)
class Constant:
    """One constant of native code. ``name``: what the code calls it; ``storage_key``: its entry in the data file. Sizes
    and strides in elements.
    """

    name: str
    storage_key: str
    nbytes: int
    dtype: int
    device_type: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def storage_key(device: str, name: str) -> str:
    """The data file's key of the constant ``name`` on ``device``."""
    return f"{KEY_PREFIX}:{device}:{name}"


def name_of(storage_key: str) -> str:
    """The fully qualified name of the constant that a key of the data file stands for."""
    return storage_key.split(":", 2)[-1]


def encode(code_key: str, constants: list[Constant]) -> bytes:
    """The payload of one delegate."""
    out = bytearray(MAGIC)

    def text(value: str) -> None:
        data = value.encode()
        out.extend(struct.pack("<I", len(data)) + data)

    text(code_key)
    out.extend(struct.pack("<I", len(constants)))
    for c in constants:
        text(c.name)
        text(c.storage_key)
        out.extend(struct.pack("<QiiqI", c.nbytes, c.dtype, c.device_type, c.offset, len(c.sizes)))
        out.extend(struct.pack(f"<{2 * len(c.sizes)}q", *c.sizes, *c.strides))
    return bytes(out)


def decode(data: bytes) -> tuple[str, list[Constant]]:
    """(key of the native code, constants). Raises ``ValueError`` for another format or a truncated payload."""
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"the delegate's payload starts with {bytes(data[:10])!r}, expected {MAGIC!r}")
    at = len(MAGIC)

    def take(form: str) -> tuple:
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values

    def text() -> str:
        nonlocal at
        (length,) = take("I")
        if at + length > len(data):
            raise struct.error("string runs past the end")
        value = bytes(data[at : at + length]).decode()
        at += length
        return value

    try:
        code_key = text()
        (count,) = take("I")
        constants = []
        for _ in range(count):
            name, key = text(), text()
            nbytes, dtype, device, offset, ndim = take("QiiqI")
            shape = take(f"{2 * ndim}q")
            constants.append(Constant(name, key, nbytes, dtype, device, offset, shape[:ndim], shape[ndim:]))
    except struct.error as error:
        raise ValueError(f"the delegate's payload is cut off at byte {at} of {len(data)} ({error})") from error
    return code_key, constants

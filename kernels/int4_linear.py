"""``eyas::int4_linear``: a linear layer with 4-bit weights in groups along the input width. Says what, not how.

Weight format (all of it, so that any backend can repack it):

* ``qweight`` uint8 ``[N, groups * group_size / 2]``: two consecutive columns a byte, the even one in the low nibble.
* ``scales`` float32 ``[N, groups]`` and, with zero points, ``offsets`` float32 ``[N, groups]``:
  ``w = q * scale + offset``. Without ``offsets`` the format is symmetric: ``w = (q - 8) * scale``.
* The input width K may be any number: the last group is padded with zero weights, which no output sees.
"""

import torch
from torch import Tensor

GROUP_SIZES = (32, 64, 128, 256)


def supports(group_size: int) -> str | None:
    """Why a group size has no kernel, or None if it has one."""
    if group_size in GROUP_SIZES:
        return None
    return f"group size {group_size} has no kernel; allowed: {', '.join(map(str, GROUP_SIZES))}"


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 ``[..., C]`` of two values a byte -> uint8 ``[..., 2C]`` in 0..15, low nibble first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def pack_nibbles(values: Tensor) -> Tensor:
    """uint8 ``[..., 2C]`` in 0..15 -> uint8 ``[..., C]``, low nibble first. The inverse of ``unpack_nibbles``."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def dequantize(qweight: Tensor, scales: Tensor, offsets: Tensor | None, group_size: int, in_features: int) -> Tensor:
    """The float32 weight ``[N, in_features]`` that the format stands for."""
    q = unpack_nibbles(qweight).unflatten(-1, (-1, group_size)).float()
    scale = scales.float().unsqueeze(-1)
    w = (q - 8) * scale if offsets is None else q * scale + offsets.float().unsqueeze(-1)
    return w.flatten(-2)[:, :in_features]


@torch.library.custom_op("eyas::int4_linear", mutates_args=())
def int4_linear(x: Tensor, qweight: Tensor, scales: Tensor, offsets: Tensor | None, group_size: int) -> Tensor:
    """``x @ w.T`` for int4 ``w``.

    Shapes: ``x`` float ``[..., K]``; ``qweight``, ``scales``, ``offsets`` as in the module's docstring; result
    ``[..., N]`` in ``x``'s dtype, with float32 accumulation. This body is the reference, and the implementation on cpu.
    """
    w = dequantize(qweight, scales, offsets, group_size, x.shape[-1])
    return (x.float() @ w.T).to(x.dtype)


@int4_linear.register_fake
def _(x: Tensor, qweight: Tensor, scales: Tensor, offsets: Tensor | None, group_size: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], qweight.shape[0]))


MAX_SMALL_ROWS = 16  # rows that one tile of the small-M kernel takes


@torch.library.custom_op("eyas::int4_smallm", mutates_args=())
def int4_smallm(x: Tensor, qweight: Tensor, scales: Tensor, offsets: Tensor | None, group_size: int) -> Tensor:
    """``eyas::int4_linear`` for 1 to ``MAX_SMALL_ROWS`` rows: one pass over the weights, rows independent."""
    return int4_linear(x, qweight, scales, offsets, group_size)


@torch.library.custom_op("eyas::int4_anym", mutates_args=())
def int4_anym(x: Tensor, qweight: Tensor, scales: Tensor, offsets: Tensor | None, group_size: int) -> Tensor:
    """``eyas::int4_linear`` for any number of rows, from the same bytes, and fast where there are many."""
    return int4_linear(x, qweight, scales, offsets, group_size)


for chosen in (int4_smallm, int4_anym):
    chosen.register_fake(lambda x, qweight, scales, offsets, group_size: x.new_empty((*x.shape[:-1], qweight.shape[0])))

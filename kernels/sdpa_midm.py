"""``eyas::sdpa_midm``: attention of a few rows over a flat cache, each row seeing the keys up to its own position.

The mask is not a tensor: row i sees key j iff ``j <= input_pos[i]``, so the cost follows the live length and not the
buffer's. The C++ body for cpu is in ``cpu/masked_sdpa.cpp``; its rows have the bits of ``eyas::masked_sdpa``.
"""

import torch
from torch import Tensor

from eyas.kernels import masked_sdpa as masked

MAX_ROWS = 16  # rows of one call: what a tile of the tensor core takes


def supports(head_width: int, dtype: torch.dtype, batch: int, rows: int) -> str | None:
    """Why a problem of at most ``rows`` rows has no kernel, or None if it has one."""
    if rows > MAX_ROWS:
        return f"a call has up to {rows} rows; the kernel takes {MAX_ROWS}"
    return masked.supports(head_width, dtype, batch)


@torch.library.custom_op("eyas::sdpa_midm", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def sdpa_midm(q: Tensor, k: Tensor, v: Tensor, input_pos: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T over the keys j <= input_pos) v, with H query heads over KV key heads.

    Shapes: ``q`` float32 ``[1, H, M, D]``, ``k`` and ``v`` float32 ``[1, KV, L, D]``, ``input_pos`` int64 ``[M]`` in
    0..L-1; result float32 ``[1, H, M, D]``, laid out as ``[1, M, H, D]``. This body is the reference.
    """
    return masked.masked_sdpa(q, k, v, input_pos[:, None] >= torch.arange(k.shape[2]), scale)


@sdpa_midm.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, input_pos: Tensor, scale: float) -> Tensor:
    _, heads, rows, width = q.shape
    return q.new_empty((1, rows, heads, width)).transpose(1, 2)

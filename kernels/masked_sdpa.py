"""``eyas::masked_sdpa``: attention under a boolean mask on cpu, with bits that do not depend on the other rows.

The C++ body is ``cpu/masked_sdpa.cpp``; lowering links it into the program. It reads only the keys that some row
sees, so its cost follows the live length and whatever lies in dead cache slots is harmless.
"""

import torch
from torch import Tensor

HEAD_WIDTH_MULTIPLE = 16


def supports(head_width: int, dtype: torch.dtype, batch: int) -> str | None:
    """Why a problem has no kernel, or None if it has one."""
    if dtype != torch.float32:
        return f"query is {dtype}; the cpu kernel takes torch.float32"
    if head_width % HEAD_WIDTH_MULTIPLE:
        return f"head width {head_width} is not a multiple of {HEAD_WIDTH_MULTIPLE}"
    if batch != 1:
        return f"batch is {batch}; the cpu kernel takes 1"
    return None


@torch.library.custom_op("eyas::masked_sdpa", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def masked_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T over the keys that ``mask`` shows) v, with H query heads over KV key heads.

    Shapes: ``q`` float32 ``[1, H, M, D]``, ``k`` and ``v`` float32 ``[1, KV, L, D]``, ``mask`` bool ``[M, L]`` (true:
    seen); result float32 ``[1, H, M, D]``, laid out as ``[1, M, H, D]``. A row that sees no key is 0. This body is the
    reference.
    """
    groups = q.shape[1] // k.shape[1]
    seen = mask.any(0)[:, None]
    k = torch.where(seen, k, 0).repeat_interleave(groups, dim=1)
    v = torch.where(seen, v, 0).repeat_interleave(groups, dim=1)
    scores = (q * scale @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2).contiguous().transpose(1, 2)


@masked_sdpa.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    _, heads, rows, width = q.shape
    return q.new_empty((1, rows, heads, width)).transpose(1, 2)

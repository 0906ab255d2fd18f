"""Linear layers on cpu over weights stored in panels: one pass over the weights for all rows, and bits that do
not depend on how many rows there are.

A panel holds 16 output columns interleaved: ``[N, K]`` becomes ``[ceil(N / 16), K, 16]``, so that a vector register
takes one k of many columns and every output keeps a single accumulator in the order k = 0..K-1. The C++ body is
``cpu/panel_linear.cpp``; lowering links it into the program.
"""

import torch
from torch import Tensor

from eyas.kernels.int4_linear import unpack_nibbles

PANEL = 16


def pack_panels(weight: Tensor) -> Tensor:
    """``[N, K]`` of any dtype -> ``[ceil(N / 16), K, 16]``, rows past N zero."""
    n, k = weight.shape
    panels = -(-n // PANEL)
    if n % PANEL:
        weight = torch.cat([weight, weight.new_zeros(panels * PANEL - n, k)])
    return weight.view(panels, PANEL, k).transpose(1, 2).contiguous()


def unpack_panels(panels: Tensor, out_features: int) -> Tensor:
    """The inverse of ``pack_panels``: ``[P, K, 16]`` -> ``[out_features, K]``."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:out_features]


def pack_scales(scales: Tensor) -> Tensor:
    """float ``[N]`` -> float32 ``[16 * ceil(N / 16)]``, padded with zeros as the panels' rows are."""
    return pack_panels(scales.float()[:, None]).flatten()


def pack_scale_offset(scales: Tensor, offsets: Tensor | None = None) -> Tensor:
    """float ``[N, groups]`` twice -> float32 ``[ceil(N / 16), groups, 2, 16]``; symmetric ones get ``-8 * scale``."""
    if offsets is None:
        offsets = -8 * scales.float()
    return torch.stack([pack_panels(scales.float()), pack_panels(offsets.float())], dim=2).contiguous()


def panel_rows(ids: Tensor, panels: Tensor) -> Tensor:
    """Rows ``ids`` int64 ``[...]`` of the unpacked weight, ``[..., K]`` in the panels' dtype, without unpacking it."""
    return panels[ids // PANEL, :, ids % PANEL]


@torch.library.custom_op("eyas::panel_linear", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def panel_linear(x: Tensor, panels: Tensor, out_features: int) -> Tensor:
    """``x`` float32 ``[M, K]`` with dense rows, ``panels`` float32 ``[P, K, 16]`` -> float32 ``[M, out_features]``."""
    return x @ unpack_panels(panels, out_features).T


@torch.library.custom_op("eyas::panel_int8_linear", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def panel_int8_linear(x: Tensor, panels: Tensor, scales: Tensor, out_features: int) -> Tensor:
    """``x`` float32 ``[M, K]``, ``panels`` int8 ``[P, K, 16]``, ``scales`` float32 ``[16 P]`` -> float32
    ``[M, out_features]``."""
    return x @ unpack_panels(panels, out_features).float().T * scales[:out_features]


@torch.library.custom_op("eyas::panel_int4_linear", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def panel_int4_linear(x: Tensor, panels: Tensor, scale_offset: Tensor, group_size: int, out_features: int) -> Tensor:
    """``x`` float32 ``[M, K]``, ``panels`` uint8 ``[P, C, 16]`` with ``2 C >= K``, ``scale_offset`` float32
    ``[P, groups, 2, 16]`` -> float32 ``[M, out_features]``. Columns of the weight past K are not read."""
    q = unpack_nibbles(unpack_panels(panels, out_features)).float()
    scale, offset = (unpack_panels(scale_offset[:, :, i], out_features) for i in (0, 1))
    w = q.unflatten(-1, (-1, group_size)) * scale.unsqueeze(-1) + offset.unsqueeze(-1)
    return x @ w.flatten(-2)[:, : x.shape[1]].T


@panel_linear.register_fake
def _(x: Tensor, panels: Tensor, out_features: int) -> Tensor:
    return x.new_empty((x.shape[0], out_features))


@panel_int8_linear.register_fake
def _(x: Tensor, panels: Tensor, scales: Tensor, out_features: int) -> Tensor:
    return x.new_empty((x.shape[0], out_features))


@panel_int4_linear.register_fake
def _(x: Tensor, panels: Tensor, scale_offset: Tensor, group_size: int, out_features: int) -> Tensor:
    return x.new_empty((x.shape[0], out_features))


def supports(dtype: torch.dtype) -> str | None:
    """Why activations of ``dtype`` have no kernel, or None if they have one."""
    return None if dtype == torch.float32 else f"activations are {dtype}; the cpu kernels take torch.float32"

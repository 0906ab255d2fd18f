"""Pieces that targets and draft heads are built from. They say what is computed; passes choose how.

Shape suffixes: M rows of this forward, L cache rows, H query heads, G key/value heads, D head width, E model width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` in float32, result in ``x``'s dtype. ``weight`` is the factor itself, never
    ``factor - 1``: a reader whose format stores the difference adds the one. Without a weight the factor is 1."""

    def __init__(self, width: int, eps: float, weighted: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False) if weighted else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y if self.weight is None else y * self.weight.float()).to(x.dtype)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions of one layer kind.

    ``kind``: ``default`` rotates all of the head width; ``linear`` divides positions by ``factor``; ``proportional``
    rotates the first ``partial * width / 2`` frequency pairs, with exponents over the whole width, and leaves the rest.
    ``llama3`` rescales low frequencies as Llama 3.1 does (``low_freq_factor``, ``high_freq_factor``, ``original_max``).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    partial: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max: int = 8192

    KINDS = ("default", "linear", "proportional", "llama3")

    def __post_init__(self):
        if self.kind not in self.KINDS:
            raise ValueError(f"unknown rope kind {self.kind!r}; allowed: {', '.join(self.KINDS)}")

    def inverse_frequencies(self, width: int) -> Tensor:
        """float32 ``[width / 2]``: radians a position for each rotated pair ``(i, i + width / 2)``."""
        inv = self.theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        if self.kind == "linear":
            inv = inv / self.factor
        elif self.kind == "proportional":
            inv[int(self.partial * width // 2) :] = 0.0
            inv = inv / self.factor
        elif self.kind == "llama3":
            wavelength = 2 * torch.pi / inv
            smooth = (self.original_max / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            smooth = smooth.clamp(0, 1)
            inv = (1 - smooth) * inv / self.factor + smooth * inv
        return inv.float()


class Rope(nn.Module):
    """Turns positions into rotation tables, once a forward for all layers of a kind."""

    def __init__(self, spec: RopeSpec, width: int):
        super().__init__()
        self.register_buffer("inv_freq", spec.inverse_frequencies(width), persistent=False)

    def forward(self, input_pos_M: Tensor) -> tuple[Tensor, Tensor]:
        angles_MD = input_pos_M.float().unsqueeze(-1) * self.inv_freq
        angles_MD = torch.cat([angles_MD, angles_MD], dim=-1)
        return angles_MD.cos(), angles_MD.sin()


def rotate(x_HMD: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Applies half-split rotary positions to ``[1, heads, M, D]``."""
    cos_MD, sin_MD = table
    low, high = x_HMD.chunk(2, dim=-1)
    rotated = torch.cat([-high, low], dim=-1)
    return (x_HMD * cos_MD + rotated * sin_MD).to(x_HMD.dtype)


class KVCache(nn.Module):
    """Keys and values of one layer, ``[1, G, rows, D]``, written in place at the given slots."""

    def __init__(self, rows: int, heads: int, width: int, dtype: torch.dtype):
        super().__init__()
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(1, heads, rows, width, dtype=dtype), persistent=False)

    def write(self, slots_M: Tensor, k_GMD: Tensor, v_GMD: Tensor) -> tuple[Tensor, Tensor]:
        self.k.index_copy_(2, slots_M, k_GMD)
        self.v.index_copy_(2, slots_M, v_GMD)
        return self.k, self.v


@dataclass(frozen=True)
class CacheGeometry:
    """How positions map to cache rows: flat (``window`` None) or a ring of ``rows`` written modulo.

    A ring of two windows serves calls of up to one window of rows, and rows that were written for rejected
    proposals, without ever showing a query a slot that has been written over.
    """

    rows: int
    window: int | None = None

    @classmethod
    def of(cls, max_seq_len: int, window: int | None) -> "CacheGeometry":
        return cls(max_seq_len, None) if window is None else cls(min(2 * window, max_seq_len), window)

    def max_call_rows(self) -> int:
        """The most rows that one call may write."""
        return self.rows if self.window is None else min(self.window, self.rows)

    def slots(self, input_pos_M: Tensor) -> Tensor:
        return input_pos_M if self.window is None else input_pos_M % self.rows

    def mask(self, input_pos_M: Tensor) -> Tensor:
        """bool ``[M, rows]``: which slots each row sees once this call's rows are written.

        Flat: slot j holds position j, seen iff j <= position. Ring: a slot holds the newest position, up to the
        call's last, that is congruent to it; seen iff it exists, is not in the future and is less than ``window`` old.
        """
        slot_L = torch.arange(self.rows, device=input_pos_M.device)
        pos_M1 = input_pos_M.unsqueeze(1)
        if self.window is None:
            return pos_M1 >= slot_L.unsqueeze(0)
        last = input_pos_M[-1]
        held_L = (last - (last - slot_L) % self.rows).unsqueeze(0)
        return (held_L >= 0) & (held_L <= pos_M1) & (held_L > pos_M1 - self.window)


def attend(q_HMD: Tensor, k_GLD: Tensor, v_GLD: Tensor, mask_ML: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Attention of ``[1, H, M, D]`` over ``[1, G, L, D]``, result ``[1, H, M, D]``. Query heads share key/value heads
    in order."""
    if softcap is None:
        gqa = q_HMD.shape[1] != k_GLD.shape[1]
        return F.scaled_dot_product_attention(q_HMD, k_GLD, v_GLD, attn_mask=mask_ML, scale=scale, enable_gqa=gqa)
    groups = q_HMD.shape[1] // k_GLD.shape[1]
    k_HLD, v_HLD = k_GLD.repeat_interleave(groups, 1), v_GLD.repeat_interleave(groups, 1)
    scores = torch.tanh(q_HMD @ k_HLD.transpose(-1, -2) * scale / softcap) * softcap
    weights = torch.softmax(scores.float().masked_fill(~mask_ML, float("-inf")), dim=-1).to(q_HMD.dtype)
    return weights @ v_HLD

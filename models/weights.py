"""Weight matrices in the formats that a recipe can ask for. All answer ``forward(x)`` (x @ w.T); those that can serve
as an embedding also answer ``rows(ids)``. A module holds its format's tensors as buffers, so they are ordinary
constants of an exported graph, and equal names mean equal storage.

A format is filled from a ``RowSource`` a slice of rows at a time: a large table never exists twice.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.kernels import int4_linear

TINY = torch.finfo(torch.float32).tiny
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # parts of a group's range that int4 steps may cover


class RowSource(Protocol):
    """A tensor that can be read a range of rows at a time."""

    shape: tuple[int, ...]

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows ``start..stop`` as a float tensor."""
        ...


class TensorSource:
    """A tensor in memory as a ``RowSource``."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.tensor[start:stop]


def row_slices(source: RowSource, elements: int = 1 << 22) -> Iterator[tuple[slice, Tensor]]:
    """Slices of about ``elements`` values, in order, as float32."""
    rows, width = source.shape
    step = max(1, elements // max(1, width))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield slice(start, stop), source.read(start, stop).float()


class Weight(nn.Module):
    """A matrix ``[out_features, in_features]`` with an optional bias. Subclasses are the formats.

    ``error``: root of (sum of squared differences from the source / sum of squares of the source).
    """

    format: str
    error: float = 0.0
    untraced = ("error",)  # a fact, not a part of what is computed: equal weights may differ in it

    def __init__(self, out_features: int, in_features: int, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.register_buffer("bias", bias)

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError(f"{self.format} weights cannot serve as an embedding; allowed: dense, int8")

    def dense(self) -> Tensor:
        """The float32 matrix that this format stands for."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def nbytes(self) -> int:
        """Bytes of this format's tensors, the bias included."""
        return sum(b.numel() * b.element_size() for b in self.buffers())

    def extra_repr(self) -> str:
        return f"{self.format}, [{self.out_features}, {self.in_features}]"


class Dense(Weight):
    """Floating-point weights, as they are. Also the place of a matrix that has not been read yet: models are built of
    ``Dense`` on the meta device, and ``eyas.models.recipe.materialize`` puts the recipe's formats in their place."""

    format = "dense"

    def __init__(self, out_features: int, in_features: int, bias: bool = False):
        super().__init__(out_features, in_features, torch.empty(out_features, device="meta") if bias else None)
        self.register_buffer("weight", torch.empty(out_features, in_features, device="meta"))

    @classmethod
    def of(cls, source: RowSource, bias: Tensor | None = None, dtype: torch.dtype = torch.float32) -> "Dense":
        module = cls(*source.shape)
        module.weight = torch.empty(source.shape, dtype=dtype)
        for rows, part in row_slices(source):
            module.weight[rows] = part
        module.bias = None if bias is None else bias.to(dtype)
        return module

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self.weight).to(dtype)

    def dense(self) -> Tensor:
        return self.weight.float()


class Int8(Weight):
    """One float32 scale a row, symmetric: ``w = qweight * scale``, scale = largest magnitude of the row / 127."""

    format = "int8"

    def __init__(self, source: RowSource, bias: Tensor | None = None):
        super().__init__(*source.shape, bias)
        self.register_buffer("qweight", torch.empty(source.shape, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(source.shape[0]))
        lost = total = 0.0
        for rows, part in row_slices(source):
            scale = (part.abs().amax(dim=1) / 127).clamp_min(TINY)
            q = (part / scale[:, None]).round().clamp(-127, 127)
            self.scales[rows], self.qweight[rows] = scale, q.to(torch.int8)
            total += part.square().sum().item()
            lost += q.mul_(scale[:, None]).sub_(part).square_().sum().item()
        self.error = (lost / total) ** 0.5 if total else 0.0

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.eyas.int8_linear(x, self.qweight, self.scales)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.ops.eyas.int8_embedding(ids, self.qweight, self.scales, dtype)

    def dense(self) -> Tensor:
        return self.qweight.float() * self.scales[:, None]


class Int4(Weight):
    """Groups of ``group_size`` columns with a scale, and an offset where ``zeros``; see ``eyas.kernels.int4_linear``.

    Each group's range (with zeros: from its least to its largest value, 0 included; symmetric: its extreme value either
    way) is mapped to the sixteen steps, shrunken where clipping costs less than it gains. A width that no group divides
    is padded with zero weights.
    """

    format = "int4"

    def __init__(self, source: RowSource, group_size: int, zeros: bool, bias: Tensor | None = None):
        if reason := int4_linear.supports(group_size):
            raise ValueError(reason)
        super().__init__(*source.shape, bias)
        self.group_size = group_size
        out_features, in_features = source.shape
        groups = -(-in_features // group_size)
        self.register_buffer("qweight", torch.empty(out_features, groups * group_size // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(out_features, groups))
        self.register_buffer("offsets", torch.empty(out_features, groups) if zeros else None)
        lost = total = 0.0
        for rows, part in row_slices(source):
            grouped = F.pad(part, (0, -in_features % group_size)).unflatten(1, (-1, group_size))
            q, scale, offset = best_of(quantize_with_zeros if zeros else quantize_symmetric, grouped)
            value = q * scale[..., None] + offset[..., None]
            if zeros:
                self.offsets[rows] = offset
            self.scales[rows] = scale
            self.qweight[rows] = int4_linear.pack_nibbles(q.to(torch.uint8).flatten(1))
            total += part.square().sum().item()
            lost += value.flatten(1)[:, :in_features].sub_(part).square_().sum().item()
        self.error = (lost / total) ** 0.5 if total else 0.0

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.eyas.int4_linear(x, self.qweight, self.scales, self.offsets, self.group_size)

    def dense(self) -> Tensor:
        return int4_linear.dequantize(self.qweight, self.scales, self.offsets, self.group_size, self.in_features)


def quantize_with_zeros(groups: Tensor, shrink: float) -> tuple[Tensor, Tensor, Tensor]:
    """Groups float32 ``[N, G, group]`` -> (q in 0..15, scales and offsets ``[N, G]``) over a part of their range."""
    low, high = shrink * groups.amin(-1).clamp_max(0), shrink * groups.amax(-1).clamp_min(0)
    scale = ((high - low) / 15).clamp_min(TINY)
    return ((groups - low[..., None]) / scale[..., None]).round().clamp_(0, 15), scale, low


def quantize_symmetric(groups: Tensor, shrink: float) -> tuple[Tensor, Tensor, Tensor]:
    """As ``quantize_with_zeros``, with the offset -8 * scale: the group's extreme value, shrunken, is hit exactly."""
    extreme = shrink * groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scale = torch.where(extreme.abs() < TINY, 1.0, extreme / -8)
    return ((groups / scale[..., None]).round() + 8).clamp_(0, 15), scale, -8 * scale


def best_of(quantize: Callable[..., tuple[Tensor, Tensor, Tensor]], groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each group, the shrinkage of its range with the least squared error: a few clipped values buy finer steps."""
    best = error = None
    for shrink in SHRINKS:
        tried = q, scale, offset = quantize(groups, shrink)
        lost = (q * scale[..., None] + offset[..., None] - groups).square_().sum(-1)
        if best is None:
            best, error = tried, lost
            continue
        better = lost < error
        error = torch.where(better, lost, error)
        best = tuple(
            torch.where(better[..., None] if new.ndim == 3 else better, new, old) for new, old in zip(tried, best)
        )
    return best

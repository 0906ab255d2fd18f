"""``eyas::int8_linear`` and ``eyas::int8_embedding``: 8-bit weights with one scale a row. Says what, not how.

Weight format: ``qweight`` int8 ``[N, K]``, ``scales`` float32 ``[N]``, ``w = qweight * scales[:, None]``. One table can
serve as embedding and as head.
"""

import torch
from torch import Tensor


def dequantize(qweight: Tensor, scales: Tensor) -> Tensor:
    """The float32 weight ``[N, K]`` that the format stands for."""
    return qweight.float() * scales.float().unsqueeze(-1)


@torch.library.custom_op("eyas::int8_linear", mutates_args=())
def int8_linear(x: Tensor, qweight: Tensor, scales: Tensor) -> Tensor:
    """``x @ w.T`` for int8 ``w``.

    Shapes: ``x`` float ``[..., K]``, ``qweight`` int8 ``[N, K]``, ``scales`` float32 ``[N]``; result ``[..., N]`` in
    ``x``'s dtype, with float32 accumulation. This body is the reference, and the implementation on cpu.
    """
    return (x.float() @ qweight.float().T * scales.float()).to(x.dtype)


@int8_linear.register_fake
def _(x: Tensor, qweight: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], qweight.shape[0]))


@torch.library.custom_op("eyas::int8_embedding", mutates_args=())
def int8_embedding(ids: Tensor, qweight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of an int8 table: ``ids`` int64 ``[...]`` -> ``[..., K]`` in ``dtype``. Ids must lie in ``[0, N)``."""
    return (qweight[ids].float() * scales[ids].float().unsqueeze(-1)).to(dtype)


@int8_embedding.register_fake
def _(ids: Tensor, qweight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return qweight.new_empty((*ids.shape, qweight.shape[1]), dtype=dtype)

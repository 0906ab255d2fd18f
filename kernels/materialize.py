"""``eyas::materialize``: a value that the compiler must compute once and keep, rather than recompute in every user.

A compiler that fuses elementwise work into its consumers recomputes a table (rotary angles, a mask) once a layer.
The C++ body is ``cpu/materialize.cpp``.
"""

import torch
from torch import Tensor


@torch.library.custom_op("eyas::materialize", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def materialize(x: Tensor) -> Tensor:
    """The same values, dense in row-major order. Any shape and dtype."""
    return x.clone(memory_format=torch.contiguous_format)


@materialize.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)

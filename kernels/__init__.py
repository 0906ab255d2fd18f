"""Operators that passes choose between: one file a kernel family, with its fake, its reference and its limits.

Importing this package registers every ``eyas::`` operator.
"""

from eyas.kernels import int4_linear, int8_linear, masked_sdpa, panel_linear

__all__ = ["int4_linear", "int8_linear", "masked_sdpa", "panel_linear"]

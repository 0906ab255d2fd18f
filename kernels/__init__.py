"""Operators that passes choose between: one file a kernel family, with its fake, its reference and its limits.

Importing this package registers every ``eyas::`` operator.
"""

from eyas.kernels import block, int4_linear, int8_linear, masked_sdpa, materialize, panel_linear, sdpa_midm

__all__ = ["block", "int4_linear", "int8_linear", "masked_sdpa", "materialize", "panel_linear", "sdpa_midm"]

# operators with a C++ body in ``cpu/``; its name is ``aoti_torch_cpu_`` and the operator's
CPU_OPERATORS = (
    "masked_sdpa", "materialize", "panel_linear", "panel_int8_linear", "panel_int4_linear", "sdpa_midm",
)  # fmt: skip

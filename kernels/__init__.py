"""Operators that passes choose between: one file a kernel family, with its fake, its reference and its limits.

Importing this package registers every ``eyas::`` operator but those with Triton kernels, which take a second more and
a package that not every installation has: ``register_triton_operators``.
"""

from importlib import import_module
from importlib.util import find_spec

from eyas.kernels import block, int4_linear, int8_linear, masked_sdpa, materialize, panel_linear, sdpa_midm

__all__ = ["block", "int4_linear", "int8_linear", "masked_sdpa", "materialize", "panel_linear", "sdpa_midm"]

TRITON_FILES = ("fragment_bf16_linear", "fragment_int8_linear", "fragment_linear", "splitk_sdpa")


def register_triton_operators() -> bool:
    """Registers the operators whose kernels are Triton's. Returns whether Triton is installed."""
    found = find_spec("triton") is not None
    for name in TRITON_FILES if found else ():
        import_module(f"{__name__}.{name}")
    return found


# operators with a C++ body in ``cpu/``; its name is ``aoti_torch_cpu_`` and the operator's
CPU_OPERATORS = (
    "masked_sdpa", "materialize", "panel_linear", "panel_int8_linear", "panel_int4_linear", "sdpa_midm",
)  # fmt: skip
# operators with kernels of Triton's
CUDA_OPERATORS = (
    "fragment_int4_linear", "fragment_int4_matmul", "fragment_int8_linear", "fragment_int8_matmul",
    "fragment_int8_embedding", "fragment_bf16_linear", "fragment_bf16_matmul", "fragment_bf16_embedding", "splitk_sdpa",
)  # fmt: skip

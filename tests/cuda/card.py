"""Where tests of Triton kernels run: on a GPU (``make test-gpu``), and small ones anywhere with ``TRITON_INTERPRET=1``.

The interpreter must be chosen before triton is first imported, so these tests have a process of their own; any other
skips them.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
if not GPU and not INTERPRETED:
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def compiled(program: torch.export.ExportedProgram, inputs: tuple[torch.Tensor, ...], folder: Path) -> Callable:
    """A program of one result as native code with its kernels in it, called as the runtime calls it."""
    from eyas.runtime.cuda_native import CudaContainer

    options = {"aot_inductor.embed_kernel_binary": True, "aot_inductor.output_path": str(folder)}
    with torch.no_grad():
        code = torch._inductor.aot_compile(program.module(), inputs, options=options)
    container = CudaContainer(Path(code))
    return lambda *tensors: container.run(tensors)[0]

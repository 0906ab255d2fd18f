"""Where tests of Triton kernels run: on a GPU (``make test-gpu``), and small ones anywhere with ``TRITON_INTERPRET=1``.

The interpreter must be chosen before triton is first imported, so these tests have a process of their own; any other
skips them.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
if not GPU and not INTERPRETED:
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")

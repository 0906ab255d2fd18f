"""Tests of Triton kernels: on a GPU with ``make test-gpu``, and small ones anywhere with ``TRITON_INTERPRET=1``.

The interpreter must be chosen before triton is first imported, so these tests have a process of their own.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
collect_ignore_glob = [] if GPU or INTERPRETED else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if GPU else "cpu"

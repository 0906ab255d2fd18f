"""The machine and the versions that a program is made with, and that it needs to run."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("torch", "executorch", "triton", "eyas")
# instruction sets that a C++ compiler uses on its own when it is told to compile for this machine
USED_FEATURES = (
    "ssse3", "sse4_1", "sse4_2", "sse4a", "popcnt", "abm", "movbe", "bmi1", "bmi2", "adx", "f16c", "fma", "avx", "avx2",
    "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni",
    "asimd", "asimddp", "asimdhp", "sve", "bf16", "i8mm",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that decide what a program looks like; None where one is absent."""
    return {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_features() -> list[str]:
    """The instruction sets that native code made on this machine may use (Linux's names; empty elsewhere)."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith(("flags", "Features"))]
    except OSError:
        return []
    return [name for name in USED_FEATURES if lines and name in lines[0].split(":", 1)[1].split()]


def machine() -> dict[str, object]:
    """Architecture, instruction sets and torch's dispatch level of this machine."""
    return {
        "architecture": platform.machine(),
        "cpu_features": cpu_features(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def gpu() -> dict[str, object]:
    """The CUDA card that programs are compiled for: name, capability, shared memory of a program in bytes, and CUDA's
    version. Raises ``ValueError`` where there is none.
    """
    if not torch.cuda.is_available():
        raise ValueError("no CUDA device was found; a program is compiled and checked on the card that it is for")
    facts = torch.cuda.get_device_properties(0)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "shared_memory": facts.shared_memory_per_block_optin,
        "cuda": torch.version.cuda,
    }

"""Builds the C++ bodies of the cpu operators into a static library that every compiled method links."""

import shutil
import subprocess
from pathlib import Path

import torch

import eyas.kernels
from eyas.lowering.content_cache import ContentCache, key_of
from eyas.lowering.environment import machine

LIBRARY = "eyas_cpu"
SHARED = "eyas_cpu_kernels.so"  # not lib*.so, which a linker would prefer to the static library
SOURCES = Path(eyas.kernels.__file__).parent / "cpu"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-Wall")
C_TYPES = {"Tensor": "AtenTensorHandle", "int": "int64_t", "float": "double", "bool": "int32_t"}


def compiler() -> str:
    """The C++ compiler that lowering uses. Raises ``RuntimeError`` where there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return get_cpp_compiler()
    except (torch._inductor.exc.InvalidCxxCompiler, RuntimeError) as error:
        raise RuntimeError(
            "lowering for cpu compiles C++, and no compiler was found; install g++ (or clang++) or set CXX"
        ) from error


def build_library(cache: ContentCache) -> Path:
    """The folder that holds ``libeyas_cpu.a``, and the same as a shared library, for this machine; built on first use."""
    cxx = compiler()
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    sources = sorted(SOURCES.iterdir())
    built_by = Path(__file__).read_text()
    key = key_of(version, torch.__version__, machine(), built_by, *(p.read_text() for p in sources))

    def fill(folder: Path) -> None:
        include = Path(torch.__file__).parent / "include"
        objects = []
        for source in sources:
            if source.suffix == ".cpp":
                target = folder / (source.stem + ".o")
                run([cxx, *FLAGS, f"-I{include}", "-c", str(source), "-o", str(target)])
                objects.append(str(target))
        run([shutil.which("ar") or "ar", "rcs", str(folder / f"lib{LIBRARY}.a"), *objects])
        # undefined symbols are torch's; whoever loads the shared form has torch's libraries loaded
        run([cxx, "-shared", "-fopenmp", *objects, "-o", str(folder / SHARED)])
        for target in objects:
            Path(target).unlink()

    return cache.get_or_put("cpu_kernels", key, fill)[0]


def run(command: list[str]) -> None:
    """Runs a build step. Raises ``RuntimeError`` with its messages where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"building the cpu kernels failed: {' '.join(command)}\n{done.stderr.strip()}")


def c_shims() -> dict[torch._ops.OpOverload, list[str]]:
    """C declaration of each cpu operator's body, from the operator's schema, in the form that AOTInductor takes."""
    shims = {}
    for name in eyas.kernels.CPU_OPERATORS:
        operator = getattr(torch.ops.eyas, name).default
        arguments = [C_TYPES[str(a.type)] for a in operator._schema.arguments]
        results = ["AtenTensorHandle*"] * len(operator._schema.returns)
        shims[operator] = [f"AOTITorchError aoti_torch_cpu_{name}({', '.join(arguments + results)})"]
    return shims

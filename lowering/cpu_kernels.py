"""Builds what compiled methods for cpu are linked from: the operators' C++ bodies, and the host of their tensors."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

import eyas.kernels
import eyas.runtime.native
from eyas.lowering.content_cache import ContentCache, key_of
from eyas.lowering.environment import machine

KIND = "cpu_kernels"  # of the cache's entries
LIBRARY = "eyas_cpu"  # the operators, linked into each method
HOST_PREFIX = "eyas_host_"
KERNELS = "eyas_cpu_kernels.so"  # the same as a library of its own, for tests and timings
SOURCES = Path(eyas.kernels.__file__).parent / "cpu"
HOST_SOURCE = Path(eyas.runtime.native.__file__).parent / "aoti_host.cpp"
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


@dataclass(frozen=True)
class KernelLibraries:
    """What a method is linked from: ``folder``, and the host library's file in it, whose name tells its build."""

    folder: Path
    host: Path

    @property
    def key(self) -> str:
        """The hash of what they were built from."""
        return self.folder.name

    @property
    def kernels(self) -> Path:
        """The operators as a shared library."""
        return self.folder / KERNELS


def libraries_key(cxx: str) -> str:
    """The hash of what the libraries are built from, and by."""
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    sources = [HOST_SOURCE, *sorted(SOURCES.iterdir())]
    built_by = Path(__file__).read_text()
    return key_of(version, torch.__version__, machine(), built_by, *(p.read_text() for p in sources))


def are_built(cache: ContentCache) -> bool:
    """Whether the cache has the libraries for this machine."""
    return cache.get(KIND, libraries_key(compiler())) is not None


def build_libraries(cache: ContentCache) -> KernelLibraries:
    """The libraries for this machine, built on first use. Raises ``RuntimeError`` where the compiler fails."""
    cxx = compiler()
    key = libraries_key(cxx)
    host_name = f"lib{HOST_PREFIX}{key[:12]}.so"

    def fill(folder: Path) -> None:
        include = Path(torch.__file__).parent / "include"
        objects = {}
        for source in (HOST_SOURCE, *SOURCES.iterdir()):
            if source.suffix == ".cpp":
                objects[source.stem] = str(folder / (source.stem + ".o"))
                run([cxx, *FLAGS, f"-I{include}", "-c", str(source), "-o", objects[source.stem]])
        host = objects.pop(HOST_SOURCE.stem)
        run([cxx, "-shared", host, f"-Wl,-soname,{host_name}", "-o", str(folder / host_name)])
        run([shutil.which("ar") or "ar", "rcs", str(folder / f"lib{LIBRARY}.a"), *objects.values()])
        link = ["-shared", "-fopenmp", *objects.values(), str(folder / host_name)]
        run([cxx, *link, "-o", str(folder / KERNELS)])
        for target in (host, *objects.values()):
            Path(target).unlink()

    folder, _ = cache.get_or_put(KIND, key, fill)
    return KernelLibraries(folder, folder / host_name)


def undefined_symbols(library: Path) -> set[str]:
    """Names that a shared library needs from others."""
    done = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if line.strip()}


def defined_symbols(library: Path) -> set[str]:
    """Names that a shared library offers."""
    done = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if line.strip()}


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

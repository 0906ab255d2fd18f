"""Compiles blocks with AOTInductor for the CUDA card of this machine. The code needs torch's libraries to run."""

import json
import tempfile
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from eyas.kernels import CUDA_OPERATORS, register_triton_operators
from eyas.lowering.aoti_cpu import (
    OPTIONS,
    WORKING,
    CompiledBlock,
    aot_compile,
    as_method,
    compile_once,
    inductor_environment,
    refuse_operators,
    smallest_method,
)
from eyas.lowering.content_cache import ContentCache, key_of
from eyas.lowering.environment import gpu, versions
from eyas.passes.printer import print_method
from eyas.passes.program import Block

CUDA_OPTIONS = {
    "aot_inductor.embed_kernel_binary": True,  # kernels travel in the library
    "max_autotune": False,  # products that no kernel of ours serves are cuBLAS's, without trying others
    "max_autotune_gemm": False,
    # the sums of a product's splits are added by all who read them, not by a kernel of its own
    "realize_reads_threshold": 64,
    "realize_acc_reads_threshold": 64,
    "realize_opcount_threshold": 256,
    "emulate_precision_casts": True,  # what is computed does not depend on what else is in a kernel, so not on blocks
    "cpp.vec_isa_ok": False,  # no code for the host's vectors is written, and to ask what it has takes seconds
}
PREPARED = "compilers"  # kind of the cache's entries that say what the compiler has made once


def block_key(block: Block, host: str, cache: ContentCache) -> str:
    """What decides a block's native code: its printed graph, options, versions, kernels and card."""
    kernels = [path.read_text() for path in sorted(Path(__file__).parents[1].glob("kernels/*.py"))]
    sources = [Path(__file__).with_name(name).read_text() for name in ("aoti_cpu.py", "aoti_cuda.py")]
    return key_of(
        print_method(block.program, "block"), block.n_constants, block.n_written, OPTIONS, CUDA_OPTIONS, host, gpu(),
        versions(), kernels, sources,
    )  # fmt: skip


def prepared_key() -> str:
    """What decides whether what the compiler makes once serves: versions, options and card."""
    return key_of(versions(), OPTIONS, CUDA_OPTIONS, gpu())


def is_prepared(cache: ContentCache) -> bool:
    """Whether ``prepare`` has been called for this machine and cache."""
    return (cache.root / WORKING).is_dir() and cache.get(PREPARED, prepared_key()) is not None


def prepare(cache: ContentCache) -> None:
    """Has the compiler make what it makes once: precompiled headers and Triton's launcher. Raises ``ValueError``
    without a card.
    """
    with inductor_environment(cache), tempfile.TemporaryDirectory(prefix="eyas-") as scratch:
        run_inductor(smallest_method(), Path(scratch))
    cache.put(PREPARED, prepared_key(), lambda folder: None)


def refuse_without_body(ep: ExportedProgram) -> None:
    """Raises ``RuntimeError`` for an operator that has no kernel for cuda."""
    register_triton_operators()
    known = [getattr(torch.ops.eyas, name).default for name in CUDA_OPERATORS if hasattr(torch.ops.eyas, name)]
    refuse_operators(ep, known, "kernel for cuda")


def compile_block(block: Block, cache: ContentCache, host: str = "cuda", key: str | None = None) -> CompiledBlock:
    """Compiles a block whose graph passes have finished. Raises ``ValueError`` without a card, ``RuntimeError`` for an
    operator that cannot be compiled. ``key``: what the one who asked knows it by.
    """
    refuse_without_body(block.program)

    def compile_into(scratch: Path) -> tuple[Path, list[str]]:
        with inductor_environment(cache):
            return run_inductor(as_method(block), scratch)

    return compile_once(cache, key or block_key(block, host, cache), compile_into)


def run_inductor(ep: ExportedProgram, folder: Path) -> tuple[Path, list[str]]:
    """The shared library, made in ``folder``, and the names of the constants that it needs."""
    code, constants, others = aot_compile(move_to_device_pass(ep, "cuda"), CUDA_OPTIONS, folder)
    for file in others:
        if file.name.endswith("extern_kernel_nodes.json") and (left := json.loads(file.read_text())["nodes"]):
            names = ", ".join(sorted({node["node"]["target"] for node in left}))
            raise RuntimeError(f"operators {names} have no kernel in native code; a pass has to replace them")
    return code, constants

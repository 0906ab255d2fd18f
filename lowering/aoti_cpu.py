"""Compiles blocks with AOTInductor, for cpu: native code without constants, cached by what it was compiled from. What
other devices share of it is here as well; see ``aoti_cuda``.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec
from torch.utils._pytree import tree_flatten

from eyas.lowering.content_cache import ContentCache, key_of
from eyas.lowering.cpu_kernels import (
    LIBRARY,
    KernelLibraries,
    are_built,
    build_libraries,
    c_shims,
    defined_symbols,
    run,
    undefined_symbols,
)
from eyas.lowering.environment import machine, versions
from eyas.passes.base import source_line
from eyas.passes.printer import print_method
from eyas.passes.program import Block, constant_nodes, constant_specs, constant_value
from eyas.runtime.payload import DEVICE_TYPES, Constant, storage_key

# who implements AOTInductor's C interface for a program, by device, the preferred one first: the small library that
# travels with it, torch's, or torch's for CUDA; see ``eyas.runtime.native.Host`` and ``eyas.runtime.cuda_native``
HOSTS = {"cpu": ("eyas", "torch"), "cuda": ("cuda",)}


@dataclass(frozen=True)
class CompiledBlock:
    """``code``: the shared library's file. ``constants``: which of the block's constants it must be given, by the names
    of ``as_method``. ``seconds``: what compiling took, in this run or the one that ``cached`` it.

    ``missing``: functions that the host it was linked for does not have; the block runs only if there are none.
    """

    code: Path
    constants: tuple[str, ...]
    cached: bool
    seconds: float
    missing: tuple[str, ...]


OPTIONS = {
    "always_keep_tensor_constants": True,  # or values of small ones are written into the code
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
}
KIND, CODE, FACTS = "blocks", "block.so", "facts.json"  # of the cache's entries
WORKING = "inductor"  # folder of the compiler's own working files, beside them


def block_key(block: Block, host: str, cache: ContentCache) -> str:
    """What decides a block's native code: its printed graph, options, versions, kernels and machine; no constants'
    values, which native code never holds, and no names.
    """
    graph = print_method(block.program, "block")
    return key_of(
        graph, block.n_constants, block.n_written, OPTIONS, host, torch.get_num_threads(), machine(), versions(),
        build_libraries(cache).key, Path(__file__).read_text(),
    )  # fmt: skip


def find_compiled(cache: ContentCache, key: str, cached: bool = True) -> CompiledBlock | None:
    """A block that was compiled before, whole and undamaged; None where there is none."""
    folder = cache.get(KIND, key)
    if folder is None:
        return None
    facts = json.loads((folder / FACTS).read_text())
    return CompiledBlock(
        folder / CODE, tuple(facts["constants"]), cached, facts["seconds"], tuple(facts["missing"])
    )  # fmt: skip


def compile_block(block: Block, cache: ContentCache, host: str = "eyas", key: str | None = None) -> CompiledBlock:
    """Compiles a block whose graph passes have finished, for a cpu host of ``HOSTS``. Raises ``RuntimeError`` for an
    operator that cannot be compiled. ``key``: what the one who asked knows it by; a graph that was written and read
    again may print its sizes otherwise.
    """
    refuse_without_body(block.program)
    libraries = build_libraries(cache)

    def compile_into(scratch: Path) -> tuple[Path, list[str]]:
        with inductor_environment(cache, libraries.folder):
            return run_inductor(as_method(block), host, libraries, scratch)

    def missing(code: Path) -> set[str]:
        return set() if host == "torch" else missing_from_host(code, libraries)

    return compile_once(cache, key or block_key(block, host, cache), compile_into, missing)


def compile_once(
    cache: ContentCache,
    key: str,
    compile_into: Callable[[Path], tuple[Path, list[str]]],
    missing: Callable[[Path], set[str]] = lambda code: set(),
) -> CompiledBlock:
    """The cache's entry of a block, compiled if there is none. ``compile_into``: makes the library in a folder, and
    says which constants it needs. ``missing``: what the library's host lacks.
    """
    if (found := find_compiled(cache, key)) is not None:
        return found

    def fill(folder: Path) -> None:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="eyas-") as scratch:
            code, constants = compile_into(Path(scratch))
            strip_debug(code, folder / CODE)
        facts = {
            "constants": constants, "missing": sorted(missing(folder / CODE)), "seconds": time.perf_counter() - start,
        }  # fmt: skip
        (folder / FACTS).write_text(json.dumps(facts))

    cache.put(KIND, key, fill)
    return find_compiled(cache, key, cached=False)


def is_prepared(cache: ContentCache) -> bool:
    """Whether ``prepare`` has been called for this machine and cache."""
    return are_built(cache)


def smallest_method() -> ExportedProgram:
    """Something to compile for its side effects."""
    with torch.no_grad():
        return torch.export.export(torch.nn.Softplus(), (torch.zeros(16, 16),))


def prepare(cache: ContentCache) -> None:
    """Has the libraries built, and the compiler make what it makes once: precompiled headers, which take it longer than
    a block does.
    """
    libraries = build_libraries(cache)
    smallest = smallest_method()
    with inductor_environment(cache, libraries.folder), tempfile.TemporaryDirectory(prefix="eyas-") as scratch:
        run_inductor(smallest, HOSTS["cpu"][0], libraries, Path(scratch))


def as_method(block: Block) -> ExportedProgram:
    """A block as a program that holds its constants, so that they are compiled as such: fake tensors, by the names of
    the block's inputs.
    """
    ep, n = block.program, block.n_constants + block.n_written
    placeholders = [node for node in ep.graph.nodes if node.op == "placeholder"]
    specs = [
        InputSpec(InputKind.BUFFER, spec.arg, spec.arg.name, persistent=True) if i < n else spec
        for i, spec in enumerate(ep.graph_signature.input_specs)
    ]
    inputs = [spec.arg for spec in specs[n:]]
    outputs = [spec.arg for spec in ep.graph_signature.output_specs]
    spec_of = ModuleCallSignature(
        inputs, outputs, tree_flatten((tuple(inputs), {}))[1], tree_flatten(tuple(outputs))[1]
    )  # fmt: skip
    return ExportedProgram(
        ep.graph_module, ep.graph, ExportGraphSignature(specs, list(ep.graph_signature.output_specs)),
        {node.name: node.meta["val"] for node in placeholders[:n]}, dict(ep.range_constraints),
        [ModuleCallEntry("", spec_of)], verifiers=ep.verifiers,
    )  # fmt: skip


def strip_debug(source: Path, out: Path) -> None:
    """Copies native code without the symbols that no loader needs, and without the hash of all that it held."""
    tool = shutil.which("strip")
    if tool is None:
        shutil.copyfile(source, out)
    else:
        run([tool, "--strip-all", "--remove-section=.note.gnu.build-id", "-o", str(out), str(source)])


def refuse_without_body(ep: ExportedProgram) -> None:
    """Raises ``RuntimeError`` for an operator that is not torch's, is not made of torch's, and has no C++ body."""
    refuse_operators(ep, c_shims(), "C++ body for cpu")


def refuse_operators(ep: ExportedProgram, bodies: Collection[torch._ops.OpOverload], what: str) -> None:
    """Raises ``RuntimeError`` for an operator that is not torch's, is not made of torch's and is none of ``bodies``.
    ``what`` it lacks.
    """
    lacking = {
        node.target: source_line(node)
        for node in ep.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace not in ("aten", "prims")
        and node.target not in bodies
        and not torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), "CompositeImplicitAutograd")
    }
    if lacking:
        named = ", ".join(f"{operator} ({line})" for operator, line in lacking.items())
        kind, has = ("operator", "has") if len(lacking) == 1 else ("operators", "have")
        raise RuntimeError(
            f"{kind} {named} {has} no {what}, so a program with {'it' if len(lacking) == 1 else 'them'} could not run; "
            f"allowed: torch's own and {', '.join(map(str, bodies))}; a pass has to replace "
            f"{'it' if len(lacking) == 1 else 'them'}"
        )


def refuse_strided_constants(ep: ExportedProgram) -> None:
    """Raises ``RuntimeError`` for a constant that is not dense in row-major order, as the data file stores them all."""
    for name, spec in constant_specs(ep):
        value = constant_value(ep, spec)
        if not value.is_contiguous():
            raise RuntimeError(
                f"constant {name!r} has sizes {list(value.shape)} and strides {list(value.stride())}; only dense "
                f"row-major tensors can be stored: register its contiguous()"
            )


def missing_from_host(code: Path, libraries: KernelLibraries) -> set[str]:
    """Functions of torch that a method needs and the small host does not have."""
    needed = {
        name
        for name in undefined_symbols(code)
        if name.startswith(("aoti_", "Sleef_")) or "at6" in name or "c10" in name
    }
    return needed - defined_symbols(libraries.host)


@contextlib.contextmanager
def inductor_environment(cache: ContentCache, libraries: Path | None = None) -> Iterator[None]:
    """Points the compiler at a folder of libraries, and its own working files at our cache."""
    values = {"TORCHINDUCTOR_CACHE_DIR": str(cache.root / WORKING)}
    if libraries is not None:
        values["LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(libraries), os.environ.get("LIBRARY_PATH")]))
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run_inductor(ep: ExportedProgram, host: str, libraries: KernelLibraries, folder: Path) -> tuple[Path, list[str]]:
    """The shared library, made in ``folder``, and the names of the constants that it needs. Raises ``RuntimeError`` for
    a constant that no buffer holds.
    """
    linked = [LIBRARY] if host == "torch" else [LIBRARY, libraries.host.stem.removeprefix("lib")]
    options = {
        "aot_inductor.custom_ops_to_c_shims": c_shims(),
        "aot_inductor.custom_op_libs": linked,
        "aot_inductor.link_libtorch": host == "torch",
    }
    code, constants, _ = aot_compile(ep, options, folder)
    return code, constants


def aot_compile(ep: ExportedProgram, options: Mapping[str, object], folder: Path) -> tuple[Path, list[str], list[Path]]:
    """The shared library, the names of the constants that it needs, and the other files that came with it. ``options``
    of the compiler, beside ``OPTIONS``. Raises ``RuntimeError`` for a constant that no buffer holds.
    """
    inputs = tuple(
        node.meta["val"]
        for node in ep.graph.nodes
        if node.op == "placeholder" and node.name in ep.graph_signature.user_inputs
    )
    # a folder of its own: equal parts of two blocks have files of equal names
    options = {**OPTIONS, **options, "aot_inductor.output_path": str(folder)}
    with torch.no_grad(), fake_constants_allowed():
        results = torch._inductor.aot_compile(ep.module(), inputs, options=options)
    files = [Path(r) for r in results if isinstance(r, str)]
    code = next(file for file in files if file.suffix == ".so")
    constants = list(next(r for r in results if not isinstance(r, str)))
    if unknown := [name for name in constants if name not in ep.state_dict]:
        raise RuntimeError(
            f"the compiler made a constant {unknown[0]!r} that no buffer of the model holds; register it as a buffer"
        )
    return code, constants, [file for file in files if file != code]


@contextlib.contextmanager
def fake_constants_allowed() -> Iterator[None]:
    """Lets the compiler compare constants that are fake tensors, which it does by their addresses.

    A method is compiled without its weights in memory. To be removed once ``is_same_tensor`` of torch's inductor does
    not read the address of a fake tensor; ``tests/test_aoti_cpu.py`` says when.
    """
    import torch._inductor.graph as graph  # seconds, which a program found in the cache need not wait for

    stock = graph.is_same_tensor

    def is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a is b if isinstance(a, FakeTensor) or isinstance(b, FakeTensor) else stock(a, b)

    graph.is_same_tensor = is_same_tensor
    try:
        yield
    finally:
        graph.is_same_tensor = stock


def release_constants(ep: ExportedProgram) -> None:
    """Puts fake tensors in the place of a method's constants: it can still be compiled, but no longer run."""
    for name, node in constant_nodes(ep).items():
        store = ep.constants if name in ep.constants else ep.state_dict
        fake = node.meta["val"]
        store[name] = torch.nn.Parameter(fake, False) if isinstance(store[name], torch.nn.Parameter) else fake


def payload_constant(device: str, local: str, name: str, value: torch.Tensor) -> Constant:
    """What native code for ``device`` is told of a constant that it calls ``local``: ``value`` (real or fake) is the
    one called ``name`` in the data file.
    """
    return Constant(
        name=local,
        storage_key=storage_key(device, name),
        nbytes=value.numel() * value.element_size(),
        dtype=SCALAR_TYPES[value.dtype],
        device_type=DEVICE_TYPES[device],
        offset=0,
        sizes=tuple(value.shape),
        strides=tuple(value.stride()),
    )


SCALAR_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
    torch.float32: 6, torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip

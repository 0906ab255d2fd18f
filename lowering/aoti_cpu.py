"""Compiles one method for cpu with AOTInductor: native code without constants, cached by what it was compiled from."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch._inductor.graph
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from eyas.lowering.content_cache import ContentCache, key_of
from eyas.lowering.cpu_kernels import (
    LIBRARY,
    KernelLibraries,
    build_libraries,
    c_shims,
    defined_symbols,
    undefined_symbols,
)
from eyas.lowering.environment import machine, versions
from eyas.passes.base import source_line
from eyas.passes.printer import SMALL, print_method
from eyas.passes.program import constant_nodes, constant_specs, constant_value
from eyas.runtime.payload import DEVICE_TYPES, Constant, storage_key

HOSTS = ("eyas", "torch")  # who implements AOTInductor's C interface for a program; see ``eyas.runtime.native.Host``


@dataclass(frozen=True)
class CompiledMethod:
    """``code``: the shared library's file. ``constants``: what it must be given. ``cached``: whether nothing was
    compiled.

    ``missing``: functions that the host it was linked for does not have; the method runs only if there are none.
    """

    code: Path
    constants: tuple[Constant, ...]
    cached: bool
    missing: tuple[str, ...]


OPTIONS = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
}


def compile_method(ep: ExportedProgram, cache: ContentCache, host: str = "eyas") -> CompiledMethod:
    """Compiles a method whose graph passes have finished, for a host of ``HOSTS``. Raises ``RuntimeError`` for an
    operator that cannot be compiled.

    The cache key is the method's printed graph, the shapes of its constants and all of the small ones' values, the
    options, the versions and the machine: not the weights, which the native code never holds.
    """
    refuse_without_body(ep)
    refuse_strided_constants(ep)
    libraries = build_libraries(cache)
    graph = print_method(ep, with_values=True)
    key = key_of(graph, OPTIONS, host, machine(), versions(), libraries.key, Path(__file__).read_text())

    def fill(folder: Path) -> None:
        with inductor_environment(cache, libraries):
            code, constants = run_inductor(ep, host, libraries)
            shutil.copyfile(code, folder / "method.so")
            shutil.rmtree(code.parent, ignore_errors=True)
        missing = () if host == "torch" else missing_from_host(folder / "method.so", libraries)
        facts = {"constants": [asdict(c) for c in constants], "missing": sorted(missing)}
        (folder / "facts.json").write_text(json.dumps(facts))

    folder, cached = cache.get_or_put("methods", key, fill)
    facts = json.loads((folder / "facts.json").read_text())
    constants = tuple(
        Constant(**{**c, "sizes": tuple(c["sizes"]), "strides": tuple(c["strides"])}) for c in facts["constants"]
    )
    return CompiledMethod(folder / "method.so", constants, cached, tuple(facts["missing"]))


def refuse_without_body(ep: ExportedProgram) -> None:
    """Raises ``RuntimeError`` for an operator that is not torch's, is not made of torch's, and has no C++ body."""
    bodies = c_shims()
    lacking = {
        node.target: source_line(node)
        for node in ep.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace not in ("aten", "prims")
        and node.target not in bodies
        and not torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), "CompositeImplicitAutograd")
    }
    if lacking:
        operator, line = next(iter(lacking.items()))
        raise RuntimeError(
            f"operator {operator} ({line}) has no C++ body for cpu, so a program with it could not run; "
            f"allowed: torch's own and {', '.join(map(str, bodies))}; a pass has to replace it"
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
def inductor_environment(cache: ContentCache, libraries: KernelLibraries) -> Iterator[None]:
    """Points the compiler at our libraries, and its own working files at our cache."""
    values = {
        "LIBRARY_PATH": os.pathsep.join(filter(None, [str(libraries.folder), os.environ.get("LIBRARY_PATH")])),
        "TORCHINDUCTOR_CACHE_DIR": str(cache.root / "inductor"),
    }
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


def run_inductor(ep: ExportedProgram, host: str, libraries: KernelLibraries) -> tuple[Path, list[Constant]]:
    """The shared library and its constants. Raises ``RuntimeError`` for a constant that no buffer holds."""
    inputs = tuple(
        node.meta["val"]
        for node in ep.graph.nodes
        if node.op == "placeholder" and node.name in ep.graph_signature.user_inputs
    )
    linked = [LIBRARY] if host == "torch" else [LIBRARY, libraries.host.stem.removeprefix("lib")]
    options = {
        **OPTIONS,
        "aot_inductor.custom_ops_to_c_shims": c_shims(),
        "aot_inductor.custom_op_libs": linked,
        "aot_inductor.link_libtorch": host == "torch",
    }
    with torch.no_grad(), fake_constants_allowed():
        results = torch._inductor.aot_compile(ep.module(), inputs, options=options)
    code = next(Path(r) for r in results if isinstance(r, str) and r.endswith(".so"))
    weights = next(r for r in results if not isinstance(r, str))
    known = {name: constant_value(ep, spec) for name, spec in constant_specs(ep)}
    constants = []
    for name in weights:
        if name not in known:
            raise RuntimeError(
                f"the compiler made a constant {name!r} that no buffer of the model holds; register it as a buffer"
            )
        tensor = known[name]
        constants.append(
            Constant(
                name=name,
                storage_key=storage_key("cpu", name),
                nbytes=tensor.numel() * tensor.element_size(),
                dtype=SCALAR_TYPES[tensor.dtype],
                device_type=DEVICE_TYPES["cpu"],
                offset=0,
                sizes=tuple(tensor.shape),
                strides=tuple(tensor.stride()),
            )
        )
    return code, constants


@contextlib.contextmanager
def fake_constants_allowed() -> Iterator[None]:
    """Lets the compiler compare constants that are fake tensors, which it does by their addresses.

    A method is compiled without its weights in memory. To be removed once ``is_same_tensor`` of torch's inductor does
    not read the address of a fake tensor; ``tests/test_aoti_cpu.py`` says when.
    """
    graph = torch._inductor.graph
    stock = graph.is_same_tensor

    def is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a is b if isinstance(a, FakeTensor) or isinstance(b, FakeTensor) else stock(a, b)

    graph.is_same_tensor = is_same_tensor
    try:
        yield
    finally:
        graph.is_same_tensor = stock


def release_constants(ep: ExportedProgram) -> None:
    """Puts fake tensors in the place of a method's large constants: it can still be compiled, but no longer run.

    Small ones stay, as the compiler writes some of them into the code.
    """
    for name, node in constant_nodes(ep).items():
        store = ep.constants if name in ep.constants else ep.state_dict
        fake = node.meta["val"]
        if fake.numel() > SMALL:
            store[name] = torch.nn.Parameter(fake, False) if isinstance(store[name], torch.nn.Parameter) else fake


SCALAR_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
    torch.float32: 6, torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip

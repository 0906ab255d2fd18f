"""One block at a time: what cannot be compiled is named, native code holds no weights, and what it needs is there."""

import gc
import os
import re
import shutil
import subprocess
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._inductor.exc
import torch._inductor.graph
from conftest import Notes
from ir import ROWS, Function, export, randn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram

from eyas.kernels import CPU_OPERATORS
from eyas.kernels.panel_linear import pack_panels
from eyas.lowering import aoti_cpu, cpu_kernels
from eyas.lowering.aoti_cpu import (
    CompiledBlock,
    compile_block,
    fake_constants_allowed,
    refuse_strided_constants,
    refuse_without_body,
    release_constants,
)
from eyas.lowering.chains import chain_of
from eyas.lowering.compile_pool import CompilePool
from eyas.lowering.content_cache import ContentCache
from eyas.lowering.cpu_kernels import build_libraries, c_shims, defined_symbols, undefined_symbols
from eyas.lowering.lower import Lowering, Request
from eyas.passes.outline_blocks import OutlineBlocks
from eyas.passes.program import Block, Program
from eyas.runtime.cuda_native import CudaContainer, handles_of, tensors_of
from eyas.runtime.native import Container, Host, Tensor
from eyas.runtime.payload import name_of

LIBRARY = torch.library.Library("eyas_test", "DEF")
LIBRARY.define("double(Tensor x) -> Tensor")
LIBRARY.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")

WIDTH = 64
X, POSITIONS = randn(ROWS, WIDTH), torch.arange(ROWS)


def step(module, x, positions):
    """Writes a cache, reads it, and scales by what large, middling and few constants say."""
    module.cache.index_copy_(0, positions, x)
    scale = (module.large * module.few.sum()).sum(1) + module.middling.sum()
    linear = torch.ops.eyas.panel_linear(x, module.panels, WIDTH)
    return module.cache[positions] * scale + linear, positions + 1


def tensors(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "large": randn(WIDTH, 1 << 14, seed=2), "middling": randn(20, seed=3), "few": torch.tensor([0.5, 3.0, -1.0]),
        "cache": torch.zeros(24, WIDTH), "panels": pack_panels(randn(WIDTH, WIDTH, seed=4)), **changes,
    }  # fmt: skip


def method(function: Callable = step, **constants: torch.Tensor) -> ExportedProgram:
    return export(Function(function, **constants), X, POSITIONS)


def program(function: Callable = step, **constants: torch.Tensor) -> Program:
    """A program of one method, which is one block."""
    made = Program({"forward": method(function, **constants)})
    OutlineBlocks(unrolled=True).run(made)
    return made


def block(function: Callable = step, **constants: torch.Tensor) -> Block:
    (only,) = program(function, **constants).blocks.values()
    return only


@pytest.fixture(scope="module")
def shared(cache) -> ContentCache:
    return ContentCache(cache)


@pytest.fixture
def own(shared, tmp_path) -> ContentCache:
    """A cache with nothing but the kernels."""
    build_libraries(shared)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cpu_kernels").symlink_to(shared.root / "cpu_kernels")
    return ContentCache(tmp_path / "cache")


@pytest.fixture(scope="module")
def compiled(shared) -> CompiledBlock:
    return compile_block(block(**tensors()), shared)


@pytest.fixture
def no_compiler(monkeypatch) -> None:
    """Whoever compiles from now on fails."""

    def run_inductor(*args):
        raise InterruptedError("compiles")

    monkeypatch.setattr(aoti_cpu, "run_inductor", run_inductor)


def run(made: CompiledBlock, source: Program, host: Host, constants: Mapping[str, torch.Tensor], *inputs) -> list:
    """The results of one call. ``constants`` are used in place."""
    (step,) = chain_of("forward", source, dict.fromkeys(source.blocks, made)).steps
    container = Container(host, made.code)
    container.bind({c.name: Tensor.of(host, constants[name_of(c.storage_key)].numpy()) for c in step.constants})
    return [out.array for out in container.run([Tensor.of(host, value.numpy()) for value in inputs])]


# Operators without a body


def test_an_operator_that_could_not_run_is_named_with_its_line(shared, no_compiler):
    def forward(module, x, positions):
        return torch.ops.eyas_test.double(x) + positions[:, None]

    line = forward.__code__.co_firstlineno + 1
    with pytest.raises(RuntimeError) as caught:
        compile_block(block(forward), shared)
    said = str(caught.value)
    assert said.startswith("operator eyas_test.double.default (") and f"{Path(__file__).name}:{line}" in said
    assert "has no C++ body for cpu" in said and "allowed: torch's own and eyas.masked_sdpa.default" in said
    assert "a pass has to replace it" in said


def test_the_models_own_projections_must_be_replaced():
    """``panel_linear`` puts operators with bodies in their place."""
    q, scales = torch.ones(16, WIDTH, dtype=torch.int8), torch.ones(16)
    ep = method(lambda m, x, p: torch.ops.eyas.int8_linear(x, m.q, m.scales), q=q, scales=scales)
    with pytest.raises(RuntimeError, match=r"operator eyas\.int8_linear\.default"):
        refuse_without_body(ep)


def test_operators_that_can_run():
    """torch's own, those made of torch's, and ours."""
    refuse_without_body(method(lambda m, x, p: torch.ops.eyas_test.twice(x).cumsum(0).sort(1)[0]))
    refuse_without_body(method(**tensors()))


def test_every_operator_with_a_body_is_declared_as_the_library_has_it(shared):
    declared = {shim.split("(")[0].split()[-1]: shim for shims in c_shims().values() for shim in shims}
    assert set(declared) == {f"aoti_torch_cpu_{name}" for name in CPU_OPERATORS}
    assert set(declared) <= defined_symbols(build_libraries(shared).kernels)
    assert declared["aoti_torch_cpu_panel_int4_linear"] == (
        "AOTITorchError aoti_torch_cpu_panel_int4_linear(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, "
        "int64_t, int64_t, AtenTensorHandle*)"
    )


# Constants


def test_native_code_holds_no_weights(compiled):
    code, made = compiled.code.read_bytes(), tensors()
    assert len(code) < made["large"].nbytes
    for name in ("large", "middling", "panels"):
        raw = made[name].numpy().tobytes()
        assert not any(raw[at : at + 16] in code for at in range(0, min(len(raw), 4096), 16)), name
    assert len(code) < 3e6


def test_constants_go_by_their_names(compiled):
    made, source = tensors(), program(**tensors())
    (step,) = chain_of("forward", source, dict.fromkeys(source.blocks, compiled)).steps
    constants = {name_of(c.storage_key): c for c in step.constants}
    assert set(constants) == set(made) and {c.name for c in step.constants} == set(compiled.constants)
    assert constants["cache"].name == "written_0"
    for name, c in constants.items():
        value = made[name]
        assert (c.storage_key, c.nbytes) == (f"cuda_fqn_weight:cpu:{name}", value.nbytes)
        assert (c.dtype, c.device_type, c.offset) == (6, 0, 0)
        assert (c.sizes, c.strides) == (tuple(value.shape), value.stride())


@pytest.mark.parametrize("rows", [1, 2, ROWS, 16])
def test_it_computes_what_the_graph_does(rows, compiled, shared):
    """For every number of rows, with the weights that it is given, which need not be those it was compiled with."""
    host, source = Host.load(build_libraries(shared).host), program(**tensors())
    others = {"large": randn(WIDTH, 1 << 14, seed=9), "few": torch.tensor([2.0, 0.0, -1.0])}
    for changes in ({}, others):
        ours, eager = tensors(**changes), tensors(**changes)
        x, where = randn(rows, WIDTH, seed=rows), torch.arange(rows) + 3
        want, following = method(**eager).module()(x, where)
        got = run(compiled, source, host, ours, x, where)
        np.testing.assert_allclose(got[0], want.numpy(), rtol=1e-4, atol=1e-3)
        np.testing.assert_array_equal(got[1], following.numpy())
        assert torch.equal(ours["cache"][3 : 3 + rows], x) and not ours["cache"][3 + rows :].any()


def test_a_constant_that_is_missing(compiled, shared):
    container = Container(Host.load(build_libraries(shared).host), compiled.code)
    with pytest.raises(ValueError, match="needs constants that the program does not have: constant_0, cons"):
        container.bind({})


def test_constants_that_are_not_dense():
    """The data file has them all in row-major order, so native code that expects another would read wrong values."""
    turned = tensors(middling=randn(4, 5).T, large=randn(WIDTH, 9), panels=pack_panels(randn(WIDTH, WIDTH)))
    with pytest.raises(RuntimeError, match=r"constant 'middling' has sizes \[5, 4\] and strides \[1, 5\]; only dense"):
        refuse_strided_constants(method(**turned))
    refuse_strided_constants(method(**tensors()))


def test_a_constant_that_the_compiler_made(shared, own, monkeypatch):
    monkeypatch.setattr(torch._inductor, "aot_compile", lambda *args, **options: ["method.so", {"_frozen_param0": 0}])
    with pytest.raises(RuntimeError, match="the compiler made a constant '_frozen_param0' that no buffer of the model"):
        compile_block(block(**tensors()), own)
    assert not list(own.root.glob("blocks/*"))


def test_releasing_lets_every_value_go():
    ep = method(**tensors())
    release_constants(ep)
    assert ep.state_dict and all(isinstance(value, FakeTensor) for value in ep.state_dict.values())
    ep = export(torch.nn.Linear(WIDTH, 1 << 10, bias=False), X)
    release_constants(ep)
    assert isinstance(ep.state_dict["weight"], torch.nn.Parameter) and not ep.state_dict["weight"].requires_grad


# The cache


def decide(**changes):
    return pytest.param(changes, id=next(iter(changes)))


SAME = [
    decide(nothing=None),
    decide(large=randn(WIDTH, 1 << 14, seed=7)),
    decide(cache=torch.ones(24, WIDTH)),
    decide(few=torch.tensor([0.5, 3.0, -2.0])),
]
OTHER = [
    decide(few=torch.tensor([0.5, 3.0])),
    decide(large=randn(WIDTH, (1 << 14) + 1)),
    decide(cache=torch.zeros(25, WIDTH)),
    decide(function=lambda module, x, positions: step(module, x, positions)[0]),
    decide(function=lambda module, x, positions: step(module, x, positions + 1)),
]


@pytest.mark.parametrize("changes", SAME)
def test_other_weights_are_compiled_already(changes, compiled, shared, no_compiler):
    changes = {name: value for name, value in changes.items() if value is not None}
    again = compile_block(block(**tensors(**changes)), shared)
    assert again.cached and (again.code, again.constants) == (compiled.code, compiled.constants)


def test_other_names_are_compiled_already(compiled, shared, no_compiler):
    """Another model that has the block elsewhere."""

    def renamed(module, x, positions):
        module.cache.index_copy_(0, positions, x)
        scale = (module.big * module.three.sum()).sum(1) + module.middling.sum()
        linear = torch.ops.eyas.panel_linear(x, module.weight, WIDTH)
        return module.cache[positions] * scale + linear, positions + 1

    made = tensors()
    made = {{"large": "big", "few": "three", "panels": "weight"}.get(name, name): t for name, t in made.items()}
    assert compile_block(block(renamed, **made), shared).code == compiled.code


@pytest.mark.parametrize("changes", OTHER)
def test_another_block_is_not(changes, compiled, shared, no_compiler):
    function = changes.pop("function", step)
    with pytest.raises(InterruptedError):
        compile_block(block(function, **tensors(**changes)), shared)


@pytest.mark.parametrize("what", ["host", "OPTIONS", "versions", "machine"])
def test_what_else_decides(what, compiled, shared, no_compiler, monkeypatch):
    if what != "host":
        other = {"other": 1}
        monkeypatch.setattr(aoti_cpu, what, other if what == "OPTIONS" else lambda: other)
    with pytest.raises(InterruptedError):
        compile_block(block(**tensors()), shared, "torch" if what == "host" else "eyas")


def test_other_kernels_compile_anew(compiled, shared, no_compiler, monkeypatch, tmp_path):
    libraries = build_libraries(shared)
    other = cpu_kernels.KernelLibraries(tmp_path / "0123", libraries.host)
    monkeypatch.setattr(aoti_cpu, "build_libraries", lambda cache: other)
    with pytest.raises(InterruptedError):
        compile_block(block(**tensors()), shared)


def test_the_kernels_are_built_once(shared, monkeypatch, tmp_path):
    """And anew for another compiler or other sources."""
    libraries = build_libraries(shared)
    assert libraries.kernels.is_file() and libraries.host.is_file() and (libraries.folder / "libeyas_cpu.a").is_file()
    assert libraries.host.name == f"libeyas_host_{libraries.key[:12]}.so"

    def run(command):
        raise InterruptedError

    monkeypatch.setattr(cpu_kernels, "run", run)
    assert build_libraries(shared) == libraries
    other = Path(shutil.copytree(cpu_kernels.SOURCES, tmp_path / "sources"))
    (other / "panels.h").write_text((other / "panels.h").read_text() + "\n")
    for name, value in (("machine", dict), ("SOURCES", other)):
        with monkeypatch.context() as patch, pytest.raises(InterruptedError):
            patch.setattr(cpu_kernels, name, value)
            build_libraries(shared)


def test_no_compiler_or_one_that_fails(monkeypatch):
    def missing():
        raise torch._inductor.exc.InvalidCxxCompiler()

    with pytest.raises(RuntimeError, match=r"building the cpu kernels failed: .*-c nothing\.cpp"):
        cpu_kernels.run([cpu_kernels.compiler(), "-c", "nothing.cpp"])
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    with pytest.raises(RuntimeError, match=r"no compiler was found; install g\+\+ \(or clang\+\+\) or set CXX"):
        cpu_kernels.compiler()


def test_the_environment_is_as_before(own, monkeypatch):
    """The compiler works in our cache, and finds our libraries, for as long as it runs."""
    names = ("LIBRARY_PATH", "TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("LIBRARY_PATH", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = [os.environ.get(name) for name in names]

    def run_inductor(*args):
        folder = build_libraries(own).folder
        assert [os.environ[name] for name in names] == [f"{folder}{os.pathsep}mine", str(own.root / "inductor")]
        raise InterruptedError

    monkeypatch.setattr(aoti_cpu, "run_inductor", run_inductor)
    with pytest.raises(InterruptedError):
        compile_block(block(**tensors()), own)
    assert [os.environ.get(name) for name in names] == before
    assert not list(own.root.glob("blocks/*"))


def test_compiling_again_gives_the_same_code(compiled, own):
    """Also with another cache, at another place; it names the folder that its sources were in, but not the cache."""
    again = compile_block(block(**tensors()), own)
    assert not again.cached and again.code.stat().st_size == compiled.code.stat().st_size
    assert again.constants == compiled.constants and str(own.root).encode() not in again.code.read_bytes()


def test_a_damaged_entry_is_compiled_anew(compiled, own):
    made = compile_block(block(**tensors()), own)
    intact = made.code.stat().st_size
    made.code.write_bytes(made.code.read_bytes()[:-100])
    again = compile_block(block(**tensors()), own)
    assert not again.cached and again.code.stat().st_size == intact


# Hosts


def needs_torch(module, x, positions):
    """Sorting is a function of torch's library."""
    return (x * module.large[:, 0]).sort(1)[0] + positions[:, None]


def compile_program(source: Program, cache: ContentCache) -> tuple[Lowering, dict[str, CompiledBlock], Path | None]:
    lowering = Lowering(Request("tiny_gemma3", Path("nowhere"), cache=cache.root), Notes())
    with CompilePool(cache, 1) as pool:
        return lowering, *lowering.compile(source, pool)


def test_a_block_that_needs_torch_gets_it(shared):
    """Told by name, compiled anew for torch's library, and run with it."""
    constants = {"large": randn(WIDTH, 100)}
    source = program(needs_torch, **constants)
    (key,) = source.blocks
    small = compile_block(source.blocks[key], shared)
    assert small.missing and all("sort" in name for name in small.missing)
    lowering, made, host = compile_program(source, shared)
    assert host is None and not made[key].missing and made[key].code != small.code
    note = lowering.progress.notes[0]
    assert note.startswith(f"block {key} needs torch's aoti_torch_cpu_sort")
    assert note.endswith("the program will need torch to run")
    want = method(needs_torch, **constants).module()(X, POSITIONS)
    for rows in (slice(None), slice(2, 3)):
        (got,) = run(made[key], source, Host.torch(), constants, X[rows], POSITIONS[rows])
        np.testing.assert_allclose(got, want[rows].numpy(), rtol=1e-6)


class ByTorch(CudaContainer):
    """Code that runs on torch's tensors, as on a card, but on the host."""

    device = b"cpu"

    def run(self, inputs):
        return tensors_of(self.run_handles(handles_of(inputs)))


def test_a_block_runs_on_tensors_of_torch(shared):
    """The way of a card's blocks: handles of torch's tensors go in and come out, and none is lost."""
    constants = {"large": randn(WIDTH, 100)}
    source = program(needs_torch, **constants)
    _, made, _ = compile_program(source, shared)
    (one,) = made.values()
    container = ByTorch(one.code)
    assert set(container.constants) == set(one.constants)
    container.bind(dict.fromkeys(container.constants, constants["large"]))
    want = method(needs_torch, **constants).module()(X, POSITIONS)
    for rows in (slice(None), slice(2, 3)):
        (got,) = container.run([X[rows], POSITIONS[rows]])
        torch.testing.assert_close(got, want[rows], rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="needs constants that the program does not have: constant_0"):
        container.bind({})
    held = weakref.ref(got)
    del got, container
    gc.collect()
    assert held() is None


def test_a_block_that_does_not_runs_without(compiled, shared):
    assert compiled.missing == ()
    linked = subprocess.run(["readelf", "-d", compiled.code], capture_output=True, text=True, check=True).stdout
    libraries = build_libraries(shared)
    assert f"[{libraries.host.name}]" in linked and "libtorch" not in linked and "libc10" not in linked
    needed = {name for name in undefined_symbols(compiled.code) if name.startswith("aoti_")}
    assert needed and needed <= defined_symbols(libraries.host)
    source = Program({"first": method(**tensors()), "second": method(**tensors())})
    OutlineBlocks(unrolled=True).run(source)
    (key,) = source.blocks
    lowering, made, host = compile_program(source, shared)
    assert host == libraries.host and set(made) == {key} and made[key].cached
    (note,) = lowering.progress.notes
    assert re.fullmatch(rf"block {key}: \d+ nodes, called 2 times, found in the cache \(\d+\.\d s\)", note)
    (facts,) = lowering.report.blocks
    assert (facts["calls"], facts["cached"], facts["bytes"]) == (2, True, compiled.code.stat().st_size)


# A workaround


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_patch_of_is_same_tensor_is_still_needed():
    """Two fake constants of one shape are two constants; torch's own comparison reads addresses they do not have."""
    stock = torch._inductor.graph.is_same_tensor
    with FakeTensorMode():
        a, b = torch.zeros(9), torch.zeros(9)
    try:
        right = (stock(a, a), stock(a, b)) == (True, False)
    except RuntimeError:
        right = False
    assert not right, "torch compares fake tensors itself: fake_constants_allowed in lowering/aoti_cpu.py can go"
    with fake_constants_allowed():
        patched = torch._inductor.graph.is_same_tensor
        real, other = torch.zeros(9), torch.zeros(9)
        assert patched(a, a) and not patched(a, b) and not patched(a, real) and not patched(real, a)
        assert patched(real, real[:]) and not patched(real, other)
    assert torch._inductor.graph.is_same_tensor is stock
    with pytest.raises(KeyError), fake_constants_allowed():
        raise KeyError
    assert torch._inductor.graph.is_same_tensor is stock

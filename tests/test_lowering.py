"""Lowering as a whole: what it refuses, what it leaves behind, what it takes from the cache, and what it says."""

import copy
import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import chain_target
import numpy as np
import pytest
import torch
from conftest import Lowered, Notes, eager_speculator, lower_quietly

from eyas.lowering import data_file, executorch_program, source_hash
from eyas.lowering import lower as lower_module
from eyas.lowering.content_cache import ContentCache, default_root, file_sha256, key_of
from eyas.lowering.lower import Lowering, Request, lower
from eyas.lowering.pipelines import FINISH, OPTIMISE, pipeline_for
from eyas.models import tiny_targets
from eyas.models.eagle3_checkpoint import expected_shapes, write_head
from eyas.models.speculator import greedy_reference
from eyas.models.target import TARGETS
from eyas.passes.registry import pipeline_text
from eyas.runtime.artifact import DATA, MANIFEST, PROGRAM, TOKENIZER, Artifact
from eyas.runtime.container_files import DataFile, ProgramFile
from eyas.runtime.decoding import GreedyDecoder, SpeculativeDecoder, positions, tokens
from eyas.runtime.memory import peak_rss
from eyas.runtime.payload import decode
from eyas.runtime.selfcheck import inputs_of

FILES = (PROGRAM, DATA, TOKENIZER)
SMALL = replace(TARGETS["tiny_gemma3"], name="small", options={"family": "gemma3", "n_layers": 1})
IDS = [2, 40, 17, 99, 5, 3, 77, 64, 21]


@pytest.fixture(scope="module", autouse=True)
def targets() -> Iterator[None]:
    """``small``: one layer. ``other``: the same with other weights."""
    other = replace(SMALL, name="other", options={**SMALL.options, "seed": 5})
    with pytest.MonkeyPatch.context() as patch:
        for spec in (SMALL, other):
            patch.setitem(TARGETS, spec.name, spec)
        yield


@pytest.fixture(scope="module")
def small(artifacts, targets) -> Lowered:
    """Lowered without the optional passes."""
    out = artifacts / "small"
    return lower_quietly(Request("small", out, passes="", max_seq_len=64, max_prefill=8, max_chain=3, chain=2))


@pytest.fixture
def request_of(small, tmp_path):
    """The request of ``small`` with changes, for a folder of its own."""
    return lambda **changes: replace(small.request, **{"out": tmp_path / "out", **changes})


@pytest.fixture
def own_cache(cache, small, tmp_path_factory) -> Path:
    """A cache that has compiled methods, but no programs."""
    root = tmp_path_factory.mktemp("own_cache")
    for kind in ("blocks", "cpu_kernels"):
        (root / kind).symlink_to(cache / kind)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def text(decoder: GreedyDecoder, new: int, **options) -> list[int]:
    return [t for block in decoder.generate(IDS, new, (), **options) for t in block]


# Requests


WRONG = [
    ({"target": "gemma5"}, "unknown target 'gemma5'; allowed: gemma3_270m, .*tiny_gemma3"),
    ({"passes": "split_copy"}, "unknown pass 'split_copy'; did you mean: split_copy_to_slice"),
    ({"passes": "masked_sdpa{x=1}"}, "pass 'masked_sdpa' has no option 'x=1'; allowed: "),
    ({"quant": "int3"}, "unknown recipe 'int3'; allowed: none, int8, int4, or the path of a recipe file"),
    ({"methods": ("target_logits", "decode")}, "unknown extra method 'decode'; allowed: target_logits"),
    ({"device": "tpu"}, "unknown device 'tpu'; allowed: cpu, cuda"),
    ({"max_seq_len": 1}, "--max-seq-len must be at least 2 .*, got 1"),
    ({"max_seq_len": 4097}, "--max-seq-len is 4097; the target was made for 4096 positions"),
    ({"max_prefill": 9}, "--max-prefill is 9; the target's caches take 1 to 8 rows a call"),
    ({"max_prefill": 0}, "--max-prefill is 0; the target's caches take 1 to 8 rows a call"),
    ({"max_prefill": -1}, "--max-prefill is -1"),
    ({"max_seq_len": 6}, "--max-prefill is 8; the target's caches take 1 to 6 rows"),
    ({"max_chain": 8}, "--max-chain plus one is 9; the target's caches take 1 to 8 rows"),
    ({"max_chain": 0, "chain": 0}, "--max-chain must be at least 1, got 0"),
    ({"chain": 4}, r"--chain must lie in 1\.\.3, got 4"),
    ({"chain": 0}, r"--chain must lie in 1\.\.3, got 0"),
    ({"checkpoint": Path("x")}, "tiny targets are random and take no checkpoint, got x"),
    ({"target": "gemma4_31b"}, r"this target \(gemma4\) has no packaged checkpoint; give one with --checkpoint"),
    ({"target": "gemma3_270m", "checkpoint": Path("nowhere.gguf")}, "no checkpoint at nowhere.gguf; expected a .gguf"),
    ({"draft": "nowhere"}, "no folder nowhere; expected one with config.json"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_the_user_can_put_right(changes, message, tmp_path, monkeypatch):
    """Said before anything is traced, and nothing is left."""
    monkeypatch.setattr(lower_module, "trace_methods", lambda *args: pytest.fail("went on"))
    request = Request("small", tmp_path / "out", max_seq_len=64, max_prefill=8, max_chain=3, chain=2)
    progress = Notes()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        lower(replace(request, **changes), progress)
    assert not list(tmp_path.iterdir()) and set(progress.stages) <= {"read checkpoints"}


@pytest.mark.parametrize("make", ["text", "empty folder"])
def test_a_checkpoint_that_is_none(make, tmp_path):
    path = tmp_path / "model.gguf"
    if make == "text":
        path.write_text("weights")
    else:
        path.mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match=r"model\.gguf"):
        lower(Request("gemma3_270m", tmp_path / "out", checkpoint=path), Notes())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 32, "own_embed": True}, "the head taps a target of width 32, this one has 48"),
        ({"boundaries": (0, 2)}, r"boundaries \[0, 2\] .* do not fit a target of 1 layers"),
        ({"vocab_size": 200}, "vocab.* 200"),
    ],
)
def test_a_head_of_another_target(changes, message, tmp_path):
    config = replace(chain_target.head_config(), **{"boundaries": (0, 1), **changes})
    zeros = {name: torch.zeros(shape) for name, shape in expected_shapes(config).items()}
    head = write_head(tmp_path / "head", config, zeros, torch.zeros(config.draft_vocab_size).long(), torch.float32)
    folder = tmp_path / "head" if head is None else Path(head)
    with pytest.raises(ValueError, match=message):
        lower(Request("small", tmp_path / "out", draft=str(folder), max_seq_len=64, max_prefill=8), Notes())
    assert list(tmp_path.iterdir()) == [folder]


def test_the_pipeline_is_the_devices_around_the_users():
    def text(passes):
        return pipeline_text(pipeline_for("cpu", passes))

    assert text(None) == f"{OPTIMISE['cpu']},{FINISH['cpu']}"
    assert text("") == text(" , ") == FINISH["cpu"]
    assert text("split_copy_to_slice") == "split_copy_to_slice," + FINISH["cpu"]


def test_memory_that_does_not_suffice(request_of, tmp_path, monkeypatch):
    monkeypatch.setattr(lower_module, "available_bytes", lambda: 10**9)
    with pytest.raises(
        MemoryError, match=r"lowering needs about 1.1 GB of memory, 1.0 GB are available; .*--quant int4"
    ):
        lower(request_of(), Notes())
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < lower_module.available_bytes() <= total
    monkeypatch.setattr(resource, "getrlimit", lambda which: (12345, resource.RLIM_INFINITY))
    assert lower_module.available_bytes() == 12345


# Where the artifact goes


def test_places_that_are_taken(request_of, tmp_path):
    """A file, a folder of something else, and a folder within a file; all stay as they are."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    before = contents(tmp_path)
    for name in ("file", "folder"):
        with pytest.raises(ValueError, match=rf"{name} exists and is not an artifact; choose another folder"):
            lower(request_of(out=tmp_path / name), Notes())
    with pytest.raises(ValueError, match=r"out cannot be made: .*file is no folder that may be written to"):
        lower(request_of(out=tmp_path / "file" / "out"), Notes())
    assert contents(tmp_path) == before and len(list(tmp_path.iterdir())) == 2


def test_places_that_are_free(small, request_of, tmp_path, monkeypatch):
    """An empty folder, folders that are not there, a path from here, and an artifact, of which nothing remains."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (small.copy(tmp_path / "old") / "extra").write_text("x")
    for out in (tmp_path / "empty", tmp_path / "a" / "b" / "c", Path("here"), tmp_path / "old"):
        lower(request_of(out=out), Notes())
        assert contents(out) == contents(small.path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "empty", "here", "old"]
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["c"]


def test_a_place_that_is_taken_meanwhile(request_of, tmp_path, monkeypatch):
    stock = lower_module.self_check

    def check(folder: Path) -> list[str]:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("mine")
        return stock(folder)

    monkeypatch.setattr(lower_module, "self_check", check)
    with pytest.raises(ValueError, match="exists and is not an artifact"):
        lower(request_of(), Notes())
    assert contents(tmp_path) == {"out/mine": b"mine"}


# Blocks


def test_blocks_give_the_bits_of_whole_methods(request_of, tmp_path, monkeypatch):
    """A program of many calls, run by the small host or by Python, is the program of one call a method.

    A layer that differs from the others of its kind by one number is a block of its own, and the number is named.
    """
    stock = tiny_targets.build

    def build(*args):
        target = stock(*args)
        target.layers[1].input_layernorm.eps = 0.5
        return target

    monkeypatch.setattr(tiny_targets, "build", build)
    tiny = TARGETS["tiny_gemma3"]
    monkeypatch.setitem(TARGETS, "tiny_gemma3", replace(tiny, options={**tiny.options, "n_layers": 6}))
    changes = dict(target="tiny_gemma3", draft="untrained")
    programs = []
    for name, passes in (("whole", ""), ("blocks", "outline_blocks")):
        report = lower(request_of(**changes, passes=passes, out=tmp_path / name), Notes())
        programs.append(report.path)
    calls = ProgramFile(report.path / PROGRAM).methods["target_verify"].calls
    codes = [decode(call.payload)[0] for call in calls]
    assert sorted(map(codes.count, set(codes)))[-3:] == [1, 2, 3], (
        "a sliding layer, the global ones, other sliding ones"
    )
    reasons = [refusal.reason for record in report.passes for refusal in record.refusals]
    assert sum("from which it differs in 1 places" in reason and "0.5)" in reason for reason in reasons) == 2
    whole, blocks, slow = (Artifact.open(path).load() for path in (*programs, programs[1]))
    for method in slow.methods.values():
        method._chain._host = copy.copy(method._chain._host)
        method._chain._host.run_chain = None
    for name, method in whole.methods.items():
        for rows in (1, 2, method.max_rows):
            results = []
            for program in (whole, blocks, slow):
                program.reset()
                outputs = [
                    output.array.tobytes()
                    for at in range(0, 3 * rows, rows)
                    for output in program.method(name)(*inputs_of(method, at, rows, 128))
                ]
                results.append((outputs, {n: a.tobytes() for n, a in program.buffers.arrays().items() if "cache" in n}))
            assert results[0] == results[1] == results[2], name


# Failures


def no_methods(*args) -> dict:
    return {}


FROM_CACHE = ("open_draft", "materialize", "write_constants", "read_tokenizer", "versions", "self_check")
ANEW = ("trace_methods", "run_pipeline", "compile", "write_program")
ERRORS = (KeyboardInterrupt("broken"), OSError(errno.ENOSPC, "broken"))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stage", [*FROM_CACHE, *ANEW])
def test_a_stage_that_fails_leaves_what_was_there(stage, error, small, request_of, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise error

    out = small.copy(tmp_path / "out")
    (out / "mark").write_text("old")
    before, changes = contents(out), {}
    if stage in ANEW:
        changes["cache"] = tmp_path / "cache"
        if stage != "trace_methods":
            monkeypatch.setattr(lower_module, "trace_methods", no_methods)
            monkeypatch.setattr(Lowering, "compile", lambda *args: ({}, None))
    owner = {"compile": Lowering, "write_program": executorch_program}.get(stage, lower_module)
    monkeypatch.setattr(owner, stage, fail)
    with pytest.raises(type(error), match="broken"):
        lower(request_of(**changes), Notes())
    assert contents(out) == before
    assert {p.name for p in tmp_path.iterdir()} <= {"out", "cache"}
    assert {name.split("/")[0] for name in contents(tmp_path / "cache")} <= {"cpu_kernels", "inductor"}
    assert not list((tmp_path / "cache").rglob(".making*"))


def test_what_a_killed_lowering_left_is_removed_by_the_next_one(tmp_path):
    """Not what another process is making, nor what is another's."""
    code = (
        "import sys, time; from pathlib import Path; from eyas.lowering.lower import making\n"
        "with making(Path(sys.argv[1])): print('made', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    killed, living = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2))
    try:
        assert killed.stdout.readline() == living.stdout.readline() == "made\n"
        (tmp_path / ".out-of-something-else").mkdir()
        killed.kill()
        killed.wait()
        for lock in tmp_path.glob(".out-*/lock"):
            os.utime(lock, (0, 0))  # as if made long ago
        with lower_module.making(tmp_path / "out") as folder:
            (folder / "manifest.json").write_text("{}")
            assert len(list(tmp_path.glob(".out-*/lock"))) == 2, "the living one's and this one's"
        assert living.poll() is None and len(list(tmp_path.glob(".out-*/new"))) == 1
    finally:
        living.kill()
    assert {p.name for p in tmp_path.iterdir()} >= {"out", ".out-of-something-else"}


@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk(there, small, request_of, tmp_path, monkeypatch):
    """In the middle of the data, and while the program is copied."""
    if there:
        small.copy(tmp_path / "out")
    before = contents(tmp_path)

    def chunks(tensor, stock=data_file.raw_chunks):
        yield from stock(tensor)
        if tensor.numel() > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name, full in (
        (data_file, "raw_chunks", chunks),
        (lower_module.shutil, "copyfile", lambda *args: list(chunks(torch.ones(2000)))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(OSError, match="No space left") as caught:
                lower(request_of(), Notes())
        assert caught.value.errno == errno.ENOSPC
        assert contents(tmp_path) == before and not [p for p in tmp_path.iterdir() if p.name != "out"]


def test_the_last_step_fails(small, request_of, tmp_path, monkeypatch):
    """The old artifact is moved back when the new one cannot take its place."""
    out, stock = small.copy(tmp_path / "out"), Path.rename
    (out / "mark").write_text("old")
    before = contents(out)

    def rename(self, target):
        if self.name == "new":
            raise OSError(errno.EXDEV, "cannot be moved")
        return stock(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="cannot be moved"):
        lower(request_of(), Notes())
    assert contents(out) == before and list(tmp_path.iterdir()) == [out]


def test_a_program_that_does_not_run(request_of, tmp_path, monkeypatch):
    """Found by running it in a process of its own, which may also die."""

    def copy(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes().replace(b"CpuBackend", b"NoBackend!"))

    with monkeypatch.context() as patch:
        patch.setattr(lower_module.shutil, "copyfile", copy)
        with pytest.raises(
            RuntimeError, match=r"the lowered program does not run: method '.+' is for the delegate 'NoB"
        ):
            lower(request_of(), Notes())
    killer = tmp_path / "killer"
    killer.write_text("#!/bin/sh\nkill -SEGV $$\n")
    killer.chmod(0o755)
    monkeypatch.setattr(lower_module.sys, "executable", str(killer))
    with pytest.raises(RuntimeError, match="does not run: the process ended with status -11"):
        lower(request_of(), Notes())
    assert list(tmp_path.iterdir()) == [killer]


# The same again


def test_a_second_lowering_is_from_the_cache_and_the_same(small, request_of):
    progress = Notes()
    report = lower(request_of(), progress)
    assert report.cached == {"program": True}
    assert progress.stages == ["read checkpoints", "weights", "write data", "tokenizer", "manifest", "check"]
    assert list(report.seconds) == progress.stages and not report.passes
    assert contents(report.path) == contents(small.path)


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
import test_lowering
from conftest import Notes
from pathlib import Path
test_lowering.TARGETS["small"] = test_lowering.SMALL
request = test_lowering.Request(
    "small", Path(sys.argv[2]), passes="", max_seq_len=64, max_prefill=8, max_chain=3, chain=2, cache=Path(sys.argv[3])
)
report = test_lowering.lower(request, Notes())
print(report.cached)
"""


def test_two_at_once_make_the_same_program(small, own_cache, tmp_path):
    """From the trace on, in processes that order sets differently, with one cache between them."""
    here = str(Path(__file__).parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE, here, str(tmp_path / name), str(own_cache)], text=True,
            env=os.environ | {"PYTHONHASHSEED": name}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for name in ("1", "2")
    ]  # fmt: skip
    for process, name in zip(processes, ("1", "2")):
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        cached = eval(out.splitlines()[-1])
        assert cached.pop("program") == (not cached) and all(cached.values()), "blocks were compiled before"
        assert contents(tmp_path / name) == contents(small.path)
    (entry,) = (own_cache / "programs").iterdir()
    assert ContentCache(own_cache).get("programs", entry.name) == entry


def nudge(patch: pytest.MonkeyPatch, matrix: str) -> None:
    """From now on, one row of one matrix of the checkpoint is larger."""
    stock = tiny_targets.random_tensors

    def tensors(module, seed):
        made = stock(module, seed)
        if matrix in made:
            made[matrix].tensor[3] *= 2
        return made

    patch.setattr(tiny_targets, "random_tensors", tensors)


def test_other_weights_take_the_same_program(small, request_of, monkeypatch):
    nudge(monkeypatch, "layers.0.mlp.up_proj.weight")
    report = lower(request_of(), Notes())
    assert report.cached == {"program": True}
    ours, other = contents(small.path), contents(report.path)
    assert other[PROGRAM] == ours[PROGRAM] and other[TOKENIZER] == ours[TOKENIZER]
    before, after = DataFile(small.path / DATA), DataFile(report.path / DATA)
    changed = {key for key in before.entries if bytes(before.bytes_of(key)) != bytes(after.bytes_of(key))}
    assert changed == {"cuda_fqn_weight:cpu:target.layers.0.mlp.up_proj.scales.panels"}
    check_against_the_module(Artifact.open(report.path), request_of())


@pytest.mark.parametrize("target", ["small", "other"])
def test_the_program_computes_what_the_module_does(target, small, request_of):
    """Also where it was compiled for another checkpoint's weights."""
    report = lower(request_of(target=target), Notes())
    assert report.cached == {"program": True}
    assert (contents(report.path)[DATA] == contents(small.path)[DATA]) == (target == "small")
    check_against_the_module(Artifact.open(report.path), request_of(target=target))


def check_against_the_module(artifact: Artifact, request: Request) -> None:
    program, speculator = artifact.load(), eager_speculator(request)
    ids, where = IDS[:4], np.arange(4)
    with torch.no_grad():
        want, feature = speculator.target_verify(torch.tensor([ids]), torch.from_numpy(where))
        proposals, g = speculator.draft_decode(torch.tensor([ids]), feature, torch.from_numpy(where))
    got = program.method("target_verify")(tokens(ids), positions(0, 4))
    drafted = program.method("draft_decode")(tokens(ids), got[1], positions(0, 4))
    np.testing.assert_array_equal(got[0].array, want)
    np.testing.assert_array_equal(drafted[0].array, proposals)
    np.testing.assert_allclose(got[1].array, feature, rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(drafted[1].array, g, rtol=1e-4, atol=2e-4)


def test_without_the_optional_passes_the_text_is_the_same(small):
    """As the module's own, and with proposals as without."""
    program = small.load()
    assert [p["pass"] for p in program.artifact.manifest["passes"]] == FINISH["cpu"].split(",")
    want = greedy_reference(small.speculator(), IDS, 30)
    assert text(GreedyDecoder(program), 30) == want and len(set(want)) > 5
    for chain in (1, 2, 3):
        assert text(SpeculativeDecoder(program), 30, chain=chain) == want


# The cache's keys


def program_key(request: Request) -> str:
    lowering = Lowering(request, Notes())
    lowering.checkpoint = lowering.spec.open_checkpoint(request.checkpoint)
    lowering.draft = lower_module.open_draft(request.draft, lowering.checkpoint)
    lowering.load_model()
    return lowering.program_key()


CHANGES = [
    {"max_seq_len": 63}, {"max_prefill": 7}, {"max_chain": 4}, {"chain": 1}, {"quant": "int4"}, {"quant": "none"},
    {"passes": "split_copy_to_slice"}, {"passes": None}, {"methods": ("target_logits",)}, {"target": "tiny_gemma3"},
]  # fmt: skip


def test_what_decides_a_program(request_of, tmp_path, cache, monkeypatch):
    key = program_key(request_of())
    for same in ({}, {"target": "other"}, {"out": tmp_path / "b"}, {"cache": tmp_path / "c"}):
        assert program_key(request_of(**same)) == key
    keys = [key, *(program_key(request_of(**change)) for change in CHANGES)]
    head = chain_target.write_chain_head(tmp_path / "head", "accept")
    keys.append(program_key(request_of(target="tiny_gemma3", draft=str(head))))
    for name, value in (
        ("versions", {"torch": "9"}),
        ("machine", {"architecture": "pdp11"}),
        ("source_hash", "other"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(lower_module, name, lambda value=value: value)
            keys.append(program_key(request_of()))
    stock = tiny_targets.open_checkpoint
    for change in ({"stop_ids": (1, 7)}, {"bos_id": 3}):
        with monkeypatch.context() as patch:
            patch.setattr(tiny_targets, "open_checkpoint", lambda *a, c=change, **o: replace(stock(*a, **o), **c))
            keys.append(program_key(request_of()))
    assert len(set(keys)) == len(keys)


def test_no_weight_decides(request_of, monkeypatch):
    """Not even a layer's scalar, which is one number: none is written into native code."""
    keys = [program_key(request_of(target="tiny_gemma4"))]
    for name in ("layers.0.mlp.up_proj.weight", "layers.0.layer_scalar"):
        with monkeypatch.context() as patch:
            stock = tiny_targets.random_tensors

            def tensors(module, seed, name=name, stock=stock):
                made = stock(module, seed)
                if name in made:
                    made[name].tensor.mul_(1.5)
                return made

            patch.setattr(tiny_targets, "random_tensors", tensors)
            keys.append(program_key(request_of(target="tiny_gemma4")))
    assert keys[0] == keys[1] == keys[2]


def test_a_damaged_program_is_made_anew(small, request_of, own_cache, monkeypatch):
    (own_cache / "programs").mkdir()
    key = program_key(request_of())
    entry = ContentCache(default_root()).get("programs", key)
    for name in (PROGRAM, "plan.json", "entry.json"):
        copy = own_cache / "programs" / key
        copy.mkdir(exist_ok=True)
        for file in entry.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        assert ContentCache(own_cache).get("programs", key) == copy
        data = bytearray((copy / name).read_bytes())
        data[len(data) // 2] ^= 1
        (copy / name).write_bytes(data)

        def make(self, given: str, data: Path) -> Path:
            raise InterruptedError(given)

        monkeypatch.setattr(Lowering, "make_program", make)
        with pytest.raises(InterruptedError, match=key):
            lower(request_of(cache=own_cache), Notes())
        assert not copy.exists()


def test_the_hash_of_the_sources(tmp_path, monkeypatch):
    packages = ("kernels", "models", "passes", "lowering", "runtime")
    for package in packages:
        (tmp_path / package / "cpu").mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text(package)
    monkeypatch.setattr(source_hash.eyas.kernels, "__file__", str(tmp_path / "kernels" / "__init__.py"))
    monkeypatch.setattr(source_hash, "entry_points", lambda group: [])

    def now() -> str:
        return source_hash.source_hash.__wrapped__()

    seen = [now()]
    (tmp_path / "kernels" / "notes.txt").write_text("no source")
    assert now() == seen[0]
    for package in packages:
        (tmp_path / package / "__init__.py").write_text("changed " + package)
        seen.append(now())
        (tmp_path / package / "cpu" / "a.cpp").write_text(package)
        seen.append(now())
        (tmp_path / package / "cpu" / "a.cpp").rename(tmp_path / package / "cpu" / "b.h")
        seen.append(now())
    assert len(set(seen)) == len(seen)


# The content cache by itself


def fill_with(value: str):
    return lambda folder: (folder / "value").write_text(value)


def test_entries_are_found_again(tmp_path):
    cache = ContentCache(tmp_path)
    assert cache.get("things", "a") is None
    folder, found = cache.get_or_put("things", "a", fill_with("1"))
    assert not found and cache.get("things", "a") == folder
    assert cache.get_or_put("things", "a", fill_with("2")) == (folder, True)
    assert (folder / "value").read_text() == "1"
    assert cache.get("things", "b") is None and cache.get("others", "a") is None
    assert key_of("ab", "c") != key_of("a", "bc") != key_of("a", "b", "c") and key_of(1) == key_of("1")


def test_an_entry_is_whole_or_absent(tmp_path):
    cache = ContentCache(tmp_path)
    for error in (RuntimeError, KeyboardInterrupt):

        def fill(folder: Path, error=error) -> None:
            fill_with("half")(folder)
            raise error

        with pytest.raises(error):
            cache.put("things", "a", fill)
        assert cache.get("things", "a") is None and not contents(tmp_path) and not list((tmp_path / "things").iterdir())


@pytest.mark.parametrize("damage", ["changed", "missing", "index", "no object"])
def test_a_damaged_entry_goes_and_is_made_again(damage, tmp_path):
    cache = ContentCache(tmp_path)
    folder = cache.put("things", "a", fill_with("1"))
    if damage == "missing":
        (folder / "value").unlink()
    else:
        name = "value" if damage == "changed" else "entry.json"
        (folder / name).write_text({"changed": "7", "index": "{", "no object": "[]"}[damage])
    assert cache.get_or_put("things", "a", fill_with("2")) == (folder, False)
    assert (folder / "value").read_text() == "2" and cache.get("things", "a") == folder


def test_of_two_writers_the_first_wins(tmp_path):
    cache = ContentCache(tmp_path)

    def fill(folder: Path) -> None:
        fill_with("late")(folder)
        ContentCache(tmp_path).put("things", "a", fill_with("first"))

    folder = cache.put("things", "a", fill)
    assert (folder / "value").read_text() == "first" and [p.name for p in (tmp_path / "things").iterdir()] == ["a"]
    threads = [
        threading.Thread(target=cache.put, args=("things", f"k{i % 3}", fill_with(str(i % 3)))) for i in range(24)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(cache.get("things", f"k{i}") / "value").read_text() for i in range(3)] == ["0", "1", "2"]
    assert len(list((tmp_path / "things").iterdir())) == 4


def test_the_cache_keeps_to_its_size(tmp_path):
    """The least recently used entries go, whatever their kind; the one just made stays, however large."""
    cache = ContentCache(tmp_path, max_bytes=3600)
    for age, name in enumerate("abc"):
        folder = cache.put("one" if name != "b" else "two", name, fill_with("x" * 1000))
        os.utime(folder / "entry.json", (1000 + age, 1000 + age))
    assert cache.get("one", "a")  # used last now
    cache.put("one", "d", fill_with("x" * 1000))
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*")}
    assert left == {"one/a", "one/c", "one/d"}
    cache.put("one", "e", fill_with("x" * 5000))
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*")} == {"one/e"}


def test_what_others_left_half_written_goes_when_it_is_old(tmp_path):
    cache = ContentCache(tmp_path, making=".making-mine-")
    for name in (".making-new", ".making-old", ".making-mine-1"):
        (tmp_path / "one" / name).mkdir(parents=True)
        fill_with("half")(tmp_path / "one" / name)
    os.utime(tmp_path / "one" / ".making-old", (1000, 1000))
    cache.put("one", "a", fill_with("1"))
    assert {p.name for p in (tmp_path / "one").iterdir()} == {"a", ".making-new", ".making-mine-1"}
    cache.clear_making()
    assert {p.name for p in (tmp_path / "one").iterdir()} == {"a", ".making-new"}


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "a"))
    assert default_root() == tmp_path / "a"
    monkeypatch.delenv("EYAS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert default_root() == tmp_path / "b" / "eyas"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_root() == Path.home() / ".cache" / "eyas"


# The data file


@pytest.mark.parametrize("chunk", [1, 100, 1 << 24])
def test_a_data_file_reads_back(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(data_file, "CHUNK", chunk)
    tensors = {
        "a": torch.arange(300, dtype=torch.int16).reshape(3, 100), "µ": torch.tensor(1.5), "none": torch.empty(0, 4),
        "b": torch.ones(1030, dtype=torch.bfloat16), "flag": torch.tensor([True]),
    }  # fmt: skip
    keys = [(name, t.numel() * t.element_size()) for name, t in tensors.items()]
    digest = data_file.write_data_file(tmp_path / "x.ptd", keys, iter(tensors.values()))
    assert digest == file_sha256(tmp_path / "x.ptd")
    read = DataFile(tmp_path / "x.ptd")
    assert list(read.entries) == list(tensors)
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert bytes(read.bytes_of(name)) == raw and read.entries[name][0] % 4096 == 0


def test_tensors_that_do_not_match_their_keys(tmp_path):
    path, square = tmp_path / "x.ptd", torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"a: expected 60 dense bytes, got \[4, 4\] torch.float32"):
        data_file.write_data_file(path, [("a", 60)], [square])
    with pytest.raises(ValueError, match="a: expected 64 dense bytes"):
        data_file.write_data_file(path, [("a", 64)], [torch.zeros(4, 5).T[:4].T.T])
    with pytest.raises(ValueError, match="shorter"):
        data_file.write_data_file(path, [("a", 64), ("b", 64)], [square])
    with pytest.raises(ValueError, match="longer"):
        data_file.write_data_file(path, [("a", 64)], [square, square])


# What lowering says


def test_the_manifest(small):
    manifest = json.loads((small.path / MANIFEST).read_text())
    assert list(manifest) == [
        "format", "format_version", "files", "native_code", "host", "device", "versions", "target", "draft",
        "quantisation", "pipeline", "passes", "sharing", "methods", "limits", "tokenizer",
    ]  # fmt: skip
    for name in FILES:
        raw = (small.path / name).read_bytes()
        assert manifest["files"][name] == {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    assert {p.name for p in small.path.iterdir()} == {MANIFEST, *FILES}
    file = ProgramFile(small.path / PROGRAM)
    for name, spec in file.methods.items():
        code = [file.named(decode(call.payload)[0]) for call in spec.calls]
        digests = list(dict.fromkeys(hashlib.sha256(value).hexdigest() for value in code))
        assert manifest["native_code"][name] == digests
    assert manifest["host"]["kind"] == "eyas"
    assert manifest["host"]["sha256"] == hashlib.sha256(file.named("eyas_host")).hexdigest()
    assert manifest["versions"].keys() == {"torch", "executorch", "triton", "eyas", "python"}
    assert manifest["versions"]["torch"] == torch.__version__ or manifest["versions"]["torch"] in torch.__version__
    assert manifest["target"] == {
        "name": "small",
        "format": "random",
        "family": "gemma3",
        "seed": 4,
        "n_layers": 1,
        "head_dim": 16,
    }
    assert manifest["draft"]["format"] == "untrained" and any("UNTRAINED" in n for n in manifest["draft"]["notes"])
    assert manifest["quantisation"]["recipe"] == {"name": "int8", "rules": [["*", "int8"]]}
    matrices = {m["name"]: m for m in manifest["quantisation"]["matrices"]}
    assert len(matrices) == 17 and {m["format"] for m in matrices.values()} == {"int8"}
    assert matrices["target.layers.0.mlp.up_proj"]["shape"] == [96, 48]
    assert all(0 < m["error"] < 0.01 and m["nbytes"] >= np.prod(m["shape"]) for m in matrices.values())
    assert manifest["pipeline"] == FINISH["cpu"] == ",".join(p["pass"] for p in manifest["passes"])
    assert all(p["rewrites"] > 0 and p["nodes"] > 0 for p in manifest["passes"])
    assert {b["name"] for b in manifest["sharing"] if b["writers"]} == {
        f"{layer}.self_attn.cache.{part}" for layer in ("draft.layers.0", "target.layers.0") for part in "kv"
    }
    rows = {"prefill": 8, "target_verify": 4, "draft_decode": 8}
    assert manifest["methods"] == {name: {"min_rows": 1, "max_rows": n} for name, n in rows.items()}
    assert manifest["limits"] == {
        "max_seq_len": 64, "max_prefill": 8, "max_chain": 3, "chain": 2, "max_draft": None,
    }  # fmt: skip
    assert manifest["tokenizer"] == {
        "sha256": manifest["files"][TOKENIZER]["sha256"], "vocab_size": 128, "bos_id": 2, "add_bos": True,
        "stop_ids": [1], "chat_template": None,
    }  # fmt: skip
    assert str(small.path.parent) not in json.dumps(manifest)


def test_the_report(request_of, monkeypatch):
    progress = Notes()
    report = lower(request_of(), progress)
    assert report.path == request_of().out and report.pipeline == FINISH["cpu"]
    assert report.bytes == {name: (report.path / name).stat().st_size for name in FILES}
    matrices = json.loads((report.path / MANIFEST).read_text())["quantisation"]["matrices"]
    assert report.source_bytes == 2 * sum(np.prod(m["shape"]) for m in matrices)
    assert all(0 < seconds < 60 for seconds in report.seconds.values())
    assert 100e6 < report.peak_bytes <= peak_rss() and report.peak_child_bytes > 10e6
    written = json.loads(json.dumps(report.to_json()))
    assert written["path"] == "out" and written["total_seconds"] >= sum(report.seconds.values()) - 0.01
    said = "\n".join(progress.notes)
    for part in (
        "draft: format: none, this head is UNTRAINED", "estimate: weights 0 MB", "weights: int8: 17 matrices",
        "check: prefill: runs with 1 to 8 rows", "check: target_verify: runs with 1 to 4 rows; rows are bit-equal",
    ):  # fmt: skip
        assert part in said


def test_a_first_lowering_says_what_passes_did_and_who_shares_what(small):
    if small.report.cached["program"]:
        pytest.skip("the kept cache has the program")
    said, records = "\n".join(small.notes), small.report.passes
    assert [r.spec for r in records] == FINISH["cpu"].split(",")
    for r in records:
        assert f"pass {r.spec}: {r.rewrites} rewrites, {r.nodes_before} -> {r.nodes_after} nodes" in said
    assert (
        "target.layers.0.self_attn.cache.k: [1, 2, 16, 16] float32, read by prefill, target_verify; written by" in said
    )
    assert list(small.report.seconds) == [
        "read checkpoints", "weights", "trace prefill", "trace target_verify", "trace draft_decode", "passes",
        "write data", "compile", "load executorch", "program file", "tokenizer", "manifest", "check",
    ]  # fmt: skip
    blocks = {facts["block"]: facts for facts in small.report.blocks}
    assert small.report.cached == {"program": False, **{key: facts["cached"] for key, facts in blocks.items()}}
    for key, facts in blocks.items():
        assert f"block {key}: {facts['nodes']} nodes, called {facts['calls']} times, " in said
        assert facts["seconds"] > 0 and facts["bytes"] > 10_000

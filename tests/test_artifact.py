"""Opening and loading: what is damaged or foreign is refused before it runs, and what is loaded is stored once."""

import ctypes
import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Lowered

from eyas.lowering.data_file import write_data_file
from eyas.runtime import artifact as artifact_module
from eyas.runtime import selfcheck
from eyas.runtime.artifact import (
    DATA,
    HOST_KEY,
    MANIFEST,
    PROGRAM,
    TOKENIZER,
    Artifact,
    ArtifactError,
    Program,
    present_features,
)
from eyas.runtime.buffers import BufferPool
from eyas.runtime.container_files import ContainerError, DataFile, ProgramFile
from eyas.runtime.decoding import GreedyDecoder, SpeculativeDecoder, positions, tokens
from eyas.runtime.native import Container, Host, Tensor
from eyas.runtime.payload import MAGIC, Constant, decode, encode, name_of, storage_key
from eyas.runtime.session import open_tokenizer

FILES = (PROGRAM, DATA, TOKENIZER)
LENGTH, VOCAB, WIDTH, ROWS = 64, 128, 48, 8  # of the fixture ``tiny``
IDS = [2, 40, 17, 99, 5, 3, 77, 64]


@pytest.fixture
def copy(tiny, tmp_path) -> Path:
    return tiny.copy(tmp_path / "copy")


@pytest.fixture(scope="module")
def program(tiny) -> Program:
    return tiny.load()


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The libraries that are loaded from now on."""
    names, stock = [], ctypes.CDLL

    def load(name, *args, **options):
        names.append(Path(name).name)
        return stock(name, *args, **options)

    monkeypatch.setattr(ctypes, "CDLL", load)
    return names


def edit_manifest(folder: Path, edit: Callable[[dict], object]) -> Path:
    manifest = json.loads((folder / MANIFEST).read_text())
    edit(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def edit_file(file: Path, edit: Callable[[bytearray], object], admit: bool = False) -> Path:
    """Changes a file. ``admit``: the manifest tells of the change, as if the artifact had been made so."""
    data = bytearray(file.read_bytes())
    edit(data)
    file.write_bytes(data)
    if admit:
        facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        edit_manifest(file.parent, lambda manifest: manifest["files"].update({file.name: facts}))
    return file.parent


def flip(at: int) -> Callable[[bytearray], None]:
    def edit(data: bytearray) -> None:
        data[at] ^= 1

    return edit


def swap(old: bytes, new: bytes) -> Callable[[bytearray], None]:
    """Puts ``new`` in the place of every ``old``, which must be there and as long."""

    def edit(data: bytearray) -> None:
        assert len(old) == len(new) and old in data
        data[:] = data.replace(old, new)

    return edit


def run(program: Program, method: str = "target_verify", start: int = 0, ids=IDS) -> list[bytes]:
    """The bits of a method's outputs."""
    inputs = [tokens(ids), positions(start, len(ids))]
    if method == "draft_decode":
        inputs.insert(1, np.sin(np.arange(len(ids) * WIDTH, dtype=np.float32)).reshape(1, -1, WIDTH))
    return [output.array.tobytes() for output in program.method(method)(*inputs)]


# Opening


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ArtifactError, match=r"no artifact at .*nowhere; expected the folder that lowering wrote"):
        Artifact.open(tmp_path / "nowhere")
    (tmp_path / "file").write_text("{}")
    with pytest.raises(ArtifactError, match="no artifact at"):
        Artifact.open(tmp_path / "file")


def test_a_folder_without_a_manifest(copy):
    (copy / MANIFEST).unlink()
    with pytest.raises(ArtifactError, match=r"copy has no manifest.json; expected the folder"):
        Artifact.open(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", '{"format": "eyas-artifact"}', "\xff\xfe"])
def test_a_manifest_that_is_none(text, copy):
    (copy / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(ArtifactError, match=r"manifest.json is damaged \(.+\); copy it again or lower again"):
        Artifact.open(copy)


@pytest.mark.parametrize(
    ("key", "value"), [("format_version", 2), ("format_version", 0), ("format_version", "1"), ("format", "other")]
)
def test_another_format(key, value, copy):
    edit_manifest(copy, lambda manifest: manifest.update({key: value}))
    with pytest.raises(ArtifactError, match="this reader takes eyas-artifact 1; lower again"):
        Artifact.open(copy)


REMOVED = [
    ("files",), ("files", PROGRAM), ("files", DATA, "bytes"), ("files", TOKENIZER, "sha256"), ("device",),
    ("device", "type"), ("device", "architecture"), ("device", "cpu_features"), ("host",), ("host", "kind"),
    ("host", "sha256"), ("host", "name"), ("sharing",), ("methods",), ("methods", "target_verify"),
    ("methods", "draft_decode", "max_rows"), ("native_code",), ("native_code", "prefill"),
    ("tokenizer",), ("tokenizer", "stop_ids"),
]  # fmt: skip


@pytest.mark.parametrize("path", REMOVED, ids=".".join)
@pytest.mark.parametrize("remove", [True, False], ids=["missing", "null"])
def test_a_manifest_without_some_part(path, remove, copy):
    def edit(manifest: dict) -> None:
        *outer, last = path
        for key in outer:
            manifest = manifest[key]
        if remove:
            del manifest[last]
        else:
            manifest[last] = None

    edit_manifest(copy, edit)
    with pytest.raises(ArtifactError, match=r"manifest.json is damaged \(.+\)|" + ("None" if not remove else "$^")):
        Artifact.open(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(name, copy):
    (copy / name).unlink()
    with pytest.raises(ArtifactError, match=rf"{name} is missing; an artifact consists of manifest.json, model.pte"):
        Artifact.open(copy)


@pytest.mark.parametrize("part", [0, 0.001, 0.3, 0.9, -1])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_off(name, part, copy, opened):
    file, size = copy / name, (copy / name).stat().st_size
    kept = size - 1 if part == -1 else int(size * part)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ArtifactError, match=rf"{name} has {kept} bytes, the manifest says {size}"):
        Artifact.open(copy)
    assert not opened


@pytest.mark.parametrize("part", [0, 0.01, 0.5, -1])
@pytest.mark.parametrize("name", FILES)
def test_one_wrong_bit(name, part, copy, opened):
    size = (copy / name).stat().st_size
    edit_file(copy / name, flip(-1 if part == -1 else int(size * part)))
    with pytest.raises(ArtifactError, match=rf"{name} does not match the manifest \(sha256 [0-9a-f]+..., expected"):
        Artifact.open(copy)
    assert not opened


def test_the_hash_of_the_data_may_be_skipped(copy):
    """Its size may not, nor may anything of the program."""
    edit_file(copy / DATA, flip(-1))
    assert set(Artifact.open(copy, check_data=False).load().methods) > {"prefill"}
    edit_file(copy / PROGRAM, flip(-1))
    with pytest.raises(ArtifactError, match=r"model.pte does not match"):
        Artifact.open(copy, check_data=False)
    edit_file(copy / PROGRAM, flip(-1))
    edit_file(copy / DATA, lambda data: data.pop())
    with pytest.raises(ArtifactError, match=r"model.ptd has"):
        Artifact.open(copy, check_data=False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("type", "tpu", "was lowered for tpu; this runtime runs programs for cpu, cuda"),
        ("architecture", "pdp11", "was lowered for pdp11, this machine is"),
        ("cpu_features", ["avx", "no_such_set"], "needs instruction sets that this machine lacks: no_such_set; lower"),
    ],
)
def test_another_machine(key, value, message, copy, monkeypatch, opened):
    monkeypatch.setattr(artifact_module, "present_features", lambda: {"avx"})
    edit_manifest(copy, lambda manifest: manifest["device"].update({"cpu_features": ["avx"], key: value}))
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(copy)
    assert not opened


def test_features_that_cannot_be_known_count_as_present(copy, monkeypatch):
    def no_such_file(*args, **options):
        raise OSError

    monkeypatch.setattr(artifact_module, "open", no_such_file, raising=False)
    assert sorted({"avx", "no_such_set"} - present_features()) == []
    monkeypatch.undo()
    assert "no_such_set" in {"avx", "no_such_set"} - present_features()


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ("1.13.0", r"was lowered with torch 2.9.1\+cpu, installed is 1.13.0; install that version"),
        (None, r"needs PyTorch's libraries, torch 2.9.1\+cpu; pip install torch"),
        ("2.9.0+cu130", None),
        ("2.90.1", "installed is 2.90.1"),
    ],
)
@pytest.mark.parametrize("kind", ["torch", "eyas"])
def test_torch_must_be_the_one_a_program_was_made_with(kind, installed, message, copy, monkeypatch):
    """Where it is linked to torch; other programs do not ask."""

    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(artifact_module, "version", version)
    edit_manifest(copy, lambda m: (m["versions"].update(torch="2.9.1+cpu"), m["host"].update(kind=kind)))
    if message is None or kind == "eyas":
        assert Artifact.open(copy).manifest["host"]["kind"] == kind
    else:
        with pytest.raises(ArtifactError, match=message):
            Artifact.open(copy)


# Files that agree with the manifest but not with each other


def test_native_code_must_be_what_the_manifest_says(copy, opened):
    """Checked for each library of its own, before it is loaded."""
    file = ProgramFile(copy / PROGRAM)
    keys = {decode(call.payload)[0] for spec in file.methods.values() for call in spec.calls}
    for key in (*keys, HOST_KEY):
        code = bytes(file.named(key))
        folder = edit_file(copy / PROGRAM, swap(code, code[:-1] + bytes([code[-1] ^ 1])), admit=True)
        opened.clear()
        with pytest.raises(ArtifactError, match=rf"the native code {key[:12]}... does not match the manifest"):
            Artifact.open(folder).load()
        assert f"{key[:64]}.so" not in opened and (key != HOST_KEY or not opened)
        edit_file(copy / PROGRAM, swap(code[:-1] + bytes([code[-1] ^ 1]), code), admit=True)
    assert Artifact.open(copy).load()


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (
            b"CpuBackend",
            b"AnyBackend",
            ArtifactError,
            "is for the delegate 'AnyBackend'; a program for cpu has CpuBackend",
        ),
        (MAGIC, b"ETCUDAFQN4", ArtifactError, "model.pte: method '.+': the delegate's payload starts with b'ETCUDAFQ"),
        (b"eyas_host", b"eyas_hast", ContainerError, "model.pte has no data named 'eyas_host'"),
        (b"ET12", b"ET13", ContainerError, r"is not an ExecuTorch program \(identifier b'ET13eh00', expected b'ET12eh"),
        (b"ET12eh00", b"ET12eh01", ContainerError, r"model.pte is not an ExecuTorch program \(identifier b'ET12eh01'"),
    ],
)
def test_another_program_than_ours(old, new, error, message, copy):
    edit_file(copy / PROGRAM, swap(old, new), admit=True)
    with pytest.raises(error, match=message):
        Artifact.open(copy).load()


def test_a_program_that_executorch_made(copy):
    """Operators instead of a delegate, with weights in segments and without."""
    from executorch.exir import to_edge

    for module, message in (
        (torch.nn.ReLU(), r"is not an ExecuTorch program \(identifier b'ET12.+', expected b'ET12eh00'\)"),
        (torch.nn.Linear(3, 3), "a constant method gives a value of kind 5; expected a number, a flag or a text"),
    ):
        edge = to_edge(torch.export.export(module, (torch.ones(1, 3),), strict=False))
        (copy / PROGRAM).write_bytes(edge.to_executorch().buffer)
        edit_file(copy / PROGRAM, lambda data: None, admit=True)
        with pytest.raises(ContainerError, match=message):
            Artifact.open(copy).load()


def rewrite_data(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Writes the data file again with other entries."""
    data = DataFile(folder / DATA)
    entries = {key: torch.frombuffer(bytearray(data.bytes_of(key)), dtype=torch.uint8) for key in data.entries}
    edit(entries)
    write_data_file(folder / DATA, [(key, value.numel()) for key, value in entries.items()], entries.values())
    return edit_file(folder / DATA, lambda data: None, admit=True)


def test_data_of_another_program(copy):
    """An entry too few, one of another size, and a cache that is missing."""
    weight = storage_key("cpu", "target.norm.weight")
    cache = storage_key("cpu", "target.layers.0.self_attn.cache.k")

    def shorter(entries: dict) -> None:
        entries[weight] = entries[weight][4:].clone()

    assert run(Artifact.open(rewrite_data(copy, lambda entries: None)).load())
    before = (copy / DATA).read_bytes()
    for edit, message in (
        (lambda entries: entries.pop(weight), rf"model.ptd has no entry '{weight}'"),
        (shorter, rf"{weight} has 188 bytes, its method expects 192"),
        (lambda entries: entries.pop(cache), rf"model.ptd lacks the buffers {cache} that the manifest lists"),
    ):
        with pytest.raises(ContainerError, match=message):
            Artifact.open(rewrite_data(copy, edit)).load()
        (copy / DATA).write_bytes(before)


# The container files by themselves


@pytest.mark.parametrize(("name", "reader"), [(PROGRAM, ProgramFile), (DATA, DataFile)])
def test_damaged_tables_are_container_errors(name, reader, tiny, tmp_path):
    """Whatever bytes the tables hold and wherever the file ends: read, or refused in words."""
    whole, generator, refused = (tiny.path / name).read_bytes(), random.Random(0), 0
    base = struct.unpack_from("<Q", whole, 24 if name == PROGRAM else 32)[0]
    (tmp_path / "whole").write_bytes(whole)
    for i in range(100):
        head = bytearray(whole[:base])
        for _ in range(1 + i % 3):
            head[generator.randrange(base)] = generator.randrange(256)
        path = tmp_path / ("part" if i % 4 == 0 else "whole")
        with open(path, "wb" if i % 4 == 0 else "r+b") as file:
            file.write(head[: generator.randrange(base)] if i % 4 == 0 else head)
        try:
            read = reader(path)
            for key in read.named_data if name == PROGRAM else read.entries:
                read.named(key) if name == PROGRAM else read.bytes_of(key)
        except ContainerError as error:
            assert str(error)
            refused += 1
    assert refused > 30
    if name == PROGRAM:
        read = ProgramFile(tiny.path / name)
        read.named_data["code"] = 10**6
        with pytest.raises(ContainerError, match=r"is damaged: it has .* segments, none 1000000"):
            read.named("code")
    with pytest.raises(ContainerError, match="is missing; the artifact is incomplete"):
        reader(tmp_path / "nothing")


@pytest.mark.parametrize(("name", "reader"), [(PROGRAM, ProgramFile), (DATA, DataFile)])
def test_segments_that_lie_past_the_end(name, reader, tiny, tmp_path):
    """The tables are whole and say so, and the file is not."""
    size = (tiny.path / name).stat().st_size
    shutil.copy(tiny.path / name, tmp_path / name)
    read = reader(tmp_path / name)
    assert len(read.file.slice(size - 5, 5)) == 5
    for start, length in ((size - 5, 6), (-1, 2), (5, -1), (size + 1, 0)):
        with pytest.raises(ContainerError, match=rf"{name} is cut off: bytes {start} to .* it has {size}"):
            read.file.slice(start, length)
    os.truncate(tmp_path / name, size - 1)
    with pytest.raises(ContainerError, match="is cut off"):
        cut = reader(tmp_path / name)
        [cut.named(key) for key in cut.named_data]


def test_a_payload_reads_back_and_is_refused_when_cut_off():
    constants = [Constant("a.b", "key", 24, 6, 0, 0, (2, 3), (3, 1)), Constant("µ", "k", 8, 4, 0, 0, (), ())]
    data = encode("code", constants)
    assert decode(data) == ("code", constants)
    for cut in range(len(data)):
        with pytest.raises(ValueError, match=r"the delegate's payload (is cut off at byte|starts with)"):
            decode(data[:cut])


# What other readers see


CONSTANTS = {
    "get_max_seq_len": 64, "get_vocab_size": 128, "get_n_layers": 4, "get_min_prefill_chunk": 1,
    "get_max_prefill_chunk": 8, "get_sliding_window": 8, "get_chain_len": 4, "get_max_chain_len": 7,
    "get_draft_vocab_size": 64, "get_draft_max_positions": 0, "get_bos_id": 2, "get_stop_ids": 1, "use_kv_cache": True,
    "enable_dynamic_shape": True,
}  # fmt: skip
METHODS = ("draft_decode", "prefill", "target_logits", "target_verify")


def test_constants_and_methods(program):
    assert program.constants == CONSTANTS and all(type(program.constants[k]) is type(v) for k, v in CONSTANTS.items())
    assert tuple(sorted(program.methods)) == METHODS
    shapes = {name: [(s.dtype, s.sizes) for s in program.method(name).spec.inputs] for name in METHODS}
    target = [(4, (1, 8)), (4, (8,))]
    assert shapes == dict.fromkeys(METHODS, target) | {"draft_decode": [target[0], (6, (1, 8, WIDTH)), target[1]]}
    outputs = {name: [(s.dtype, s.sizes) for s in program.method(name).spec.outputs] for name in METHODS}
    rows = [(4, (1, 8)), (6, (1, 8, WIDTH))]
    assert outputs == dict.fromkeys(METHODS, rows) | {
        "prefill": [(4, (1, 1)), rows[1]], "target_logits": [(6, (1, 8, VOCAB))],
    }  # fmt: skip


def test_the_program_is_executorchs(tiny):
    """Its own reader finds delegate calls alone in each method, no operator besides, and the same data as ours."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    read = deserialize_pte_binary((tiny.path / PROGRAM).read_bytes())
    ours = ProgramFile(tiny.path / PROGRAM)
    plans = {plan.name: plan for plan in read.program.execution_plan}
    assert set(plans) == {*METHODS, *CONSTANTS}
    for name, plan in plans.items():
        calls = [type(step.instr_args).__name__ for chain in plan.chains for step in chain.instructions]
        assert not plan.operators
        count = len(ours.methods[name].calls) if name in METHODS else 0
        assert [d.id for d in plan.delegates] == ["CpuBackend"] * count
        assert calls == ["DelegateCall"] * count and (name in METHODS) == (count > 0)
        if name in CONSTANTS:
            (index,) = plan.outputs
            assert list(vars(plan.values[index].val).values()) == [CONSTANTS[name]]
    stored = read.named_data.pte_data
    assert set(stored) == set(ours.named_data)
    for key, entry in stored.items():
        assert read.named_data.buffers[entry.buffer_index] == ours.named(key)


def test_executorchs_runtime_takes_the_program(tiny):
    from executorch.runtime import Runtime, Verification

    loaded = Runtime.get().load_program(tiny.path / PROGRAM, verification=Verification.InternalConsistency)
    assert loaded.method_names == {*METHODS, *CONSTANTS}
    for name, value in CONSTANTS.items():
        assert loaded.load_method(name).execute([]) == [value]
    meta = loaded.metadata("draft_decode")
    assert [meta.input_tensor_meta(i).sizes() for i in range(meta.num_inputs())] == [(1, 8), (1, 8, WIDTH), (8,)]
    assert [meta.output_tensor_meta(i).dtype() for i in range(meta.num_outputs())] == [4, 6]


def test_the_data_is_executorchs(tiny):
    from executorch.exir._serialize._cord import Cord
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorConfig, FlatTensorSerializer

    read = FlatTensorSerializer(FlatTensorConfig()).deserialize(Cord((tiny.path / DATA).read_bytes()))
    ours = DataFile(tiny.path / DATA)
    assert set(read.named_data) == set(ours.entries) and len(ours.entries) > 100
    for key, entry in read.named_data.items():
        assert bytes(read.buffers[entry.buffer_index]) == bytes(ours.bytes_of(key))


def test_the_text_side(tiny, copy):
    tokenizer = open_tokenizer(Artifact.open(tiny.path))
    assert tokenizer.encode("") == [2] and tokenizer.stop_ids == (1,)
    edit_file(copy / TOKENIZER, lambda data: data.__setitem__(slice(0, 1), b"["), admit=True)
    with pytest.raises(ValueError, match="tokenizer"):
        open_tokenizer(Artifact.open(copy))


def test_the_size_of_an_artifact(tiny):
    files = sum((tiny.path / name).stat().st_size for name in FILES)
    assert Artifact.open(tiny.path).nbytes() == files


# Arguments


FEATURE = np.zeros((1, 3, WIDTH), np.float32)
BAD = {
    "too few": ("prefill", [tokens(IDS)], TypeError, "method 'prefill' takes 2 inputs, got 1"),
    "too many": ("target_verify", [tokens(IDS)] * 3, TypeError, "method 'target_verify' takes 2 inputs, got 3"),
    "none": ("draft_decode", [], TypeError, "takes 3 inputs, got 0"),
    "int32 tokens": ("prefill", [tokens([5]).astype(np.int32), positions(0, 1)], TypeError,
                     "input 0 of method 'prefill' is int64, got int32"),
    "float positions": ("prefill", [tokens([5]), positions(0, 1).astype(np.float32)], TypeError,
                        "input 1 of method 'prefill' is int64, got float32"),
    "float64 feature": ("draft_decode", [tokens(IDS[:3]), FEATURE.astype(np.float64), positions(0, 3)], TypeError,
                        "input 1 of method 'draft_decode' is float32, got float64"),
    "strings": ("prefill", [np.array([["a"]]), positions(0, 1)], TypeError, "no tensor of <U1"),
    "flat tokens": ("prefill", [np.array(IDS), positions(0, 8)], ValueError,
                    r"input 0 of method 'prefill' has shape \[8\], expected \[1, rows\]"),
    "a batch": ("prefill", [np.array([IDS, IDS]), positions(0, 8)], ValueError, r"has shape \[2, 8\]"),
    "a width": ("draft_decode", [tokens(IDS[:3]), FEATURE[..., 1:].copy(), positions(0, 3)], ValueError,
                rf"input 1 of method 'draft_decode' has shape \[1, 3, 47\], expected \[1, rows, {WIDTH}\]"),
    "no rows": ("prefill", [tokens([]), positions(0, 0)], ValueError, "takes 1 to 8 rows, .* got 0"),
    "rows over": ("target_verify", [tokens([1] * 9), positions(0, 9)], ValueError,
                  "method 'target_verify' takes 1 to 8 rows, the same in every input; got 9"),
    "unlike rows": ("target_verify", [tokens([1] * 3), positions(0, 2)], ValueError, "got 2, 3"),
    "unlike features": ("draft_decode", [tokens(IDS[:2]), FEATURE, positions(0, 2)], ValueError, "got 2, 3"),
    "token 128": ("target_verify", [tokens([5, VOCAB]), positions(0, 2)], ValueError,
                  r"tokens of method 'target_verify' \(input 0\) must lie in 0..127, got 5 to 128"),
    "token -1": ("draft_decode", [tokens([-1, 4, 5]), FEATURE, positions(0, 3)], ValueError, "0..127, got -1 to 5"),
    "position 64": ("prefill", [tokens(IDS), positions(57, 8)], ValueError,
                    r"positions of method 'prefill' \(input 1\) must lie in 0..63, got 57 to 64"),
    "position -1": ("draft_decode", [tokens(IDS[:3]), FEATURE, positions(-1, 3)], ValueError,
                    r"\(input 2\) must lie in 0..63, got -1 to 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments(name, program, monkeypatch):
    """Refused before any native code runs, and no reason to load the program again."""
    method, inputs, error, message = BAD[name]
    with monkeypatch.context() as patch, pytest.raises(error, match=message):
        patch.setattr(Container, "run", lambda *args: pytest.fail("native code ran"))
        program.method(method)(*inputs)
    assert run(program, method, LENGTH - ROWS)


def test_bounds_are_inclusive(program):
    for method in METHODS:
        assert run(program, method, LENGTH - ROWS, [0, VOCAB - 1] * 4) and run(program, method, 0, [VOCAB - 1])


def test_an_unknown_method(program):
    with pytest.raises(KeyError, match=r"no method 'decode'; it has draft_decode, prefill, target_logits, target_ver"):
        program.method("decode")


def test_arguments_of_any_layout_and_owner(tiny, program):
    """Lists, strided views, and tensors of another host; the caller's arrays stay as they are."""
    program.reset()
    wide = np.zeros((1, 5, 2 * WIDTH), np.float32)
    feature = np.sin(np.arange(5 * WIDTH, dtype=np.float32)).reshape(1, 5, WIDTH)
    wide[..., ::2] = feature
    method, ids, at = program.method("draft_decode"), IDS[:5], positions(0, 5)
    want = [output.array.tobytes() for output in method(tokens(ids), feature, at)]
    every_other = np.repeat(tokens(ids), 2, axis=1)[:, ::2]
    foreign, own = (Tensor.of(host, wide).part(np.s_[..., ::2]) for host in (Host.torch(), program.host))
    for inputs in (
        ([ids], wide[..., ::2], list(range(5))),
        (every_other, np.asfortranarray(feature), at),
        (tokens(ids), foreign, Tensor.of(Host.torch(), at)),
        (tokens(ids), own, Tensor.of(program.host, at)),
    ):
        program.reset()
        assert [output.array.tobytes() for output in method(*inputs)] == want
    assert wide[..., ::2].tobytes() == feature.tobytes() and at.tolist() == list(range(5))


def test_outputs_are_new_memory_and_outlive_the_program(tiny):
    program = tiny.load()
    first = program.method("target_logits")(tokens(IDS), positions(0, 8))[0].array
    kept = first.copy()
    second = program.method("target_logits")(tokens(IDS[::-1]), positions(0, 8))[0].array
    assert not np.shares_memory(first, second)
    del program
    assert np.array_equal(first, kept) and not np.array_equal(first, second)


# State


def written(program: Program) -> dict[str, np.ndarray]:
    names = {b["name"] for b in program.artifact.manifest["sharing"] if b["writers"]}
    return {name: array for name, array in program.buffers.arrays().items() if name in names}


def stored(program: Program) -> dict[str, bytes]:
    """Every buffer's bytes in the data file, by its name."""
    data = DataFile(program.artifact.path / DATA)
    return {name: bytes(data.bytes_of(storage_key("cpu", name))) for name in program.buffers.arrays()}


def test_reset_forgets_everything(tiny):
    program = tiny.load()
    fresh = [run(program, name, start) for start in (0, 8) for name in METHODS]
    assert fresh[:4] != fresh[4:]
    assert [run(program, name, 30) for name in METHODS] != fresh[:4]
    for array in written(program).values():
        array[...] = np.nan
    epoch = program.epoch
    assert program.reset() == epoch + 1 == program.epoch
    assert all(array.tobytes() == stored(program)[name] for name, array in program.buffers.arrays().items())
    assert [run(program, name, start) for start in (0, 8) for name in METHODS] == fresh


def test_a_pool_resets_whole_buffers_and_no_others(program, tmp_path):
    """Whatever their sizes; and what it is asked for must be what the file has."""
    sizes = {"a": 5000, "b": 4096, "c": 100, "d": 9000, "e": 8192}
    initial = {name: torch.arange(size).to(torch.uint8) for name, size in sizes.items()}
    write_data_file(tmp_path / DATA, list(sizes.items()), initial.values())
    pool = BufferPool(program.host, tmp_path / DATA, ["a", "c", "e"])
    asked = {name: Constant(name, name, size, 0, 0, 0, (size,), (1,)) for name, size in sizes.items()}
    arrays = {name: pool.tensor(constant).array for name, constant in asked.items()}
    for array in arrays.values():
        array[...] = 7
    pool.reset()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, initial[name] if name in "ace" else 7)
    assert pool.tensor(asked["a"]) is pool.tensor(asked["a"]) and pool.mutable_nbytes == 5000 + 100 + 8192
    for changes, message in (
        (
            {"sizes": (50, 100), "strides": (100, 1)},
            r"two calls mean different tensors by 'a': \(5000,\) and \(50, 1",
        ),
        ({"storage_key": "z"}, r"model\.ptd has no entry 'z'"),
    ):
        with pytest.raises(ContainerError, match=message):
            pool.tensor(replace(asked["a"], **changes))
    fresh = BufferPool(program.host, tmp_path / DATA, [])
    with pytest.raises(ContainerError, match="b has 4096 bytes, its method expects 5000"):
        fresh.tensor(replace(asked["a"], storage_key="b"))
    with pytest.raises(ContainerError, match="constant 'a' has scalar type 99, which is not supported"):
        fresh.tensor(replace(asked["a"], dtype=99))


def test_generations_change_caches_and_nothing_else(tiny):
    program, before = tiny.load(), hashlib.sha256((tiny.path / DATA).read_bytes()).digest()
    caches = written(program)
    list(SpeculativeDecoder(program).generate(IDS, 40))
    data = stored(program)
    changed = {name for name, array in program.buffers.arrays().items() if array.tobytes() != data[name]}
    assert changed == set(caches) and len(caches) == 10 and all(".cache." in name for name in caches)
    assert hashlib.sha256((tiny.path / DATA).read_bytes()).digest() == before


def test_two_programs_of_one_artifact_share_no_state(tiny):
    first, second, third = tiny.load(), tiny.load(), tiny.load()
    alone = [run(first, start=start) for start in (0, 8, 16)]
    both = []
    for start in (0, 8, 16):
        both.append(run(second, start=start))
        run(third, start=start, ids=IDS[::-1])
    assert both == alone
    second.reset()
    assert run(third, start=24) != run(second, start=24)


def test_a_second_generation_ends_the_first(tiny, program):
    first, second = GreedyDecoder(program), SpeculativeDecoder(program)
    left = first.generate(IDS, 20, ())
    next(left), next(left)
    whole = [t for block in second.generate(IDS, 20, ()) for t in block]
    with pytest.raises(RuntimeError, match="another generation has started on this program since"):
        next(left)
    one, other = (GreedyDecoder(tiny.load()).generate(IDS, 20, ()) for _ in range(2))
    assert [(a[0], b[0]) for a, b in zip(one, other, strict=True)] == [(t, t) for t in whole]


# Storage


def test_one_storage_a_name(tiny):
    """All methods' containers hold the pool's own tensors, each at one place of the one mapping."""
    program = tiny.load()
    pool = {name: array.__array_interface__["data"][0] for name, array in program.buffers.arrays().items()}
    held: dict[str, set[int]] = {}
    file = ProgramFile(tiny.path / PROGRAM)
    for method in program.methods.values():
        for (container, _), call in zip(method._chain._steps, file.methods[method.name].calls, strict=True):
            names = {c.name: name_of(c.storage_key) for c in decode(call.payload)[1]}
            for own, tensor in zip(container.constants, container._bound, strict=True):
                held.setdefault(names[own], set()).add(tensor.array.__array_interface__["data"][0])
    assert held == {name: {address} for name, address in pool.items()}
    assert len(set(pool.values())) == len(pool)
    sharing = {b["name"]: b for b in tiny_sharing(tiny)}
    assert set(pool) == set(sharing)
    entries = DataFile(tiny.path / DATA).entries
    base = pool["draft.d2t"] - entries[storage_key("cpu", "draft.d2t")][0]
    for name, address in pool.items():
        offset, size = entries[storage_key("cpu", name)]
        assert address == base + offset and size == sharing[name]["nbytes"]
    several = [name for name, b in sharing.items() if len(b["readers"]) > 2]
    assert len(several) > 60


def tiny_sharing(tiny: Lowered) -> list[dict]:
    return json.loads((tiny.path / MANIFEST).read_text())["sharing"]


def test_methods_see_what_others_write(program):
    """A prompt's chunk by one method, the next rows by another: bit for bit as by one alone."""
    ids = [*IDS, 9, 8, 7]
    for first in ("prefill", "target_verify", "target_logits"):
        for second in ("target_verify", "target_logits"):
            program.reset()
            run(program, second)
            want = run(program, second, 8, ids[8:])
            program.reset()
            without = run(program, second, 8, ids[8:])
            program.reset()
            run(program, first)
            run(program, "draft_decode", 0, IDS[::-1])
            assert run(program, second, 8, ids[8:]) == want != without


def test_each_weight_is_stored_once(tiny):
    """No bytes twice, no bytes that no method reads, and no entry within another."""
    data, sharing = DataFile(tiny.path / DATA), tiny_sharing(tiny)
    assert set(data.entries) == {storage_key("cpu", b["name"]) for b in sharing}
    assert all(b["readers"] for b in sharing)
    spans = sorted(data.entries.values())
    assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
    assert all(start % 4096 == 0 for start, _ in spans)
    assert spans[-1][0] + spans[-1][1] == (tiny.path / DATA).stat().st_size
    large = [bytes(data.bytes_of(storage_key("cpu", b["name"]))) for b in sharing if not b["writers"]]
    large = [value for value in large if len(value) > 1024]
    assert len(set(large)) == len(large) > 30


def mapping(path: Path) -> dict[str, int]:
    """Bytes of this process's mappings of a file, by the kernel's names for what they are."""
    totals: dict[str, int] = {}
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and (found := re.match(r"(\w+): +(\d+) kB", line)):
            totals[found[1]] = totals.get(found[1], 0) + int(found[2]) * 1024
    return totals


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mappings")
def test_weights_stay_in_the_file_and_only_caches_take_memory(copy):
    program = Artifact.open(copy).load()
    file, size = (copy / DATA).resolve(), (copy / DATA).stat().st_size
    loaded = mapping(file)
    assert size <= loaded["Size"] < size + 4096 and loaded["Anonymous"] == 0
    list(SpeculativeDecoder(program).generate(IDS, 56))
    pages = sum(-(-array.nbytes // 4096) for array in written(program).values())
    assert 0 < mapping(file)["Anonymous"] <= 4096 * pages < size
    program.reset()
    assert mapping(file)["Anonymous"] == 0
    assert program.buffers.mutable_nbytes == sum(array.nbytes for array in written(program).values())
    assert program.buffers.nbytes == sum(array.nbytes for array in program.buffers.arrays().values())


# Without torch


WITHOUT_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "executorch", "transformers", "triton", "safetensors", "torchao"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
from eyas.runtime.artifact import Artifact
from eyas.runtime.decoding import SpeculativeDecoder
from eyas.runtime.session import open_tokenizer
artifact = Artifact.open(sys.argv[1])
program, tokenizer = artifact.load(), open_tokenizer(artifact)
decoder = SpeculativeDecoder(program)
print([t for block in decoder.generate(tokenizer.encode(sys.argv[2]), 20, (), 3) for t in block])
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
print(sorted(name for name in ("libtorch", "libc10", "libeyas_host") if name in maps), "torch" in sys.modules)
"""


def test_a_program_runs_without_torch(tiny, program):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tiny.path), "abc"], capture_output=True, text=True, check=True
    )
    text, loaded = done.stdout.splitlines()
    ids = open_tokenizer(program.artifact).encode("abc")
    assert len(ids) > 1
    assert json.loads(text) == [t for b in SpeculativeDecoder(program).generate(ids, 20, (), 3) for t in b]
    assert loaded == f"{['libeyas_host'] if sys.platform == 'linux' else []} False"


def test_nothing_is_left_of_loading(tiny, tmp_path, monkeypatch):
    """The unpacked code goes as soon as it is mapped, whether loading succeeds or not."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = tiny.load()
    assert run(program) and not list(tmp_path.iterdir())
    opened = Artifact.open(tiny.path)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(Container, "bind", lambda *args: (_ for _ in ()).throw(RuntimeError("no memory")))
        opened.load()
    assert not list(tmp_path.iterdir())


# The check that lowering ends with


def test_the_check_says_what_runs(program):
    assert selfcheck.check(program) == [
        f"{name}: runs with 1 to 8 rows" + "; rows are bit-equal in calls of 1 to 8" for name in program.methods
    ]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda array: array.__setitem__((0, 0), np.nan), "method 'target_logits' gives values that are not finite"),
        (lambda array: array.__imul__(1 + array.shape[1] / 2**20), "'target_logits': a row of a call of 2 rows has ot"),
        (lambda array: array.__imul__(1 + (array.shape[1] == 8) / 2**20), "a row of a call of 8 rows has other bits"),
    ],
    ids=["not finite", "rows", "eight rows"],
)
def test_the_check_finds(spoil, message, tiny, monkeypatch):
    program = tiny.load()
    chain = program.method("target_logits")._chain
    stock = chain.run

    def spoilt(inputs):
        outputs = stock(inputs)
        spoil(outputs[0].array)
        return outputs

    monkeypatch.setattr(chain, "run", spoilt)
    with pytest.raises(RuntimeError, match=message):
        selfcheck.check(program)


def test_the_check_as_a_program(tiny, copy):
    def check(folder: Path) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "eyas.runtime.selfcheck", folder], capture_output=True, text=True)

    done = check(tiny.path)
    assert done.returncode == 0 and [line.split(":")[0] for line in done.stdout.splitlines()] == list(METHODS)
    edit_file(copy / PROGRAM, flip(-1))
    done = check(copy)
    assert (done.returncode, done.stdout) == (1, "") and "model.pte does not match the manifest" in done.stderr

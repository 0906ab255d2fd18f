"""From a target and a draft head to an artifact: the whole of lowering, stage by stage."""

import fcntl
import gc
import glob
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from eyas.lowering.aoti_cpu import HOSTS, CompiledBlock, refuse_strided_constants, release_constants
from eyas.lowering.chains import BLOCK, chain_of
from eyas.lowering.compile_pool import CompilePool, default_jobs
from eyas.lowering.content_cache import ContentCache, default_root, file_sha256, key_of
from eyas.lowering.cpu_kernels import build_libraries
from eyas.lowering.data_file import write_data_file
from eyas.lowering.environment import gpu, machine, versions
from eyas.lowering.pipelines import pipeline_for
from eyas.lowering.source_hash import source_hash
from eyas.lowering.tokenizer import TokenizerFacts, read_tokenizer
from eyas.lowering.trace import EXTRA_METHODS, METHODS, Limits, trace_methods
from eyas.models.eagle3 import Eagle3Head
from eyas.models.eagle3_checkpoint import DraftCheckpoint, untrained_head
from eyas.models.eagle3_reader import read_head
from eyas.models.recipe import Recipe, load_recipe, materialize, report_lines
from eyas.models.shipped_heads import shipped_head
from eyas.models.speculator import Eagle3Speculator
from eyas.models.target import Checkpoint, find_target
from eyas.passes.pipeline import PassRecord, run_pipeline
from eyas.passes.printer import program_hash
from eyas.passes.program import Derived, Program, SharedBuffer
from eyas.passes.registry import pipeline_text
from eyas.passes.share_buffers import plan_lines
from eyas.runtime.artifact import DATA, FORMAT, FORMAT_VERSION, MANIFEST, PROGRAM, TOKENIZER
from eyas.runtime.memory import peak_rss
from eyas.runtime.payload import storage_key
from eyas.runtime.text import return_free_memory

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # activations and caches: what a device's kernels take
DEFAULT_PREFILL = 512  # rows of a prompt's chunk, where the window allows them
PLAN = "plan.json"
LOCK, LOCKING = "lock", 2.0  # a file that is locked while a folder is being made; seconds that locking may take
COMPILER_BYTES = 1 << 30  # what tracing and compiling need beside the weights, measured on the 270M model


@dataclass(frozen=True)
class Request:
    """What to lower. ``draft``: the folder of a head, ``untrained``, or ``auto``: the head that ships for the target's
    checkpoint, an untrained one where none does. ``passes``: None takes the device's own.

    ``methods``: those to compile beside the usual three, from ``EXTRA_METHODS``. ``jobs``: compiler processes at a
    time, None: one a core.
    """

    target: str
    out: Path
    draft: str = "auto"
    checkpoint: Path | None = None
    device: str = "cpu"
    quant: str = "int8"
    passes: str | None = None
    max_seq_len: int = 2048
    max_prefill: int | None = None
    max_chain: int = 7
    chain: int = 4
    methods: tuple[str, ...] = ()
    cache: Path | None = None
    jobs: int | None = None


class Progress(Protocol):
    """Where lowering says what it is doing."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Around each stage, which may take minutes."""

    def note(self, text: str) -> None:
        """One finding, in words."""


@dataclass
class Report:
    """What lowering did: seconds by stage and in all, peak memory in bytes, sizes, what came from the cache, and the
    blocks.
    """

    path: Path
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)
    source_bytes: int = 0
    peak_bytes: int = 0
    peak_child_bytes: int = 0
    cached: dict[str, bool] = field(default_factory=dict)
    blocks: list[dict[str, object]] = field(default_factory=list)
    pipeline: str = ""
    passes: list[PassRecord] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "path": self.path.name}


@dataclass(frozen=True)
class Plan:
    """What an artifact needs beside its program file: which constants, and how passes made them."""

    constants: tuple[str, ...]
    derived: Mapping[str, Derived]
    sharing: list[dict[str, object]]
    native_code: Mapping[str, list[str]]
    host: Mapping[str, str]
    passes: list[dict[str, object]]

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> "Plan":
        derived = {
            name: Derived(one["function"], tuple(one["sources"]), tuple(one["options"]))
            for name, one in data["derived"].items()
        }
        return cls(**{**data, "constants": tuple(data["constants"]), "derived": derived})


def lower(request: Request, progress: Progress) -> Report:
    """Lowers ``request`` and leaves an artifact at ``request.out``, whole or not at all.

    Raises ``ValueError`` or ``FileNotFoundError`` for what the user can put right, ``TraceError`` and ``PassError`` for
    methods that cannot be traced or rewritten, ``RuntimeError`` for a failing compiler.
    """
    with seldom_collected():
        return Lowering(request, progress).run()


def trace_target(request: Request, methods: Iterable[str] | None, progress: Progress) -> Program:
    """The program as it is before any pass: the methods named, or the three of every artifact. Raises as ``lower``."""
    lowering = Lowering(request, progress)
    allowed = (*METHODS, *EXTRA_METHODS)
    if unknown := [method for method in methods or () if method not in allowed]:
        raise ValueError(f"unknown method {unknown[0]!r}; allowed: {', '.join(allowed)}")
    lowering.read_checkpoints()
    lowering.load_model()
    return lowering.trace(METHODS if methods is None else methods)


class Lowering:
    """One run of lowering. Weights are held once, and let go before anything is compiled."""

    def __init__(self, request: Request, progress: Progress):
        self.request, self.progress = request, progress
        self.report = Report(request.out)
        self.cache = ContentCache(request.cache or default_root())
        unknown = sorted(set(request.methods) - set(EXTRA_METHODS))
        if unknown:
            raise ValueError(f"unknown extra method {unknown[0]!r}; allowed: {', '.join(EXTRA_METHODS)}")
        self.methods = tuple(dict.fromkeys((*METHODS, *request.methods)))
        self.pipeline = pipeline_for(request.device, request.passes)
        self.report.pipeline = pipeline_text(self.pipeline)
        self.dtype = DTYPES[request.device]
        self.recipe = load_recipe(request.quant)
        self.spec = find_target(request.target)

    @cached_property
    def machine(self) -> dict[str, object]:
        """What programs are compiled for. Raises ``ValueError`` where there is no card and they are for one."""
        return machine() | (gpu() if self.request.device == "cuda" else {})

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.progress.stage(name):
            yield
        self.report.seconds[name] = self.report.seconds.get(name, 0.0) + time.perf_counter() - start

    def run(self) -> Report:
        start = time.perf_counter()
        check_free(self.request.out)
        self.progress.note(f"for {self.machine.get('name', self.machine['architecture'])}")
        self.read_checkpoints()
        with making(self.request.out) as folder:
            converting = Aside(
                read_tokenizer, self.checkpoint.tokenizer, self.cache.root / "tokenizers",
                vocab_size=self.checkpoint.config.vocab_size, bos_id=self.checkpoint.bos_id,
            )  # fmt: skip
            self.load_model()
            plan = self.write_program(folder)
            with self.stage("tokenizer"):
                content, tokenizer = converting.result()
                (folder / TOKENIZER).write_bytes(content)
            with self.stage("manifest"):
                manifest = self.manifest(plan, tokenizer, folder)
                (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
            with self.stage("check"):
                for line in self_check(folder):
                    self.progress.note(f"check: {line}")
        self.report.bytes = {name: facts["bytes"] for name, facts in manifest["files"].items()}
        scale = 1 if sys.platform == "darwin" else 1024
        self.report.total_seconds = time.perf_counter() - start
        self.report.peak_bytes = peak_rss()
        self.report.peak_child_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * scale
        return self.report

    def read_checkpoints(self) -> None:
        """Opens what the target and the head are made from."""
        with self.stage("read checkpoints"):
            self.checkpoint = self.spec.open_checkpoint(self.request.checkpoint)
            self.draft = open_draft(self.request.draft, self.checkpoint)
        for note in self.draft.notes:
            self.progress.note(f"draft: {note}")

    def load_model(self) -> None:
        """Builds the speculator and fills it; the checkpoints' own memory is let go."""
        request = self.request
        target = self.spec.build(self.checkpoint.config, request.max_seq_len, self.dtype)
        self.limits = Limits(
            request.max_seq_len,
            min(target.max_call_rows, DEFAULT_PREFILL) if request.max_prefill is None else request.max_prefill,
            request.max_chain,
            request.chain,
            # on cuda few rows have kernels of their own, and a prompt's are dealt out to the draft in such calls
            request.max_chain + 1 if request.device == "cuda" else None,
        )
        self.limits.check(target.max_call_rows)
        positions = getattr(self.checkpoint.config, "max_positions", None)
        if positions is not None and request.max_seq_len > positions:
            raise ValueError(f"--max-seq-len is {request.max_seq_len}; the target was made for {positions} positions")
        self.speculator = Eagle3Speculator(target, Eagle3Head(self.draft.config, request.max_seq_len, self.dtype))
        estimate(self.speculator, self.recipe, self.progress)
        with self.stage("weights"):
            offset = getattr(self.checkpoint.config, "norm_offset", 0.0)
            placed = materialize(target, "target.", self.checkpoint.tensors, self.recipe, self.dtype, offset)
            placed += materialize(self.speculator.draft, "draft.", self.draft.tensors, self.recipe, self.dtype)
            self.speculator.draft.d2t.copy_(self.draft.d2t)
            self.checkpoint = replace(self.checkpoint, tensors={})
            self.draft = replace(self.draft, tensors={})
            trim_memory()
        for line in report_lines(placed):
            self.progress.note(f"weights: {line}")
        self.placed = placed
        self.report.source_bytes = 2 * sum(p.shape[0] * p.shape[1] for p in placed)

    def program_key(self) -> str:
        """What decides a program file: not the weights, which native code never holds. On cuda they decide the types of
        scales.
        """
        weights = [self.checkpoint.identity, self.draft.identity] if self.request.device == "cuda" else []
        return key_of(
            self.checkpoint.config, self.draft.config, self.limits, self.methods,
            [(p.name, p.format) for p in self.placed], self.report.pipeline, versions(), self.machine, source_hash(),
            Path(find_spec(self.spec.module).origin).read_text(encoding="utf-8"), torch.get_num_threads(),
            self.checkpoint.stop_ids, self.checkpoint.bos_id, weights,
        )  # fmt: skip

    def write_program(self, folder: Path) -> Plan:
        """Leaves ``model.pte`` and ``model.ptd`` in ``folder``, the program from the cache where it was made before."""
        key = self.program_key()
        entry = self.cache.get("programs", key)
        self.report.cached["program"] = entry is not None
        if entry is None:
            entry = self.make_program(key, folder / DATA)
        else:
            with self.stage("write data"):
                plan = read_plan(entry)
                constants = {**named_tensors(self.speculator)}
                self.speculator = None
                write_constants(folder / DATA, self.request.device, plan, Constants(constants, plan.derived))
        trim_memory()
        shutil.copyfile(entry / PROGRAM, folder / PROGRAM)
        return read_plan(entry)

    def make_program(self, key: str, data: Path) -> Path:
        """Traces, rewrites and compiles. Writes the data file, and everything else as an entry of the cache; returns
        that.
        """
        with CompilePool(self.cache, self.request.jobs or default_jobs(), self.request.device) as pool:
            program, plan = self.rewrite(data)
            Aside(import_module, "eyas.lowering.executorch_program")  # seconds, while others compile
            compiled, host = self.compile(program, pool)
        return self.link(key, program, plan, compiled, host)

    def rewrite(self, data: Path) -> tuple[Program, Plan]:
        """Traces, runs the passes and writes the data file; the program no longer holds its weights."""
        program = self.trace(self.methods)
        with self.stage("passes"):
            self.report.passes = run_pipeline(program, self.pipeline)
        for line in (*record_lines(self.report.passes), *plan_lines(program.sharing)):
            self.progress.note(line)
        self.progress.note(f"program {program_hash(program)} after the passes")
        for ep in program.methods.values():
            refuse_strided_constants(ep)
        names = tuple(name for name, buffer in program.sharing.items() if buffer.readers or buffer.writers)
        sharing = [buffer_json(program.sharing[name]) for name in names]
        derived = made_from(names, program.derived)
        passes = [{"pass": r.spec, "rewrites": r.rewrites, "nodes": r.nodes_after} for r in self.report.passes]
        plan = Plan(names, derived, sharing, {}, {}, passes)
        with self.stage("write data"):
            write_constants(data, self.request.device, plan, program.constants())
            for ep in program.methods.values():
                release_constants(ep)
            trim_memory()
        return program, plan

    def link(
        self, key: str, program: Program, plan: Plan, compiled: Mapping[str, CompiledBlock], host: Path | None
    ) -> Path:
        """Puts compiled blocks into a program file: an entry of the cache."""
        with self.stage("load executorch"):  # what is left of it
            from eyas.lowering.executorch_program import write_program

        device = self.request.device
        facts = {"kind": "torch" if device == "cpu" else device}
        if host is not None:
            facts = {"kind": "eyas", "name": host.name, "sha256": file_sha256(host)}
        chains = {name: (chain_of(name, program, compiled, device), self.limits.rows(name)) for name in program.methods}
        digest = {key: file_sha256(one.code) for key, one in compiled.items()}
        code = {
            name: [digest[block] for block in dict.fromkeys(step.block for step in chain.steps)]
            for name, (chain, _) in chains.items()
        }
        plan = replace(plan, native_code=code, host=facts)

        def fill(entry: Path) -> None:
            files = {key: one.code for key, one in compiled.items()}
            write_program(entry / PROGRAM, chains, files, program.constant_methods, host, device)
            (entry / PLAN).write_text(json.dumps(plan.to_json()))

        with self.stage("program file"):
            return self.cache.put("programs", key, fill)

    def trace(self, methods: Iterable[str]) -> Program:
        """The traced methods. The model itself is let go: its weights then belong to them alone."""
        program = Program({}, constant_methods(self.limits, self.checkpoint, self.draft), self.request.device)
        for method in methods:
            with self.stage(f"trace {method}"):
                program.methods |= trace_methods(self.speculator, self.limits, [method])
        self.speculator = None
        trim_memory()  # it is in cycles
        return program

    def compile(self, program: Program, pool: CompilePool) -> tuple[dict[str, CompiledBlock], Path | None]:
        """Native code of every block, and the library that hosts its tensors; None where that must be torch's."""
        calls = Counter(
            n.args[0] for ep in program.methods.values() for n in ep.graph.nodes if n.target is BLOCK
        )  # fmt: skip
        for host in HOSTS[self.request.device]:
            with self.stage("compile"):
                compiled = pool.compile({key: program.blocks[key] for key in calls}, host)
            lacking = [(key, one.missing) for key, one in compiled.items() if one.missing]
            if lacking:
                key, missing = lacking[0]
                self.progress.note(
                    f"block {key} needs torch's {', '.join(missing[:3])}; the program will need torch to run"
                )
                continue
            for key, one in compiled.items():
                self.report.cached[key] = one.cached
                self.progress.note(
                    f"block {key}: {program.blocks[key].size} nodes, called {calls[key]} times, "
                    f"{'found in the cache' if one.cached else 'compiled'} ({one.seconds:.1f} s)"
                )
            self.report.blocks = [
                {"block": key, "nodes": program.blocks[key].size, "calls": calls[key], "seconds": one.seconds,
                 "cached": one.cached, "bytes": one.code.stat().st_size}
                for key, one in compiled.items()
            ]  # fmt: skip
            return compiled, build_libraries(self.cache).host if host == "eyas" else None
        raise AssertionError("torch lacks nothing")

    def manifest(self, plan: Plan, tokenizer: TokenizerFacts, folder: Path) -> dict[str, object]:
        """What the artifact says of itself; see ``eyas.runtime.artifact`` for who reads it."""
        checkpoint = self.checkpoint
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "files": {
                name: {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
                for name in (PROGRAM, DATA, TOKENIZER)
            },
            "native_code": plan.native_code,
            "host": plan.host,
            "device": {"type": self.request.device, **self.machine},
            "versions": versions(),
            "target": {"name": self.request.target, **checkpoint.identity},
            "draft": {**self.draft.identity, "notes": list(self.draft.notes)},
            "quantisation": {"recipe": self.recipe.to_json(), "matrices": [asdict(p) for p in self.placed]},
            "pipeline": self.report.pipeline,
            "passes": plan.passes,
            "sharing": plan.sharing,
            "methods": {name: {"min_rows": 1, "max_rows": self.limits.rows(name)} for name in self.methods},
            "limits": asdict(self.limits),
            "tokenizer": {
                "sha256": tokenizer.sha256,
                "vocab_size": tokenizer.vocab_size,
                "bos_id": tokenizer.bos_id,
                "add_bos": tokenizer.add_bos and checkpoint.add_bos,
                "stop_ids": list(checkpoint.stop_ids),
                "chat_template": checkpoint.chat_template,
            },
        }


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Looks for garbage in cycles a hundredth as often: graphs are many small objects that live long."""
    before = gc.get_threshold()
    gc.set_threshold(100 * max(before[0], 700), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Aside:
    """A call that runs beside others: one that mostly waits for a process of its own."""

    def __init__(self, function: Callable, *args, **kwargs):
        self._done: Future = Future()

        def run() -> None:
            try:
                self._done.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  whoever asks for the result must see it
                self._done.set_exception(error)

        threading.Thread(target=run, daemon=True).start()  # it does not keep a failed lowering waiting

    def result(self) -> object:
        """What the call returned or raised, once it has."""
        return self._done.result()


def check_free(out: Path) -> None:
    """Raises ``ValueError`` where ``out`` cannot be made, or is something that may not be replaced."""
    parent = next((folder for folder in out.absolute().parents if folder.exists()), out)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"{out} cannot be made: {parent} is no folder that may be written to; choose another place")
    if out.exists() and not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an artifact; choose another folder or remove it")


@contextmanager
def making(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place when the block ends well, and disappears when it does not. Those of
    processes that were killed are removed first: nobody holds their locks.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{glob.escape(out.name)}-*/{LOCK}"):
        if is_left(left):
            shutil.rmtree(left.parent, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch,
        open(Path(scratch) / LOCK, "w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = Path(scratch) / "new"
        folder.mkdir()
        yield folder
        check_free(out)  # again: somebody may have put something else there meanwhile
        old = Path(scratch) / "old"
        if out.exists():
            out.rename(old)
        try:
            folder.rename(out)
        except BaseException:
            if old.exists():
                old.rename(out)
            raise


def is_left(lock: Path) -> bool:
    """Whether the process that made a lock's file has ended: it is not new, and nobody holds it."""
    try:
        with open(lock) as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < LOCKING:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def open_draft(name: str, checkpoint: Checkpoint) -> DraftCheckpoint:
    """The head of ``Request.draft`` for a target's checkpoint."""
    config = checkpoint.config
    facts = dict(
        target_vocab_size=config.vocab_size,
        target_hidden_size=config.hidden_size,
        target_layers=config.n_layers,
        target_embed=checkpoint.tensors["embed_tokens.weight"],
    )
    if name == "auto":
        name = str(shipped_head(checkpoint.identity) or "untrained")
    return untrained_head(**facts) if name == "untrained" else read_head(Path(name), **facts)


def estimate(speculator: Eagle3Speculator, recipe: Recipe, progress: Progress) -> None:
    """Says what the weights and caches will take. Raises ``MemoryError`` where this machine cannot hold them."""
    width = {"int8": 1.0, "int4": 0.75, "dense": 4.0}
    weights = caches = 0.0
    for name, buffer in speculator.named_buffers():
        if buffer.is_meta:
            weights += buffer.numel() * width[recipe.format_of(name.rpartition(".")[0]).kind]
        elif ".cache." in name:
            caches += buffer.numel() * buffer.element_size()
    need = 2 * weights + caches + COMPILER_BYTES  # a repacked copy of the weights exists beside the first for a while
    progress.note(
        f"estimate: weights {weights / 1e6:.0f} MB, caches {caches / 1e6:.0f} MB, lowering about {need / 1e9:.1f} GB"
    )
    free = available_bytes()
    if free is not None and need > free:
        raise MemoryError(
            f"lowering needs about {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are available; "
            f"free some, or lower with a smaller --max-seq-len or --quant int4"
        )


def available_bytes() -> int | None:
    """Memory that this process may still take, None where it cannot be known."""
    limits = []
    try:
        with open("/proc/meminfo") as file:
            limits += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")]
    except OSError:
        pass
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min(limits, default=None)


def constant_methods(limits: Limits, checkpoint: Checkpoint, draft: DraftCheckpoint) -> dict[str, object]:
    """Facts that a runner needs, by the names of the methods that give them. No BOS: -1. No limit of the head: 0."""
    config = checkpoint.config
    return {
        "get_max_seq_len": limits.max_seq_len,
        "get_vocab_size": config.vocab_size,
        "get_n_layers": config.n_layers,
        "get_min_prefill_chunk": 1,
        "get_max_prefill_chunk": limits.max_prefill,
        "get_sliding_window": config.sliding_window or 0,
        "get_chain_len": limits.chain,
        "get_max_chain_len": limits.max_chain,
        "get_draft_vocab_size": draft.config.draft_vocab_size,
        "get_draft_max_positions": draft.config.max_positions or 0,
        "get_bos_id": -1 if checkpoint.bos_id is None else checkpoint.bos_id,
        "get_stop_ids": list(checkpoint.stop_ids),
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
    }


def trim_memory() -> None:
    """Collects what is only in cycles, and gives free memory back to the system."""
    gc.collect()
    return_free_memory()


def named_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """A module's tensors by the names that a traced method gives them."""
    return {name: t.detach() for name, t in (*module.named_parameters(), *module.named_buffers())}


def made_from(names: Iterable[str], derived: Mapping[str, Derived]) -> dict[str, Derived]:
    """How those of some constants that passes derived are made, and whatever they are made from that is derived too."""
    found: dict[str, Derived] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in derived and name not in found:
            found[name] = derived[name]
            waiting += derived[name].sources
    return found


class Constants(Mapping):
    """A program's constants out of a model's: those that passes had derived are made when asked for, and not kept."""

    def __init__(self, given: Mapping[str, Tensor], derived: Mapping[str, Derived]):
        self.given, self.derived = given, derived

    def __getitem__(self, name: str) -> Tensor:
        return self.derived[name].compute(self) if name in self.derived else self.given[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.given, **self.derived})

    def __len__(self) -> int:
        return len({**self.given, **self.derived})


def write_constants(path: Path, device: str, plan: Plan, constants: Mapping[str, Tensor]) -> None:
    """The data file: every constant of the plan, once, in the plan's order."""
    keys = [(storage_key(device, entry["name"]), entry["nbytes"]) for entry in plan.sharing]
    write_data_file(path, keys, (constants[name].detach().contiguous() for name in plan.constants))


def read_plan(entry: Path) -> Plan:
    return Plan.from_json(json.loads((entry / PLAN).read_text()))


def buffer_json(buffer: SharedBuffer) -> dict[str, object]:
    return {
        "name": buffer.name, "shape": list(buffer.shape), "dtype": str(buffer.dtype).removeprefix("torch."),
        "nbytes": buffer.nbytes, "readers": list(buffer.readers), "writers": list(buffer.writers),
    }  # fmt: skip


def record_lines(records: list[PassRecord]) -> Iterator[str]:
    """What each pass did, and why it left candidates alone, in words."""
    for r in records:
        yield f"pass {r.spec}: {r.rewrites} rewrites, {r.nodes_before} -> {r.nodes_after} nodes, {r.seconds:.2f} s"
        for (method, reason), count in Counter((refusal.method, refusal.reason) for refusal in r.refusals).items():
            yield f"pass {r.spec}: left {count} of {method} alone: {reason}"


def self_check(folder: Path) -> list[str]:
    """Runs every method of a finished artifact in a process of its own. Raises ``RuntimeError`` naming the method that
    fails.
    """
    command = [sys.executable, "-m", "eyas.runtime.selfcheck", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"the process ended with status {done.returncode}"
        raise RuntimeError(f"the lowered program does not run: {said}")
    return done.stdout.strip().splitlines()

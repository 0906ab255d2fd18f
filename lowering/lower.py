"""From a target and a draft head to an artifact: the whole of lowering, stage by stage."""

import gc
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from eyas.lowering.content_cache import ContentCache, default_root, file_sha256, key_of
from eyas.lowering.data_file import write_data_file
from eyas.lowering.environment import machine, versions
from eyas.lowering.pipelines import pipeline_for
from eyas.lowering.source_hash import source_hash
from eyas.lowering.tokenizer import TokenizerFacts, make_tokenizer_json
from eyas.lowering.trace import METHODS, Limits, trace_methods
from eyas.models.eagle3 import Eagle3Head
from eyas.models.eagle3_checkpoint import DraftCheckpoint, read_head, untrained_head
from eyas.models.recipe import Placed, Recipe, load_recipe, materialize, report_lines
from eyas.models.speculator import Eagle3Speculator
from eyas.models.target import Checkpoint, find_target
from eyas.passes.pipeline import PassRecord, run_pipeline
from eyas.passes.program import Derived, Program
from eyas.passes.registry import parse_pipeline, pipeline_text
from eyas.passes.share_buffers import plan_lines
from eyas.runtime.artifact import DATA, FORMAT, FORMAT_VERSION, MANIFEST, PROGRAM, TOKENIZER
from eyas.runtime.payload import storage_key

DTYPE = torch.float32  # activations and caches on cpu: what its kernels take
COMPILER_BYTES = 1 << 30  # what tracing and compiling need beside the weights, measured on the 270M model


@dataclass(frozen=True)
class Request:
    """What to lower. ``draft``: ``untrained``, or the folder of a head. ``passes``: None takes the device's own.

    ``methods``: those to compile beside the usual three, from ``EXTRA_METHODS``.
    """

    target: str
    out: Path
    draft: str = "untrained"
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


class Progress(Protocol):
    """Where lowering says what it is doing."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Around each stage, which may take minutes."""

    def note(self, text: str) -> None:
        """One finding, in words."""


@dataclass
class Report:
    """What lowering did: seconds by stage, peak memory in bytes, sizes, and what came from the cache."""

    path: Path
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    source_bytes: int = 0
    peak_bytes: int = 0
    peak_child_bytes: int = 0
    cached: dict[str, bool] = field(default_factory=dict)
    pipeline: str = ""
    passes: list[PassRecord] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "path": self.path.name, "total_seconds": sum(self.seconds.values())}


@dataclass(frozen=True)
class Plan:
    """What is needed beside the program file to write an artifact: which constants it takes, and how passes made them."""

    constants: tuple[str, ...]
    derived: Mapping[str, Derived]
    sharing: list[dict[str, object]]
    native_code: Mapping[str, str]
    passes: list[dict[str, object]]

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "derived": {n: [d.function, *d.sources] for n, d in self.derived.items()}}

    @classmethod
    def from_json(cls, data: dict) -> "Plan":
        derived = {n: Derived(function, tuple(sources)) for n, (function, *sources) in data["derived"].items()}
        return cls(**{**data, "constants": tuple(data["constants"]), "derived": derived})


def lower(request: Request, progress: Progress) -> Report:
    """Lowers ``request`` and leaves an artifact at ``request.out``, whole or not at all.

    Raises ``ValueError`` or ``FileNotFoundError`` for what the user can put right, ``TraceError`` and ``PassError`` for
    methods that cannot be traced or rewritten, ``RuntimeError`` for a failing compiler.
    """
    report = Report(request.out)
    cache = ContentCache(request.cache or default_root())

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        start = time.perf_counter()
        with progress.stage(name):
            yield
        report.seconds[name] = report.seconds.get(name, 0.0) + time.perf_counter() - start

    check_free(request.out)
    pipeline = parse_pipeline(pipeline_for(request.device, request.passes))
    report.pipeline = pipeline_text(pipeline)
    recipe = load_recipe(request.quant)
    spec = find_target(request.target)
    with stage("read checkpoints"):
        checkpoint = spec.open_checkpoint(request.checkpoint)
        draft = open_draft(request.draft, checkpoint)
    for note in draft.notes:
        progress.note(f"draft: {note}")
    target = spec.build(checkpoint.config, request.max_seq_len, DTYPE)
    limits = Limits(
        request.max_seq_len, request.max_prefill or min(target.max_call_rows, 512), request.max_chain, request.chain
    )
    limits.check(target.max_call_rows)
    speculator = Eagle3Speculator(target, Eagle3Head(draft.config, request.max_seq_len, DTYPE))
    estimate(speculator, recipe, progress)
    methods = (*METHODS, *request.methods)
    with stage("weights"):
        placed = load_weights(speculator, checkpoint, draft, recipe)
    for line in report_lines(placed):
        progress.note(f"weights: {line}")
    report.source_bytes = 2 * sum(p.shape[0] * p.shape[1] for p in placed)
    key = key_of(
        checkpoint.config, draft.config, limits, methods, [(p.name, p.format) for p in placed], report.pipeline,
        versions(), machine(), source_hash(), checkpoint.stop_ids, checkpoint.bos_id,
    )  # fmt: skip
    with making(request.out) as folder:
        found = cache.get("programs", key)
        report.cached["program"] = found is not None
        constants = model_constants(speculator)
        if found is None:
            found = make_program(
                speculator, methods, limits, checkpoint, draft, pipeline, cache, key, folder, stage, progress, report
            )
        plan = Plan.from_json(json.loads((found / "plan.json").read_text()))
        shutil.copyfile(found / PROGRAM, folder / PROGRAM)
        if not (folder / DATA).exists():
            with stage("write data"):
                write_constants(folder / DATA, plan, constants)
        del speculator, target, constants
        with stage("tokenizer"):
            tokenizer = make_tokenizer_json(
                checkpoint.tokenizer, folder / TOKENIZER, cache.root / "tokenizers",
                vocab_size=checkpoint.config.vocab_size, bos_id=checkpoint.bos_id,
            )  # fmt: skip
        with stage("manifest"):
            manifest = manifest_of(
                request, checkpoint, draft, recipe, placed, limits, methods, report, plan, tokenizer, folder
            )
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False))
        with stage("check"):
            for line in self_check(folder):
                progress.note(f"check: {line}")
    report.bytes = {name: facts["bytes"] for name, facts in manifest["files"].items()}
    scale = 1 if sys.platform == "darwin" else 1024
    report.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    report.peak_child_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * scale
    return report


def check_free(out: Path) -> None:
    """Raises ``ValueError`` where ``out`` is something else than an artifact that may be replaced."""
    if out.exists() and not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an artifact; choose another folder or remove it")


@contextmanager
def making(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place when the block ends well, and disappears when it does not."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        folder = Path(scratch) / "new"
        folder.mkdir()
        yield folder
        if out.exists():
            out.rename(Path(scratch) / "old")
        folder.rename(out)


def open_draft(name: str, checkpoint: Checkpoint) -> DraftCheckpoint:
    config = checkpoint.config
    facts = dict(
        target_vocab_size=config.vocab_size,
        target_hidden_size=config.hidden_size,
        target_layers=config.n_layers,
        target_embed=checkpoint.tensors["embed_tokens.weight"],
    )
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
        f"estimate: weights {weights / 1e6:.0f} MB, caches {caches / 1e6:.0f} MB, lowering needs about {need / 1e9:.1f} GB"
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


def load_weights(
    speculator: Eagle3Speculator, checkpoint: Checkpoint, draft: DraftCheckpoint, recipe: Recipe
) -> list[Placed]:
    placed = materialize(
        speculator.target, "target.", checkpoint.tensors, recipe, DTYPE, getattr(checkpoint.config, "norm_offset", 0.0)
    )
    placed += materialize(speculator.draft, "draft.", draft.tensors, recipe, DTYPE)
    speculator.draft.d2t.copy_(draft.d2t)
    return placed


def model_constants(speculator: Eagle3Speculator) -> dict[str, Tensor]:
    """The model's tensors by the names that a traced method gives them."""
    return {name: t.detach() for name, t in (*speculator.named_parameters(), *speculator.named_buffers())}


def make_program(
    speculator, methods, limits, checkpoint, draft, pipeline, cache, key, folder, stage, progress, report
) -> Path:
    """Traces, rewrites and compiles; leaves the data file in ``folder`` and the rest in the cache. Returns the cache entry."""
    from eyas.lowering.aoti_cpu import compile_method
    from eyas.lowering.executorch_program import write_program

    program = Program({}, constant_methods(limits, checkpoint, draft))
    for method in methods:
        with stage(f"trace {method}"):
            program.methods |= trace_methods(speculator, limits, [method])
    with stage("passes"):
        records = run_pipeline(program, pipeline)
    report.passes = records
    for record in records:
        progress.note(
            f"pass {record.spec}: {record.rewrites} rewrites, {record.nodes_before} -> {record.nodes_after} nodes, "
            f"{record.seconds:.2f} s"
        )
        reasons = dict.fromkeys(refusal.reason for refusal in record.refusals)
        for reason in reasons:
            progress.note(f"pass {record.spec}: left alone: {reason}")
    for line in plan_lines(program.sharing):
        progress.note(f"shared: {line}")
    constants = program.constants()
    names = tuple(name for name, buffer in program.sharing.items() if buffer.readers or buffer.writers)
    with stage("write data"):
        write_keys(folder / DATA, names, constants)
        map_constants(program, folder / DATA, names)  # the compiler needs their shapes; the weights may go
        forget(speculator)
        del constants
        gc.collect()
    compiled = {}
    for method, ep in program.methods.items():
        with stage(f"compile {method}"):
            compiled[method] = compile_method(ep, cache)
        report.cached[method] = compiled[method].cached
    with stage("program file"):
        plan = Plan(
            constants=names,
            derived={name: program.derived[name] for name in names if name in program.derived},
            sharing=[
                {"name": b.name, "shape": list(b.shape), "dtype": str(b.dtype).removeprefix("torch."), "nbytes": b.nbytes,
                 "readers": list(b.readers), "writers": list(b.writers)}
                for b in program.sharing.values() if b.name in names
            ],
            native_code={method: file_sha256(c.code) for method, c in compiled.items()},
            passes=[{"pass": r.spec, "rewrites": r.rewrites, "nodes": r.nodes_after} for r in records],
        )  # fmt: skip

        def fill(entry: Path) -> None:
            rows = {name: (ep, limits.rows(name)) for name, ep in program.methods.items()}
            write_program(entry / PROGRAM, rows, compiled, program.constant_methods)
            (entry / "plan.json").write_text(json.dumps(plan.to_json()))

        return cache.put("programs", key, fill)


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


def write_constants(path: Path, plan: Plan, constants: dict[str, Tensor]) -> None:
    """The data file of a program that came from the cache: constants that passes had made are made again."""

    class Lazy(Mapping):
        """Computes a derived constant when it is asked for, and keeps none."""

        def __getitem__(self, name: str) -> Tensor:
            return plan.derived[name].compute(constants) if name in plan.derived else constants[name]

        def __iter__(self):
            return iter(plan.constants)

        def __len__(self) -> int:
            return len(plan.constants)

    sizes = {entry["name"]: entry["nbytes"] for entry in plan.sharing}
    lazy = Lazy()
    keys = [(storage_key("cpu", name), sizes[name]) for name in plan.constants]
    write_data_file(path, keys, (lazy[name].contiguous() for name in plan.constants))


def write_keys(path: Path, names: tuple[str, ...], constants: Mapping[str, Tensor]) -> None:
    tensors = [constants[name].detach() for name in names]
    keys = [(storage_key("cpu", name), t.numel() * t.element_size()) for name, t in zip(names, tensors)]
    write_data_file(path, keys, tensors)


def map_constants(program: Program, path: Path, names: tuple[str, ...]) -> None:
    """Puts each constant of a program over the data file that holds it, so that its own memory can be given back."""
    from eyas.runtime.container_files import DataFile

    file = DataFile(path, writable=True)
    mapped: dict[str, Tensor] = {}
    for ep in program.methods.values():
        for store in (ep.state_dict, ep.constants):
            for name, old in list(store.items()):
                if name in names and isinstance(old, Tensor):
                    if name not in mapped:
                        data = file.bytes_of(storage_key("cpu", name))
                        mapped[name] = torch.frombuffer(data, dtype=old.dtype).view(old.shape)
                    store[name] = (
                        torch.nn.Parameter(mapped[name], False) if isinstance(old, torch.nn.Parameter) else mapped[name]
                    )


def forget(speculator: Eagle3Speculator) -> None:
    """Gives a model's memory back; it cannot be used afterwards."""
    speculator.to("meta")


def manifest_of(
    request, checkpoint, draft, recipe, placed, limits, methods, report, plan, tokenizer: TokenizerFacts, folder
) -> dict:
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
        for name in (PROGRAM, DATA, TOKENIZER)
    }
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "files": files,
        "native_code": plan.native_code,
        "device": {"type": request.device, **machine()},
        "versions": versions(),
        "target": {"name": request.target, **checkpoint.identity},
        "draft": {**draft.identity, "notes": list(draft.notes)},
        "quantisation": {"recipe": recipe.to_json(), "matrices": [asdict(p) for p in placed]},
        "pipeline": report.pipeline,
        "passes": plan.passes,
        "sharing": plan.sharing,
        "methods": {name: {"min_rows": 1, "max_rows": limits.rows(name)} for name in methods},
        "limits": asdict(limits),
        "tokenizer": {
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "add_bos": tokenizer.add_bos and checkpoint.add_bos,
            "stop_ids": list(checkpoint.stop_ids),
            "chat_template": checkpoint.chat_template,
        },
    }


def self_check(folder: Path) -> list[str]:
    """Runs every method of a finished artifact in a process of its own. Raises ``RuntimeError`` naming the method that fails."""
    command = [sys.executable, "-m", "eyas.runtime.selfcheck", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the lowered program does not run: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().splitlines()

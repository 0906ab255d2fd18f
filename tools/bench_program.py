"""Checks and times a whole artifact against its own module run eagerly, and against transformers."""

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from eyas.models.recipe import Recipe, load_recipe, materialize
from eyas.models.target import Checkpoint, find_target
from eyas.models.weights import Dense, TensorSource, Weight
from eyas.runtime.artifact import Artifact, Program
from eyas.runtime.decoding import positions, tokens
from eyas.runtime.session import open_decoder, open_tokenizer
from eyas.tools.bench_peers import load_peer
from eyas.tools.prompts import TEXT
from eyas.training.generate import before_loops, repeated_share

LOGIT_BOUND = 5e-3  # the most that float32 logits of the two implementations may differ


def bench_acceptance(
    path: Path, prompts_file: Path, per_kind: int, new_tokens: int, max_repeated: float
) -> dict[str, object]:
    """tau of an artifact's head by kind of prompt and chain, by decoding greedy texts up to where more than
    ``max_repeated`` of their 4-grams are repeated ones, and the speed-up over greedy decoding. tau is that of rounds
    with whole chains, which the end of a text does not cut short. Fails where a speculative text is not the greedy one.
    """
    kinds = read_held_out(prompts_file, per_kind)
    artifact = Artifact.open(path)
    program, console = artifact.load(), Console()
    greedy, speculative = (open_decoder(program, kind) for kind in ("greedy", "speculative"))
    chains = range(1, speculative.max_chain + 1)
    table = Table(title=f"tau at each chain, up to {per_kind} prompts a kind")
    for column in ("kind", *(f"K={chain}" for chain in chains), "same"):
        table.add_column(column, justify="right")
    figures: dict[str, dict[str, object]] = {}
    seconds, written = Counter(), 0  # by chain, 0 for greedy decoding; tokens after the first of each text
    with Progress(console=Console(stderr=True)) as live:
        task = live.add_task("prompts", total=sum(map(len, kinds.values())))
        for kind, prompts in kinds.items():
            emitted, rounds = dict.fromkeys(chains, 0), dict.fromkeys(chains, 0)
            hits, proposed = Counter(), Counter()
            repeated, of_all, n_tokens, same = [], [], 0, True
            for ids in prompts:
                text = flat(greedy.generate(ids, new_tokens))
                of_all.append(repeated_share(text))
                text = text[: before_loops(text, max_repeated)]
                repeated.append(repeated_share(text))
                n_tokens += len(text)
                same &= text == flat(greedy.generate(ids, len(text)))
                seconds[0] += greedy.statistics.decode_seconds
                written += len(text) - 1
                for chain in chains:
                    blocks = list(speculative.generate(ids, len(text), chain=chain))
                    same &= text == flat(blocks)
                    counts = speculative.statistics
                    seconds[chain] += counts.decode_seconds
                    sizes = [len(block) for block in blocks]  # the prefill's first
                    whole = [n for n, known in zip(sizes[1:], accumulate(sizes)) if known + chain < len(text)]
                    emitted[chain] += sum(whole)
                    rounds[chain] += len(whole)
                    if chain == speculative.max_chain:
                        hits, proposed = hits + counts.hits, proposed + counts.proposed
                live.advance(task)
            tau = {chain: emitted[chain] / max(1, rounds[chain]) for chain in chains}
            by_position = [hits[i] / proposed[i] for i in sorted(proposed)]
            figures[kind] = {"tau": tau, "by_position": by_position, "repeated": statistics.mean(repeated),
                             "repeated_of_all": statistics.mean(of_all), "tokens": n_tokens,
                             "prompts": len(prompts), "same": same}  # fmt: skip
            table.add_row(kind, *(f"{tau[chain]:.2f}" for chain in chains), "yes" if same else "NO")
    mean = {chain: statistics.mean(found["tau"][chain] for found in figures.values()) for chain in chains}
    rate = {chain: written / max(1e-9, seconds[chain]) for chain in (0, *chains)}
    table.add_section()
    table.add_row("mean", *(f"{mean[chain]:.2f}" for chain in chains), "")
    table.add_row("speed-up", *(f"{rate[chain] / max(1e-9, rate[0]):.2f}" for chain in chains), "")
    console.print(table)
    console.print(f"greedy decoding: {rate[0]:.1f} tokens/s; same: the text is the greedy one at every chain")
    for kind, found in figures.items():
        shares = ", ".join(f"{share:.0%}" for share in found["by_position"])
        console.print(
            f"{kind}: {found['tokens']} tokens, {found['repeated']:.0%} of their 4-grams repeated ones "
            f"({found['repeated_of_all']:.0%} in {new_tokens} greedy tokens); accepted by position {shares}",
            soft_wrap=True,
        )
    return {
        "kinds": figures, "mean_tau": mean, "tokens_per_second": rate,
        "ok": all(found["same"] for found in figures.values()),
    }  # fmt: skip


def flat(blocks: Iterable[list[int]]) -> list[int]:
    return [token for block in blocks for token in block]


def read_held_out(path: Path, per_kind: int) -> dict[str, list[list[int]]]:
    """Prompts by kind of a head's ``held_out.json``. Raises ``ValueError`` for another file."""
    try:
        prompts = [(p["kind"], list(p["ids"])) for p in json.loads(path.read_text(encoding="utf-8"))["prompts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no prompts; expected held_out.json of a trained head ({error!r})") from error
    kinds: dict[str, list[list[int]]] = {}
    for kind, ids in prompts:
        if len(kinds.setdefault(kind, [])) < per_kind:
            kinds[kind].append(ids)
    return kinds


def open_model(
    target: str, checkpoint_path: Path | None, recipe: Recipe, max_seq_len: int
) -> tuple[Checkpoint, nn.Module]:
    """The target's module in a recipe's formats."""
    spec = find_target(target)
    checkpoint = spec.open_checkpoint(checkpoint_path)
    module = spec.build(checkpoint.config, max_seq_len, torch.float32)
    materialize(module, "target.", checkpoint.tensors, recipe, torch.float32, checkpoint.config.norm_offset)
    return checkpoint, module


def eager_module(artifact: Artifact, max_seq_len: int | None = None) -> nn.Module:
    """The target of an artifact as an eager module with the same weights, kept in float32 so that it runs at torch's
    speed.
    """
    m = artifact.manifest
    recipe = Recipe.from_json(m["quantisation"]["recipe"])
    _, module = open_model(m["target"]["name"], None, recipe, max_seq_len or m["limits"]["max_seq_len"])
    return as_dense(module)


def as_dense(module: nn.Module) -> nn.Module:
    """Every matrix in float32, with the values that its format stands for."""
    for name, child in list(module.named_modules()):
        if isinstance(child, Weight) and not isinstance(child, Dense):
            module.set_submodule(name, Dense.of(TensorSource(child.dense()), child.bias))
    return module


@torch.no_grad()
def logits_of(module: nn.Module, ids: list[int], step: int | None = None) -> torch.Tensor:
    """float32 ``[len(ids), V]`` from empty caches, in calls of ``step`` rows (the most that the caches take, by
    default).
    """
    for name, buffer in module.named_buffers():
        if ".cache." in name:
            buffer.zero_()
    step, parts, device = step or module.max_call_rows, [], next(module.buffers()).device
    for at in range(0, len(ids), step):
        part = torch.tensor([ids[at : at + step]], device=device)
        hidden, _ = module(part, torch.arange(at, at + part.shape[1], device=device), ())
        parts.append(module.logits(hidden)[0])
    return torch.cat(parts)


def logits_of_program(program: Program, ids: list[int], step: int) -> torch.Tensor:
    """As ``logits_of``, of a program with ``target_logits``, on the host."""
    method, parts = program.method("target_logits"), []
    program.reset()
    for at in range(0, len(ids), step):
        part = ids[at : at + step]
        parts.append(method(tokens(part), positions(at, len(part)))[0].array[0])
    return torch.from_numpy(np.concatenate(parts))


def median_ms(call: Callable[[], object], repeats: int = 15) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def bench_eager(path: Path, new_tokens: int) -> dict[str, object]:
    """target_verify against the eager module, greedy decoding against transformers, and logits against transformers."""
    artifact = Artifact.open(path)
    program, tokenizer, console = artifact.load(), open_tokenizer(artifact), Console()
    module = eager_module(artifact)
    verify, figures = program.method("target_verify"), {}
    ids = tokenizer.encode(TEXT)[:600]
    table = Table(title="target_verify at position 500, ms a call")
    for column in ("rows", "artifact", "eager float32", "eager as quantised", "ratio to the faster"):
        table.add_column(column, justify="right")
    quantised = quantised_module(artifact)
    for rows in (1, 2, 5):
        part = ids[500 : 500 + rows]
        speculators = [module, quantised]
        own = median_ms(lambda part=part, rows=rows: verify(tokens(part), positions(500, rows)))
        eager = [
            median_ms(lambda m=m, part=part, rows=rows: eager_verify(m, part, 500), repeats)
            for m, repeats in zip(speculators, (9, 3))
        ]
        table.add_row(str(rows), f"{own:.1f}", *(f"{t:.1f}" for t in eager), f"{min(eager) / own:.1f}x")
        figures[f"verify_{rows}"] = {"artifact_ms": own, "eager_float32_ms": eager[0], "eager_quantised_ms": eager[1]}
    console.print(table)
    figures |= against_transformers(artifact, program, module, ids, new_tokens, console)
    return figures


def quantised_module(artifact: Artifact) -> nn.Module:
    m = artifact.manifest
    recipe = Recipe.from_json(m["quantisation"]["recipe"])
    return open_model(m["target"]["name"], None, recipe, m["limits"]["max_seq_len"])[1]


@torch.no_grad()
def eager_verify(module: nn.Module, ids: list[int], start: int) -> torch.Tensor:
    hidden, _ = module(torch.tensor([ids]), torch.arange(start, start + len(ids)), ())
    return module.logits(hidden).argmax(-1)


def against_transformers(artifact, program, module, ids, new_tokens, console) -> dict[str, object]:
    """Greedy tokens a second against ``transformers`` on the same checkpoint, in float32 and bfloat16."""
    figures: dict[str, object] = {}
    prompt = ids[:16]
    decoder = open_decoder(program, "greedy")
    list(decoder.generate(prompt, new_tokens, stop_ids=()))
    rates = []
    for _ in range(3):
        list(decoder.generate(prompt, new_tokens, stop_ids=()))
        rates.append(decoder.statistics.decode_rate)
    own = statistics.median(rates)
    console.print(f"greedy decoding, artifact: {own:.1f} tokens/s")
    figures["artifact_tokens_per_second"] = own
    for dtype in (torch.float32, torch.bfloat16):
        model = load_peer(dtype)
        with torch.no_grad():
            start = time.perf_counter()
            out = model.generate(torch.tensor([prompt]), max_new_tokens=2, min_new_tokens=2, do_sample=False)
            first = time.perf_counter() - start
            start = time.perf_counter()
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
            )
            seconds = time.perf_counter() - start
        rate = (out.shape[1] - len(prompt)) / seconds
        name = str(dtype).removeprefix("torch.")
        console.print(
            f"greedy decoding, transformers in {name}: {rate:.1f} tokens/s ({own / rate:.1f}x; first two {first:.2f} s)"
        )
        figures[f"transformers_{name}_tokens_per_second"] = rate
        del model
    return figures


def bench_logits(path: Path | None) -> dict[str, object]:
    """Logits of the 270M target in float32 against ``transformers`` on the same file, for three prompts.

    Eagerly as a prefill in the largest chunks, in chunks of 100 rows and row by row; with the artifact of recipe none
    at ``path``, also through its ``target_logits`` in calls of one row and of as many as it takes.
    """
    console, figures = Console(), {}
    oracle = load_peer(torch.float32)
    checkpoint, module = open_model("gemma3_270m", None, load_recipe("none"), 1024)
    ids = tokenize(checkpoint, TEXT)
    program = None if path is None else Artifact.open(path).load()
    window = checkpoint.config.sliding_window
    prompts = {"first line": ids[:24], "half the window": ids[: window // 2], "past the window": ids}
    table = Table(title="largest difference of any logit from transformers, float32")
    ways = {"prefill": module.max_call_rows, "chunks of 100": 100, "row by row": 1}
    names = [*ways, *(["artifact, row by row", "artifact, all rows"] if program else [])]
    for column in ("prompt", "tokens", "largest logit", *names):
        table.add_column(column, justify="right")
    for name, prompt in prompts.items():
        with torch.no_grad():
            expected = oracle(torch.tensor([prompt])).logits[0].float()
        found = {way: logits_of(module, prompt, step) for way, step in ways.items()}
        if program:
            for way, step in zip(names[3:], (1, program.method("target_logits").max_rows)):
                found[way] = logits_of_program(program, prompt, step)
        differences = {way: float((logits - expected).abs().max()) for way, logits in found.items()}
        top = float(expected.abs().max())
        table.add_row(name, str(len(prompt)), f"{top:.1f}", *(f"{differences[way]:.1e}" for way in names))
        figures[name] = {"tokens": len(prompt), "largest_logit": top, **differences}
    console.print(table)
    figures["ok"] = all(v < LOGIT_BOUND for f in figures.values() for k, v in f.items() if k in names)
    return figures


def tokenize(checkpoint: Checkpoint, text: str) -> list[int]:
    """Ids of a text, by the checkpoint's own tokenizer."""
    from eyas.lowering.content_cache import default_root
    from eyas.lowering.tokenizer import make_tokenizer_json
    from eyas.runtime.text import Tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        facts = make_tokenizer_json(
            checkpoint.tokenizer, path, default_root() / "tokenizers",
            vocab_size=checkpoint.config.vocab_size, bos_id=checkpoint.bos_id,
        )  # fmt: skip
        tokenizer = Tokenizer.load(path, bos_id=facts.bos_id, add_bos=facts.add_bos, stop_ids=checkpoint.stop_ids)
        return tokenizer.encode(text)


def bench_quant(target: str, checkpoint_path: Path | None, recipes: list[str]) -> dict[str, object]:
    """Perplexity of each recipe on the fixed text, teacher-forced."""
    console, figures = Console(), {}
    ids = tokenize(find_target(target).open_checkpoint(checkpoint_path), TEXT)
    table = Table(title=f"perplexity on a fixed text of {len(ids)} tokens")
    for column in ("recipe", "weights, MB", "perplexity", f"same next token as {recipes[0]}"):
        table.add_column(column, justify="right")
    reference = None
    for name in recipes:
        _, module = open_model(target, checkpoint_path, load_recipe(name), len(ids))
        size = sum(m.nbytes() for m in module.modules() if isinstance(m, Weight))
        logits = logits_of(as_dense(module), ids[:-1])
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
        choice = logits.argmax(-1)
        reference = choice if reference is None else reference
        agree = float((choice == reference).float().mean())
        table.add_row(name, f"{size / 1e6:.0f}", f"{loss.exp():.2f}", f"{100 * agree:.1f}%")
        figures[name] = {"bytes": size, "perplexity": float(loss.exp()), "agreement": agree}
        del module, logits
    console.print(table)
    return figures

"""Whether all ways of decoding an artifact write one text, and whether that is the text of its module run eagerly."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from eyas.models.recipe import load_recipe, materialize
from eyas.models.target import find_target
from eyas.models.weights import TensorSource
from eyas.runtime.artifact import Artifact, Program
from eyas.runtime.decoding import GreedyDecoder, positions, tokens
from eyas.runtime.session import open_decoder, open_tokenizer
from eyas.runtime.text import Tokenizer
from eyas.tools.bench_program import eager_module, flat, logits_of, logits_of_program
from eyas.tools.oracle import CudaOracleDecoder, OracleDecoder, open_oracle
from eyas.tools.prompts import PROMPTS, text_ids

NEAR_TIE = 0.02  # logits closer than this may change places between two orders of summation
LENGTHS_NEW_TOKENS = 64
LOGITS_PROMPT = 600  # tokens


def bench_identity(
    path: Path, n_prompts: int, new_tokens: int, with_eager: bool, with_lengths: bool = False
) -> dict[str, object]:
    """Speculative against greedy text for every chain; bits of verify's rows; greedy against the eager module; prompts
    of the lengths at which caches wrap and chunks end.
    """
    artifact = Artifact.open(path)
    program, tokenizer, console = artifact.load(), open_tokenizer(artifact), Console()
    prompts = [tokenizer.encode(text) for text in PROMPTS[:n_prompts]]
    figures, texts = compare_chains(program, prompts, new_tokens, console)
    rows, methods = rows_equal(program, prompts[0] + texts[0])
    most = program.method("target_verify").max_rows
    console.print(f"rows bit-equal in calls of 1 to {most} rows ({', '.join(methods)}): {rows}")
    figures["rows_bit_equal"] = rows
    verdicts = [rows, all(n == 2 * len(prompts) for n in figures["equal"].values())]
    if with_lengths:
        figures["lengths"] = bench_lengths(program, tokenizer, console)
        verdicts += [row["identical"] for row in figures["lengths"]]
    if with_eager:
        against = eager_on_card if program.device == "cuda" else eager_on_host
        found = against(artifact, program, prompts, texts, console)
        figures |= found
        verdicts += [not found.get("eager_others"), found.get("eager_within_bound", True)]
    figures["ok"] = all(verdicts)
    return figures


def compare_chains(
    program: Program, prompts: list[list[int]], new_tokens: int, console: Console
) -> tuple[dict[str, object], list[list[int]]]:
    """Figures of speculative and an oracle's texts at every chain, and the greedy texts."""
    greedy, speculative = (open_decoder(program, kind) for kind in ("greedy", "speculative"))
    oracle = open_oracle(program)
    chains = range(1, speculative.max_chain + 1)
    texts, equal, tau, oracle_tau = [], *(dict.fromkeys(chains, 0) for _ in range(3))
    with Progress(console=Console(stderr=True)) as live:
        task = live.add_task("prompts", total=len(prompts) * (1 + len(chains)))
        for ids in prompts:
            text = flat(greedy.generate(ids, new_tokens, stop_ids=()))
            texts.append(text)
            oracle.text = [*ids, *text]
            live.advance(task)
            for chain in chains:
                for decoder, taus in ((speculative, tau), (oracle, oracle_tau)):
                    equal[chain] += text == flat(decoder.generate(ids, new_tokens, stop_ids=(), chain=chain))
                    taus[chain] += decoder.statistics.tau / len(prompts)
                live.advance(task)
    table = Table(title=f"{len(prompts)} prompts x {new_tokens} new tokens, twice a chain")
    for column in ("chain", "speculative = greedy", "tau of the head", "tau of an oracle, wrong at times"):
        table.add_column(column, justify="right")
    for chain in chains:
        share = 100 * equal[chain] / (2 * len(prompts))
        shown = f"{share:.0f}%" if equal[chain] == 2 * len(prompts) else f"{min(share, 99.9):.1f}%"
        table.add_row(str(chain), shown, f"{tau[chain]:.3f}", f"{oracle_tau[chain]:.3f}")
    console.print(table)
    figures: dict[str, object] = {
        "equal": equal,
        "tau": tau,
        "oracle_tau": oracle_tau,
        "prompts": len(prompts),
        "new_tokens": new_tokens,
    }
    return figures, texts


def rows_equal(program: Program, ids: list[int]) -> tuple[bool, list[str]]:
    """Whether every output row of verify (and of ``target_logits``, if the program has it) is bit-equal for all call
    sizes.
    """
    methods = [name for name in ("target_verify", "target_logits") if name in program.methods]
    ok = True
    for name in methods:
        method = program.method(name)

        def outputs(step: int, method=method) -> list[bytes]:
            program.reset()
            parts = [
                method(tokens(ids[at : at + step]), positions(at, len(ids[at : at + step])))
                for at in range(0, len(ids), step)
            ]
            return [np.concatenate([part[i].array for part in parts], axis=1).tobytes() for i in range(len(parts[0]))]

        alone = outputs(1)
        ok = ok and all(outputs(step) == alone for step in range(2, method.max_rows + 1))
    return ok, methods


def lengths_of(constants: dict[str, object]) -> list[int]:
    """Lengths of prompts that fit: the shortest, around one and two windows, past two chunks, the longest whose rounds
    meet the end of the caches, and the longest.
    """
    window, chunk, most = (
        int(constants[f"get_{fact}"]) for fact in ("sliding_window", "max_prefill_chunk", "max_seq_len")
    )
    around = [n * window + off for n in (1, 2) for off in (-1, 0, 1)] if window else []
    return sorted(
        {n for n in (1, 2, 9, *around, 2 * chunk + 1, most - LENGTHS_NEW_TOKENS, most - 9, most - 1) if 1 <= n < most}
    )


def ways_to_decode(program: Program) -> Iterator[tuple[str, GreedyDecoder, dict[str, int]]]:
    """Every way but the plain one: its name, a decoder, and options of its ``generate``. Oracles want to be told the
    text.
    """
    speculative = open_decoder(program, "speculative")
    few = min(4, speculative.max_chain)
    for chain in sorted({1, few, speculative.max_chain}):
        yield f"K={chain}", speculative, {"chain": chain}
    yield f"oracle, K={few}", open_oracle(program), {"chain": few}
    if program.device == "cuda":
        yield "greedy, no graphs", open_decoder(program, "greedy", graphs=False), {}
        yield f"K={few}, no graphs", open_decoder(program, "speculative", graphs=False), {"chain": few}


def bench_lengths(program: Program, tokenizer: Tokenizer, console: Console) -> list[dict[str, object]]:
    """For a prompt of each length, whether all ways of decoding write the greedy text."""
    greedy, ways = open_decoder(program, "greedy"), list(ways_to_decode(program))
    lengths, found = lengths_of(program.constants), []
    table = Table(title=f"greedy text, and that of {'; '.join(name for name, *_ in ways)}")
    for column in ("prompt, tokens", "new tokens", "identical", "tau of the oracle"):
        table.add_column(column, justify="right")
    with Progress(console=Console(stderr=True)) as live:
        for length in live.track(lengths, description="lengths"):
            ids = text_ids(tokenizer, length)
            new = min(LENGTHS_NEW_TOKENS, greedy.max_seq_len - length)
            want = flat(greedy.generate(ids, new, stop_ids=()))
            wrong, tau = [], 0.0
            for name, decoder, options in ways:
                told = isinstance(decoder, OracleDecoder | CudaOracleDecoder)
                if told:
                    decoder.text = [*ids, *want]
                if flat(decoder.generate(ids, new, stop_ids=(), **options)) != want:
                    wrong.append(name)
                tau = decoder.statistics.tau if told else tau
            found.append(
                {"length": length, "new_tokens": len(want), "identical": not wrong, "different": wrong, "tau": tau}
            )
            verdict = f"NO: {', '.join(wrong)}" if wrong else "yes"
            table.add_row(str(length), str(len(want)), verdict, f"{tau:.2f}" if tau else "")
    console.print(table)
    return found


def eager_on_host(artifact: Artifact, program: Program, prompts, texts, console: Console) -> dict[str, object]:
    """Greedy text against the module in float32, which is what a program for cpu computes in."""
    ties, wrong, total = compare_eager(eager_module(artifact), prompts, texts)
    console.print(
        f"greedy text against the eager module: {total - len(ties) - len(wrong)} of {total} tokens equal, "
        f"{len(ties)} near ties (gap below {NEAR_TIE}), {len(wrong)} others"
    )
    for prompt, at, gap in ties + wrong:
        console.print(f"  prompt {prompt}, new token {at}: gap of the eager logits {gap:.5f}")
    return {"eager_tokens": total, "eager_near_ties": len(ties), "eager_others": len(wrong)}


def compare_eager(module: nn.Module, prompts, texts) -> tuple[list, list, int]:
    """Positions where the eager module, fed the same text, prefers another token: (near ties, others, tokens)."""
    ties, wrong, total = [], [], 0
    for i, (ids, text) in enumerate(zip(prompts, texts)):
        logits = logits_of(module, [*ids, *text[:-1]])[len(ids) - 1 :]
        total += len(text)
        for at, token in enumerate(text):
            gap = float(logits[at].max() - logits[at, token])
            if gap > 0:
                (ties if gap < NEAR_TIE else wrong).append((i, at, gap))
    return ties, wrong, total


def eager_on_card(artifact: Artifact, program: Program, prompts, texts, console: Console) -> dict[str, object]:
    """Greedy text, and logits if the program has them, against the module in float32, beside the module in bfloat16,
    which is what a program for cuda computes in. A token counts as right if it lies within twice the largest difference
    of the two modules' logits from the most likely one: rounding may move both of two logits so far.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    exact = eager_module(artifact)
    rounded = in_bfloat16(exact, artifact.manifest["target"]["name"]).to(device)
    exact = exact.to(device)
    found = compare_rounded(exact, rounded, prompts, texts)
    console.print(
        f"greedy text against the eager module in float32: {found['eager_equal']} of {found['eager_tokens']} tokens "
        f"equal, largest gap {found['eager_largest_gap']:.4f}\n"
        f"the eager module in bfloat16 against it: {found['eager_bfloat16_equal']} tokens equal, logits at most "
        f"{found['eager_bfloat16_difference']:.4f} apart; a gap may have twice that: {found['eager_within_bound']}",
        soft_wrap=True,
    )
    if "target_logits" in program.methods:
        ids = text_ids(open_tokenizer(artifact), min(LOGITS_PROMPT, exact.max_seq_len))
        reference = logits_of(exact, ids).cpu()
        apart = {"eager, bfloat16": largest_difference(logits_of(rounded, ids).cpu(), reference)}
        for step in sorted({1, program.method("target_logits").max_rows}):
            name = f"artifact, calls of {step}"
            apart[name] = largest_difference(logits_of_program(program, ids, step), reference)
        console.print(
            f"logits of {len(ids)} tokens, largest difference from eager float32 (largest logit "
            f"{float(reference.abs().max()):.1f}): {'; '.join(f'{name} {d:.4f}' for name, d in apart.items())}",
            soft_wrap=True,
        )
        found["logits_apart"] = apart
    return found


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def in_bfloat16(module: nn.Module, target: str) -> nn.Module:
    """A copy of a module of dense matrices, with matrices, activations and caches in bfloat16; ``target``: its name."""
    spec = find_target(target)
    rounded = spec.build(spec.open_checkpoint(None).config, module.max_seq_len, torch.bfloat16)
    values = {name: TensorSource(value) for name, value in module.state_dict().items()}
    materialize(rounded, "target.", values, load_recipe("none"), torch.bfloat16)
    return rounded


def compare_rounded(exact: nn.Module, rounded: nn.Module, prompts, texts) -> dict[str, object]:
    """Texts under both modules, fed the same tokens; ``eager_within_bound``: no token lies further from the most likely
    one of ``exact`` than twice the modules' largest difference.
    """
    gaps, apart, equal, total = [], [], 0, 0
    for ids, text in zip(prompts, texts):
        a, b = (logits_of(module, [*ids, *text[:-1]])[len(ids) - 1 :] for module in (exact, rounded))
        best, chosen = a.max(-1), torch.tensor(text, device=a.device)
        gaps.append(best.values - a.gather(-1, chosen[:, None])[:, 0])
        apart.append((a - b).abs().max())
        equal += int((b.argmax(-1) == best.indices).sum())
        total += len(text)
    gaps, apart = torch.cat(gaps), float(torch.stack(apart).max())
    largest = float(gaps.max())
    return {
        "eager_tokens": total,
        "eager_equal": int((gaps == 0).sum()),
        "eager_bfloat16_equal": equal,
        "eager_bfloat16_difference": apart,
        "eager_largest_gap": largest,
        "eager_within_bound": largest <= 2 * apart,
    }

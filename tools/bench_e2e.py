"""Decoding of a whole artifact: tokens a second by chain, what a round is made of, and transformers beside it.

On a card a round is one CUDA graph. Replayed back to back, without anybody reading what it found, it takes what the
card needs for it; what a round takes longer in decoding is spent between rounds.
"""

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from eyas.runtime.artifact import Artifact, Method, Program
from eyas.runtime.decoding import GreedyDecoder, SpeculativeDecoder, positions, tokens
from eyas.runtime.selfcheck import inputs_of
from eyas.runtime.session import open_decoder, open_tokenizer
from eyas.runtime.statistics import TAU, Statistics
from eyas.tools.bench_peers import FAILURES, PEER_TARGET, decode_rate, load_peer
from eyas.tools.bench_program import flat, median_ms
from eyas.tools.console import ConsoleProgress
from eyas.tools.cuda_timing import graph_us
from eyas.tools.prompts import text_ids

REPLAYS = 50  # of a round, back to back
PROFILED = 16  # rounds
PEER_TOKENS = 64  # the most that a peer writes in a timed generation: they take their time
KERNELS = 10  # lines of the table
SHOWN_CHAIN = 4  # the one that is taken apart, as far as the artifact has it
ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")  # what a trace calls the card's own work


def bench_e2e(
    path: Path, context: int, new_tokens: int, repeats: int, chains: Sequence[int] | None, with_peers: bool
) -> dict[str, object]:
    """Prints a table as soon as it is measured. ``chains``: None for all that the artifact has. Raises ``ValueError``
    for a text that does not fit or a chain that the artifact lacks.
    """
    artifact = Artifact.open(path)
    free = free_memory() if artifact.manifest["device"]["type"] == "cuda" else 0
    program, console, progress = artifact.load(), Console(width=140, highlight=False), ConsoleProgress()
    greedy, speculative = (open_decoder(program, kind) for kind in ("greedy", "speculative"))
    taken = free - torch.cuda.mem_get_info()[0] if program.device == "cuda" else 0
    chains = check(speculative, context, new_tokens, repeats, chains)
    ids = text_ids(open_tokenizer(artifact), context)
    console.print(f"{artifact.manifest['target']['name']}, {machine(program)}, torch {torch.__version__}; tau: {TAU}")
    with progress.stage("decoding"):
        decoding = time_decoding(greedy, speculative, ids, new_tokens, repeats, chains)
    show_decoding(decoding, f"{context} tokens of context, {new_tokens} new ones, medians of {repeats}", console)
    memory = memory_of(program, free, taken) if program.device == "cuda" else {}
    at = last_position(speculative, context, speculative.max_chain + 1)
    with progress.stage("phases"):
        phases = time_phases(program, text_ids(open_tokenizer(artifact), speculative.max_chain + 1), at)
    show_phases(phases, at, console)
    figures = {
        "context": context, "new_tokens": new_tokens, "repeats": repeats, "decoding": decoding, "phases": phases,
        "ok": all(row["same"] for row in decoding.values()),
    }  # fmt: skip
    shown = {0: greedy, min(SHOWN_CHAIN, speculative.max_chain): speculative}
    shown = {chain: decoder for chain, decoder in shown.items() if chain in decoding}
    if program.device == "cuda":
        with progress.stage("rounds"):
            figures["rounds"] = {
                chain: time_round(decoder, ids, chain, decoding[chain], phases) for chain, decoder in shown.items()
            }
        show_rounds(figures["rounds"], console)
        show_memory(memory, console)
        figures["memory"] = memory
    if with_peers:
        rates = {chain: row["tokens_per_second"] for chain, row in decoding.items()}
        figures["peers"] = bench_peers(artifact, program.device, ids, new_tokens, repeats, rates, progress, console)
    if program.device == "cuda":  # last: what a profiler attaches to the process may stay there
        with progress.stage("kernels"):
            figures["kernels"] = {
                chain: profile_rounds(decoder, ids, chain, new_tokens, decoding[chain]["round_us"])
                for chain, decoder in shown.items()
            }
        show_kernels(figures["kernels"], console)
    return figures


def check(
    speculative: SpeculativeDecoder, context: int, new_tokens: int, repeats: int, chains: Sequence[int] | None
) -> list[int]:
    """The chains to measure."""
    if context < 1 or new_tokens < 2 or repeats < 1:
        raise ValueError(
            f"--context and --repeats must be at least 1 and --new-tokens at least 2, got {context}, {repeats} and "
            f"{new_tokens}"
        )
    if context + new_tokens > speculative.max_seq_len:
        raise ValueError(
            f"--context {context} and --new-tokens {new_tokens} do not fit: the program holds "
            f"{speculative.max_seq_len} tokens; take fewer, or lower again with a larger --max-seq-len"
        )
    chains = sorted(set(chains or range(1, speculative.max_chain + 1)))
    if bad := [chain for chain in chains if not 1 <= chain <= speculative.max_chain]:
        raise ValueError(f"--chains must lie in 1..{speculative.max_chain} for this artifact, got {bad[0]}")
    return chains


def machine(program: Program) -> str:
    if program.device == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu, {torch.get_num_threads()} threads"


def time_decoding(
    greedy: GreedyDecoder, speculative: SpeculativeDecoder, ids: list[int], new_tokens: int, repeats: int, chains
) -> dict[int, dict[str, object]]:
    """Figures by chain, 0 for greedy decoding; the chains take turns, so that a slow moment meets all of them."""
    runs: dict[int, list[Statistics]] = {chain: [] for chain in (0, *chains)}
    same = dict.fromkeys(runs, True)
    text = None
    for repeat in range(repeats + 1):  # the first loads and captures what the same text needs again
        for chain in runs:
            decoder, options = (speculative, {"chain": chain}) if chain else (greedy, {})
            got = flat(decoder.generate(ids, new_tokens, stop_ids=(), **options))
            text = got if text is None else text
            same[chain] &= got == text
            if repeat:
                runs[chain].append(decoder.statistics)
    figures: dict[int, dict[str, object]] = {}
    for chain, found in runs.items():
        rate = statistics.median(s.decode_rate for s in found)
        tau = statistics.median(s.tau for s in found)
        speed_up = rate / figures[0]["tokens_per_second"] if chain else 1.0
        figures[chain] = {
            "tokens_per_second": rate,
            "round_us": statistics.median(1e6 * s.decode_seconds / s.rounds for s in found),
            "host_us": statistics.median(1e6 * s.host_seconds / s.rounds for s in found),
            "prefill_ms": statistics.median(1e3 * s.prefill_seconds for s in found),
            "tau": tau, "speed_up": speed_up, "eta": speed_up / tau, "same": same[chain],
        }  # fmt: skip
    return figures


def name_of(chain: int) -> str:
    return f"K={chain}" if chain else "greedy"


def show_decoding(figures: dict[int, dict[str, object]], title: str, console: Console) -> None:
    columns = "", "tokens/s", "µs a round", "tau", "speed-up", "eta = speed-up / tau", "greedy text"
    table = table_of(title, columns)
    for chain, row in figures.items():
        speculative = [f"{row[key]:.2f}" for key in ("tau", "speed_up", "eta")] if chain else ["", "", ""]
        text = ("yes" if row["same"] else "NO") if chain else "" if row["same"] else "NOT TWICE"
        table.add_row(name_of(chain), f"{row['tokens_per_second']:.1f}", f"{row['round_us']:.1f}", *speculative, text)
    console.print(table)
    with_draft = statistics.median(row["prefill_ms"] for chain, row in figures.items() if chain)
    console.print(f"prefill: {figures[0]['prefill_ms']:.2f} ms, {with_draft:.2f} ms with the draft's")


def table_of(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def last_position(decoder: SpeculativeDecoder, context: int, rows: int) -> int:
    """``context``, or the last position from which the target and the head can take ``rows``."""
    end = min(decoder.max_seq_len, decoder.draft_positions or decoder.max_seq_len)
    return max(0, min(context, end - rows))


def time_phases(program: Program, ids: list[int], at: int) -> dict[str, dict[int, float]]:
    """Microseconds of a call at position ``at``, of each method by the number of its rows, from 1 to those of ``ids``;
    on a card, of its CUDA graph.
    """
    verify, draft = program.method("target_verify"), program.method("draft_decode")
    found: dict[str, dict[int, float]] = {"target_verify": {}, "draft_decode": {}}
    for rows in range(1, len(ids) + 1):
        part, where = on_device(program, tokens(ids[:rows])), on_device(program, positions(at, rows))
        feature = call(verify, part, where)[1]
        found["target_verify"][rows] = call_us(verify, part, where)
        found["draft_decode"][rows] = call_us(draft, part, feature, where)
    return found


def on_device(program: Program, array: np.ndarray) -> np.ndarray | torch.Tensor:
    return torch.from_numpy(array).cuda() if program.device == "cuda" else array


def call(method: Method, *inputs: object) -> list:
    """One call, with tensors of the card or with what the host has."""
    return method.run(*inputs) if isinstance(inputs[0], torch.Tensor) else method(*inputs)


def call_us(method: Method, *inputs: object) -> float:
    if isinstance(inputs[0], torch.Tensor):
        return graph_us(lambda _: call(method, *inputs), 1)
    return 1e3 * median_ms(lambda: call(method, *inputs))


def show_phases(phases: dict[str, dict[int, float]], at: int, console: Console) -> None:
    verify, draft = phases["target_verify"], phases["draft_decode"]
    table = table_of(
        f"calls at position {at}, µs", ("rows", "target_verify", "of one row", "draft_decode", "of one row")
    )
    for rows in verify:
        table.add_row(
            str(rows), f"{verify[rows]:.1f}", f"{verify[rows] / verify[1]:.2f}x", f"{draft[rows]:.1f}",
            f"{draft[rows] / draft[1]:.2f}x",
        )  # fmt: skip
    console.print(table)
    window = min(SHOWN_CHAIN + 1, max(verify))
    console.print(
        f"target_verify of {window} rows takes {verify[window] / verify[1]:.2f} times as long as one row; a draft step "
        f"takes {draft[1]:.1f} µs, {draft[1] / verify[1]:.2f} times a row of target_verify"
    )


def replay_us(decoder: GreedyDecoder, chain: int, anchor: int, position: int, end: int) -> float:
    """Microseconds of the card for a round of ``chain`` proposals, its graph replayed back to back. Rounds start at
    ``position`` and stay below ``end``. Raises ``ValueError`` where there is no room for two.
    """
    rounds, spent, done = decoder.rounds, 0.0, 0
    fit = (end - position) // (chain + 1) - 1  # after one that keeps the card busy while the next are started
    if fit < 1:
        raise ValueError(f"two rounds of {chain} proposals do not fit between positions {position} and {end}")
    while done < REPLAYS:
        n = min(fit, REPLAYS - done)
        rounds.begin(anchor, position)
        spent, done = spent + n * rounds.replay_us(chain, n), done + n
    return spent / done


def time_round(
    decoder: GreedyDecoder, ids: list[int], chain: int, decoding: dict[str, object], phases: dict[str, dict[int, float]]
) -> dict[str, float]:
    """Where the time of a round goes, in microseconds. Assumes that the decoder has decoded with that chain."""
    end = min(decoder.max_seq_len, getattr(decoder, "draft_positions", 0) or decoder.max_seq_len)
    list(decoder.generate(ids, 2, stop_ids=(), **({"chain": chain} if chain else {})))  # caches of this context
    position = max(0, min(len(ids), end - 2 * (chain + 1)))
    wall, replay = decoding["round_us"], replay_us(decoder, chain, ids[-1], position, end)
    verify, draft = phases["target_verify"], phases["draft_decode"]
    calls = verify[chain + 1] + ((chain - 1) * draft[1] + draft[chain + 1] if chain else 0.0)
    return {
        "wall_us": wall, "replay_us": replay, "between_us": wall - replay, "idle": 1 - replay / wall,
        "host_us": decoding["host_us"], "calls_us": calls,
    }  # fmt: skip


def show_rounds(figures: dict[int, dict[str, float]], console: Console) -> None:
    table = table_of(
        "a round, µs",
        ("", "in decoding", "replayed back to back", "between rounds", "card idle", "host alone", "its calls apart"),
    )
    for chain, row in figures.items():
        table.add_row(
            name_of(chain), f"{row['wall_us']:.1f}", f"{row['replay_us']:.1f}", f"{row['between_us']:.1f}",
            f"{row['idle']:.1%}", f"{row['host_us']:.1f}", f"{row['calls_us']:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "card idle: 1 - replayed / in decoding; host alone: outside the call that starts a round and waits for one; "
        "its calls apart: the sum of the phases above",
        soft_wrap=True,
    )


def free_memory() -> int:
    """Bytes of the card that nobody has, once CUDA itself has what it takes."""
    torch.zeros(1, device="cuda")
    return torch.cuda.mem_get_info()[0]


def memory_of(program: Program, free: int, taken: int) -> dict[str, int]:
    """Bytes: weights and caches; what loading them took of the ``free`` ones; tensors and torch's allocator at most
    since then, while texts were decoded, and all that is gone; the most that a call of any method has beside weights
    and caches.
    """
    found = {
        "weights and caches": program.buffers.nbytes,
        "taken by loading": taken,
        "tensors at most": torch.cuda.max_memory_allocated(),
        "torch's allocator at most": torch.cuda.max_memory_reserved(),
        "taken of the card": free - torch.cuda.mem_get_info()[0],
        "largest call": 0,
    }
    for method in program.methods.values():
        inputs = inputs_of(method, 0, method.max_rows, int(program.constants["get_vocab_size"]))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        method(*inputs)
        torch.cuda.synchronize()
        found["largest call"] = max(found["largest call"], torch.cuda.max_memory_allocated() - before)
    return found


def show_memory(memory: dict[str, int], console: Console) -> None:
    need = memory["weights and caches"] + memory["largest call"]
    table = table_of("memory of the card, MB", ("", "MB", "of weights, caches and the largest call"))
    for name, size in memory.items():
        table.add_row(name, f"{size / 1e6:.1f}", f"{size / need:.3f}x")
    console.print(table)


def profile_rounds(
    decoder: GreedyDecoder, ids: list[int], chain: int, new_tokens: int, wall_us: float
) -> dict[str, object]:
    """Kernels of rounds while a text is written. ``wall_us``: what a round takes without the profiler."""
    blocks = decoder.generate(ids, new_tokens, stop_ids=(), **({"chain": chain} if chain else {}))
    whole = (new_tokens - 1) // (chain + 1) - 3  # rounds that the end of the text does not cut short, after two
    list(islice(blocks, 3))  # the prefill's, and two rounds
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        done = len(list(islice(blocks, max(1, min(PROFILED, whole)))))
        torch.cuda.synchronize()
    blocks.close()
    with tempfile.TemporaryDirectory(prefix="eyas-") as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        spans = spans_of(json.loads(trace.read_text(encoding="utf-8")))
    return kernel_figures(spans, max(1, done), wall_us)


def spans_of(trace: dict[str, object]) -> list[tuple[str, float, float]]:
    """(name, start, length in microseconds) of what the card ran, of a trace in Chrome's format."""
    return [
        (event["name"], float(event["ts"]), float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ON_CARD
    ]


def kernel_figures(spans: list[tuple[str, float, float]], rounds: int, wall_us: float) -> dict[str, object]:
    """Kernels by name, the longest first, and the time in which any runs; all a round."""
    times, calls = defaultdict(float), defaultdict(int)
    busy, until = 0.0, float("-inf")
    for name, start, length in sorted(spans, key=lambda span: span[1]):
        times[name] += length
        calls[name] += 1
        busy += max(0.0, start + length - max(start, until))
        until = max(until, start + length)
    longest = sorted(times, key=times.get, reverse=True)
    return {
        "rounds": rounds,
        "busy_us": busy / rounds,
        "share": busy / rounds / wall_us,
        "calls": len(spans) / rounds,
        "kernels": [{"name": n, "us": times[n] / rounds, "calls": calls[n] / rounds} for n in longest],
    }


def show_kernels(figures: dict[int, dict[str, object]], console: Console) -> None:
    for chain, found in figures.items():
        title = f"{name_of(chain)}: kernels of a round, mean of {found['rounds']} under the profiler"
        table = table_of(title, ("kernel", "µs", "calls"))
        for kernel in found["kernels"][:KERNELS]:
            name = kernel["name"] if len(kernel["name"]) <= 90 else kernel["name"][:87] + "..."
            table.add_row(name, f"{kernel['us']:.1f}", f"{kernel['calls']:.1f}")
        table.add_section()
        rest = found["kernels"][KERNELS:]
        table.add_row(
            f"{len(rest)} others", f"{sum(k['us'] for k in rest):.1f}", f"{sum(k['calls'] for k in rest):.1f}"
        )
        console.print(table)
        console.print(
            f"kernels run in {found['busy_us']:.1f} µs of a round, {found['share']:.1%} of what one takes in decoding; "
            f"{found['calls']:.1f} of them" if found["kernels"] else "the profiler has seen no kernel"
        )  # fmt: skip


def bench_peers(
    artifact: Artifact, device: str, ids: list[int], new_tokens: int, repeats: int, rates: dict[int, float],
    progress: ConsoleProgress, console: Console,
) -> dict[str, object]:  # fmt: skip
    """transformers on the same weights and the same prompt. A peer that fails is a line that says why."""
    if (target := artifact.manifest["target"]["name"]) != PEER_TARGET:
        console.print(f"transformers is compared for {PEER_TARGET} alone; the target of this artifact is {target}")
        return {}
    best = max((chain for chain in rates if chain), key=rates.get)
    table = table_of(
        f"greedy decoding by transformers, medians of {repeats if device == 'cuda' else 1}",
        ("", "tokens/s", "eyas, greedy", f"eyas, {name_of(best)}"),
    )
    found: dict[str, object] = {}
    for dtype in (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.bfloat16):
        kind, model = str(dtype).removeprefix("torch."), None
        try:
            with progress.stage(f"transformers reads the checkpoint in {kind}"):
                model = load_peer(dtype, device)
        except FAILURES as error:
            found[f"eager, {kind}"] = reason(error)
        for name, caching in peer_kinds(device, kind) if model is not None else ():
            try:
                with progress.stage(f"transformers, {name}"):
                    found[name] = peer_rate(
                        model, ids, min(new_tokens, PEER_TOKENS), repeats if device == "cuda" else 1, caching
                    )
            except FAILURES as error:
                found[name] = reason(error)
    for name, rate in found.items():
        if isinstance(rate, str):
            table.add_row(name, rate, "", "")
        else:
            table.add_row(name, f"{rate:.1f}", f"{rates[0] / rate:.2f}x", f"{rates[best] / rate:.2f}x")
    console.print(table)
    return found


def peer_kinds(device: str, kind: str) -> list[tuple[str, bool]]:
    """Names of peers, and whether each has a static cache, for which transformers compiles its forward."""
    static = [(f"static cache, compiled, {kind}", True)] if device == "cuda" else []
    return [(f"eager, {kind}", False), *static]


def peer_rate(model: torch.nn.Module, ids: list[int], new_tokens: int, repeats: int, static: bool) -> float:
    """Median tokens a second after a warm-up; compiled code needs two whole ones, to be compiled and captured. Raises
    ``RuntimeError`` where ``generate`` was asked to compile and has not.
    """
    options: dict[str, object] = {}
    if static:
        from transformers import CompileConfig

        options = {"cache_implementation": "static", "compile_config": CompileConfig(mode="reduce-overhead")}
    for _ in range(2 if static else 1):
        decode_rate(model, ids, new_tokens if static else min(16, new_tokens), **options)
    if static and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        raise RuntimeError("generate has compiled nothing for its static cache")
    return statistics.median(decode_rate(model, ids, new_tokens, **options) for _ in range(repeats))


def reason(error: Exception) -> str:
    """The first line of an error, in few words."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no detail")
    return f"{type(error).__name__}: {line}"[:120]

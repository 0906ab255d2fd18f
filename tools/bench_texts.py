"""Whether two artifacts of one model, lowered in different ways, give the same: bits of every method, and texts."""

from itertools import cycle
from pathlib import Path

from rich.console import Console

from eyas.runtime.artifact import Artifact, Program
from eyas.runtime.selfcheck import inputs_of
from eyas.runtime.session import open_decoder, open_tokenizer
from eyas.tools.bench_program import flat
from eyas.tools.prompts import PROMPTS


def bench_texts(paths: list[Path], n_prompts: int, new_tokens: int) -> dict[str, object]:
    """Bits of the methods that both have, and greedy and speculative text at the default chain. Raises ``ValueError``
    for programs that take different calls.
    """
    console = Console(highlight=False)
    artifacts = [Artifact.open(path) for path in paths]
    for path, artifact in zip(paths, artifacts):
        console.print(f"{path.name}: {artifact.manifest['pipeline']}", soft_wrap=True)
    programs = [artifact.load() for artifact in artifacts]
    outputs = compare_outputs(*programs)
    for name, (compared, different) in outputs.items():
        console.print(f"{name}: {different} of {compared} outputs differ")
    for name in sorted(set(programs[0].methods) ^ set(programs[1].methods)):
        console.print(f"{name}: one of them alone has it")
    tokenizer, same = open_tokenizer(artifacts[0]), 0
    pairs = [[open_decoder(program, kind) for program in programs] for kind in ("greedy", "speculative")]
    for text in PROMPTS[:n_prompts]:
        ids = tokenizer.encode(text)
        for pair in pairs:
            first, second = (flat(decoder.generate(ids, new_tokens, stop_ids=())) for decoder in pair)
            same += first == second
    total = 2 * len(PROMPTS[:n_prompts])
    console.print(f"{same} of {total} texts identical ({total // 2} prompts x {new_tokens} tokens, both decoders)")
    ok = same == total and not any(different for _, different in outputs.values())
    return {"outputs": outputs, "texts": total, "identical": same, "ok": ok}


def compare_outputs(first: Program, second: Program) -> dict[str, tuple[int, int]]:
    """By the methods that both programs have, how many outputs were compared and how many had other bits: the whole of
    the caches in calls of as many rows as there are, and once more in calls of one row, two, and so on.
    """
    shared = [name for name in first.methods if name in second.methods]
    limits = [
        {"positions": int(program.constants["get_max_seq_len"]), "vocabulary": int(program.constants["get_vocab_size"])}
        | {f"rows of {name}": program.method(name).max_rows for name in shared}
        for program in (first, second)
    ]
    if limits[0] != limits[1]:
        raise ValueError(f"the artifacts take different calls: {limits[0]} and {limits[1]}; lower both with one model")
    length, vocab_size = limits[0]["positions"], limits[0]["vocabulary"]
    found = {}
    for name in shared:
        methods = first.method(name), second.method(name)
        most, compared, different = methods[0].max_rows, 0, 0
        for sizes in ([most], range(1, min(most, 16) + 1)):
            first.reset()
            second.reset()
            at, size = 0, cycle(sizes)
            while at < length:
                inputs = inputs_of(methods[0], at, min(next(size), length - at), vocab_size)
                at += inputs[0].shape[1]
                for a, b in zip(*(method(*inputs) for method in methods), strict=True):
                    compared += 1
                    different += a.array.tobytes() != b.array.tobytes()
        found[name] = compared, different
    return found

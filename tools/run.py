"""Generates text from an artifact, speculatively or greedily, and says how it went.

python -m eyas.tools.run DIR --prompt 'The falcon' --chain 4
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from eyas.runtime.memory import peak_rss
from eyas.tools.console import check_writable, run_tool, write_json


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="run.py", description=__doc__.splitlines()[0])
    p.add_argument("artifact", type=Path, help="folder that lower.py wrote")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue")
    source.add_argument("--prompt-file", type=Path, help="file with the text to continue (UTF-8)")
    source.add_argument("--chat", metavar="MESSAGE", help="one user message, put into the artifact's chat template")
    p.add_argument("--raw-prompt", action="store_true", help="special tokens count as written, and none is added")
    p.add_argument("--chain", type=int, help="proposals a round (default: the artifact's)")
    p.add_argument("--max-new-tokens", type=int, default=128, help="budget of new tokens (default 128)")
    p.add_argument("--stop-ids", help="comma-separated ids that end the text, instead of the artifact's; '' for none")
    p.add_argument("--greedy", action="store_true", help="plain decoding, one token a call")
    p.add_argument("--compare-greedy", action="store_true", help="run both; exit 1 at the first different token")
    p.add_argument("--threads", type=int, help="threads (default: all cores)")
    p.add_argument("--stats-json", type=Path, help="write tokens, rounds, acceptance and times to this file")
    p.add_argument("--no-cuda-graph", action="store_true", help="on cuda, make a round's calls one by one")
    p.add_argument("--no-verify-data", action="store_true", help="do not check the hash of the weights")
    return p


def main(argv: list[str] | None = None) -> int:
    return run_tool(lambda: run(parser().parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {args.threads}")
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if args.raw_prompt and args.chat is not None:
        raise ValueError("--raw-prompt goes with --prompt or --prompt-file; --chat uses the artifact's template")
    if args.greedy and args.chain is not None and not args.compare_greedy:
        raise ValueError("--chain is for speculative decoding, --greedy has no proposals; --compare-greedy runs both")
    check_writable(args.stats_json)
    start = time.perf_counter()
    from eyas.runtime.artifact import Artifact
    from eyas.runtime.session import open_decoder, open_tokenizer

    artifact = Artifact.open(args.artifact, check_data=not args.no_verify_data)
    tokenizer = open_tokenizer(artifact)
    program = artifact.load()
    load_seconds = time.perf_counter() - start
    ids = prompt_ids(args, tokenizer)
    stop = None if args.stop_ids is None else parse_ids(args.stop_ids, int(program.constants["get_vocab_size"]))
    kinds = {"greedy": args.greedy or args.compare_greedy, "speculative": not args.greedy or args.compare_greedy}
    results: dict[str, tuple[list[int], object]] = {}
    for kind in (name for name, wanted in kinds.items() if wanted):
        decoder = open_decoder(program, kind, graphs=not args.no_cuda_graph)
        options = {} if kind == "greedy" else {"chain": args.chain}
        show = kind == ("greedy" if args.greedy else "speculative")
        new = []
        for piece in stream(decoder.generate(ids, args.max_new_tokens, stop, **options), new, tokenizer):
            if show:
                sys.stdout.write(piece)
                sys.stdout.flush()
        if show:
            sys.stdout.write("\n")
        results[kind] = new, decoder.statistics
    for kind, (_, statistics) in results.items():
        report(kind, statistics, load_seconds, artifact)
    verdict = compare(results, tokenizer) if args.compare_greedy else None
    if args.stats_json:
        write_json(
            args.stats_json,
            {
                **next(reversed(results.values()))[1].to_json(),
                "load_seconds": load_seconds,
                "peak_rss_bytes": peak_rss(),
                "artifact_bytes": artifact.nbytes(),
                "draft": artifact.manifest["draft"],
                **({} if verdict is None else {"identical_to_greedy": verdict}),
            },
        )
    return 1 if verdict is False else 0


def prompt_ids(args: argparse.Namespace, tokenizer) -> list[int]:
    """Token ids of what the user asked for. Raises ``ValueError`` for a prompt without any."""
    if args.chat is not None:
        return tokenizer.chat([{"role": "user", "content": args.chat}])
    if args.prompt_file is not None:
        try:
            text = args.prompt_file.read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError):
            raise FileNotFoundError(f"no prompt file at {args.prompt_file}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.prompt_file} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    else:
        text = args.prompt
    ids = tokenizer.encode_raw(text) if args.raw_prompt else tokenizer.encode(text)
    if not ids:
        raise ValueError("the prompt is empty and this tokenizer adds no start token; give some text")
    return ids


def parse_ids(text: str, vocab_size: int) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    bad = [part for part in parts if not part.isdecimal() or int(part) >= vocab_size]
    if bad:
        raise ValueError(f"--stop-ids takes comma-separated ids from 0 to {vocab_size - 1}, got {bad[0]!r}")
    return [int(part) for part in parts]


def stream(blocks: Iterator[list[int]], new: list[int], tokenizer) -> Iterator[str]:
    """Text as it is confirmed; collects the ids in ``new``."""
    from eyas.runtime.text import TextStream

    text = TextStream(tokenizer)
    for block in blocks:
        new += block
        if piece := text.push(block):
            yield piece
    if piece := text.finish():
        yield piece


def report(kind: str, s, load_seconds: float, artifact) -> None:
    """The figures of one generation, on stderr."""
    from eyas.runtime.statistics import TAU

    def line(text: str) -> None:
        print(text, file=sys.stderr)

    line(f"{kind}: {s.new_tokens} new tokens after a prompt of {s.prompt_tokens}; ended by {s.finished}")
    line(
        f"  prompt {s.prompt_rate:.1f} tokens/s, decode {s.decode_rate:.1f} tokens/s; load {load_seconds:.2f} s, "
        f"prefill {s.prefill_seconds:.2f} s, decode {s.decode_seconds:.2f} s"
    )
    if kind == "speculative" and s.rounds:
        histogram = ", ".join(f"{i}: {s.accepted[i]}" for i in sorted(s.accepted))
        shares = ", ".join(f"{share:.2f}" for share in s.acceptance())
        line(
            f"  chain {s.chain}: {s.rounds} rounds, accepted {{{histogram}}}, by position [{shares}]; "
            f"verify {s.verify_seconds:.2f} s, draft {s.draft_seconds:.2f} s, host {s.host_seconds:.3f} s"
        )
        line(f"  tau {s.tau:.3f} ({TAU})")
        if artifact.manifest["draft"]["format"] == "untrained":
            line("  the draft head of this artifact is untrained: its proposals are random, so expect a tau near 1")


def compare(results: dict, tokenizer) -> bool:
    """Whether both decoders gave the same tokens; says where they part if not."""
    greedy, speculative = results["greedy"][0], results["speculative"][0]
    if greedy == speculative:
        print(f"identical: {len(greedy)} tokens, speculative and greedy", file=sys.stderr)
        return True
    at = next((i for i, (a, b) in enumerate(zip(greedy, speculative)) if a != b), min(len(greedy), len(speculative)))
    shown = [tokenizer.decode(text[max(0, at - 8) : at + 8]) for text in (greedy, speculative)]
    print(
        f"different at new token {at}: greedy {greedy[at : at + 1]} {shown[0]!r}, speculative "
        f"{speculative[at : at + 1]} {shown[1]!r}; see 'What is guaranteed' in the README",
        file=sys.stderr,
    )
    return False


if __name__ == "__main__":
    sys.exit(main())

"""Lowers a target and a draft head to an artifact.

python -m eyas.tools.lower --target gemma3_270m --device cpu -o DIR
"""

import argparse
import sys
import time
from pathlib import Path

from eyas.tools.console import ConsoleProgress, check_writable, run_tool, write_json


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="lower.py", description=__doc__.splitlines()[0])
    p.add_argument("--target", help="name of the target; --list-targets shows them")
    p.add_argument("--checkpoint", type=Path, help="a .gguf file or a Hugging Face folder, instead of the target's own")
    p.add_argument(
        "--draft", default="auto", help="folder of an EAGLE-3 head, 'untrained', or 'auto' (default): the head that "
        "ships for the target, an untrained one where none does",
    )  # fmt: skip
    p.add_argument("-o", "--out", type=Path, help="folder of the artifact; an artifact there is replaced")
    p.add_argument("--device", default="cpu", help="cpu (default), or cuda: the card of this machine")
    p.add_argument(
        "--passes", help="passes instead of the device's optimisations, as name{option=value},...; those that the "
        "device cannot do without follow; --list-passes shows them",
    )  # fmt: skip
    p.add_argument("--quant", default="int8", help="int8 (default), int4, none, or a recipe file")
    p.add_argument("--max-seq-len", type=int, default=2048, help="positions in the caches (default 2048)")
    p.add_argument("--max-prefill", type=int, help="largest chunk of a prompt (default: the window, at most 512)")
    p.add_argument("--chain", type=int, default=4, help="proposals a round where run.py is not told (default 4)")
    p.add_argument("--max-chain", type=int, default=7, help="most proposals a round (default 7)")
    p.add_argument("--extra-method", action="append", default=[], help="also compile this method (target_logits)")
    p.add_argument("--stats-json", type=Path, help="write seconds by stage, memory and sizes to this file")
    p.add_argument(
        "--cache", type=Path, help="folder for compiled code and tokenizers (default: $EYAS_CACHE or the user's)"
    )
    p.add_argument("--jobs", type=int, help="compiler processes at a time (default: one a core)")
    p.add_argument("--quiet", action="store_true", help="stages only, without findings")
    p.add_argument("--list-targets", action="store_true", help="print the targets and stop")
    p.add_argument("--list-passes", action="store_true", help="print the passes and stop")
    return p


def main(argv: list[str] | None = None) -> int:
    return run_tool(lambda: run(parser().parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    if args.list_targets:
        from eyas.models.target import TARGETS

        width = max(map(len, TARGETS))
        print("\n".join(f"{name:{width}} {spec.summary}" for name, spec in TARGETS.items()))
        return 0
    if args.list_passes:
        from eyas.passes.registry import find_pass, pass_names

        for name in pass_names():
            print(f"{name:22} {(find_pass(name).__doc__ or '').strip().splitlines()[0]}")
        return 0
    if args.target is None or args.out is None:
        raise ValueError("--target and -o are needed; for example: --target gemma3_270m -o build/gemma3")
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
    check_writable(args.stats_json)
    progress = ConsoleProgress(verbose=not args.quiet)
    with progress.stage("load the compiler"):
        from eyas.lowering.lower import Request, lower
    request = Request(
        target=args.target, out=args.out, draft=args.draft, checkpoint=args.checkpoint, device=args.device,
        quant=args.quant, passes=args.passes, max_seq_len=args.max_seq_len, max_prefill=args.max_prefill,
        max_chain=args.max_chain, chain=args.chain, methods=tuple(args.extra_method), cache=args.cache, jobs=args.jobs,
    )  # fmt: skip
    report = lower(request, progress)
    size, total = sum(report.bytes.values()), time.perf_counter() - progress.start
    progress.note(f"pipeline: {report.pipeline}")
    progress.note(
        f"peak memory {report.peak_bytes / 1e6:.0f} MB here, {report.peak_child_bytes / 1e6:.0f} MB in the largest "
        f"compiler process; {report.peak_bytes / report.source_bytes:.2f} times the weights in bfloat16"
    )
    progress.note(", ".join(f"{name} {nbytes / 1e6:.1f} MB" for name, nbytes in report.bytes.items()))
    print(f"{args.out}: {size / 1e6:.1f} MB in {total:.1f} s", file=sys.stderr)
    if args.stats_json:
        write_json(args.stats_json, report.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())

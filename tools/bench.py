"""Measures what the README states. Every figure is a median of repeated runs, beside its peer in the same run.

python -m eyas.tools.bench kernels [--device cuda]
python -m eyas.tools.bench plans
python -m eyas.tools.bench e2e DIR
python -m eyas.tools.bench identity DIR
python -m eyas.tools.bench acceptance DIR --prompts HEAD/held_out.json
python -m eyas.tools.bench eager DIR
python -m eyas.tools.bench quant
python -m eyas.tools.bench lowering --target gemma3_270m
python -m eyas.tools.bench passes
"""

import argparse
import sys
from pathlib import Path

from eyas.tools.console import check_writable, run_tool, write_json


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="bench.py", description=__doc__.splitlines()[0])
    p.add_argument("--stats-json", type=Path, help="also write the figures to this file")
    commands = p.add_subparsers(dest="command", required=True)
    kernels = commands.add_parser("kernels", help="kernels against others', for each projection of the models")
    kernels.add_argument("--rows", help="numbers of rows (default 1,2,5,8,64; on cuda 1,2,4,5,8,16)")
    kernels.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose kernels (default cpu)")
    kernels.add_argument("--kinds", default="int4,int8,attention", help="on cuda, which of them (default all)")
    kernels.add_argument("--no-executorch", action="store_true", help="on cuda, without the peers that tune themselves")
    plans = commands.add_parser("plans", help="plans of the cuda kernels against others, on the card at hand")
    plans.add_argument(
        "--kinds", default="int4,attention", help="int4, attention (a cache of 131072), or both (default)"
    )
    plans.add_argument("--shape", default="43008,5376", help="outputs and inputs of an int4 weight (43008,5376)")
    plans.add_argument("--rows", default="1,8,16", help="numbers of rows, at most 16 (default 1,8,16)")
    e2e = commands.add_parser("e2e", help="decoding of an artifact by chain, what a round is made of, and transformers")
    e2e.add_argument("artifact", type=Path, help="folder that lower.py wrote")
    e2e.add_argument("--context", type=int, default=512, help="tokens of the prompt (default 512)")
    e2e.add_argument("--new-tokens", type=int, default=256, help="new tokens a text (default 256)")
    e2e.add_argument("--repeats", type=int, default=3, help="texts of each kind (default 3)")
    e2e.add_argument("--chains", help="comma-separated numbers of proposals (default: all that the artifact has)")
    e2e.add_argument("--no-transformers", action="store_true", help="leave out the comparison with transformers")
    identity = commands.add_parser("identity", help="speculative against greedy text, bits of rows, and eager text")
    identity.add_argument("artifact", type=Path, help="folder that lower.py wrote")
    identity.add_argument("--prompts", type=int, default=20, help="how many of the fixed prompts (default 20)")
    identity.add_argument("--new-tokens", type=int, default=128, help="new tokens a prompt (default 128)")
    identity.add_argument("--lengths", action="store_true", help="also prompts around windows, chunks and the end")
    identity.add_argument("--no-eager", action="store_true", help="leave out the comparison with the eager module")
    texts = commands.add_parser("texts", help="whether two artifacts of one model give the same bits and texts")
    texts.add_argument("artifacts", type=Path, nargs=2, help="folders that lower.py wrote")
    texts.add_argument("--prompts", type=int, default=20, help="how many of the fixed prompts (default 20)")
    texts.add_argument("--new-tokens", type=int, default=128, help="new tokens a prompt (default 128)")
    acceptance = commands.add_parser("acceptance", help="tau of a trained head by kind of prompt, by decoding")
    acceptance.add_argument("artifact", type=Path, help="folder that lower.py wrote with the head")
    acceptance.add_argument("--prompts", type=Path, required=True, help="the held_out.json of the head's folder")
    acceptance.add_argument("--per-kind", type=int, default=10, help="prompts of each kind (default 10)")
    acceptance.add_argument("--new-tokens", type=int, default=128, help="new tokens a prompt at most (default 128)")
    acceptance.add_argument(
        "--max-repeated",
        type=float,
        default=0.2,
        help="share of repeated 4-grams to end a text at (default 0.2; 1: none)",
    )
    eager = commands.add_parser("eager", help="target_verify and greedy decoding against eager and transformers")
    eager.add_argument("artifact", type=Path, help="folder that lower.py wrote")
    eager.add_argument("--new-tokens", type=int, default=48, help="new tokens a timed generation (default 48)")
    logits = commands.add_parser("logits", help="logits of the 270M target against transformers")
    logits.add_argument("artifact", type=Path, nargs="?", help="an artifact of recipe none with target_logits")
    quant = commands.add_parser("quant", help="perplexity of each recipe on a fixed text")
    quant.add_argument("--target", default="gemma3_270m", help="name of the target (default gemma3_270m)")
    quant.add_argument("--checkpoint", type=Path, help="a .gguf file or a Hugging Face folder")
    quant.add_argument("--recipes", default="none,int8,int4", help="comma-separated (default none,int8,int4)")
    lowering = commands.add_parser("lowering", help="seconds and memory of lowering, cold and warm, and of loading")
    lowering.add_argument("--target", default="gemma3_270m", help="name of the target (default gemma3_270m)")
    lowering.add_argument("--quant", default="int8", help="int8 (default), int4, none, or a recipe file")
    depth = commands.add_parser("depth", help="seconds and native code of lowering decoders of growing depth")
    depth.add_argument("--layers", default="18,36,72", help="comma-separated (default 18,36,72)")
    passes = commands.add_parser("passes", help="seconds of each pass on decoders of growing depth")
    passes.add_argument("--layers", default="18,72", help="comma-separated (default 18,72)")
    return p


def main(argv: list[str] | None = None) -> int:
    return run_tool(lambda: run(parser().parse_args(argv)))


def numbers(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if bad := [part for part in parts if not part.strip().isdecimal() or int(part) < 1]:
        raise ValueError(f"{option} takes comma-separated numbers of at least 1, got {bad[0]!r}")
    return [int(part) for part in parts]


def run(args: argparse.Namespace) -> int:
    check_writable(args.stats_json)
    if args.command == "kernels":
        rows = numbers("--rows", args.rows or {"cpu": "1,2,5,8,64", "cuda": "1,2,4,5,8,16"}[args.device])
        if args.device == "cuda":
            from eyas.tools.bench_cuda_kernels import bench_cuda_kernels

            figures = bench_cuda_kernels(rows, tuple(args.kinds.split(",")), not args.no_executorch)
        else:
            from eyas.tools.bench_kernels import bench_kernels

            figures = bench_kernels(rows)
    elif args.command == "plans":
        from eyas.tools.bench_cuda_plans import bench_cuda_plans

        shape = numbers("--shape", args.shape)
        if len(shape) != 2:
            raise ValueError(f"--shape takes two numbers, outputs and inputs, got {args.shape!r}")
        figures = bench_cuda_plans(tuple(args.kinds.split(",")), tuple(shape), numbers("--rows", args.rows))
    elif args.command == "e2e":
        from eyas.tools.bench_e2e import bench_e2e

        chains = None if args.chains is None else numbers("--chains", args.chains)
        figures = bench_e2e(
            args.artifact, args.context, args.new_tokens, args.repeats, chains, not args.no_transformers
        )
    elif args.command == "identity":
        from eyas.tools.bench_identity import bench_identity

        figures = bench_identity(args.artifact, args.prompts, args.new_tokens, not args.no_eager, args.lengths)
    elif args.command == "texts":
        from eyas.tools.bench_texts import bench_texts

        figures = bench_texts(args.artifacts, args.prompts, args.new_tokens)
    elif args.command == "acceptance":
        from eyas.tools.bench_program import bench_acceptance

        figures = bench_acceptance(args.artifact, args.prompts, args.per_kind, args.new_tokens, args.max_repeated)
    elif args.command == "eager":
        from eyas.tools.bench_program import bench_eager

        figures = bench_eager(args.artifact, args.new_tokens)
    elif args.command == "logits":
        from eyas.tools.bench_program import bench_logits

        figures = bench_logits(args.artifact)
    elif args.command == "quant":
        from eyas.tools.bench_program import bench_quant

        figures = bench_quant(args.target, args.checkpoint, args.recipes.split(","))
    elif args.command == "depth":
        from eyas.tools.bench_depth import bench_depth

        figures = bench_depth([int(part) for part in args.layers.split(",")])
    elif args.command == "passes":
        from eyas.tools.bench_passes import bench_passes

        figures = bench_passes([int(part) for part in args.layers.split(",")])
    else:
        from eyas.tools.bench_lowering import bench_lowering

        figures = bench_lowering(args.target, args.quant)
    if args.stats_json:
        write_json(args.stats_json, figures)
    return 0 if figures.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())

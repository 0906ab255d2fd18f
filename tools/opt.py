"""Runs passes over an exported graph and prints the result.

python -m eyas.tools.opt FILE.pt2 -p 'split_copy_to_slice,midm_sdpa{max_m=8}'
python -m eyas.tools.opt gemma3_270m:target_verify -p midm_sdpa,dead_code --print-changed
"""

import argparse
import os
import sys
from pathlib import Path

from eyas.tools.console import ConsoleProgress, run_tool


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="opt.py", description=__doc__.splitlines()[0])
    p.add_argument("source", nargs="?", help="a .pt2 file, TARGET for all methods of a target, or TARGET:METHOD")
    p.add_argument("-p", "--passes", default="", help="passes in order, as name{option=value},...; default: none")
    p.add_argument("-o", "--out", type=Path, help="write the graph to this .pt2 file (one method) and print nothing")
    p.add_argument("--print-before", action="append", default=[], metavar="NAME", help="print before a pass, to stderr")
    p.add_argument("--print-after", action="append", default=[], metavar="NAME", help="print after a pass, to stderr")
    p.add_argument("--print-after-all", action="store_true", help="print after every pass, to stderr")
    p.add_argument("--print-changed", action="store_true", help="print a diff for every pass that changed something")
    p.add_argument("--time-passes", action="store_true", help="print a table: rewrites, nodes, seconds")
    p.add_argument("--explain", metavar="PASS", help="after the passes: what PASS would rewrite, and why not the rest")
    p.add_argument("--verify-numerics", action="store_true", help="compare outputs before and after each pass")
    p.add_argument("--bisect", action="store_true", help="find the first pass after which outputs differ, and exit 1")
    p.add_argument("--tolerance", type=float, help="for --bisect: of the largest value (default: 1e-4)")
    p.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    p.add_argument("--no-verify", action="store_true", help="do not check the graph after each pass")
    p.add_argument("--list-passes", action="store_true", help="print the passes with their options and stop")
    add_target_options(p)
    return p


def add_target_options(p: argparse.ArgumentParser) -> None:
    """The options of tracing a target."""
    g = p.add_argument_group("tracing a target")
    g.add_argument("--device", default="cpu", help="cpu (default), or cuda: in bfloat16, as the passes for it expect")
    g.add_argument("--checkpoint", type=Path, help="a .gguf file or a Hugging Face folder, instead of the target's own")
    g.add_argument("--draft", default="auto", help="folder of an EAGLE-3 head, 'untrained', or 'auto' (default)")
    g.add_argument("--quant", default="int8", help="int8 (default), int4, none, or a recipe file")
    g.add_argument("--max-seq-len", type=int, default=2048, help="positions in the caches (default 2048)")
    g.add_argument("--max-prefill", type=int, help="largest chunk of a prompt (default: the window, at most 512)")
    g.add_argument("--max-chain", type=int, default=7, help="most proposals a round (default 7)")


def main(argv: list[str] | None = None) -> int:
    return run_tool(lambda: run(parser().parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    from eyas.passes.registry import find_pass, parse_pass, parse_pipeline

    if args.list_passes:
        print("\n".join(pass_lines()))
        return 0
    if args.source is None:
        raise ValueError("give a .pt2 file, TARGET or TARGET:METHOD; for example: tiny_gemma3:target_verify")
    passes = parse_pipeline(args.passes)  # before any work: a wrong name or option is an error at once
    explained = parse_pass(args.explain) if args.explain else None
    for name in (*args.print_before, *args.print_after):
        find_pass(name)
        if name not in {one.name for one in passes}:
            raise ValueError(f"pass {name!r} is to be printed but does not run; these do: {args.passes or 'none'}")
    if args.out is not None and (args.out.suffix != ".pt2" or not args.out.parent.is_dir()):
        raise ValueError(f"-o takes a .pt2 file in a folder that exists, got {args.out}")
    progress = ConsoleProgress()
    program = load(args, progress)
    if args.bisect:
        return bisect(args, program, passes, progress)
    return transform(args, program, passes, explained, progress)


def load(args: argparse.Namespace, progress: ConsoleProgress):
    """The program that ``source`` names."""
    from eyas.passes.program import Program

    path = Path(args.source)
    if path.suffix == ".pt2" or path.exists():
        return Program({path.stem: load_file(path)})
    target, _, method = args.source.partition(":")
    with progress.stage("load the compiler"):
        from eyas.lowering.lower import Request, trace_target

    request = Request(
        target=target, out=Path(), draft=args.draft, checkpoint=args.checkpoint, quant=args.quant,
        max_seq_len=args.max_seq_len, max_prefill=args.max_prefill, max_chain=args.max_chain,
        chain=min(4, args.max_chain), device=args.device,
    )  # fmt: skip
    return trace_target(request, (method,) if method else None, progress)


def load_file(path: Path):
    import zipfile

    import torch

    from eyas.kernels import register_triton_operators

    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a .pt2 file that torch.export.save wrote")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no .pt2 file, or a truncated one; write it with torch.export.save")
    register_triton_operators()  # the file may hold our operators, these among them
    try:
        return torch.export.load(path)
    except (RuntimeError, ValueError, LookupError, AssertionError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be loaded as an exported program: {error}") from error


def transform(args: argparse.Namespace, program, passes, explained, progress: ConsoleProgress) -> int:
    """Runs the passes with what the options ask to see, and prints or writes the result."""
    from eyas.passes.numerics import NumericCheck
    from eyas.passes.pipeline import run_pipeline
    from eyas.passes.printer import print_program, program_hash

    check = NumericCheck(args.seed) if args.verify_numerics else None
    observers = [Printing(args), *([check] if check else [])]
    records = run_pipeline(program, passes, not args.no_verify, observers)
    if args.time_passes:
        progress.console.print(time_table(records))
    for spec, found in check.found if check else ():
        worst = max(found, key=lambda d: d.error, default=None)
        text = f"off by {worst.error:.2g} in {worst.where} of {worst.method}" if worst and worst.error else "equal bits"
        print(f"numerics: {spec}: {text}", file=sys.stderr)
    print(f"program {program_hash(program)} after the passes", file=sys.stderr)
    if explained is not None:
        print("\n".join(explanation(program, explained)))
    elif args.out is None:
        print(print_program(program), end="")
    else:
        save(program, args.out)
    return 0


class Printing:
    """An observer that prints to stderr what the options ask for."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.text = args, ""

    def before_pass(self, number, one, program) -> None:
        from eyas.passes.printer import print_program

        if self.args.print_changed:
            self.text = print_program(program)
        if one.name in self.args.print_before:
            print(f"// before {one}\n{print_program(program)}", file=sys.stderr)

    def after_pass(self, number, one, program, record) -> None:
        from eyas.passes.diff import unified
        from eyas.passes.printer import print_program

        print(
            f"{one}: {record.rewrites} rewrites, {record.nodes_before} -> {record.nodes_after} nodes, "
            f"{record.seconds:.2f} s, checks {record.verify_seconds:.2f} s",
            file=sys.stderr,
        )
        if self.args.print_changed and (changed := unified(self.text, print_program(program), str(one))):
            print(changed, file=sys.stderr)
        if self.args.print_after_all or one.name in self.args.print_after:
            print(f"// after {one}\n{print_program(program)}", file=sys.stderr)


def explanation(program, one) -> list[str]:
    """What a pass would do to a program, and its reasons for leaving the rest alone."""
    from eyas.passes.numerics import copy_program
    from eyas.passes.pipeline import run_pipeline

    (record,) = run_pipeline(copy_program(program), [one])
    lines = [f"{one}: would make {record.rewrites} rewrites"]
    if not record.rewrites and not record.refusals:
        lines.append("there is no candidate: no node of the kind that it rewrites")
    lines += [f"{r.method}: {r.node}: {r.reason}" for r in record.refusals]
    return lines


def bisect(args: argparse.Namespace, program, passes, progress: ConsoleProgress) -> int:
    from eyas.passes import numerics

    tolerance = numerics.TOLERANCE if args.tolerance is None else args.tolerance
    with progress.stage("bisect"):
        culprit = numerics.bisect(program, passes, tolerance, args.seed)
    if culprit is None:
        print(f"no pass changes the outputs by more than {tolerance:g} of the largest value")
        return 0
    d = culprit.difference
    print(
        f"pass {culprit.spec} (number {culprit.number}) is the first after which outputs differ: method {d.method} "
        f"with {d.rows} rows, {d.where}, by {d.error:.2g} of the largest value (allowed: {tolerance:g})"
    )
    return 1


def time_table(records):
    """Rewrites, nodes and seconds of each pass."""
    from rich.table import Table

    table = Table("pass", "rewrites", "refused", "nodes before", "nodes after", "seconds", "checks", title="passes")
    table.columns[0].no_wrap = True
    for r in records:
        table.add_row(
            r.spec, str(r.rewrites), str(len(r.refusals)), str(r.nodes_before), str(r.nodes_after),
            f"{r.seconds:.3f}", f"{r.verify_seconds:.3f}",
        )  # fmt: skip
    total = sum(r.seconds for r in records), sum(r.verify_seconds for r in records)
    table.add_row("all", "", "", "", "", f"{total[0]:.3f}", f"{total[1]:.3f}")
    return table


def pass_lines() -> list[str]:
    """Every pass: its options with defaults, whether it is exact, and its first line."""
    import dataclasses

    from eyas.passes.registry import find_pass, pass_names

    lines = []
    for name in pass_names():
        cls = find_pass(name)
        options = ",".join(f"{f.name}={f.default}" for f in dataclasses.fields(cls) if f.name != "must_fire")
        first = (cls.__doc__ or "").strip().splitlines()[0]
        kind = "exact" if cls.exact else "changes bits"
        lines.append(f"{name + (f'{{{options}}}' if options else ''):28} {kind:12} {first}")
    return lines


def save(program, path: Path) -> None:
    """Writes the program's one method under a temporary name, then renames it."""
    import torch

    if len(program.methods) != 1:
        raise ValueError(f"-o takes one method, the program has {', '.join(program.methods)}; name one: TARGET:METHOD")
    (ep,) = program.methods.values()
    scratch = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        with open(scratch, "wb") as file:  # given a path, the archive would name itself after it
            torch.export.save(ep, file)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())

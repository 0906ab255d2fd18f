"""Writes one self-contained HTML page that shows what each pass did to a program.

python -m eyas.tools.explain gemma3_270m -p midm_sdpa,dead_code -o build/passes.html
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from eyas.tools import opt
from eyas.tools.console import ConsoleProgress, run_tool

TEMPLATE = "explain.html.j2"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="explain.py", description=__doc__.splitlines()[0])
    p.add_argument("source", help="a .pt2 file, TARGET for all methods of a target, or TARGET:METHOD")
    p.add_argument("-p", "--passes", help="passes in order (default: those of lower.py for the device)")
    p.add_argument("-o", "--out", type=Path, required=True, help="the .html file to write")
    p.add_argument("--rows", type=int, default=5, help="rows of a call that costs are counted for (default 5)")
    p.add_argument("--live", type=int, default=512, help="cache rows in use that costs are counted for (default 512)")
    p.add_argument("--bandwidth", type=float, default=20.0, help="of the roofline, in GB/s (default 20)")
    p.add_argument("--peak", type=float, default=100.0, help="of the roofline, in GFLOP/s (default 100)")
    opt.add_target_options(p)
    return p


def main(argv: list[str] | None = None) -> int:
    return run_tool(lambda: run(parser().parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    from eyas.lowering.pipelines import pipeline_for
    from eyas.passes.pipeline import run_pipeline
    from eyas.passes.registry import parse_pipeline

    if not args.out.parent.is_dir():
        raise FileNotFoundError(f"no folder {args.out.parent} for {args.out.name}")
    for option in ("rows", "live", "bandwidth", "peak"):
        if getattr(args, option) <= 0:
            raise ValueError(f"--{option} must be positive, got {getattr(args, option)}")
    passes = pipeline_for(args.device, None) if args.passes is None else parse_pipeline(args.passes)
    progress = ConsoleProgress()
    program = opt.load(args, progress)
    record = Recording(args.rows, args.live)
    with progress.stage("passes"):
        record.start(program)
        run_pipeline(program, passes, observers=[record])
    with progress.stage("page"):
        page = render(record.page(program, args))
        scratch = args.out.with_name(f".{os.getpid()}.{args.out.name}")
        try:
            scratch.write_text(page, encoding="utf-8")
            os.replace(scratch, args.out)
        finally:
            scratch.unlink(missing_ok=True)
    print(f"{args.out}: {len(page) / 1e6:.1f} MB", file=sys.stderr)
    return 0


def render(data: dict) -> str:
    """The page for ``Recording.page``'s data."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("eyas.tools", "."), autoescape=True)
    blob = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no text of a graph may end the script
    return environment.get_template(TEMPLATE).render(title=data["source"], blob=blob)


@dataclass
class Recording:
    """An observer that keeps each stage's text (every distinct line once), diffs, counts and costs."""

    rows: int
    live: int
    lines: dict[str, int] = field(default_factory=dict)
    stages: list[dict] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def start(self, program) -> None:
        self.stages.append({"spec": "traced", "rewrites": 0, "seconds": 0, "refusals": [], **self.state(program)})

    def before_pass(self, number, one, program) -> None: ...

    def after_pass(self, number, one, program, record) -> None:
        from eyas.passes.diff import side_by_side

        old = self.texts
        stage = {
            "spec": str(one),
            "rewrites": record.rewrites,
            "seconds": round(record.seconds, 4),
            "refusals": [[r.method, r.node, r.reason] for r in record.refusals],
            **self.state(program),
        }
        stage["diff"] = {
            method: [[row.kind, self.line(row.before), self.line(row.after)] for row in side_by_side(old[method], text)]
            for method, text in self.texts.items()
            if old[method] != text
        }
        self.stages.append(stage)

    def state(self, program) -> dict:
        """A program as it is now."""
        from eyas.passes.costs import costs
        from eyas.passes.pipeline import count_operators
        from eyas.passes.printer import print_method
        from eyas.passes.program import Program

        self.texts = {name: print_method(ep, name) for name, ep in program.methods.items()}
        counted = {
            name: [[operator, c.count, c.moved, c.work] for operator, c in costs(ep, self.rows, self.live).items()]
            for name, ep in program.methods.items()
        }
        text = {name: [self.line(line) for line in text.splitlines()] for name, text in self.texts.items()}
        counts = {name: count_operators(Program({name: ep})) for name, ep in program.methods.items()}
        return {"text": text, "costs": counted, "counts": counts}

    def line(self, text: str) -> int:
        return self.lines.setdefault(text, len(self.lines))

    def page(self, program, args: argparse.Namespace) -> dict:
        """Everything that the page shows."""
        from eyas.passes.printer import dtype_name

        sharing = [
            [b.name, dtype_name(b.dtype), list(b.shape), b.nbytes, list(b.readers), list(b.writers)]
            for b in (program.sharing or {}).values()
        ]
        return {
            "source": args.source, "rows": self.rows, "live": self.live, "bandwidth": args.bandwidth * 1e9,
            "peak": args.peak * 1e9, "lines": list(self.lines), "stages": self.stages, "buffers": sharing,
        }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

"""Seconds and native code of lowering random decoders of growing depth, each from an empty cache in its own process."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

LOWER = """
import json, sys
from dataclasses import replace
from pathlib import Path
from eyas.lowering.lower import Request, lower
from eyas.models.target import TARGETS
from eyas.runtime.container_files import ProgramFile
from eyas.tools.console import ConsoleProgress
name, depth, out = "deep", int(sys.argv[1]), Path(sys.argv[2])
tiny = TARGETS["tiny_gemma3"]
TARGETS[name] = replace(tiny, name=name, options={**tiny.options, "n_layers": depth})
report = lower(Request(name, out, max_seq_len=256, max_prefill=8), ConsoleProgress(verbose=False))
file = ProgramFile(out / "model.pte")
print(json.dumps({**report.to_json(), "code_bytes": sum(len(file.named(key)) for key in file.named_data)}))
"""
WEIGHTS = ("read checkpoints", "weights", "write data", "manifest")  # stages whose time goes with the weights


def bench_depth(depths: Sequence[int]) -> dict[str, object]:
    """Lowers a Gemma-3-like decoder of each depth: every third layer global, random weights, all methods."""
    runs = {}
    for depth in depths:
        with tempfile.TemporaryDirectory(prefix="eyas-bench-") as scratch:
            environment = {**os.environ, "EYAS_CACHE": str(Path(scratch) / "cache")}
            command = [sys.executable, "-c", LOWER, str(depth), str(Path(scratch) / "artifact")]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        runs[depth] = json.loads(done.stdout.splitlines()[-1])
    table = Table(title=f"lowering by depth, {os.cpu_count()} cores")
    table.add_column("figure")
    for depth in depths:
        table.add_column(f"{depth} layers", justify="right")
    table.add_column("last / first", justify="right")
    rows: dict[str, list[float]] = {}
    for stage in runs[depths[0]]["seconds"]:
        rows[f"{stage}, s"] = [run["seconds"][stage] for run in runs.values()]
    own = [sum(s for stage, s in run["seconds"].items() if stage not in WEIGHTS) for run in runs.values()]
    rows["all but the weights, s"] = own
    rows["blocks"] = [len(run["blocks"]) for run in runs.values()]
    rows["calls of blocks"] = [sum(block["calls"] for block in run["blocks"]) for run in runs.values()]
    rows["native code, MB"] = [run["code_bytes"] / 1e6 for run in runs.values()]
    rows["program file, MB"] = [run["bytes"]["model.pte"] / 1e6 for run in runs.values()]
    for name, values in rows.items():
        text = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in values]
        table.add_row(name, *text, f"{values[-1] / values[0]:.2f}" if values[0] else "")
    Console().print(table)
    return {"depths": list(depths), **rows}

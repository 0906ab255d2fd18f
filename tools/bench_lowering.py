"""Seconds and memory of lowering, cold and warm, and of loading, each in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

LOADER = """
import json, sys, time
start = time.perf_counter()
from pathlib import Path
from eyas.runtime.artifact import Artifact
from eyas.runtime.decoding import SpeculativeDecoder
from eyas.runtime.memory import peak_rss
from eyas.runtime.session import open_tokenizer
artifact = Artifact.open(Path(sys.argv[1]))
tokenizer = open_tokenizer(artifact)
program = artifact.load()
loaded = time.perf_counter() - start
decoder = SpeculativeDecoder(program)
ids = tokenizer.encode("The history of falconry begins")
new = [t for block in decoder.generate(ids, 128, stop_ids=()) for t in block]
print(json.dumps({"load_seconds": loaded, "peak_bytes": peak_rss(), "artifact_bytes": artifact.nbytes()}))
"""


def lower_once(target: str, quant: str, out: Path, environment: dict[str, str]) -> dict[str, object]:
    stats = out.with_suffix(".json")
    command = [sys.executable, "-m", "eyas.tools.lower", "--target", target, "--quant", quant, "-o", str(out)]
    start = time.perf_counter()
    subprocess.run([*command, "--stats-json", str(stats)], check=True, env=environment)
    return {**json.loads(stats.read_text()), "wall_seconds": time.perf_counter() - start}


def bench_lowering(target: str, quant: str) -> dict[str, object]:
    """Lowers twice with a cache that starts empty, then loads and generates 128 tokens."""
    with tempfile.TemporaryDirectory(prefix="eyas-bench-") as scratch:
        environment = {**os.environ, "EYAS_CACHE": str(Path(scratch) / "cache")}
        out = Path(scratch) / "artifact"
        cold = lower_once(target, quant, out, environment)
        warm = lower_once(target, quant, out, environment)
        loads = []
        for _ in range(5):
            done = subprocess.run([sys.executable, "-c", LOADER, str(out)], check=True, capture_output=True, text=True)
            loads.append(json.loads(done.stdout))
    load = sorted(loads, key=lambda r: r["load_seconds"])[2]
    source = cold["source_bytes"]
    table = Table(title=f"{target}, {quant}, {os.cpu_count()} cores")
    table.add_column("figure")
    table.add_column("measured", justify="right")
    rows = {
        "cold lowering, s": f"{cold['wall_seconds']:.1f}",
        "warm lowering, s": f"{warm['wall_seconds']:.1f}",
        "peak memory of lowering, MB": f"{cold['peak_bytes'] / 1e6:.0f}",
        "  times the weights in bfloat16": f"{cold['peak_bytes'] / source:.2f}",
        "peak memory of the largest compiler process, MB": f"{cold['peak_child_bytes'] / 1e6:.0f}",
        "loading, s (median of 5)": f"{load['load_seconds']:.2f}",
        "artifact, MB": f"{load['artifact_bytes'] / 1e6:.0f}",
        "peak memory of loading and 128 tokens, MB": f"{load['peak_bytes'] / 1e6:.0f}",
        "  times the artifact": f"{load['peak_bytes'] / load['artifact_bytes']:.2f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    return {"cold": cold, "warm": warm, "load": load}

"""Shows what an artifact holds, or what this machine offers.

python -m eyas.tools.inspect DIR
python -m eyas.tools.inspect --doctor
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from eyas.tools.console import run_tool


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="inspect.py", description=__doc__.splitlines()[0])
    p.add_argument("artifact", type=Path, nargs="?", help="folder that lower.py wrote")
    p.add_argument("--doctor", action="store_true", help="report versions, the compiler and the devices found here")
    p.add_argument("--buffers", action="store_true", help="list every buffer, not only those that methods write")
    p.add_argument("--matrices", action="store_true", help="list every weight matrix: format, bytes, error")
    return p


def main(argv: list[str] | None = None) -> int:
    return run_tool(lambda: run(parser().parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    if args.doctor:
        print("\n".join(doctor()))
        return 0
    if args.artifact is None:
        raise ValueError("give the folder of an artifact, or --doctor")
    from eyas.runtime.artifact import Artifact

    artifact = Artifact.open(args.artifact)
    print("\n".join(describe(artifact, args.buffers, args.matrices)))
    return 0


def describe(artifact, buffers: bool = False, matrices: bool = False) -> Iterator[str]:
    """An artifact in words, a line a fact."""
    from eyas.runtime.artifact import PROGRAM
    from eyas.runtime.container_files import ProgramFile
    from eyas.runtime.native import NAMES
    from eyas.runtime.session import open_tokenizer

    m = artifact.manifest
    device, versions = m["device"], m["versions"]
    yield f"target      {m['target']['name']} ({m['target'].get('file', m['target']['format'])})"
    for note in m["draft"]["notes"]:
        yield f"draft       {note}"
    yield f"device      {device['type']}, {device['architecture']}, {' '.join(device['cpu_features'])}"
    if device["type"] == "cuda":
        yield (
            f"card        {device['name']}, capability {device['capability']}, CUDA {device['cuda']}, up to "
            f"{device['shared_memory']} bytes of shared memory a program"
        )
    yield "made with   " + ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    yield f"pipeline    {m['pipeline']}"
    for name, facts in m["files"].items():
        yield f"file        {name}: {facts['bytes'] / 1e6:.1f} MB, sha256 {facts['sha256'][:16]}"
    program = ProgramFile(artifact.path / PROGRAM)
    for name, spec in program.methods.items():
        rows = m["methods"][name]
        sides = [
            ", ".join(f"{NAMES[t.dtype]}{shape_text(t)}" for t in tensors) for tensors in (spec.inputs, spec.outputs)
        ]
        yield f"method      {name}({sides[0]}) -> {sides[1]}; {rows['min_rows']} to {rows['max_rows']} rows"
    for name, value in sorted(program.constants.items()):
        yield f"constant    {name} = {value}"
    formats = Counter()
    for p in m["quantisation"]["matrices"]:
        formats[p["format"]] += p["nbytes"]
        if matrices:
            yield f"matrix      {p['name']} {p['shape']} {p['format']}: error {p['error']:.4f} {p['note']}"
    yield "weights     " + ", ".join(f"{fmt}: {nbytes / 1e6:.1f} MB" for fmt, nbytes in formats.items())
    for b in m["sharing"]:
        if b["writers"] or buffers:
            yield (
                f"buffer      {b['name']} {b['dtype']}{b['shape']}: read by {', '.join(b['readers'])}"
                + (f"; written by {', '.join(b['writers'])}" if b["writers"] else "")
            )
    tokenizer = open_tokenizer(artifact)
    for token_id, literal in tokenizer.describe_stops():
        yield f"stop id     {token_id} {literal!r}"


def shape_text(spec) -> str:
    """``[1,M,640]`` for a tensor with dynamic rows."""
    rows = len(spec.sizes) - 1 if len(spec.sizes) == 1 else 1
    return "[" + ",".join("M" if spec.dynamic and i == rows else str(s) for i, s in enumerate(spec.sizes)) + "]"


def doctor() -> Iterator[str]:
    """What lowering and running would find here."""
    from eyas.lowering.cpu_kernels import compiler
    from eyas.lowering.environment import machine, versions

    for name, value in versions().items():
        yield f"{name:12} {value or 'not installed'}"
    facts = machine()
    yield f"{'machine':12} {facts['architecture']}, {facts['cpu_capability']}, {' '.join(facts['cpu_features'])}"
    try:
        yield f"{'c++':12} {compiler()}"
    except RuntimeError as error:
        yield f"{'c++':12} {error}"
    import torch

    yield f"{'cpu':12} lowering and running are supported"
    found = torch.cuda.is_available()
    yield f"{'cuda':12} {'a device is present, but this version lowers for cpu only' if found else 'no device found'}"


if __name__ == "__main__":
    sys.exit(main())

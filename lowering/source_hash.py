"""A hash of the code that decides what lowering writes: this project's packages, and those that bring passes or
targets.
"""

import hashlib
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import eyas.kernels
from eyas.passes.registry import ENTRY_POINT_GROUP

PACKAGES = ("kernels", "models", "passes", "lowering", "runtime")
SUFFIXES = {".py", ".cpp", ".h"}


@cache
def source_hash() -> str:
    """sha256 over names and contents of all sources that tracing, passes and compilation depend on."""
    root = Path(eyas.kernels.__file__).parent.parent
    files = [p for name in PACKAGES for p in sorted((root / name).rglob("*")) if p.suffix in SUFFIXES]
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
        spec = find_spec(point.module)
        if spec is not None and spec.origin:
            files.append(Path(spec.origin))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()

"""The arrows between the folders point one way, and the runtime stands on its own."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "kernels": set(),
    "models": {"kernels"},
    "passes": {"kernels"},
    "runtime": {"kernels"},
    "lowering": {"models", "passes", "kernels", "runtime"},  # the artifact's format lives in runtime
    "training": {"models", "kernels"},
    "tools": {"models", "passes", "kernels", "runtime", "lowering", "training"},
}
HEAVY = {"torch", "transformers", "executorch", "triton"}
MODULES = [(folder, path) for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(folder: str, path: Path) -> str:
    parts = path.relative_to(ROOT / folder).with_suffix("").parts
    return ".".join(["eyas", folder, *(part for part in parts if part != "__init__")])


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of each import; ``from a import b`` counts as ``a.b``, as b may be a module. ``package``:
    what relative imports start from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield from ((".".join([*base, *filter(None, [node.module]), a.name]), node.lineno) for a in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) and node.args:
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield first.value, node.lineno


def at_import_time(tree: ast.Module) -> ast.Module:
    """What runs when a module is imported: everything but the bodies of functions."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            node.body = []
            return node

        visit_AsyncFunctionDef = visit_FunctionDef

    return Strip().visit(tree)


def violations(folder: str, source: str, package: str, on_card: bool = False) -> list[str]:
    """What a module of ``folder`` imports against the arrows. ``on_card``: programs that it runs need torch anyway."""
    allowed = MAY_IMPORT[folder] | {folder}
    found = []
    for name, line in imports(ast.parse(source), package):
        parts = name.split(".")
        if parts[0] == "eyas" and (len(parts) < 2 or parts[1] not in allowed):
            found.append(f"line {line}: {name}")
    if folder == "runtime" and not on_card:
        found += [
            f"line {line}: {name}"
            for name, line in imports(at_import_time(ast.parse(source)), package)
            if name.split(".")[0] in HEAVY
        ]
    return found


@pytest.mark.parametrize(("folder", "path"), MODULES, ids=lambda value: getattr(value, "stem", value))
def test_arrows(folder, path):
    assert not violations(folder, path.read_text(), f"eyas.{folder}", path.stem.startswith("cuda_"))


def test_every_module_is_looked_at():
    assert len(MODULES) > 40 and all(any(folder == other for other, _ in MODULES) for folder in MAY_IMPORT)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("kernels", "from eyas.passes import base"),
        ("models", "def f():\n    import eyas.lowering.trace"),
        ("passes", "from importlib import import_module\nimport_module('eyas.models.layers')"),
        ("passes", "from ..lowering import pipelines"),
        ("runtime", "from eyas import models"),
        ("runtime", "import torch.nn"),
        ("runtime", "try:\n    from transformers import x\nexcept ImportError:\n    x = None"),
        ("lowering", "from eyas.tools.console import x"),
    ],
)
def test_a_wrong_arrow_is_found(folder, source):
    assert violations(folder, source, f"eyas.{folder}")


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("passes", "from . import base\nfrom eyas.kernels import panel_linear"),
        ("runtime", "import numpy\ndef f():\n    import torch"),
        ("tools", "import eyas.lowering.lower, eyas.runtime.session"),
    ],
)
def test_a_right_arrow_is_fine(folder, source):
    assert not violations(folder, source, f"eyas.{folder}")


@pytest.mark.parametrize(("folder", "path"), MODULES, ids=lambda value: getattr(value, "stem", value))
def test_imports_cleanly(folder, path):
    import_module(name_of(folder, path))


def modules_after(code: str) -> set[str]:
    """Top-level modules of a fresh process after ``code``."""
    report = f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_runtime_loads_without_torch():
    names = [name_of(folder, p) for folder, p in MODULES if folder == "runtime" and not p.stem.startswith("cuda_")]
    assert {"eyas.runtime.decoding", "eyas.runtime.session"} <= set(names)
    loaded = modules_after("import " + ", ".join(names))
    assert "numpy" in loaded and not loaded & HEAVY


def test_the_tools_that_run_load_without_torch():
    assert not modules_after("import eyas.tools.run") & HEAVY

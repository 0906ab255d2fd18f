"""The pass of docs/first_pass.md, found by its entry point as another package's; and that page, run as it stands."""

import re
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import ir
import pytest
from ir import ROWS, apply, assert_equal, check, program_of, randn, results, unchanged

from eyas.passes.registry import ENTRY_POINT_GROUP, PASSES, find_pass, parse_pass, pass_names
from eyas.tools.opt import main

FOLDER = Path(__file__).parent / "first_pass"
PAGE = (FOLDER.parents[1] / "docs" / "first_pass.md").read_text()
X = randn(1, ROWS, 8)
INPUTS = [(randn(1, rows, 8, seed=rows),) for rows in (1, 2, 16)]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The folder as an installed package: on the path, with its metadata."""
    monkeypatch.syspath_prepend(str(FOLDER))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


# The pass


def test_it_is_found_by_its_entry_point():
    (point,) = entry_points(group=ENTRY_POINT_GROUP, name="square")
    assert point.value == "square_pass:Square" and "square" in pass_names() and "square" not in PASSES
    cls = find_pass("square")
    assert cls is point.load() and cls.__module__ == "square_pass" and str(parse_pass("square")) == "square"


def test_it_is_gone_without_its_package(monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(FOLDER)])
    assert "square" not in pass_names()
    with pytest.raises(ValueError, match="unknown pass 'square'; did you mean"):
        find_pass("square")


def test_it_fires():
    program = program_of(lambda m, x: (x * x).sum(-1) + m.w * m.w, X, w=randn(ROWS + 1)[:1])
    expected = results(program, *INPUTS)
    record = apply(parse_pass("square"), program)
    assert record.rewrites == 2 and not record.refusals
    assert_equal(results(program, *INPUTS), expected)
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: f32[1] = buffer w
        CHECK: %[[x:\w+]]: f32[1,s0,8] = input
        CHECK-NOT: aten.mul
        CHECK: f32[1,s0,8] = aten.square.default(%[[x]])
        CHECK: f32[1] = aten.square.default(%[[w]])
        """,
    )


def test_a_square_with_two_users():
    def forward(module, x):
        y = x * x
        return y.sin() + y

    program = program_of(forward, X)
    expected = results(program, *INPUTS)
    assert apply(parse_pass("square"), program).rewrites == 1
    assert_equal(results(program, *INPUTS), expected)
    check(program, "CHECK: %[[y:\\w+]]: {{.*}} = aten.square\nCHECK: aten.sin.default(%[[y]])\nCHECK: add{{.*}}%[[y]])")


def test_a_product_of_two_values_stays():
    unchanged(parse_pass("square"), program_of(lambda m, x: x * x.clone(), X))


def test_a_product_with_a_number_stays():
    unchanged(parse_pass("square"), program_of(lambda m, x: x * 2.0, X))


def test_booleans_are_refused():
    program = program_of(lambda m, x: (x > 0) * (x > 0), X)
    unchanged(parse_pass("square"), program)

    def twice(module, x):
        seen = x > 0
        return seen * seen

    unchanged(parse_pass("square"), program_of(twice, X), "the square of booleans is a number")


def test_without_a_product_nothing_changes():
    unchanged(parse_pass("square"), program_of(lambda m, x: x.sin(), X))


# The page


def test_the_page_shows_the_file_as_it_is():
    code = (FOLDER / "square_pass.py").read_text()
    assert code in blocks("python")
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 30


def test_the_page_shows_the_entry_point_as_it_is():
    (text,) = blocks("toml")
    project = tomllib.loads(text)["project"]
    (point,) = entry_points(group=ENTRY_POINT_GROUP, name="square")
    assert project["entry-points"] == {ENTRY_POINT_GROUP: {point.name: point.value}}
    assert (project["name"], project["version"]) == (point.dist.name, point.dist.version)


def test_the_page_does_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(blocks("python")[0], {"__name__": "page"})
    assert main(["norm.pt2"]) == 0
    assert capsys.readouterr().out == blocks("text")[0]
    (command,) = blocks("sh")
    python, *arguments = command.split()
    assert (python, arguments[:2]) == ("python", ["-m", "eyas.tools.opt"])
    assert main(arguments[2:]) == 0
    captured = capsys.readouterr()
    assert blocks("diff")[0] in captured.err and "numerics: square: equal bits" in captured.err
    assert captured.out == blocks("text")[0].replace("aten.mul.Tensor(%x, %x)", "aten.square.default(%x)")


def test_the_page_names_files_that_there_are():
    root = FOLDER.parents[1]
    for path in ("tests/first_pass", "tests/test_first_pass.py", "tests/ir.py", "passes/facts.py"):
        assert f"`{path}`" in PAGE and (root / path).exists()
    names = ("program_of", "apply", "unchanged", "check", "results")
    assert all(f"`{name}`" in PAGE and callable(getattr(ir, name)) for name in names)

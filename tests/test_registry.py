"""The table of passes, the text that names them, and passes of other packages."""

import ast
import dataclasses
import re
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.lowering.pipelines import FINISH, OPTIMISE, pipeline_for
from eyas.passes import registry
from eyas.passes.base import MethodPass, Outcome, Pass
from eyas.passes.facts import FACTS
from eyas.passes.pipeline import PassError
from eyas.passes.registry import PASSES, find_pass, parse_pass, parse_pipeline, pass_names, pipeline_text, split_specs

TESTS = Path(__file__).parent
FOLDER = TESTS.parent / "passes"
INFRASTRUCTURE = {
    "__init__", "base", "blocks", "cache_proof", "costs", "diff", "facts", "mask_proof", "numerics", "packed_weights",
    "pipeline", "printer", "program", "ranges", "registry", "types", "verify",
}  # fmt: skip


@dataclass(frozen=True)
class Dummy(Pass):
    """A pass with an option of each kind."""

    name: ClassVar[str] = "dummy"
    max_m: int = 8
    fast: bool = False
    safe: bool = True
    label: str = "plain"

    def run(self, program):
        return Outcome()


@dataclass(frozen=True)
class Strict(Dummy):
    """A pass with an option that has no default, and one of a kind that no text stands for."""

    name: ClassVar[str] = "strict"
    limit: int = dataclasses.field(kw_only=True)
    odd: int | None = None


@pytest.fixture(autouse=True)
def foreign(monkeypatch):
    """Another package's passes, as its metadata declares them."""
    points = EntryPoints(
        EntryPoint(name, f"{__name__}:{cls.__name__}", registry.ENTRY_POINT_GROUP)
        for name, cls in (("dummy", Dummy), ("strict", Strict))
    )
    monkeypatch.setattr(registry, "entry_points", lambda **kwargs: points.select(**kwargs))


# The table


def test_the_table_is_sorted():
    assert list(PASSES) == sorted(PASSES)


def test_every_file_that_holds_a_pass_is_in_the_table():
    assert {path.stem for path in FOLDER.glob("*.py")} - INFRASTRUCTURE == set(PASSES)


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_one_file_one_class_one_name_one_test(name):
    cls = find_pass(name)
    module = import_module(f"eyas.passes.{name}")
    assert cls.name == name and cls.__module__ == module.__name__ and issubclass(cls, Pass)
    assert cls.__name__ == "".join(word.capitalize() for word in name.split("_"))
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Pass)]
    assert [c for c in classes if c.__module__ == module.__name__] == [cls]
    assert (TESTS / f"test_{name}.py").is_file()
    assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
    assert isinstance(cls.exact, bool)
    for facts in (cls.requires, cls.ensures, cls.breaks):
        assert isinstance(facts, frozenset) and facts <= set(FACTS), "a fact of ours can be looked up"


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_can_be_told_that_it_must_fire(name):
    assert parse_pass(f"{name}{{must_fire=true}}").must_fire and not parse_pass(name).must_fire


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_shows_the_text_before_and_after(name):
    """Blocks of 1 to 12 lines of the printer's text, then words on what is left alone."""
    text = ast.get_docstring(next(n for n in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text()))
                                  if isinstance(n, ast.ClassDef) and n.name == find_pass(name).__name__))  # fmt: skip
    _, before, after = text.split("::\n")
    before, _, title = before.rpartition("\n\n")
    after, _, rest = after.strip("\n").partition("\n\n")
    title_before = text.partition("::")[0].splitlines()[-1]
    assert re.fullmatch(r"Before( \(.*\))?", title_before) and title.strip() == "After" and rest.strip()
    for block in (before.strip("\n"), after):
        lines = block.splitlines()
        assert 1 <= len(lines) <= 12 and all(line.startswith("    ") for line in lines)
        assert all(": " in line and ("[" in line or ": none = " in line) for line in lines), block


def test_pipelines_name_passes_that_there_are():
    for device in FINISH:
        passes = pipeline_for(device, None)
        assert parse_pipeline(pipeline_text(passes)) == passes
        own, needed = (split_specs(table[device]) for table in (OPTIMISE, FINISH))
        assert list(map(str, passes)) == [*own, *(spec for spec in needed if spec not in own)]


def test_what_a_device_needs_is_added_where_facts_allow():
    """Passes that are asked for keep their order; those that are left out are put where they can stand."""
    assert pipeline_text(pipeline_for("cpu", "")) == FINISH["cpu"]
    assert pipeline_text(pipeline_for("cpu", "dead_code,int4_smallm")) == f"dead_code,int4_smallm,{FINISH['cpu']}"
    given = pipeline_text(pipeline_for("cpu", "share_buffers,midm_sdpa{max_m=4}"))
    assert given.split(",").index("share_buffers") < given.split(",").index("midm_sdpa{max_m=4}")
    assert given.split(",")[-1] == "outline_blocks{overhead=320}", "what it calls cannot be rewritten any more"
    assert sorted(given.split(",")[:-1]) == ["masked_sdpa", "midm_sdpa{max_m=4}", "panel_linear", "share_buffers"]


def test_what_cuda_needs_is_added_as_well():
    assert pipeline_text(pipeline_for("cuda", "")) == FINISH["cuda"]
    asked = "outline_blocks{unrolled=true},int4_smallm"
    given = pipeline_text(pipeline_for("cuda", "int4_smallm,splitk_sdpa"))
    assert given == "int4_smallm,splitk_sdpa,fragment_linear,share_buffers,outline_blocks{overhead=320}"
    with pytest.raises(PassError, match=r"int4_smallm requires no_blocks, which outline_blocks.* breaks"):
        pipeline_for("cuda", asked)
    with pytest.raises(PassError, match="splitk_sdpa requires visible_masks, which masked_sdpa breaks"):
        pipeline_for("cuda", "masked_sdpa,splitk_sdpa")
    with pytest.raises(PassError, match="int4_smallm requires unpacked_weights, which fragment_linear breaks"):
        pipeline_for("cuda", "fragment_linear,int4_smallm")


def test_a_pipeline_that_cannot_be_ordered_names_its_passes():
    with pytest.raises(PassError, match=r"midm_sdpa requires visible_masks, which masked_sdpa breaks"):
        pipeline_for("cpu", "masked_sdpa,midm_sdpa")


def test_an_unknown_device_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown device 'tpu'; allowed: cpu, cuda"):
        pipeline_for("tpu", None)


# The text


def texts():
    return st.text(st.characters(codec="utf-8")).filter(lambda t: t == t.strip() and not set(t) & set(",{}"))


@settings(deadline=None)
@given(st.builds(Dummy, max_m=st.integers(), fast=st.booleans(), safe=st.booleans(), label=texts()))
def test_a_pass_reads_back_from_its_text(one):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PASSES, "dummy", f"{__name__}:Dummy")
        assert parse_pass(str(one)) == one
        assert parse_pass(f"  {one} ") == one


@settings(deadline=None)
@given(st.lists(st.builds(Dummy, max_m=st.integers(), fast=st.booleans(), label=texts()), max_size=4))
def test_a_pipeline_reads_back_from_its_text(passes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PASSES, "dummy", f"{__name__}:Dummy")
        assert parse_pipeline(pipeline_text(passes)) == passes
        assert parse_pipeline([pipeline_text(passes), "", pipeline_text(passes)]) == passes * 2


@settings(deadline=None)
@given(st.text())
def test_a_text_that_would_not_read_back_makes_no_pass(label):
    try:
        one = Dummy(label=label)
    except ValueError as error:
        assert "option 'label' of pass 'dummy'" in str(error) and (label != label.strip() or set(label) & set(",{}"))
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(PASSES, "dummy", f"{__name__}:Dummy")
            assert parse_pass(str(one)) == one


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (Dummy(), "dummy"),
        (Dummy(max_m=-4, safe=False), "dummy{max_m=-4,safe=false}"),
        (Dummy(fast=True, label="a=b c"), "dummy{fast=true,label=a=b c}"),
        (Dummy(label=""), "dummy{label=}"),
        (Strict(limit=3), "strict{limit=3}"),
        (Dummy(must_fire=True), "dummy{must_fire=true}"),
    ],
    ids=str,
)
def test_options_that_are_not_the_default_are_shown(one, text):
    assert str(one) == text and parse_pass(text) == one


def test_space_and_empty_braces_are_fine():
    assert parse_pass(" dummy { max_m = 3 , fast = true } ") == Dummy(max_m=3, fast=True)
    assert parse_pass("dummy{}") == Dummy()
    assert parse_pipeline(" dummy , dummy{max_m=3} ,, ") == [Dummy(), Dummy(max_m=3)]


def test_commas_inside_braces_do_not_separate_passes():
    assert split_specs("a,b{x=1,y=2},c{z=3}") == ["a", "b{x=1,y=2}", "c{z=3}"]
    assert split_specs("b{x=1,y=2},b{x=1,y=2}") == ["b{x=1,y=2}"] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dummy{max_k=3}", r"pass 'dummy' has no option 'max_k=3'; allowed: .*max_m \(int\), fast \(bool\), "
                           r"safe \(bool\), label \(str\)"),
        ("dummy{max_m}", r"no option 'max_m'; allowed"),
        ("dummy{max_m=few}", r"option 'max_m' of pass 'dummy' takes int, got 'few'"),
        ("dummy{max_m=1.5}", r"takes int, got '1.5'"),
        ("dummy{fast=1}", r"option 'fast' of pass 'dummy' takes bool, got '1'"),
        ("dummy{max_m=1,max_m=2}", r"option 'max_m' of pass 'dummy' is given twice"),
        ("strict", r"pass 'strict' needs limit; its options: .*odd \(int \| None\)"),
        ("strict{limit=1,odd=2}", r"option 'odd' of pass 'strict' takes int \| None, got '2'"),
        ("share_buffers{max_m=3}", r"pass 'share_buffers' has no option 'max_m=3'; allowed: must_fire \(bool\)"),
        ("dummy{max_m=3", r"is not a pass; write name or name\{option=value,...\}"),
        ("dummy max_m", r"is not a pass"),
        ("", r"is not a pass"),
    ],
)  # fmt: skip
def test_a_wrong_text_is_answered_with_the_right_ones(text, message):
    with pytest.raises(ValueError, match=message):
        parse_pass(text)


def test_an_unknown_pass_is_answered_with_the_closest():
    with pytest.raises(
        ValueError, match=r"unknown pass 'share_bufers'; did you mean: share_buffers\? all of them: dead_code, dummy, "
    ):
        parse_pipeline("dummy,share_bufers")
    with pytest.raises(ValueError, match=r"did you mean: dead_code, dummy, .*share_buffers.*\? all of them") as error:
        parse_pass("zzz")
    assert all(name in str(error.value) for name in pass_names())


# Passes of other packages


def test_a_foreign_pass_is_found():
    assert pass_names() == sorted([*PASSES, "dummy", "strict"])
    assert find_pass("dummy") is Dummy and parse_pass("dummy{max_m=2}") == Dummy(max_m=2)


def test_a_foreign_pass_does_not_replace_ours(monkeypatch):
    point = EntryPoint("share_buffers", f"{__name__}:Dummy", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **kwargs: EntryPoints([point]).select(**kwargs))
    assert find_pass("share_buffers").__name__ == "ShareBuffers"
    assert pass_names().count("share_buffers") == 1


def test_no_module_of_a_pass_is_imported_to_list_them(monkeypatch):
    monkeypatch.setattr(registry, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    assert pass_names()


def test_the_bases_leave_the_work_to_the_passes():
    for base, arguments in ((Pass, (None,)), (MethodPass, ("forward", None))):
        with pytest.raises(NotImplementedError):
            (base.run if base is Pass else base.run_method)(base(), *arguments)

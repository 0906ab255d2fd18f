"""What a pass changed, as a unified diff and side by side."""

from hypothesis import given, settings
from hypothesis import strategies as st
from ir import ROWS, check, program_of, randn

from eyas.passes.diff import Row, side_by_side, unified
from eyas.passes.pipeline import run_pipeline
from eyas.passes.printer import print_program
from eyas.passes.registry import parse_pipeline

LINES = st.lists(st.sampled_from(["%a: f32 = x", "%b: f32 = y", "%b: f32 = z", "%c: f32 = w", "return"]), max_size=12)


def texts():
    program = program_of(lambda m, x: x.chunk(2, dim=-1)[0].sin() + m.w, randn(1, ROWS, 8), w=randn(4))
    before = print_program(program)
    run_pipeline(program, parse_pipeline("split_copy_to_slice{must_fire=true}"))
    return before, print_program(program)


def test_a_unified_diff_shows_the_lines_that_changed():
    check(
        unified(*texts(), "split_copy_to_slice"),
        r"""
        CHECK: --- before split_copy_to_slice
        CHECK-NEXT: +++ after split_copy_to_slice
        CHECK: {{^}}-{{.*}}aten.chunk.default(
        CHECK: {{^}}-{{.*}}aten.sin.default(%getitem
        CHECK: {{^}}+{{.*}}aten.slice.Tensor(
        CHECK: {{^}}+{{.*}}aten.sin.default(
        """,
    )


def test_equal_texts_have_no_diff():
    before, _ = texts()
    assert unified(before, before, "nothing") == "" and list(side_by_side(before, before)) == []


def test_lines_that_define_one_value_stand_side_by_side():
    before = "method m\n  %x: f32[2] = input\n  %a: f32[2] = sin(%x)\n  %b: f32[2] = cos(%a)\n  return [%b]"
    after = "method m\n  %x: f32[2] = input\n  %b: f32[2] = cos(%x)\n  %c: f32[2] = tan(%b)\n  return [%b]"
    rows = [row for row in side_by_side(before, after) if row.kind != "equal"]
    assert rows == [
        Row("removed", "  %a: f32[2] = sin(%x)", ""),
        Row("changed", "  %b: f32[2] = cos(%a)", "  %b: f32[2] = cos(%x)"),
        Row("added", "", "  %c: f32[2] = tan(%b)"),
    ]


def test_long_equal_stretches_are_skipped():
    lines = [f"%v{i}: f32 = f({i})" for i in range(40)]
    changed = [*lines[:20], "%new: f32 = g(1)", *lines[20:]]
    rows = list(side_by_side("\n".join(lines), "\n".join(changed), context=2))
    assert [row.kind for row in rows] == ["skipped", "equal", "equal", "added", "equal", "equal", "skipped"]
    assert (rows[0].before, rows[-1].before) == ("18", "18")
    assert rows[3] == Row("added", "", "%new: f32 = g(1)")
    middle = [*lines[:5], "%p: f32 = g(1)", *lines[5:35], "%q: f32 = g(2)", *lines[35:]]
    rows = list(side_by_side("\n".join(lines), "\n".join(middle), context=2))
    assert [row.before for row in rows if row.kind == "skipped"] == ["3", "26", "3"]


@settings(deadline=None, max_examples=60)
@given(LINES, LINES, st.integers(0, 3))
def test_no_line_is_lost(before, after, context):
    """The left side is the text before but for what is skipped, the right side the text after."""
    rows = list(side_by_side("\n".join(before), "\n".join(after), context))
    if before == after:
        assert not rows
        return
    skipped = sum(int(row.before) for row in rows if row.kind == "skipped")
    left = [row.before for row in rows if row.kind in ("equal", "changed", "removed")]
    right = [row.after for row in rows if row.kind in ("equal", "changed", "added")]
    assert len(left) + skipped == len(before) and len(right) + skipped == len(after)
    for row in rows:
        assert (row.before == row.after) == (row.kind == "equal")
    if not skipped:
        assert left == before and right == after

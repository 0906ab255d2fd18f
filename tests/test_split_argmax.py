"""A long argmax becomes two short ones, and finds the same element: the first of equal ones, or the first NaN."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ir import (
    MAX_ROWS,
    ROWS,
    Positive,
    apply,
    assert_equal,
    check,
    export,
    node_of,
    program_of,
    randn,
    results,
    unchanged,
)
from torch import nn

from eyas.lowering.pipelines import OPTIMISE
from eyas.passes.program import Program
from eyas.passes.registry import parse_pass, split_specs
from eyas.passes.split_argmax import SplitArgmax, parts_of

aten = torch.ops.aten
POSITIVE = Positive()
INF, NAN = math.inf, math.nan


def inputs(width, dtype=torch.float32):
    return [(randn(1, rows, width, seed=rows).to(dtype),) for rows in (1, 2, ROWS, MAX_ROWS)]


LONG = inputs(4096)


def rewrite(one, program, inputs=LONG, rewrites=1):
    expected = results(program, *inputs)
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals
    assert_equal(results(program, *inputs), expected)
    return program


def last(module, x):
    return x.argmax(-1)


@POSITIVE
def rows_in_a_symbolic_dimension(one):
    check(
        rewrite(one, program_of(last, *inputs(8192)[2]), inputs(8192)),
        r"""
        CHECK-LABEL: method forward where s0 in [1, 16]
        CHECK: %[[x:\w+]]: f32[1,s0,8192] = input
        CHECK: %[[parts:\w+]]: f32[1,s0,64,128] = aten.reshape.default(%[[x]], [1, -1, 64, 128])
        CHECK: %[[inner:\w+]]: i64[1,s0,64] = aten.argmax.default(%[[parts]], -1)
        CHECK: %[[best:\w+]]: f32[1,s0,64] = aten.amax.default(%[[parts]], [-1])
        CHECK: %[[outer:\w+]]: i64[1,s0,1] = aten.argmax.default(%[[best]], -1, True)
        CHECK: %[[within:\w+]]: i64[1,s0,1] = aten.gather.default(%[[inner]], -1, %[[outer]])
        CHECK: %[[start:\w+]]: i64[1,s0,1] = aten.mul.Tensor(%[[outer]], 128)
        CHECK: %[[index:\w+]]: i64[1,s0,1] = aten.add.Tensor(%[[start]], %[[within]])
        CHECK: %[[ids:\w+]]: i64[1,s0] = aten.squeeze.dim(%[[index]], -1)
        CHECK: return [%[[ids]]]
        """,
    )


@POSITIVE
def the_dimension_is_kept(one):
    check(
        rewrite(one, program_of(lambda module, x: x.argmax(2, keepdim=True) + 1, *LONG[2])),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[index:\w+]]: i64[1,s0,1] = aten.add.Tensor(
        CHECK-NOT: aten.squeeze
        CHECK: aten.add.Tensor(%[[index]], 1)
        """,
    )


@POSITIVE
def arguments_by_name(one):
    program = program_of(last, *LONG[2])
    node = node_of(program, "aten.argmax.default")
    node.args, node.kwargs = (), {"self": node.args[0], "dim": 2, "keepdim": False}
    check(rewrite(one, program), "CHECK-LABEL: method forward\nCHECK: f32[1,s0,64] = aten.amax.default(")


@POSITIVE
def a_vector(one):
    x = randn(6000)
    check(
        rewrite(one, program_of(last, x), [(x,)]),
        r"""
        CHECK-LABEL: method forward
        CHECK: f32[75,80] = aten.reshape.default(%{{\w+}}, [75, 80])
        CHECK: %[[index:\w+]]: i64[1] = aten.add.Tensor(
        CHECK: i64[] = aten.squeeze.dim(%[[index]], -1)
        """,
    )


@POSITIVE
def rows_in_constant_dimensions_after_a_symbolic_one(one):
    x = randn(ROWS, 2, 3, 4096)
    check(
        rewrite(one, program_of(last, x), [(x,), (x[:1],)]),
        "CHECK-LABEL: method forward\nCHECK: f32[s0,2,3,64,64] = aten.reshape.default(%{{\\w+}}, [-1, 2, 3, 64, 64])",
    )


@POSITIVE
def a_value_that_does_not_lie_row_by_row(one):
    x = randn(4096, ROWS)
    rewrite(one, program_of(lambda module, x: x.t().argmax(-1), x), [(x,), (x[:, :1],), (randn(4096, MAX_ROWS),)])


@POSITIVE
def bfloat16_that_others_read(one):
    """Thousands of numbers in bfloat16 have equal ones among the largest."""

    def both(module, x):
        ids = x.argmax(-1)
        return ids, x.gather(-1, ids[..., None]), ids + 1, x * 2

    many = inputs(8192, torch.bfloat16)
    tied = [(x.clamp(max=1),) for (x,) in many]
    check(
        rewrite(one, program_of(both, *many[2]), [*many, *tied]),
        r"""
        CHECK-LABEL: method forward
        CHECK: bf16[1,s0,64] = aten.amax.default(
        CHECK: %[[ids:\w+]]: i64[1,s0] = aten.squeeze.dim(
        CHECK: aten.add.Tensor(%[[ids]], 1)
        CHECK: return [%[[ids]],
        """,
    )


@POSITIVE
def integers(one):
    x = torch.randint(-9, 9, (1, ROWS, 4096), generator=torch.Generator().manual_seed(0))
    rewrite(one, program_of(last, x), [(x,)])


@POSITIVE
def each_of_several(one):
    def several(module, x):
        return x.argmax(-1), (-x).argmax(-1, keepdim=True), x[..., :4095].argmax(-1)

    check(
        rewrite(one, program_of(several, *LONG[2]), rewrites=2),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[short:\w+]]: f32[1,s0,4095] = aten.slice.Tensor(
        CHECK: aten.argmax.default(%[[short]], -1)
        """,
    )


@POSITIVE
def parts_that_are_long_are_split_again(one):
    x = randn(2, 65536)
    program = program_of(last, x)
    check(
        rewrite(type(one)(min_width=256), program, [(x,)], rewrites=3),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[x:\w+]]: f32[2,65536] = input
        CHECK: %[[parts:\w+]]: f32[2,256,256] = aten.reshape.default(%[[x]], [2, 256, 256])
        CHECK: f32[2,256,16,16] = aten.reshape.default(%[[parts]], [2, 256, 16, 16])
        CHECK: %[[best:\w+]]: f32[2,256] = aten.amax.default(%[[parts]], [-1])
        CHECK: f32[2,16,16] = aten.reshape.default(%[[best]], [2, 16, 16])
        """,
    )


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(SplitArgmax())


# The element that is found

WIDTH, PARTS = 320, 16  # 16 parts of 20


@functools.cache
def split_module():
    program = program_of(last, randn(1, ROWS, WIDTH))
    assert apply(SplitArgmax(min_width=256), program).rewrites == 1
    check(program, f"CHECK: f32[1,s0,{PARTS},{WIDTH // PARTS}] = aten.reshape.default(")
    return program.methods["forward"].module()


def row(fill, at=()):
    """A row of ``fill``, with other values at some places: ``at`` maps place to value."""
    made = torch.full((WIDTH,), fill)
    for place in at:
        made[place] = at[place]
    return made


ROWS_AND_FIRST = {
    "all equal": (row(0.0), 0),
    "all -inf": (row(-INF), 0),
    "all +inf": (row(INF), 0),
    "all NaN": (row(NAN), 0),
    "one above -inf": (row(-INF, at={47: -3.0}), 47),
    "equal in one part": (row(0.0, at={23: 1.0, 25: 1.0}), 23),
    "equal in two parts": (row(0.0, at={59: 1.0, 41: 1.0, 299: 1.0}), 41),
    "equal, later in the earlier part": (row(0.0, at={39: 1.0, 40: 1.0}), 39),
    "+inf in two parts": (row(0.0, at={219: INF, 100: INF}), 100),
    "NaN in one part": (row(0.0, at={25: NAN, 23: NAN}), 23),
    "NaN in two parts": (row(0.0, at={319: NAN, 150: NAN}), 150),
    "NaN after +inf": (row(0.0, at={1: INF, 318: NAN}), 318),
    "NaN before +inf in its part": (row(0.0, at={20: NAN, 21: INF}), 20),
    "NaN among -inf": (row(-INF, at={200: NAN}), 200),
    "zeros of both signs": (row(-0.0, at={77: 0.0}), 0),
    "last": (row(0.0, at={319: 1.0}), 319),
}


@pytest.mark.parametrize("name", ROWS_AND_FIRST)
def test_the_first_of_the_largest_is_found(name):
    values, first = ROWS_AND_FIRST[name]
    x = torch.stack([values, values.roll(1)])[None]
    found = split_module()(x)
    assert found[0, 0] == first
    assert torch.equal(found, x.argmax(-1))


values = st.sampled_from([-INF, -1.0, 0.0, 1.0, 2.0, INF, NAN])


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32), st.lists(values, min_size=1, max_size=4), st.integers(1, MAX_ROWS))
def test_rows_with_many_equal_elements(seed, among, rows):
    """Few values, some of them rare: a value after another of the list comes a tenth as often."""
    generator = torch.Generator().manual_seed(seed)
    often = torch.tensor([0.1**i for i in range(len(among))])
    chosen = torch.multinomial(often, rows * WIDTH, replacement=True, generator=generator)
    x = torch.tensor(among)[chosen].view(1, rows, WIDTH)
    assert torch.equal(split_module()(x), x.argmax(-1))


def test_the_parts_are_the_divisor_nearest_to_the_square_root():
    for width in range(256, 3000):
        divisors = (parts for parts in range(1, width + 1) if width % parts == 0)
        nearest = min(divisors, key=lambda parts: abs(parts - math.sqrt(width)))
        assert parts_of(width) == (nearest if 16 <= nearest <= width // 16 else None), width


def test_the_parts_of_vocabularies():
    known = {262144: 512, 8192: 64, 128256: 334, 151936: 128, 50257: 29, 256: 16, 255: None}
    assert {width: parts_of(width) for width in known} == known


# What stays


def test_a_symbolic_width_is_refused():
    x = randn(2, ROWS)
    unchanged(SplitArgmax(), program_of(last, x), "its width is symbolic: s")


@pytest.mark.parametrize("width", [4099, 15 * 293, 2 * 2053])
def test_a_width_without_a_divisor_is_refused(width):
    reason = f"its width {width} has no divisor that leaves 16 parts or more of 16 elements or more"
    unchanged(SplitArgmax(), program_of(last, randn(1, ROWS, width)), reason)


def test_rows_in_two_symbolic_dimensions_are_refused():
    unchanged(SplitArgmax(), program_of(last, randn(ROWS, ROWS, 4096)), "rows lie in several symbolic dimensions: s")


class Greedy(nn.Module):
    def forward(self, x):
        return x.argmax(-1)


def test_a_refusal_names_the_line_of_the_model():
    (refusal,) = apply(SplitArgmax(), Program.of(export(Greedy(), randn(1, ROWS, 4099)))).refusals
    assert (refusal.method, refusal.node) == ("forward", f"{__file__}:{Greedy.forward.__code__.co_firstlineno + 1}")


@pytest.mark.parametrize(
    "near",
    [
        lambda m, x: x.argmax(),
        lambda m, x: x.argmax(None, True),
        lambda m, x: x.argmax(1),
        lambda m, x: x.argmax(-2),
        lambda m, x: x[..., :4095].argmax(-1),
        lambda m, x: x.sum().argmax(-1),
        lambda m, x: x.argmin(-1),
        lambda m, x: x.amax(-1),
        lambda m, x: x.max(-1).indices,
    ],
    ids=["flat", "flat and kept", "rows", "negative", "short", "number", "argmin", "amax", "max"],
)
def test_other_reductions_stay(near):
    unchanged(SplitArgmax(), program_of(near, *LONG[2]))


def test_another_dimension_that_is_long_stays():
    unchanged(SplitArgmax(), program_of(lambda module, x: x.argmax(0), randn(4096, ROWS)))


def test_without_an_argmax_nothing_changes():
    unchanged(SplitArgmax(), program_of(lambda module, x: x.softmax(-1), *LONG[2]))


def test_the_shortest_row_is_an_option():
    program = program_of(last, *LONG[2])
    unchanged(SplitArgmax(min_width=4097), program)
    assert apply(parse_pass("split_argmax{min_width=4096}"), program).rewrites == 1
    with pytest.raises(ValueError, match="option 'min_width' of pass 'split_argmax' is 255; allowed: 256 or more"):
        parse_pass("split_argmax{min_width=255}")


def test_it_runs_for_cuda_alone_and_before_what_nobody_reads_goes():
    specs = {device: split_specs(text) for device, text in OPTIMISE.items()}
    assert specs["cuda"][-2:] == ["split_argmax", "dead_code"] and "split_argmax" not in specs["cpu"]

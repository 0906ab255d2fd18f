"""Tables of the positions are pinned where several nodes read them, and the graph computes the same bits."""

import pytest
import torch
import torch.nn.functional as F
from ir import (
    MAX_ROWS,
    ROWS,
    Positive,
    apply,
    assert_equal,
    check,
    node_of,
    program_of,
    randn,
    results,
    transformer,
    transformer_inputs,
    unchanged,
)

from eyas.passes.materialize_tables import MaterializeTables

POSITIVE = Positive()
WIDTH = 16


def inputs_of(rows):
    """Features ``[1, 2, rows, WIDTH]`` and positions ``[rows]``."""
    return randn(1, 2, rows, WIDTH, seed=rows), torch.arange(rows) + 2


def rewrite(one, program, rewrites, make=inputs_of, rows=(1, 2, ROWS, MAX_ROWS)):
    inputs = [make(n) for n in rows]
    expected = results(program, *inputs)
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals
    assert_equal(results(program, *inputs), expected)
    return program


def angles(positions):
    return positions.float()[:, None] * torch.arange(WIDTH)


@POSITIVE
def a_table_of_two_readers(one):
    def turn(module, x, positions):
        cos = angles(positions).cos()
        return x * cos, x + cos

    check(
        rewrite(one, program_of(turn, *inputs_of(ROWS)), 1),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[x:\w+]]: f32[1,2,s0,16] = input
        CHECK: %[[cos:\w+]]: f32[s0,16] = aten.cos.default(
        CHECK-NEXT: %[[table:\w+]]: f32[s0,16] = eyas.materialize.default(%[[cos]])
        CHECK: aten.mul.Tensor(%[[x]], %[[table]])
        CHECK: aten.add.Tensor(%[[x]], %[[table]])
        CHECK-NOT: eyas.materialize
        """,
    )


@POSITIVE
def tables_that_share_what_they_are_made_of(one):
    """The angles are read by tables only, so they stay; a constant vector may go into a table."""

    def turn(module, x, positions):
        both = positions.float()[:, None] * module.inv_freq
        cos, sin = both.cos(), both.sin()
        return x * cos + x.flip(-1) * sin, x * sin - cos

    check(
        rewrite(one, program_of(turn, *inputs_of(ROWS), inv_freq=randn(WIDTH)), 2),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[angles:\w+]]: f32[s0,16] = aten.mul.Tensor(
        CHECK-NOT: eyas.materialize.default(%[[angles]])
        CHECK: %[[cos:\w+]]: f32[s0,16] = aten.cos.default(%[[angles]])
        CHECK: eyas.materialize.default(%[[cos]])
        CHECK: %[[sin:\w+]]: f32[s0,16] = aten.sin.default(%[[angles]])
        CHECK: eyas.materialize.default(%[[sin]])
        CHECK-NOT: eyas.materialize
        """,
    )


@POSITIVE
def mask_and_slots_of_two_layers(one):
    """The mask is bool and the slots are int64; both layers write a cache at the slots and read it under the mask."""

    def layers(module, x, positions):
        slots = positions % 24
        mask = positions[:, None] >= torch.arange(24)
        for cache in (module.a, module.b):
            cache.index_copy_(2, slots, x)
            x = F.scaled_dot_product_attention(x, cache, cache, mask)
        return x

    caches = dict(a=randn(1, 2, 24, WIDTH, seed=1), b=randn(1, 2, 24, WIDTH, seed=2))
    check(
        rewrite(one, program_of(layers, *inputs_of(ROWS), **caches), 2),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[slots:\w+]]: i64[s0] = aten.remainder.Scalar(
        CHECK: %[[where:\w+]]: i64[s0] = eyas.materialize.default(%[[slots]])
        CHECK: %[[ge:\w+]]: bool[s0,24] = aten.ge.Tensor(
        CHECK: %[[mask:\w+]]: bool[s0,24] = eyas.materialize.default(%[[ge]])
        CHECK: aten.index_copy_.default(%{{\w+}}, 2, %[[where]],
        CHECK: aten.scaled_dot_product_attention.default(%{{\w+}}, %{{\w+}}, %{{\w+}}, %[[mask]])
        CHECK: aten.index_copy_.default(%{{\w+}}, 2, %[[where]],
        CHECK: aten.scaled_dot_product_attention.default(%{{\w+}}, %{{\w+}}, %{{\w+}}, %[[mask]])
        """,
    )


@POSITIVE
def a_result_reads_the_table_itself(one):
    """A table that the method also returns: the readers take the pinned one, the result stays."""

    def turn(module, x, positions):
        cos = angles(positions).cos()
        return cos, x * cos, x + cos

    check(
        rewrite(one, program_of(turn, *inputs_of(ROWS)), 1),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[cos:\w+]]: f32[s0,16] = aten.cos.default(
        CHECK: eyas.materialize.default(%[[cos]])
        CHECK: return [%[[cos]],
        """,
    )


@POSITIVE
def a_strided_view_becomes_dense(one):
    def turn(module, x, positions):
        table = angles(positions).cos().t().unsqueeze(0)
        return x.mT * table, x.mT + table

    check(
        rewrite(one, program_of(turn, *inputs_of(ROWS)), 1),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[view:\w+]]: f32[1,16,s0] = aten.unsqueeze.default(
        CHECK: eyas.materialize.default(%[[view]])
        """,
    )


@POSITIVE
def rotary_tables_of_transformers(one):
    """Each of the layer's two tables is read for the query and for the key."""
    program = transformer()
    rewrite(one, program, 2, transformer_inputs, (1, 2, 7))
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[cos:\w+]]: f32[1,1,s0,16] = eyas.materialize.default(
        CHECK: %[[sin:\w+]]: f32[1,1,s0,16] = eyas.materialize.default(
        CHECK: aten.mul.Tensor(%{{\w+}}, %[[cos]])
        CHECK: aten.mul.Tensor(%{{\w+}}, %[[sin]])
        CHECK: aten.mul.Tensor(%{{\w+}}, %[[cos]])
        CHECK: aten.mul.Tensor(%{{\w+}}, %[[sin]])
        CHECK-NOT: eyas.materialize
        """,
    )


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(MaterializeTables())


def filled_in_place(module, x, positions):
    table = torch.zeros(positions.shape[0], WIDTH)
    table[:, 1:3] = 1.0
    return x * table, x + table


def written_between_its_readers(module, x, positions):
    table = positions * 2
    early = x * table[:, None]
    table.add_(1)
    return early, x * table[:, None], x + table[:, None]


def over_a_written_buffer(module, x, positions):
    table = module.steps.unsqueeze(0)
    module.steps.add_(1)
    return x * table, x + table


def read_once(module, x, positions):
    cos = angles(positions).cos()
    return x * cos


def read_once_and_checked(module, x, positions):
    """Reading a table's size and checking its type are no work that a pin would save."""
    cos = angles(positions).cos()
    return x * cos.float(), torch.zeros(cos.shape[0], 3)


NEAR = {
    "one reader": read_once,
    "one reader and a check": read_once_and_checked,
    "filled in place": filled_in_place,
    "written between its readers": written_between_its_readers,
    "over a written buffer": over_a_written_buffer,
    "made of a matrix": lambda m, x, p: (x * (m.matrix + p[:, None]), x + (m.matrix + p[:, None])),
    "made of features": lambda m, x, p: (lambda t: (x * t, x + t))(x[0, 0] * p[:, None]),
    "made of float vectors": lambda m, x, p: (lambda t: (x * t, x + t))(x[0, 0, :, 0].cos()[:, None]),
    "absent": lambda m, x, p: (x * 2, x + 2),
}


@pytest.mark.parametrize("name", NEAR)
def test_left_alone(name):
    inputs = [inputs_of(rows) for rows in (1, ROWS)]
    steps = torch.arange(WIDTH)
    program = program_of(NEAR[name], *inputs_of(ROWS), matrix=randn(1, WIDTH), steps=steps)
    expected = results(program, *inputs)
    unchanged(MaterializeTables(), program)
    assert_equal(results(program, *inputs), expected)


def test_a_matrix_of_token_ids_is_no_position():
    def embed(module, tokens):
        return torch.cat([tokens * 2, tokens * 2 + 1]), (tokens * 2).float()

    unchanged(MaterializeTables(), program_of(embed, torch.zeros(1, ROWS, dtype=torch.int64)))


def test_an_assertion_is_no_reader():
    program = program_of(read_once, *inputs_of(ROWS))
    cos = node_of(program, "aten.cos.default")
    with program.methods["forward"].graph.inserting_after(cos):
        checking = program.methods["forward"].graph.call_function(
            torch.ops.aten._assert_tensor_metadata.default, (cos,), {"dtype": torch.float32}
        )
    checking.meta["val"] = None
    unchanged(MaterializeTables(), program)

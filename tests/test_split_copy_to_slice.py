"""Splits become slices, piece by piece, and the graph computes the same bits."""

import operator

import pytest
import torch
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
    transformer,
    transformer_inputs,
    unchanged,
)
from torch import nn

from eyas.passes.program import Program, mutated_buffers
from eyas.passes.split_copy_to_slice import SplitCopyToSlice

aten = torch.ops.aten
POSITIVE = Positive()
INPUTS = [(randn(1, rows, 8, seed=rows),) for rows in (1, 2, ROWS, MAX_ROWS)]


def rewrite(one, program, inputs=INPUTS, rewrites=1):
    expected = results(program, *inputs)
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals
    assert_equal(results(program, *inputs), expected)
    return program


def longer_split(sizes):
    """Splits ``rows + 3`` rows into pieces of ``sizes(rows)``."""
    return lambda module, x: torch.cat([x, x[:, :1], x[:, :1], x[:, :1]], dim=1).split(sizes(x.shape[1]), dim=1)


@POSITIVE
def chunk_along_a_negative_dimension(one):
    def turn(module, x):
        low, high = x.chunk(2, dim=-1)
        return torch.cat([-high, low], dim=-1)

    check(
        rewrite(one, program_of(turn, *INPUTS[2])),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[x:\w+]]: f32[1,s0,8] = input
        CHECK-NOT: aten.chunk
        CHECK: %[[low:\w+]]: f32[1,s0,4] = aten.slice.Tensor(%[[x]], 2, 0, 4)
        CHECK: %[[high:\w+]]: f32[1,s0,4] = aten.slice.Tensor(%[[x]], 2, 4, 8)
        CHECK: %[[minus:\w+]]: f32[1,s0,4] = aten.neg.default(%[[high]])
        CHECK: aten.cat.default([%[[minus]], %[[low]]], -1)
        """,
    )


@POSITIVE
def pieces_of_one_size_and_a_rest(one):
    check(
        rewrite(one, program_of(lambda module, x: x.split(3, dim=2), *INPUTS[2])),
        r"""
        CHECK-LABEL: method forward
        CHECK-NOT: aten.split
        CHECK: %[[a:\w+]]: f32[1,s0,3] = aten.slice.Tensor(%{{\w+}}, 2, 0, 3)
        CHECK: %[[b:\w+]]: f32[1,s0,3] = aten.slice.Tensor(%{{\w+}}, 2, 3, 6)
        CHECK: %[[c:\w+]]: f32[1,s0,2] = aten.slice.Tensor(%{{\w+}}, 2, 6, 8)
        CHECK: return [%[[a]], %[[b]], %[[c]]]
        """,
    )


@POSITIVE
def pieces_of_several_sizes_and_users(one):
    def mix(module, x):
        a, b, c = x.split([1, 5, 2], dim=-1)
        return a * b + a, b.sum(-1), c

    check(
        rewrite(one, program_of(mix, *INPUTS[2])),
        r"""
        CHECK-LABEL: method forward
        CHECK-NOT: aten.split
        CHECK: %[[a:\w+]]: f32[1,s0,1] = aten.slice.Tensor(%{{\w+}}, 2, 0, 1)
        CHECK: %[[b:\w+]]: f32[1,s0,5] = aten.slice.Tensor(%{{\w+}}, 2, 1, 6)
        CHECK: %[[c:\w+]]: f32[1,s0,2] = aten.slice.Tensor(%{{\w+}}, 2, 6, 8)
        CHECK: %[[ab:\w+]]: {{.*}} = aten.mul.Tensor(%[[a]], %[[b]])
        CHECK: aten.add.Tensor(%[[ab]], %[[a]])
        CHECK: aten.sum.dim_IntList(%[[b]], [-1])
        """,
    )


@POSITIVE
def last_piece_of_a_dynamic_length(one):
    check(
        rewrite(one, program_of(longer_split(lambda rows: [2, rows + 1]), *INPUTS[2])),
        r"""
        CHECK-LABEL: method forward
        CHECK-NOT: aten.split
        CHECK: f32[1,2,8] = aten.slice.Tensor(%{{\w+}}, 1, 0, 2)
        CHECK: f32[1,s0 + 1,8] = aten.slice.Tensor(%{{\w+}}, 1, 2, 9223372036854775807)
        """,
    )


@POSITIVE
def splits_of_one_value_and_of_pieces(one):
    """Two splits of one value, and a split of a piece of one: each is rewritten on its own."""

    def nest(module, x):
        low, high = x.chunk(2, dim=-1)
        first, *_ = x.split(2, dim=-1)
        return low.split(1, dim=-1)[3] + first, high

    check(
        rewrite(one, program_of(nest, *INPUTS[2]), rewrites=3),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[x:\w+]]: f32[1,s0,8] = input
        CHECK: %[[low:\w+]]: f32[1,s0,4] = aten.slice.Tensor(%[[x]], 2, 0, 4)
        CHECK: f32[1,s0,4] = aten.slice.Tensor(%[[x]], 2, 4, 8)
        CHECK: %[[first:\w+]]: f32[1,s0,2] = aten.slice.Tensor(%[[x]], 2, 0, 2)
        CHECK: %[[last:\w+]]: f32[1,s0,1] = aten.slice.Tensor(%[[low]], 2, 3, 4)
        CHECK: aten.add.Tensor(%[[last]], %[[first]])
        """,
    )


@POSITIVE
def no_piece_is_used(one):
    program = program_of(lambda module, x: x.chunk(2, dim=-1)[0], *INPUTS[2])
    graph = program.methods["forward"].graph
    split = graph.call_function(aten.split.Tensor, (node_of(program, "aten.chunk.default").args[0], 2))
    node_of(program, "aten.chunk.default").append(split)
    split.meta["val"] = tuple(node_of(program, "aten.chunk.default").meta["val"])
    check(rewrite(one, program, rewrites=2), "CHECK-LABEL: method forward\nCHECK-NOT: aten.split")


@POSITIVE
def copying_splits(one):
    """What a functional graph makes of a split: slices that copy as well. A dimension may be given by name, and a piece
    counted from the end.
    """
    x = randn(1, 3, 8)
    program = program_of(lambda module, x: (x.split(3, dim=-1)[1], x.split([1, 7], dim=-1)[1]), x)
    sizes = node_of(program, "aten.split_with_sizes.default")
    sizes.target, sizes.args, sizes.kwargs = aten.split_with_sizes_copy.default, sizes.args[:2], {"dim": -1}
    node_of(program, "aten.split.Tensor").target = aten.split_copy.Tensor
    for node in program.methods["forward"].graph.nodes:
        if node.target is operator.getitem:
            node.meta["val"] = node.meta["val"].contiguous()
            node.args = (node.args[0], node.args[1] - len(node.args[0].meta["val"]))
    check(
        rewrite(one, program, [(x,)], rewrites=2),
        r"""
        CHECK-LABEL: method forward
        CHECK-NOT: aten.split
        CHECK: f32[1,3,3] = aten.slice_copy.Tensor(%{{\w+}}, 2, 3, 6)
        CHECK: f32[1,3,7] = aten.slice_copy.Tensor(%{{\w+}}, 2, 1, 8)
        """,
    )


@POSITIVE
def writes_through_a_piece_reach_the_buffer(one):
    def write(module, x):
        low, high = module.cache.chunk(2, dim=-1)
        low.add_(x[0, :1, :2])
        high.mul_(2.0)
        return module.cache.sum(0)

    program = rewrite(one, program_of(write, *INPUTS[2], cache=randn(6, 4)))
    assert mutated_buffers(program.methods["forward"]) == {"cache"}
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[cache:\w+]]: f32[6,4] = buffer cache
        CHECK: %[[low:\w+]]: f32[6,2] = aten.slice.Tensor(%[[cache]], 1, 0, 2)
        CHECK: aten.add_.Tensor(%[[low]],
        CHECK: aten.sum.dim_IntList(%[[cache]], [0])
        """,
    )


@POSITIVE
def gated_layer_of_transformers(one):
    program = transformer()
    rewrite(one, program, [transformer_inputs(rows) for rows in (1, 2, 7)])
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[both:\w+]]: f32[1,s0,80] = aten.linear.default(
        CHECK: %[[gate:\w+]]: f32[1,s0,40] = aten.slice.Tensor(%[[both]], 2, 0, 40)
        CHECK: %[[up:\w+]]: f32[1,s0,40] = aten.slice.Tensor(%[[both]], 2, 40, 80)
        CHECK: %[[silu:\w+]]: f32[1,s0,40] = aten.silu.default(%[[gate]])
        CHECK: aten.mul.Tensor(%[[up]], %[[silu]])
        """,
    )


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(SplitCopyToSlice())


def test_dynamic_lengths_before_the_last_are_refused():
    program = program_of(longer_split(lambda rows: [rows + 1, 2]), *INPUTS[2])
    unchanged(SplitCopyToSlice(), program, "lengths are symbolic")


def test_a_list_used_as_a_whole_is_refused():
    program = program_of(lambda module, x: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1), *INPUTS[2])
    node_of(program, "aten.cat.default").args = (node_of(program, "aten.chunk.default"), -1)
    unchanged(SplitCopyToSlice(), program, "used as a whole by cat")


@pytest.mark.parametrize(
    "near",
    [lambda m, x: x.unbind(2)[3], lambda m, x: x.tensor_split(3, dim=-1)[1], lambda m, x: x.topk(2, dim=-1).values],
    ids=["unbind", "tensor_split", "topk"],
)
def test_other_operators_with_several_results_stay(near):
    unchanged(SplitCopyToSlice(), program_of(near, *INPUTS[2]))


def test_without_a_split_nothing_changes():
    unchanged(SplitCopyToSlice(), program_of(lambda module, x: x[..., 2:4] + 1, *INPUTS[2]))


class Splitter(nn.Module):
    def forward(self, x):
        return torch.cat([x, x[:, :1], x[:, :1]], dim=1).split([x.shape[1] + 1, 1], dim=1)


def test_a_refusal_names_the_line_of_the_model():
    (refusal,) = apply(SplitCopyToSlice(), Program.of(export(Splitter(), *INPUTS[2]))).refusals
    line = Splitter.forward.__code__.co_firstlineno + 1
    assert (refusal.method, refusal.node) == ("forward", f"{__file__}:{line}")

"""Masked attention goes to the row-invariant kernel; everything the kernel does not take stays, with a reason."""

import pytest
import torch
import torch.nn.functional as F
from ir import (
    MAX_ROWS,
    ROWS,
    Positive,
    apply,
    assert_close,
    check,
    node_of,
    program_of,
    randn,
    results,
    transformer,
    unchanged,
)

from eyas.passes.masked_sdpa import MaskedSdpa

POSITIVE = Positive()
LENGTH, WIDTH = 24, 16  # rows of the cache, width of a head
ATOL = 1e-6  # values near 1, whose sums run in another order; measured 3e-7


def inputs_of(rows, heads=4, kv_heads=2, width=WIDTH):
    """Query ``[1, heads, rows, width]``, key and value ``[1, kv_heads, LENGTH, width]``, mask ``[rows, LENGTH]``."""
    mask = torch.arange(rows)[:, None] + 3 >= torch.arange(LENGTH)
    q, k, v = randn(1, heads, rows, width), randn(1, kv_heads, LENGTH, width), randn(1, kv_heads, LENGTH, width, seed=1)
    return q, k, v, mask


def attend(module, q, k, v, mask, **options):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **{"enable_gqa": True, **options})


def attend_with(**options):
    return lambda module, q, k, v, mask: attend(module, q, k, v, mask, **options)


def rewrite(one, program, make=inputs_of, rewrites=1):
    inputs = [make(rows) for rows in (1, 2, ROWS, MAX_ROWS)]
    expected = results(program, *inputs)
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals
    assert_close(results(program, *inputs), expected, ATOL)
    return program


@POSITIVE
def grouped_heads_and_a_scale(one):
    check(
        rewrite(one, program_of(attend_with(scale=0.5), *inputs_of(ROWS))),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[q:\w+]]: f32[1,4,s0,16] = input
        CHECK: %[[k:\w+]]: f32[1,2,24,16] = input
        CHECK: %[[v:\w+]]: f32[1,2,24,16] = input
        CHECK: %[[mask:\w+]]: bool[s0,24] = input
        CHECK-NOT: aten.scaled_dot_product_attention
        CHECK: %[[y:\w+]]: f32[1,4,s0,16] = eyas.masked_sdpa.default(%[[q]], %[[k]], %[[v]], %[[mask]], 0.5)
        CHECK: return [%[[y]]]
        """,
    )


@POSITIVE
def one_head_a_key_and_the_usual_scale(one):
    def make(rows):
        return inputs_of(rows, heads=2, width=64)

    check(
        rewrite(one, program_of(attend_with(enable_gqa=False), *make(ROWS)), make),
        r"""
        CHECK-LABEL: method forward
        CHECK: f32[1,2,s0,64] = eyas.masked_sdpa.default(%{{\w+}}, %{{\w+}}, %{{\w+}}, %{{\w+}}, 0.125)
        """,
    )


@POSITIVE
def layers_of_one_mask_and_a_cache(one):
    """Two layers over caches that the method writes, under one mask made from the positions; the second reads the first
    twice.
    """

    def layers(module, x, positions):
        mask = positions[:, None] >= torch.arange(LENGTH)
        module.k.index_copy_(2, positions, x)
        first = F.scaled_dot_product_attention(x, module.k, module.v, mask)
        module.v.index_copy_(2, positions, first)
        return F.scaled_dot_product_attention(x + first, module.k, module.v, mask, 0.0, False) * first

    def make(rows):
        return randn(1, 2, rows, WIDTH), torch.arange(rows) + 4

    caches = dict(k=randn(1, 2, LENGTH, WIDTH, seed=2), v=randn(1, 2, LENGTH, WIDTH, seed=3))
    check(
        rewrite(one, program_of(layers, *make(ROWS), **caches), make, rewrites=2),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[mask:\w+]]: bool[s0,24] = aten.ge.Tensor(
        CHECK: %[[k:\w+]]: f32[1,2,24,16] = aten.index_copy_.default(
        CHECK: %[[first:\w+]]: {{.*}} = eyas.masked_sdpa.default(%{{\w+}}, %{{\w+}}, %{{\w+}}, %[[mask]], 0.25)
        CHECK-NOT: aten.scaled_dot_product_attention
        CHECK: aten.index_copy_.default(%{{\w+}}, 2, %{{\w+}}, %[[first]])
        CHECK: %[[second:\w+]]: {{.*}} = eyas.masked_sdpa.default(%{{\w+}}, %{{\w+}}, %{{\w+}}, %[[mask]], 0.25)
        CHECK: aten.mul.Tensor(%[[second]], %[[first]])
        """,
    )


@POSITIVE
def beside_a_call_that_stays(one):
    """One mask, two readers: the one that the kernel takes is rewritten, the other refused."""

    def both(module, q, k, v, mask):
        return attend(module, q, k, v, mask), attend(module, q, k, v, mask, dropout_p=0.5)

    program = program_of(both, *inputs_of(ROWS))
    record = apply(one, program)
    assert record.rewrites == 1 and len(record.refusals) == 1
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[y:\w+]]: {{.*}} = eyas.masked_sdpa.default(%{{\w+}}, %{{\w+}}, %{{\w+}}, %[[mask:\w+]], 0.25)
        CHECK: %[[z:\w+]]: {{.*}} = aten.scaled_dot_product_attention.default({{.*}}, %[[mask]], 0.5
        CHECK: return [%[[y]], %[[z]]]
        """,
    )


@POSITIVE
def a_row_that_sees_no_key_is_zero(one):
    *qkv, mask = inputs_of(ROWS)
    mask[2] = False
    program = program_of(attend, *qkv, mask)
    assert apply(one, program).rewrites == 1
    (y,) = results(program, (*qkv, mask))
    assert torch.equal(y[:, :, 2], torch.zeros(1, 4, WIDTH)) and y[:, :, 3].all()


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(MaskedSdpa())


def causal(module, q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def bare(module, q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


REFUSED = {
    "no mask": (bare, inputs_of(ROWS), "it has no mask"),
    "is_causal": (causal, inputs_of(ROWS), "it has no mask but is_causal"),
    "dropout": (attend_with(dropout_p=0.1), inputs_of(ROWS), "dropout_p=0.1"),
    "additive mask": (lambda m, q, k, v, mask: attend(m, q, k, v, mask.float()), inputs_of(ROWS), "additive"),
    "mask of four dimensions": (
        lambda m, q, k, v, mask: attend(m, q, k, v, mask[None, None]), inputs_of(ROWS), "[1, 1,"
    ),
    "mask of one row for all": (
        lambda m, q, k, v, mask: attend(m, q, k, v, mask[:1]), inputs_of(ROWS), "the mask has shape [1, 24]"
    ),
    "mask of one column for all": (
        lambda m, q, k, v, mask: attend(m, q, k, v, mask[:, :1]), inputs_of(ROWS), "a row a query"
    ),
    "three dimensions": (
        lambda m, q, k, v, mask: attend(m, q[0], k[0], v[0], mask, enable_gqa=False),
        inputs_of(ROWS, heads=2),
        "3 dimensions",
    ),
    "batch of two": (
        attend, tuple(t.expand(2, -1, -1, -1) if t.ndim == 4 else t for t in inputs_of(ROWS)), "batch is 2"
    ),
    "dynamic batch": (
        attend,
        tuple(t.expand(ROWS, -1, -1, -1) if t.ndim == 4 else t for t in inputs_of(7)),
        "the kernel takes dynamic rows only",
    ),
    "head width": (attend, inputs_of(ROWS, width=24), "head width 24 is not a multiple of 16"),
    "wider values": (
        lambda m, q, k, v, mask: attend(m, q, k, torch.cat([v, v], -1), mask), inputs_of(ROWS), "values have shape"
    ),
    "bfloat16": (
        attend, tuple(t.bfloat16() if t.is_floating_point() else t for t in inputs_of(ROWS)), "query is torch.bfloat16"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_a_reason(name):
    function, inputs, reason = REFUSED[name]
    unchanged(MaskedSdpa(), program_of(function, *inputs), reason)


def test_a_mask_and_is_causal_at_once_is_refused():
    """Eager PyTorch refuses this pair, so no export has it; another pass might."""
    program = program_of(attend_with(scale=0.5), *inputs_of(ROWS))
    node = node_of(program, "aten.scaled_dot_product_attention.default")
    node.args = (*node.args[:4], 0.0, True)
    unchanged(MaskedSdpa(), program, "is_causal=True")


def test_query_heads_over_fewer_key_heads_need_the_flag():
    program = program_of(attend, *inputs_of(ROWS))
    node = node_of(program, "aten.scaled_dot_product_attention.default")
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "enable_gqa"}
    before = node.format_node()
    (refusal,) = MaskedSdpa().run(program).refusals
    assert "4 query heads over 2 key heads without enable_gqa" in refusal.reason and node.format_node() == before


def test_the_mask_of_transformers_has_four_dimensions():
    unchanged(MaskedSdpa(), transformer(), "the kernel takes one [rows, keys] mask for all heads")


def test_without_attention_nothing_changes():
    unchanged(MaskedSdpa(), program_of(lambda module, x: torch.softmax(x @ x.mT, -1), randn(1, ROWS, 16)))

"""Attention that sees the keys up to each row's position, over a cache just written there, needs no mask tensor; all
that differs from it in one thing stays, with the reason.
"""

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
)

from eyas.models.layers import CacheGeometry, KVCache, attend
from eyas.passes.midm_sdpa import MidmSdpa
from eyas.passes.program import Program

POSITIVE = Positive()
LENGTH, WIDTH = 24, 16  # rows of the cache, width of a head
ATOL = 2e-6  # values near 1, whose sums run in another order; measured 5e-7
FIRES = r"""
    CHECK-LABEL: method forward
    CHECK: %[[k:\w+]]: f32[1,2,24,16] = buffer k
    CHECK: %[[v:\w+]]: f32[1,2,24,16] = buffer v
    CHECK: %[[q:\w+]]: f32[1,4,s0,16] = input
    CHECK: %[[pos:\w+]]: i64[s0] = input
    CHECK: %[[keys:\w+]]: f32[1,2,24,16] = aten.index_{{copy|put}}_.default(%[[k]],
    CHECK: %[[values:\w+]]: f32[1,2,24,16] = aten.index_{{copy|put}}_.default(%[[v]],
    CHECK-NOT: aten.scaled_dot_product_attention
    CHECK: f32[1,4,s0,16] = eyas.sdpa_midm.default(%[[q]], %[[keys]], %[[values]], %[[pos]], 0.25)
    """


def make(rows):
    """Query ``[1, 4, rows, WIDTH]``, new key and value ``[1, 2, rows, WIDTH]``, and positions, not all in a row."""
    positions = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(rows))[:rows].sort().values
    return randn(1, 4, rows, WIDTH), randn(1, 2, rows, WIDTH, seed=1), randn(1, 2, rows, WIDTH, seed=2), positions


def flat(pos):
    return pos[:, None] >= torch.arange(LENGTH)


def layer(mask=flat, repeat=lambda x: x, **options):
    """One layer's attention: it writes the rows at their positions, then reads the whole cache."""

    def forward(module, q, k, v, pos):
        module.k.index_copy_(2, pos, k)
        module.v.index_copy_(2, pos, v)
        k, v = repeat(module.k), repeat(module.v)
        given = mask(module, pos) if mask.__code__.co_argcount == 2 else mask(pos)
        return F.scaled_dot_product_attention(q, k, v, given, **{"enable_gqa": k.shape[1] == 2, **options})

    return forward


def program_with(function, inputs=None, **tensors):
    caches = {name: randn(1, 2, LENGTH, WIDTH, seed=i) for i, name in enumerate(("k", "v"), 3)}
    return program_of(function, *(make(ROWS) if inputs is None else inputs), **{**caches, **tensors})


def rewrite(one, program, rows=(1, 2, ROWS, MAX_ROWS), make=make, rewrites=1):
    inputs = [make(n) for n in rows]
    expected = results(program, *inputs)
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals, record.refusals
    assert_close(results(program, *inputs), expected, ATOL)
    return program


@POSITIVE
def a_layer_of_our_models(one):
    """As ``models/layers.py`` writes it: cache, mask and attention."""
    geometry, cache = CacheGeometry.of(LENGTH, None), KVCache(LENGTH, 2, WIDTH, torch.float32)

    def forward(module, q, k, v, pos):
        return attend(q, *module.cache.write(geometry.slots(pos), k, v), geometry.mask(pos), 0.5, None)

    check(
        rewrite(one, program_of(forward, *make(ROWS), cache=cache)),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[k:\w+]]: f32[1,2,24,16] = buffer cache.k
        CHECK: %[[v:\w+]]: f32[1,2,24,16] = buffer cache.v
        CHECK: %[[pos:\w+]]: i64[s0] = input
        CHECK: %[[keys:\w+]]: {{.*}} = aten.index_copy_.default(%[[k]], 2, %[[pos]], %{{\w+}})
        CHECK: %[[values:\w+]]: {{.*}} = aten.index_copy_.default(%[[v]], 2, %[[pos]], %{{\w+}})
        CHECK-NOT: aten.scaled_dot_product_attention
        CHECK: %[[y:\w+]]: f32[1,4,s0,16] = eyas.sdpa_midm.default(%{{\w+}}, %[[keys]], %[[values]], %[[pos]], 0.5)
        CHECK: return [%[[y]]]
        """,
    )


@POSITIVE
def the_usual_scale_and_the_last_row_count(one):
    check(rewrite(one, program_with(layer())), FIRES)


@POSITIVE
def static_rows(one):
    def unlike_rows(rows):
        return make(4)

    program = rewrite(one, program_with(layer(), make(4)), rows=(4,), make=unlike_rows)
    check(program, "CHECK-LABEL: method forward\nCHECK: f32[1,4,4,16] = eyas.sdpa_midm.default(")


def expanded(x):
    return x[:, :, None].expand(1, 2, 2, LENGTH, WIDTH).reshape(1, 4, LENGTH, WIDTH)


@POSITIVE
def keys_expanded_for_the_query_heads(one):
    """As transformers' ``repeat_kv`` does it; the kernel reads the cache itself."""
    check(rewrite(one, program_with(layer(repeat=expanded))), FIRES)


@POSITIVE
def keys_repeated_for_the_query_heads(one):
    check(rewrite(one, program_with(layer(repeat=lambda x: x.repeat_interleave(2, dim=1)))), FIRES)


@POSITIVE
def copies_of_the_whole_cache(one):
    check(rewrite(one, program_with(layer(repeat=lambda x: x.float().contiguous().clone()[:, :]))), FIRES)


@POSITIVE
def a_key_head_a_query_head(one):
    def make_one(rows):
        q, k, v, pos = make(rows)
        return q[:, :2], k, v, pos

    program = rewrite(one, program_with(layer(enable_gqa=False), make_one(ROWS)), make=make_one)
    check(program, "CHECK-LABEL: method forward\nCHECK: f32[1,2,s0,16] = eyas.sdpa_midm.default(")


def additive(hidden):
    return lambda pos: torch.where(flat(pos), 0.0, hidden)


def filled(pos):
    empty = torch.zeros(pos.shape[0], LENGTH)
    return empty.masked_fill(torch.arange(LENGTH) > pos[:, None], torch.finfo(torch.float32).min)[None, None]


MASKS = {
    "le, the other way round": lambda pos: torch.arange(LENGTH) <= pos[:, None],
    "gt of the next": lambda pos: pos[:, None] + 1 > torch.arange(LENGTH),
    "lt of the next": lambda pos: torch.arange(LENGTH)[None] < pos.unsqueeze(-1) + 1,
    "ge of a difference": lambda pos: pos[:, None] - torch.arange(LENGTH) >= 0,
    "not later": lambda pos: ~(torch.arange(LENGTH) > pos[:, None]),
    "logical not": lambda pos: torch.logical_not(pos[:, None] < torch.arange(LENGTH)),
    "four dimensions": lambda pos: flat(pos)[None, None],
    "broadcast heads": lambda pos: flat(pos)[None, None].expand(1, 4, -1, -1),
    "three dimensions": lambda pos: pos.view(1, -1, 1) >= torch.arange(LENGTH).view(1, 1, -1),
    "and all true": lambda pos: flat(pos) & torch.ones(LENGTH, dtype=torch.bool),
    "and what is always true": lambda pos: flat(pos) & (torch.arange(LENGTH) >= 0),
    "and a weaker one": lambda pos: flat(pos) & (pos[:, None] + 2 >= torch.arange(LENGTH)),
    "times all true": lambda pos: flat(pos) * torch.ones(LENGTH, dtype=torch.bool),
    "int32": lambda pos: pos.int()[:, None] >= torch.arange(LENGTH, dtype=torch.int32),
    "casts between": lambda pos: pos.to(torch.int32).long()[:, None].clone() >= torch.arange(LENGTH).int().long(),
    "bool of a bool": lambda pos: flat(pos).bool().contiguous(),
    "index from one": lambda pos: pos[:, None] + 1 >= torch.arange(1, LENGTH + 1),
    "part of a longer index": lambda pos: pos[:, None] + 3 >= torch.arange(2 * LENGTH)[3 : LENGTH + 3],
    "part of a longer mask": lambda pos: (pos[:, None] >= torch.arange(2 * LENGTH))[:, :LENGTH],
    "constant index": lambda module, pos: pos[:, None] >= module.index,
    "constant index of two dimensions": lambda module, pos: pos[:, None] >= module.index[None],
    "additive, minus infinity": additive(float("-inf")),
    "additive, least number": additive(torch.finfo(torch.float32).min),
    "additive, a huge number": additive(-1e9),
    "additive, other way round": lambda pos: torch.where(torch.arange(LENGTH) > pos[:, None], float("-inf"), 0.0),
    "additive, tensors": lambda pos: torch.where(flat(pos), torch.tensor(0.0), torch.tensor(float("-inf"))),
    "additive, full": lambda pos: torch.full((LENGTH,), -1e30).masked_fill(flat(pos), 0.0),
    "additive, filled": filled,
    "additive, cast": lambda pos: torch.where(flat(pos), 0.0, float("-inf")).double().float(),
}


def masked_as(name):
    """A positive case: the mask of that name."""

    def case(one):
        index = {"index": torch.arange(LENGTH)} if "constant index" in name else {}
        check(rewrite(one, program_with(layer(MASKS[name]), **index), rows=(1, ROWS, MAX_ROWS)), FIRES)

    case.__name__ = "mask_" + "_".join(name.replace(",", "").split())
    return case


for name in MASKS:
    POSITIVE(masked_as(name))


@POSITIVE
def functional_form(one):
    """As ``run_decompositions`` leaves it: the written cache is a new value, handed back at the end."""
    program = Program.of(program_with(layer()).methods["forward"].run_decompositions({}))
    check(
        rewrite(one, program),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[k:\w+]]: f32[1,2,24,16] = aten.index_copy.default(
        CHECK: %[[v:\w+]]: f32[1,2,24,16] = aten.index_copy.default(
        CHECK: eyas.sdpa_midm.default(%{{\w+}}, %[[k]], %[[v]], %{{\w+}}, 0.25)
        """,
    )


@POSITIVE
def written_by_index_put(one):
    def forward(module, q, k, v, pos):
        module.k[:, :, pos] = k
        module.v[:, :, pos] = v
        return F.scaled_dot_product_attention(q, module.k, module.v, flat(pos), enable_gqa=True)

    program = program_with(forward)
    assert node_of(program, "aten.index_put_.default")
    check(rewrite(one, program), FIRES)


@POSITIVE
def two_layers_under_one_mask_that_is_returned(one):
    """Both layers are rewritten, and the mask stays for its other reader."""

    def forward(module, q, k, v, pos):
        mask = flat(pos)
        first = layer(lambda pos: mask)(module, q, k, v, pos)
        module.k2.index_copy_(2, pos, v)
        module.v2.index_copy_(2, pos, k)
        second = F.scaled_dot_product_attention(q + first, module.k2, module.v2, mask, enable_gqa=True)
        return second * first, mask

    more = {"k2": randn(1, 2, LENGTH, WIDTH, seed=7), "v2": randn(1, 2, LENGTH, WIDTH, seed=8)}
    check(
        rewrite(one, program_with(forward, **more), rewrites=2),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[mask:\w+]]: bool[s0,24] = aten.ge.Tensor(
        CHECK: %[[first:\w+]]: f32[1,4,s0,16] = eyas.sdpa_midm.default(
        CHECK-NOT: aten.scaled_dot_product_attention
        CHECK: %[[sum:\w+]]: f32[1,4,s0,16] = aten.add.Tensor(%{{\w+}}, %[[first]])
        CHECK: %[[second:\w+]]: f32[1,4,s0,16] = eyas.sdpa_midm.default(%[[sum]],
        CHECK: %[[y:\w+]]: f32[1,4,s0,16] = aten.mul.Tensor(%[[second]], %[[first]])
        CHECK: return [%[[y]], %[[mask]]]
        """,
    )


@POSITIVE
def beside_a_sliding_layer(one):
    """A flat layer goes, the sliding one beside it stays with its reason."""

    def forward(module, q, k, v, pos):
        module.k.index_copy_(2, pos, k)
        module.v.index_copy_(2, pos, v)
        seen, age = flat(pos), pos[:, None] - torch.arange(LENGTH)
        near = seen & (age < 4)
        attend = F.scaled_dot_product_attention
        return attend(q, module.k, module.v, seen, enable_gqa=True), attend(
            q, module.k, module.v, near, enable_gqa=True
        )

    program = program_with(forward)
    record = apply(one, program)
    assert record.rewrites == 1 and [r.reason for r in record.refusals] == ["its mask is a sliding window of 4 keys"]
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[near:\w+]]: bool[s0,24] = aten.__and__.Tensor(
        CHECK: %[[flat:\w+]]: {{.*}} = eyas.sdpa_midm.default(
        CHECK: %[[window:\w+]]: {{.*}} = aten.scaled_dot_product_attention.default({{.*}}, %[[near]]
        CHECK: return [%[[flat]], %[[window]]]
        """,
    )


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(MidmSdpa())

"""Attention that sees the keys up to each row's position, over a cache just written there, needs no mask tensor; all
that differs from it in one thing stays, with the reason.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
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
    unchanged,
)

from eyas.models.layers import CacheGeometry, KVCache, attend
from eyas.passes.mask_proof import why_not_causal
from eyas.passes.midm_sdpa import MidmSdpa
from eyas.passes.numerics import copy_program
from eyas.passes.printer import print_program
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
    before, inputs = copy_program(program), [make(n) for n in rows]
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals, record.refusals
    assert_close(results(program, *inputs), results(before, *inputs), ATOL)
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


def under_masks(names):
    """A positive case: attention over one cache under each of the masks of those names."""

    def forward(module, q, k, v, pos):
        module.k.index_copy_(2, pos, k)
        module.v.index_copy_(2, pos, v)
        masks = [mask(module, pos) if mask.__code__.co_argcount == 2 else mask(pos) for mask in map(MASKS.get, names)]
        attend = F.scaled_dot_product_attention
        return [attend(q, module.k, module.v, mask, enable_gqa=True) for mask in masks]

    def case(one):
        program = rewrite(one, program_with(forward, index=torch.arange(LENGTH)), (1, MAX_ROWS), rewrites=len(names))
        check(program, FIRES + "CHECK-NOT: aten.scaled_dot_product_attention\n    CHECK: return")

    case.__name__ = f"masks_{'_'.join(names[0].replace(',', '').split())}_and_more"
    return case


for kind in ("additive", "constant"):
    POSITIVE(under_masks([name for name in MASKS if name.startswith(kind)]))
POSITIVE(under_masks([name for name in MASKS if not name.startswith(("additive", "constant"))]))


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


# What differs in one thing


def refuses(program, reason, one=None):
    """Nothing changes, and the one attention is refused for exactly this reason."""
    before = print_program(program)
    record = apply(one or MidmSdpa(), program)
    assert record.rewrites == 0 and print_program(program) == before
    assert [refusal.reason for refusal in record.refusals] == [reason]


def window(pos):
    return flat(pos) & (pos[:, None] - torch.arange(LENGTH) < 5)


def shown_in_place(pos):
    """A mask one of whose columns is shown afterwards, through a view."""
    mask = flat(pos)
    mask[:, 3:4] = True
    return mask


OTHER_MASKS = {
    "one key less": (
        lambda pos: pos[:, None] > torch.arange(LENGTH),
        "its mask shows keys up to position -1, not up to the position itself",
    ),
    "one key more": (
        lambda pos: pos[:, None] + 1 >= torch.arange(LENGTH),
        "its mask shows keys up to position +1, not up to the position itself",
    ),
    "index from one": (
        lambda pos: pos[:, None] >= torch.arange(1, LENGTH + 1),
        "its mask shows keys up to position -1, not up to the position itself",
    ),
    "part of the keys": (
        lambda pos: (pos[:, None] >= torch.arange(LENGTH + 2))[:, 2:],
        "its mask shows keys up to position -2, not up to the position itself",
    ),
    "sliding window": (window, "its mask is a sliding window of 5 keys"),
    "later keys": (lambda pos: pos[:, None] <= torch.arange(LENGTH), "its mask is a sliding window of 1 keys"),
    "all true": (lambda pos: pos[:, None] + torch.arange(LENGTH) >= 0, "its mask hides nothing"),
    "every second key": (
        lambda pos: pos[:, None] >= torch.arange(LENGTH) + torch.arange(LENGTH),
        "its mask shows keys where position - 2 key >= 0, not where key <= position",
    ),
    "the first keys": (
        lambda pos: flat(pos) & (torch.arange(LENGTH) <= 7),
        "its mask shows keys where - key + 7 >= 0 and position - key >= 0, not where key <= position",
    ),
    "one key for all": (lambda pos: (pos[:, None] >= torch.arange(1)).expand(-1, LENGTH), "its mask hides nothing"),
    "one key for all, by an and": (
        lambda pos: (pos[:, None] >= torch.arange(1)) & torch.ones(LENGTH, dtype=torch.bool),
        "its mask hides nothing",
    ),
    "a column for all": (
        lambda pos: flat(pos)[:, 5:6].expand(-1, LENGTH),
        "its mask shows keys where position - 5 >= 0, not where key <= position",
    ),
    "either": (
        lambda pos: flat(pos) | (torch.arange(LENGTH) < 2),
        "its mask depends on %or_1 = aten.__or__.Tensor, which says nothing of positions",
    ),
    "a soft mask": (
        lambda pos: torch.where(flat(pos), 0.0, -30.0),
        "its mask depends on %where = aten.where.Scalar in a way that is not understood",
    ),
    "a bias on what is seen": (
        lambda pos: torch.where(flat(pos), 1.0, float("-inf")),
        "its mask depends on %where = aten.where.Scalar in a way that is not understood",
    ),
    "keys before rows": (
        lambda pos: flat(pos).expand(4, -1, -1).transpose(0, 1)[:, :, None].expand(-1, 4, -1, -1)[:1],
        "its mask depends on %transpose = aten.transpose.int, which says nothing of positions",
    ),
    "of the row's number": (
        lambda pos: torch.arange(pos.shape[0])[:, None] >= torch.arange(LENGTH),
        "its mask depends on %ge = aten.ge.Tensor in a way that is not understood",
    ),
    "index that does not count up": (
        lambda module, pos: pos[:, None] >= module.index,
        "its mask depends on the values of %b_index, which do not count up",
    ),
    "one bit of a constant": (
        lambda module, pos: flat(pos) & module.index,
        "its mask depends on the values of %b_index, which do not count up",
    ),
    "float positions": (
        lambda pos: pos.float()[:, None] >= torch.arange(LENGTH).float(),
        "its mask depends on %to = aten.to.dtype in a way that is not understood",
    ),
    "written in place": (
        lambda pos: flat(pos).logical_not_(),
        "its mask depends on %logical_not_, which is written in place",
    ),
    "written through a view": (shown_in_place, "its mask depends on %ge, which is written in place"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_another_mask_is_refused(name):
    mask, reason = OTHER_MASKS[name]
    index = torch.arange(LENGTH).flip(0) if "count" in name else torch.arange(LENGTH) != 9
    refuses(program_with(layer(mask), index=index), reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_p": 0.25}, "dropout_p=0.25; the kernel has none"),
        ({"attn_mask": None}, "it has no mask"),
        ({"attn_mask": None, "is_causal": True}, "it has no mask but is_causal, which counts rows and not positions"),
        ({"is_causal": True}, "it has a mask and is_causal"),
    ],
    ids=["dropout", "no mask", "is_causal", "mask and is_causal"],
)
def test_another_call_is_refused(options, reason):
    program = program_with(layer(scale=0.5))
    node = node_of(program, "aten.scaled_dot_product_attention.default")
    mask = options.get("attn_mask", node.args[3])
    node.args = (*node.args[:3], mask, options.get("dropout_p", 0.0), options.get("is_causal", False))
    before = node.format_node()
    (refusal,) = MidmSdpa().run(program).refusals  # a dropout is no function, so no two runs are compared
    assert refusal.reason == reason and node.format_node() == before


@pytest.mark.parametrize("max_m", [1, MAX_ROWS - 1])
def test_more_rows_than_max_m_are_refused(max_m):
    refuses(program_with(layer()), f"a call has up to 16 rows; max_m is {max_m}", MidmSdpa(max_m=max_m))


def test_max_m_itself_is_taken():
    assert apply(MidmSdpa(max_m=4), program_with(layer(), make(4))).rewrites == 1


def test_rows_without_a_limit_are_refused():
    program = program_with(layer())
    (symbol,) = program.methods["forward"].range_constraints
    program.methods["forward"].range_constraints.clear()
    del symbol
    refuses(program, "a call has up to any number of rows; max_m is 16")


@pytest.mark.parametrize("max_m", [0, 17])
def test_max_m_is_what_the_kernel_takes(max_m):
    with pytest.raises(ValueError, match=rf"option 'max_m' of pass 'midm_sdpa' is {max_m}; allowed: 1 to 16"):
        MidmSdpa(max_m=max_m)


def writes(body):
    """A layer that writes and reads its cache as ``body(module, k, v, pos)`` does, and gives keys and values."""

    def forward(module, q, k, v, pos):
        keys, values = body(module, k, v, pos)
        return F.scaled_dot_product_attention(q, keys, values, flat(pos), enable_gqa=True)

    return forward


def new_keys_only(module, k, v, pos):
    long = torch.zeros(1, 2, LENGTH, WIDTH)
    return long.index_copy(2, pos, k), long.index_copy(2, pos, v)


def not_written(module, k, v, pos):
    return module.k, module.v


def at_other_positions(module, k, v, pos):
    at = pos + 1
    return module.k.index_copy_(2, at, k), module.v.index_copy_(2, at, v)


def at_two_positions(module, k, v, pos):
    return module.k.index_copy_(2, pos, k), module.v.index_copy_(2, pos + 0, v)


def in_a_ring(module, k, v, pos):
    at = pos % LENGTH
    return module.k.index_copy_(2, at, k), module.v.index_copy_(2, at, v)


def twice(module, k, v, pos):
    module.k.index_copy_(2, pos, k)
    return module.k.index_copy_(2, pos, k), module.v.index_copy_(2, pos, v)


def values_not_written(module, k, v, pos):
    return module.k.index_copy_(2, pos, k), module.v


def part_of_the_buffer(module, k, v, pos):
    module.long.index_copy_(2, pos, k)
    return module.long[:, :, :LENGTH], module.v.index_copy_(2, pos, v)


def of_permuted_axes(module, k, v, pos):
    module.rows.index_copy_(1, pos, k.transpose(1, 2))
    return module.rows.transpose(1, 2), module.v.index_copy_(2, pos, v)


def along_heads(module, k, v, pos):
    module.k.index_copy_(1, torch.arange(2), k[:, :, :1].expand(1, 2, LENGTH, WIDTH))
    return module.k, module.v.index_copy_(2, pos, v)


def copied_before(module, k, v, pos):
    old = module.k.clone()
    module.k.index_copy_(2, pos, k)
    return old, module.v.index_copy_(2, pos, v)


def added_up(module, k, v, pos):
    module.k.index_add_(2, pos, k)
    return module.k, module.v.index_copy_(2, pos, v)


def heads_in_turn(module, k, v, pos):
    """Repeated for the query heads, but all key heads after each other."""
    k, v = module.k.index_copy_(2, pos, k), module.v.index_copy_(2, pos, v)
    return torch.cat([k, k], 1), torch.cat([v, v], 1)


def heads_in_turn_by_expand(module, k, v, pos):
    k, v = module.k.index_copy_(2, pos, k), module.v.index_copy_(2, pos, v)
    return tuple(x[:, None].expand(1, 2, 2, LENGTH, WIDTH).reshape(1, 4, LENGTH, WIDTH) for x in (k, v))


def through_a_view(module, k, v, pos):
    module.k[0].index_copy_(1, pos, k[0])
    return module.k, module.v.index_copy_(2, pos, v)


OTHER_CACHES = {
    through_a_view: "its keys are not a cache: %index_copy_ writes a view of it",
    new_keys_only: "its keys are not a cache: %zeros, which is written, is no buffer",
    not_written: "its keys are not a cache: no node writes the buffer k",
    values_not_written: "its values are not a cache: no node writes the buffer v",
    at_other_positions: "its mask depends on %args_3; the cache was written at %add",
    at_two_positions: "its keys were written at %args_3, its values at %add",
    in_a_ring: "its cache is a ring: it is written at %remainder = aten.remainder.Scalar",
    twice: "its keys are not a cache: the buffer k is written 2 times",
    part_of_the_buffer: "its keys are not a cache: %slice_1 is only a part or another view of the buffer long",
    of_permuted_axes: "its keys are not a cache: %transpose_1 is only a part or another view of the buffer rows",
    along_heads: "its keys are not a cache: %index_copy_ writes along dimension 1 of 4, not along rows of [1, G, L, D]",
    copied_before: "its keys are not a cache: %clone is made of the buffer k before it is written",
    added_up: "its keys are not a cache: %index_add_ is only a part or another view of the buffer k",
    heads_in_turn: "its keys are not a cache: they come from %cat, which is no buffer",
    heads_in_turn_by_expand: "its keys are not a cache: %reshape is only a part or another view of the buffer k",
}


@pytest.mark.parametrize("body", OTHER_CACHES, ids=lambda body: body.__name__)
def test_another_cache_is_refused(body):
    more = {"long": randn(1, 2, LENGTH + 8, WIDTH), "rows": randn(1, LENGTH, 2, WIDTH)}
    refuses(program_with(writes(body), **more), OTHER_CACHES[body])


def test_a_cache_written_after_it_is_read_is_refused():
    def forward(module, q, k, v, pos):
        y = F.scaled_dot_product_attention(q, module.k, module.v, flat(pos), enable_gqa=True)
        module.k.index_copy_(2, pos, k)
        module.v.index_copy_(2, pos, v)
        return y

    reason = "its keys are not a cache: the buffer k is written after it is read"
    refuses(program_with(forward), reason)


def test_keys_that_are_inputs_are_refused():
    def forward(module, q, k, v, pos):
        return F.scaled_dot_product_attention(q, k, v, flat(pos), enable_gqa=True)

    inputs = (make(ROWS)[0], randn(1, 2, LENGTH, WIDTH), randn(1, 2, LENGTH, WIDTH), make(ROWS)[3])
    refuses(program_with(forward, inputs), "its keys are not a cache: they come from %args_1, which is no buffer")


def test_a_mask_of_another_input_is_refused():
    def forward(module, q, k, v, pos, other):
        return layer(lambda pos: flat(other))(module, q, k, v, pos)

    program = program_with(forward, (*make(ROWS), torch.arange(ROWS)))
    refuses(program, "its mask depends on %args_4; the cache was written at %args_3")


def test_a_mask_that_is_an_input_is_refused():
    def forward(module, q, k, v, pos, mask):
        return layer(lambda pos: mask)(module, q, k, v, pos)

    program = program_with(forward, (*make(ROWS), flat(torch.arange(ROWS))))
    refuses(program, "its mask depends on %args_4; the cache was written at %args_3")


def test_a_mask_over_heads_and_rows_is_refused():
    """Eight heads, rows and keys: a mask of ``[rows, keys, 1]`` is broadcast as one of heads and rows."""

    def forward(module, q, k, v, pos):
        module.short_k.index_copy_(2, pos, k)
        module.short_v.index_copy_(2, pos, v)
        mask = (pos[:, None] >= torch.arange(8))[..., None]
        return F.scaled_dot_product_attention(q, module.short_k, module.short_v, mask)

    q = randn(1, 8, 8, WIDTH)
    caches = {"short_k": torch.zeros(1, 8, 8, WIDTH), "short_v": torch.zeros(1, 8, 8, WIDTH)}
    program = program_with(forward, (q, q, q, torch.arange(8)), **caches)
    refuses(program, "its mask has not rows and keys as its last dimensions")


@pytest.mark.parametrize(
    ("heads", "width", "dtype", "reason"),
    [
        (4, WIDTH, torch.bfloat16, "query is torch.bfloat16; the cpu kernel takes torch.float32"),
        (4, 24, torch.float32, "head width 24 is not a multiple of 16"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(heads, width, dtype, reason):
    inputs = [t.expand(1, -1, -1, WIDTH).repeat(1, 1, 1, 2)[..., :width].to(dtype) for t in make(ROWS)[:3]]
    caches = {name: torch.zeros(1, 2, LENGTH, width, dtype=dtype) for name in ("k", "v")}
    refuses(program_with(layer(), (*inputs, make(ROWS)[3]), **caches), reason)


def test_a_query_of_another_type_than_its_cache_is_refused():
    program = program_with(layer())
    node = node_of(program, "aten.scaled_dot_product_attention.default")
    query = node.args[0]
    query.meta["val"] = query.meta["val"].to(torch.float64)
    (refusal,) = MidmSdpa().run(program).refusals
    assert refusal.reason == "the query is torch.float64, its caches are not"


def test_values_of_another_width_are_refused():
    def forward(module, q, k, v, pos):
        module.k.index_copy_(2, pos, k)
        module.wide.index_copy_(2, pos, torch.cat([v, v], -1))
        return F.scaled_dot_product_attention(q, module.k, module.wide, flat(pos), enable_gqa=True)

    reason = "its caches have shapes [1, 2, 24, 16] and [1, 2, 24, 32]; the kernel takes equal ones"
    refuses(program_with(forward, wide=randn(1, 2, LENGTH, 2 * WIDTH)), reason)


def test_query_heads_over_fewer_key_heads_need_the_flag():
    program = program_with(layer())
    node = node_of(program, "aten.scaled_dot_product_attention.default")
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "enable_gqa"}
    (refusal,) = MidmSdpa().run(program).refusals
    assert refusal.reason == "4 query heads over 2 key heads without enable_gqa"


def test_a_ring_of_our_models_is_refused():
    geometry = CacheGeometry.of(LENGTH, 12)
    cache = KVCache(geometry.rows, 2, WIDTH, torch.float32)

    def forward(module, q, k, v, pos):
        return attend(q, *module.cache.write(geometry.slots(pos), k, v), geometry.mask(pos), 0.5, None)

    program = program_of(forward, *make(ROWS), cache=cache)
    refuses(program, "its cache is a ring: it is written at %remainder = aten.remainder.Scalar")


def test_without_attention_nothing_changes():
    unchanged(MidmSdpa(), program_of(lambda module, x: torch.softmax(x @ x.mT, -1), randn(1, ROWS, 16)))


# The proof against what masks are


@st.composite
def masks(draw, depth=2):
    """(mask of positions, its text): comparisons of position and key with offsets, their negations, and ands."""
    if depth and draw(st.booleans()):
        (left, a), (right, b) = draw(masks(depth - 1)), draw(masks(depth - 1))
        return (lambda pos: left(pos) & right(pos)), f"({a} & {b})"
    name, offset = draw(st.sampled_from(["ge", "gt", "le", "lt"])), draw(st.integers(-2, 2))
    op, swapped, inverted = getattr(torch, name), draw(st.booleans()), draw(st.integers(0, 2))

    def compare(pos):
        sides = pos[:, None] + offset, torch.arange(LENGTH)
        mask = op(*(sides[::-1] if swapped else sides))
        for _ in range(inverted):
            mask = ~mask
        return mask

    return compare, f"{'~' * inverted}{name}({offset:+d}{', swapped' if swapped else ''})"


@settings(deadline=None, max_examples=40, derandomize=True)
@given(masks(), st.integers(0, 2**32))
def test_the_proof_is_right_exactly_where_the_mask_is_causal(drawn, seed):
    """Ranges of one symbol are not looked at, so one export without dynamic rows is enough."""
    mask, text = drawn
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, LENGTH, (7,), generator=generator) for _ in range(3)] + [
        torch.tensor([0, 1, 2, 9, 21, 22, 23])
    ]
    truth = all(torch.equal(mask(pos), flat(pos)) for pos in rows)
    graph = torch.fx.experimental.proxy_tensor.make_fx(mask, tracing_mode="fake")(rows[0]).graph
    (positions,) = (node for node in graph.nodes if node.op == "placeholder")
    (output,) = (node for node in graph.nodes if node.op == "output")
    assert (why_not_causal(output.args[0], positions, {}) is None) == truth, text


def numbers(draw, depth=2):
    """A function of positions that makes integers: positions, key indices, parts of them and sums."""
    if depth and draw(st.booleans()):
        left, right = numbers(draw, depth - 1), numbers(draw, depth - 1)
        op = draw(st.sampled_from([torch.add, torch.sub]))
        return lambda pos: op(left(pos), right(pos))
    start, kind = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    return [
        lambda pos: pos[:, None],
        lambda pos: pos.int()[None, :, None],
        lambda pos: torch.arange(LENGTH),
        lambda pos: torch.arange(2 * LENGTH)[start : start + LENGTH],
        lambda pos: torch.arange(start, LENGTH)[start : start + 1],
        lambda pos: torch.full((), start),
    ][kind]


PERTURB = [
    lambda mask: mask,
    lambda mask: ~mask,
    lambda mask: mask[..., 2:3],
    lambda mask: mask[..., :1].expand(*mask.shape),
    lambda mask: mask.expand(3, *mask.shape),
    lambda mask: mask[None],
    lambda mask: mask.unsqueeze(-1),
    lambda mask: mask & torch.ones(LENGTH, dtype=torch.bool),
    lambda mask: mask.clone().contiguous(),
    lambda mask: mask.view(1, *mask.shape),
    lambda mask: torch.where(mask, 0.0, float("-inf")),
    lambda mask: torch.zeros(mask.shape).masked_fill(mask, -1e9),
    lambda mask: mask.logical_not().logical_not_(),
]


@st.composite
def stranger_masks(draw):
    """A comparison of what ``numbers`` makes, or the causal mask, and up to two changes of it."""
    base = flat
    if draw(st.booleans()):
        left, right = numbers(draw), numbers(draw)
        op = getattr(torch, draw(st.sampled_from(["ge", "gt", "le", "lt"])))
        base = lambda pos: op(left(pos), right(pos))  # noqa: E731
    changes = draw(st.lists(st.sampled_from(PERTURB), max_size=2))

    def mask(pos):
        made = base(pos)
        for change in changes:
            made = change(made)
        return made

    return mask


def shows(mask):
    """Which keys a mask shows, for all heads, rows and keys."""
    return (mask if mask.dtype == torch.bool else mask == 0).expand(2, 3, 7, LENGTH)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(stranger_masks())
def test_what_is_not_causal_is_never_taken_for_it(mask):
    """Broadcasts, parts and changes in place included; what is not understood may be refused."""
    rows = torch.tensor([0, 1, 2, 9, 21, 22, 23]), torch.tensor([3, 20, 5, 5, 0, 23, 11])
    try:
        truth = all(torch.equal(shows(mask(pos)), shows(flat(pos))) for pos in rows)
        graph = torch.fx.experimental.proxy_tensor.make_fx(mask, tracing_mode="fake")(rows[0]).graph
    except (RuntimeError, TypeError, IndexError):
        return  # no mask, or none that attention over these keys could take
    (positions,) = (node for node in graph.nodes if node.op == "placeholder")
    (output,) = (node for node in graph.nodes if node.op == "output")
    if isinstance(output.args[0], torch.fx.Node):
        assert why_not_causal(output.args[0], positions, {}) is not None or truth, graph


def test_there_are_masks_of_both_kinds():
    assert torch.equal(MASKS["not later"](make(5)[3]), flat(make(5)[3]))
    assert not torch.equal(window(make(16)[3]), flat(make(16)[3]))

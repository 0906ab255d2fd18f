"""Attention over a flat cache, or over a ring with a window, goes to the CUDA kernel that counts in positions; all that
differs from it in one thing stays, with the reason. The kernel itself is in ``test_splitk_kernel``.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ir import (
    ROWS,
    Positive,
    apply,
    assert_close,
    assert_equal,
    check,
    node_of,
    program_of,
    randn,
    results,
    unchanged,
)
from test_fragment_linear import test_passes_can_be_listed_without_triton as without_triton
from torch.utils._sympy.value_ranges import ValueRanges

from eyas.kernels import register_triton_operators
from eyas.models.layers import CacheGeometry, KVCache, attend
from eyas.passes.mask_proof import window_of
from eyas.passes.numerics import copy_program
from eyas.passes.printer import print_program
from eyas.passes.splitk_sdpa import SplitkSdpa

POSITIVE = Positive()
register_triton_operators()
LENGTH, RING, WINDOW, WIDTH, MAX_M = 40, 24, 12, 64, 8
# Results are averages of values up to 4. Both sides round them to bfloat16, 2^-8 of 4 apart at most, and the stock
# kernel rounds its weights too: 2^-9 of each value, whose average is as large again. Measured 0.016.
ATOL = 2**-5


def make(rows, start=3):
    """Query ``[1, 4, rows, WIDTH]``, new key and value ``[1, 2, rows, WIDTH]``, and positions from ``start`` on."""
    q, k, v = randn(1, 4, rows, WIDTH), randn(1, 2, rows, WIDTH, seed=1), randn(1, 2, rows, WIDTH, seed=2)
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), torch.arange(start, start + rows)


def caches(rows):
    return {name: randn(1, 2, rows, WIDTH, seed=i).bfloat16() for i, name in enumerate(("k", "v"), 3)}


def bounded(program, rows=MAX_M):
    for ranges in (ep.range_constraints for ep in program.methods.values()):
        ranges.update({symbol: ValueRanges(1, rows) for symbol in ranges})
    return program


def layer(geometry=None, mask=None, slots=None, **options):
    """One layer's attention: it writes the rows where ``slots`` says, then reads the cache under ``mask``."""
    geometry = geometry or CacheGeometry(RING, WINDOW)
    mask, slots = mask or geometry.mask, slots or geometry.slots

    def forward(module, q, k, v, pos, *others):
        at = slots(pos)
        module.k.index_copy_(2, at, k)
        module.v.index_copy_(2, at, v)
        shown = mask(pos, *others) if others else mask(pos)
        return F.scaled_dot_product_attention(q, module.k, module.v, shown, **{"enable_gqa": True, **options})

    return forward


FLAT = CacheGeometry(LENGTH)


def program_with(function, size=RING, inputs=None, rows=MAX_M, **tensors):
    return bounded(
        program_of(function, *(make(ROWS) if inputs is None else inputs), **{**caches(size), **tensors}), rows
    )


def rewrite(one, program, starts=(0, 3, 30, 32), rewrites=1, make=make, rows=(1, 2, ROWS, MAX_M), atol=ATOL):
    """Rings have gone round at most of ``starts``; those of 40 rows end where the last calls do."""
    before, inputs = copy_program(program), [make(n, start) for n in rows for start in starts]
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals, record.refusals
    assert_close(results(program, *inputs), results(before, *inputs), atol)
    return program


def a_layer_of_our_models(one, geometry, window):
    """As ``models/layers.py`` writes it: cache, mask and attention."""
    cache = KVCache(geometry.rows, 2, WIDTH, torch.bfloat16)
    for buffer, values in zip((cache.k, cache.v), caches(geometry.rows).values()):
        buffer.copy_(values)

    def forward(module, q, k, v, pos):
        return attend(q, *module.cache.write(geometry.slots(pos), k, v), geometry.mask(pos), 0.5, None)

    check(
        rewrite(one, bounded(program_of(forward, *make(ROWS), cache=cache))),
        rf"""
        CHECK-LABEL: method forward
        CHECK: %[[k:\w+]]: bf16[1,2,{geometry.rows},64] = buffer cache.k
        CHECK: %[[v:\w+]]: bf16[1,2,{geometry.rows},64] = buffer cache.v
        CHECK: %[[pos:\w+]]: i64[s0] = input
        CHECK: %[[keys:\w+]]: {{{{.*}}}} = aten.index_copy_.default(%[[k]], 2, %
        CHECK: %[[values:\w+]]: {{{{.*}}}} = aten.index_copy_.default(%[[v]], 2, %
        CHECK-NOT: aten.scaled_dot_product_attention
        CHECK: %[[y:\w+]]: bf16[1,4,s0,64] = eyas.splitk_sdpa.default({{{{.*}}}}, %[[keys]], %[[values]], %[[pos]], 0.5, {window}, 8)
        CHECK: return [%[[y]]]
        """,  # noqa: E501
    )


@POSITIVE
def a_flat_layer_of_our_models(one):
    a_layer_of_our_models(one, FLAT, 0)


@POSITIVE
def a_sliding_layer_of_our_models(one):
    a_layer_of_our_models(one, CacheGeometry.of(64, WINDOW), WINDOW)


def fires(operands):
    return f"CHECK-LABEL: method forward\nCHECK: bf16[1,4,s0,64] = eyas.splitk_sdpa.default({{{{.*}}}}, {operands})"


def held(pos, last=None):
    last = pos[-1] if last is None else last
    return last - (last - torch.arange(RING)) % RING


RING_MASKS = {
    "other way round": lambda pos: (pos[:, None] >= held(pos)) & (held(pos) >= 0) & (pos[:, None] < held(pos) + WINDOW),
    "of ages": lambda pos: (held(pos) >= 0) & (pos[:, None] - held(pos) >= 0) & (pos[:, None] - held(pos) < WINDOW),
    "not hidden": lambda pos: ~(held(pos) < 0) & ~(held(pos) > pos[:, None]) & ~(pos[:, None] - WINDOW >= held(pos)),
    "additive": lambda pos: torch.where(CacheGeometry(RING, WINDOW).mask(pos), 0.0, float("-inf")).bfloat16(),
    "for all heads": lambda pos: CacheGeometry(RING, WINDOW).mask(pos)[None, None].expand(1, 4, -1, -1),
    "with a weaker one": lambda pos: CacheGeometry(RING, WINDOW).mask(pos) & (held(pos) > pos[:, None] - WINDOW - 3),
}


def under_mask(name):
    def case(one):
        check(rewrite(one, program_with(layer(mask=RING_MASKS[name]))), fires("0.125, 12, 8"))

    case.__name__ = f"ring_mask_{name.replace(' ', '_')}"
    return case


for name in RING_MASKS:
    POSITIVE(under_mask(name))


@POSITIVE
def a_window_of_another_size(one):
    """What the window is, is read in the mask: here one key more, which a ring of 24 rows still holds."""

    def wider(pos):
        return (held(pos) >= 0) & (held(pos) <= pos[:, None]) & (held(pos) >= pos[:, None] - WINDOW)

    check(rewrite(one, program_with(layer(mask=wider))), fires("0.125, 13, 8"))


@POSITIVE
def the_smallest_ring(one):
    """A window and the other rows of a call."""
    geometry = CacheGeometry(WINDOW + MAX_M - 1, WINDOW)
    check(rewrite(one, program_with(layer(geometry), geometry.rows)), fires("0.125, 12, 8"))


@POSITIVE
def a_window_over_a_flat_cache(one):
    """As draft heads with a window have it: position j lies in row j, also where it is taken modulo."""

    def near(pos):
        age = pos[:, None] - torch.arange(LENGTH)
        return (age >= 0) & (age < WINDOW)

    check(rewrite(one, program_with(layer(FLAT, near), LENGTH)), fires("0.125, 12, 8"))


@POSITIVE
def static_rows(one):
    def four(rows, start):
        return make(4, start)

    program = rewrite(one, program_with(layer(), inputs=make(4)), make=four)
    check(program, "CHECK-LABEL: method forward\nCHECK: bf16[1,4,4,64] = eyas.splitk_sdpa.default({{.*}}, 12, 4)")


@POSITIVE
def keys_repeated_for_the_query_heads(one):
    def forward(module, q, k, v, pos):
        ring = CacheGeometry(RING, WINDOW)
        k, v = (c.index_copy_(2, ring.slots(pos), x).repeat_interleave(2, 1) for c, x in ((module.k, k), (module.v, v)))
        return F.scaled_dot_product_attention(q, k, v, ring.mask(pos))

    program = program_with(forward)
    unchanged(SplitkSdpa(), copy_program(program), "its keys were written at %remainder, its values at %remainder_1")
    keys, values = (n for n in program.methods["forward"].graph.nodes if str(n.target) == "aten.index_copy_.default")
    values.args = (values.args[0], 2, keys.args[2], values.args[3])
    check(rewrite(one, program), fires("0.125, 12, 8"))


@POSITIVE
def what_midm_sdpa_says(one):
    def forward(module, q, k, v, pos):
        keys, values = module.k.index_copy_(2, pos, k), module.v.index_copy_(2, pos, v)
        return torch.ops.eyas.sdpa_midm(q, keys, values, pos, 0.5)

    program = program_with(forward, LENGTH)  # whose own reference rounds queries and scores as well
    check(rewrite(one, program, atol=2 * ATOL), fires("%{{\\w+}}, 0.5, 0, 8"))


@POSITIVE
def two_layers_under_one_mask_that_is_returned(one):
    """Both layers are rewritten, and the mask stays for its other reader."""
    ring = CacheGeometry(RING, WINDOW)

    def forward(module, q, k, v, pos):
        mask, slots = ring.mask(pos), ring.slots(pos)
        first = layer(mask=lambda pos: mask, slots=lambda pos: slots)(module, q, k, v, pos)
        keys, values = module.k2.index_copy_(2, slots, v), module.v2.index_copy_(2, slots, k)
        return F.scaled_dot_product_attention(q + first, keys, values, mask, enable_gqa=True) * first, mask

    more = {"k2": caches(RING)["v"], "v2": caches(RING)["k"]}
    program = program_with(forward, **more)
    assert apply(one, program).rewrites == 2
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: aten.gt.Tensor(
        CHECK: %[[mask:\w+]]: bool[s0,24] = aten.__and__.Tensor(
        CHECK: %[[first:\w+]]: bf16[1,4,s0,64] = eyas.splitk_sdpa.default(
        CHECK-NOT: aten.scaled_dot_product_attention
        CHECK: %[[sum:\w+]]: bf16[1,4,s0,64] = aten.add.Tensor(%{{\w+}}, %[[first]])
        CHECK: %[[second:\w+]]: bf16[1,4,s0,64] = eyas.splitk_sdpa.default(%[[sum]],
        CHECK: %[[y:\w+]]: bf16[1,4,s0,64] = aten.mul.Tensor(%[[second]], %[[first]])
        CHECK: return [%[[y]], %[[mask]]]
        """,
    )


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(SplitkSdpa())


def test_a_row_is_what_it_is_alone():
    """Where the reference's sums are exact: equal keys, so equal weights of a power of two, and whole values."""
    program = program_with(layer(CacheGeometry(16, 8)), 16)
    assert apply(SplitkSdpa(), program).rewrites == 1
    module = program.methods["forward"].module()
    state = dict(module.named_buffers())
    state["k"].fill_(1)
    state["v"].copy_(randn(1, 2, 16, WIDTH).mul(8).round())
    q, k, v, pos = make(MAX_M, 20)
    k, v = torch.ones_like(k), v.mul(8).round()
    together = module(q, k, v, pos)
    alone = [module(*(t[:, :, i : i + 1] for t in (q, k, v)), pos[i : i + 1]) for i in range(MAX_M)]
    assert_equal([together], [torch.cat(alone, 2)])


# What differs in one thing


def refuses(program, reason):
    """Nothing changes, and the one attention is refused for exactly this reason."""
    before = print_program(program)
    record = apply(SplitkSdpa(), program)
    assert record.rewrites == 0 and print_program(program) == before
    assert [refusal.reason for refusal in record.refusals] == [reason]


def ring_mask(seen=lambda held, pos: held <= pos, near=lambda held, pos: held > pos - WINDOW, held=held):
    return lambda pos: (held(pos) >= 0) & seen(held(pos), pos[:, None]) & near(held(pos), pos[:, None])


OLD, NOT_LATER, NEAR = "last - age >= 0", "position - last + age >= 0", "- position + last - age + 11 >= 0"
WANTED = "not where last - age <= position and last - age >= 0"
OTHER_MASKS = {
    "not the position itself": (
        ring_mask(seen=lambda held, pos: held < pos),
        "its mask shows keys up to position -1, not up to the position itself",
    ),
    "the next one too": (
        ring_mask(seen=lambda held, pos: held <= pos + 1),
        "its mask shows keys up to position +1, not up to the position itself",
    ),
    "no window": (
        lambda pos: (held(pos) >= 0) & (held(pos) <= pos[:, None]),
        "its mask has no window, and a ring forgets",
    ),
    "rows that hold nothing yet": (
        lambda pos: (held(pos) <= pos[:, None]) & (held(pos) > pos[:, None] - WINDOW),
        f"its mask shows keys where {NEAR} and {NOT_LATER}, {WANTED}",
    ),
    "position 0 left out": (
        lambda pos: (held(pos) > 0) & (held(pos) <= pos[:, None]) & (held(pos) > pos[:, None] - WINDOW),
        f"its mask shows keys where {NEAR} and {OLD.replace(' >=', ' - 1 >=')} and {NOT_LATER}, {WANTED}",
    ),
    "later keys": (
        lambda pos: (held(pos) >= 0) & (held(pos) > pos[:, None] - WINDOW),
        f"its mask shows keys where {NEAR} and {OLD}, {WANTED}",
    ),
    "a window that grows": (
        ring_mask(near=lambda held, pos: held > pos + pos - WINDOW),
        f"its mask shows keys where {NEAR.replace('- pos', '- 2 pos')} and {OLD} and {NOT_LATER}, {WANTED}",
    ),
    "rows of the cache": (
        lambda pos: (torch.arange(RING) <= pos[:, None]) & (torch.arange(RING) > pos[:, None] - WINDOW),
        f"its mask shows keys where - position + key + 11 >= 0 and position - key >= 0, {WANTED}",
    ),
    "a ring of another length": (
        ring_mask(held=lambda pos: pos[-1] - (pos[-1] - torch.arange(RING)) % (RING + 1)),
        "its mask depends on %remainder_1 = aten.remainder.Scalar in a way that is not understood",
    ),
    "ages from one": (
        ring_mask(held=lambda pos: pos[-1] - (pos[-1] - torch.arange(1, RING + 1)) % RING),
        "its mask depends on %remainder_1 = aten.remainder.Scalar in a way that is not understood",
    ),
    "up to the first row": (
        ring_mask(held=lambda pos: held(pos, pos[0])),
        "its mask depends on %select = aten.select.int in a way that is not understood",
    ),
    "up to the largest": (
        ring_mask(held=lambda pos: held(pos, pos.max())),
        "its mask depends on %max_1 = aten.max.default, which says nothing of positions",
    ),
    "part of a longer ring": (
        ring_mask(held=lambda pos: (pos[-1] - (pos[-1] - torch.arange(48)) % 48)[:RING]),
        "its mask depends on %slice_1 = aten.slice.Tensor in a way that is not understood",
    ),
    "an empty window": (
        ring_mask(near=lambda held, pos: held > pos),
        f"its mask shows keys where {NEAR.replace('+ 11', '- 1')} and {OLD} and {NOT_LATER}, {WANTED}",
    ),
    "some ages": (
        lambda pos: ring_mask()(pos) & ((pos[-1] - torch.arange(RING)) % RING <= 7),
        f"its mask shows keys where {NEAR} and {OLD} and - age + 7 >= 0 and {NOT_LATER}, {WANTED}",
    ),
    "a soft mask": (
        lambda pos: torch.where(ring_mask()(pos), 0.0, -30.0).bfloat16(),
        "its mask depends on %where = aten.where.Scalar in a way that is not understood",
    ),
    "one mask a head": (
        lambda pos: ring_mask()(pos) & (torch.arange(4) > 0)[:, None, None],
        "its mask depends on %and_3 = aten.__and__.Tensor in a way that is not understood",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_another_mask_is_refused(name):
    mask, reason = OTHER_MASKS[name]
    refuses(program_with(layer(mask=mask)), reason)


FLAT_MASKS = {
    "not the position itself": (
        lambda pos: pos[:, None] > torch.arange(LENGTH),
        "its mask shows keys up to position -1, not up to the position itself",
    ),
    "a window without an end": (
        lambda pos: pos[:, None] - torch.arange(LENGTH) < WINDOW,
        "its mask shows keys where - position + key + 11 >= 0, not where key <= position",
    ),
    "all true": (lambda pos: pos[:, None] + torch.arange(LENGTH) >= 0, "its mask hides nothing"),
    "a number": (lambda pos: (pos[:, None] * 0.0).expand(-1, LENGTH).bfloat16(), "its mask depends on %mul = "
                 "aten.mul.Tensor in a way that is not understood"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAT_MASKS)
def test_another_mask_of_a_flat_cache_is_refused(name):
    mask, reason = FLAT_MASKS[name]
    refuses(program_with(layer(FLAT, mask), LENGTH), reason)


def test_a_call_without_a_mask_is_refused():
    program = program_with(layer())
    node = node_of(program, "aten.scaled_dot_product_attention.default")
    node.args = node.args[:3]
    (refusal,) = SplitkSdpa().run(program).refusals
    assert refusal.reason == "it has no mask" and node.target is torch.ops.aten.scaled_dot_product_attention.default


def test_a_mask_over_heads_and_rows_is_refused():
    """Eight heads, rows and keys: a mask of ``[rows, keys, 1]`` is broadcast as one of heads and rows."""

    def forward(module, q, k, v, pos):
        keys, values = module.short_k.index_copy_(2, pos, k), module.short_v.index_copy_(2, pos, v)
        return F.scaled_dot_product_attention(q, keys, values, (pos[:, None] >= torch.arange(8))[..., None])

    q = randn(1, 8, 8, WIDTH).bfloat16()
    short = {name: torch.zeros(1, 8, 8, WIDTH, dtype=torch.bfloat16) for name in ("short_k", "short_v")}
    program = program_with(forward, inputs=(q, q, q, torch.arange(8)), **short)
    refuses(program, "its mask has not rows and keys as its last dimensions")


def test_a_mask_of_other_positions_is_refused():
    program = program_with(layer(mask=lambda pos, other: ring_mask()(other)), inputs=(*make(ROWS), make(ROWS)[3]))
    refuses(program, "its mask depends on %args_4; the cache was written at %args_3")


def in_place(pos):
    slots = pos % RING
    slots.add_(0)
    return slots


OTHER_SLOTS = {
    "another modulus": (
        lambda pos: pos % 20, "its ring of 24 rows is written at %remainder = aten.remainder.Scalar(.., 20)"
    ),
    "fmod": (
        lambda pos: torch.fmod(pos, RING), "its ring of 24 rows is written at %fmod = aten.fmod.Scalar(.., 24)"
    ),
    "one row further": (
        lambda pos: (pos + 1) % RING, "its mask depends on %args_3; the cache was written at %add"
    ),
    "moved in the ring": (
        lambda pos: pos % RING + 0, "its mask depends on %args_3; the cache was written at %add"
    ),
    "written in place": (in_place, "its mask depends on %args_3; the cache was written at %add_"),
    "not modulo": (
        lambda pos: pos, f"its mask shows keys where {NEAR} and {OLD} and {NOT_LATER}, not where key <= position"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_SLOTS)
def test_a_cache_written_elsewhere_is_refused(name):
    slots, reason = OTHER_SLOTS[name]
    refuses(program_with(layer(slots=slots)), reason)


def test_slots_that_change_after_they_were_computed_are_refused():
    program = program_with(layer(slots=in_place))
    for node in program.methods["forward"].graph.nodes:
        if str(node.target) == "aten.index_copy_.default":
            node.args = (*node.args[:2], node_of(program, "aten.remainder.Scalar"), node.args[3])
    refuses(program, "its ring is written at %remainder, which is written in place")


def not_written(module, q, k, v, pos):
    module.k.index_copy_(2, pos % RING, k)
    return F.scaled_dot_product_attention(q, module.k, module.v, CacheGeometry(RING, WINDOW).mask(pos), enable_gqa=True)


def test_values_that_are_not_written_are_refused():
    refuses(program_with(not_written), "its values are not a cache: no node writes the buffer v")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda: program_with(layer(), rows=17), "a call has up to 17 rows; the kernel takes 16"),
        (
            lambda: program_with(layer(CacheGeometry(18, WINDOW)), 18),
            "a cache of 18 rows; a window of 12 and 8 rows a call need 19",
        ),
        (
            lambda: program_with(layer(), inputs=floats(make(ROWS)), **{k: v.float() for k, v in caches(RING).items()}),
            "the query is torch.float32; the kernel takes torch.bfloat16",
        ),
        (
            lambda: program_with(layer(), inputs=narrow(make(ROWS)), **narrow_caches()),
            "head width 48 has no kernel; allowed: 64, 128, 256, 512",
        ),
    ],
    ids=["rows", "ring too short", "float32", "head width"],
)  # fmt: skip
def test_what_the_kernel_does_not_take_is_refused(program, reason):
    refuses(program(), reason)


def floats(inputs):
    return (*(t.float() for t in inputs[:3]), inputs[3])


def narrow(inputs):
    return (*(t[..., :48].contiguous() for t in inputs[:3]), inputs[3])


def narrow_caches():
    return {name: values[..., :48] for name, values in caches(RING).items()}


def test_a_query_of_another_type_than_its_cache_is_refused():
    program = program_with(layer())
    node = node_of(program, "aten.scaled_dot_product_attention.default")
    node.args[0].meta["val"] = node.args[0].meta["val"].double()
    (refusal,) = SplitkSdpa().run(program).refusals
    assert refusal.reason == "the query is torch.float64, its caches are not"


def test_a_query_whose_vectors_are_not_dense_is_refused():
    def forward(module, q, k, v, pos):
        return layer()(module, q.mT, k, v, pos)

    q, k, v, pos = make(ROWS)
    inputs = (q.mT.contiguous(), k, v, pos)
    refuses(program_with(forward, inputs=inputs), "the query's vectors or the positions are not dense")


def test_rows_without_a_limit_are_refused():
    program = program_with(layer())
    program.methods["forward"].range_constraints.clear()
    refuses(program, "a call has up to any number of rows")


def test_positions_that_are_not_dense_are_refused():
    def forward(module, q, k, v, pos):
        return layer()(module, q, k, v, pos[:, 1])

    q, k, v, pos = make(ROWS)
    refuses(
        program_with(forward, inputs=(q, k, v, torch.stack([pos, pos], 1))),
        "the query's vectors or the positions are not dense",
    )


def test_midm_sdpa_of_more_rows_stays():
    def forward(module, q, k, v, pos):
        keys, values = module.k.index_copy_(2, pos, k), module.v.index_copy_(2, pos, v)
        return torch.ops.eyas.sdpa_midm(q, keys, values, pos, 0.5)

    refuses(program_with(forward, LENGTH, rows=17), "a call has up to 17 rows; the kernel takes 16")


def test_without_attention_nothing_changes():
    unchanged(SplitkSdpa(), program_of(lambda module, x: torch.softmax(x @ x.mT, -1), randn(1, ROWS, 16)))


def test_listed_without_triton():
    without_triton("splitk_sdpa")


# The proof against what masks are


@st.composite
def ring_masks(draw):
    """(mask of positions, its text): comparisons of what rows hold with 0 and with the position, and ands of them."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        kind, offset = draw(st.sampled_from(["exists", "not later", "near", "key"])), draw(st.integers(-1, 1))
        op = getattr(torch, draw(st.sampled_from(["ge", "gt"] if kind != "key" else ["ge"])))
        parts.append((kind, offset, op))

    def mask(pos):
        sides = {
            "exists": lambda c: (held(pos) + c, torch.zeros((), dtype=torch.int64)),
            "not later": lambda c: (pos[:, None] + c, held(pos)),
            "near": lambda c: (held(pos) + c, pos[:, None] - WINDOW),
            "key": lambda c: (torch.arange(RING), torch.full((), c)),
        }
        made = torch.ones(len(pos), RING, dtype=torch.bool)
        for kind, offset, op in parts:
            made = made & op(*sides[kind](offset))
        return made

    return mask, str([(kind, offset, op.__name__) for kind, offset, op in parts])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(ring_masks())
def test_the_proof_is_right_exactly_where_the_mask_is_a_window(drawn):
    mask, text = drawn
    calls = [torch.arange(start, start + MAX_M) for start in (0, 1, 7, 11, 12, 13, 20, 23, 24, 40)]
    windows = [w for w in range(1, RING - MAX_M + 2) if all(map(shows_window(mask, w), calls))]
    graph = torch.fx.experimental.proxy_tensor.make_fx(mask, tracing_mode="fake")(calls[0]).graph
    (positions,) = (node for node in graph.nodes if node.op == "placeholder")
    (output,) = (node for node in graph.nodes if node.op == "output")
    found = window_of(output.args[0], positions, {}, set(), True)
    assert ([found] if isinstance(found, int) else []) == windows, (text, found)


def shows_window(mask, window):
    return lambda pos: torch.equal(mask(pos), CacheGeometry(RING, window).mask(pos))

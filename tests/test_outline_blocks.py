"""Layers that are equal but for their constants become calls of one block, wherever they stand; one that differs in
anything is another block; and every program computes, bit for bit, what it did.
"""

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import test_foreign_graphs as foreign
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ir import (
    MAX_ROWS,
    ROWS,
    Positive,
    assert_close,
    assert_equal,
    check,
    check_types,
    export,
    program_of,
    randn,
    results,
)
from torch import nn
from torch._subclasses import FakeTensorMode

from eyas.kernels.block import GRAPHS
from eyas.models.layers import CacheGeometry, KVCache, RMSNorm, Rope, RopeSpec, attend, rotate
from eyas.passes.blocks import Flow
from eyas.passes.numerics import copy_program, differences
from eyas.passes.outline_blocks import OutlineBlocks
from eyas.passes.pipeline import PassError, run_pipeline
from eyas.passes.printer import print_program
from eyas.passes.program import Program
from eyas.passes.registry import parse_pipeline

POSITIVE = Positive()
BLOCK = torch.ops.eyas.block.default
WIDTH, LENGTH, LAYERS = 8, 24, 5


def make(rows):
    """A stream ``[1, rows, WIDTH]`` and positions, which do not start at 0."""
    return randn(1, rows, WIDTH, seed=rows), torch.arange(rows) + 3


def make_ids(rows):
    return torch.randint(0, 16, (1, rows), generator=torch.Generator().manual_seed(rows)), torch.arange(rows) + 3


ROW_COUNTS = (1, 2, ROWS, MAX_ROWS)


def tensors(layers=LAYERS, **more):
    """Weights ``w0``, ... and caches ``c0``, ... of so many layers."""
    weights = {f"w{i}": randn(WIDTH, WIDTH, seed=i) * 0.3 for i in range(layers)}
    return weights | {f"c{i}": randn(LENGTH, WIDTH, seed=50 + i) for i in range(layers)} | more


def layer(module, i, x, pos, eps=1e-6, scale=0.5, cache=None):
    """A norm, attention over a cache that it writes first, and a product: each ends in a sum with the stream."""
    weight, cache = module.get_buffer(f"w{i}"), module.get_buffer(f"c{i if cache is None else cache}")
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    cache.index_copy_(0, pos, (y @ weight)[0])
    x = x + ((y @ cache.T) * scale).softmax(-1) @ cache
    return x + F.silu(x @ weight)


def stack(change=None, layers=LAYERS, **options):
    """``layers`` layers in one function; those whose number is in ``change`` have other options."""

    def forward(module, x, pos):
        for i in range(layers):
            x = layer(module, i, x, pos, **{**options, **(change or {}).get(i, {})})
        return x

    return forward


def simple(module, i, x):
    return x + torch.tanh(x @ module.get_buffer(f"w{i}"))


def outline(program, one=None, make=make, atol=None):
    """Runs the pass as the pipeline does. Types must be true, results and caches what they were, and a second run must
    find nothing to do.
    """
    one, before = one or OutlineBlocks(), copy_program(program)
    record = run_pipeline(program, [*parse_pipeline("share_buffers"), one])[-1]
    for ep in (*program.methods.values(), *(block.program for block in program.blocks.values())):
        check_types(ep)
    for method in program.methods:
        got, expected = (results(p, *map(make, ROW_COUNTS), method=method) for p in (program, before))
        assert_equal(got, expected) if atol is None else assert_close(got, expected, atol)
    assert all(difference.error <= (atol or 0) for difference in differences(before, program))
    text = print_program(program)
    (again,) = run_pipeline(program, [one])
    assert again.rewrites == 0 and print_program(program) == text
    assert record.rewrites == sum(len(calls(program, method)) for method in program.methods)
    return record


def nodes_called(program, method="forward"):
    return [node for node in program.methods[method].graph.nodes if node.target is BLOCK]


def calls(program, method="forward"):
    """The blocks that a method calls, in order, each by a letter."""
    keys = [node.args[0] for node in nodes_called(program, method)]
    letters = dict(zip(dict.fromkeys(keys), "ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    return "".join(letters[key] for key in keys)


def outlined(function, make=make, atol=None, **given):
    """The calls that the pass makes of a function."""
    program = program_of(function, *make(ROWS), **given)
    outline(program, make=make, atol=atol)
    return calls(program)


# What it does


class Decoder(nn.Module):
    """Embedding, layers with rotary tables, masks and caches of two kinds, and a head."""

    def __init__(self, windows):
        super().__init__()
        self.embed, self.rope, self.norm = nn.Embedding(16, WIDTH), Rope(RopeSpec(100.0), WIDTH), RMSNorm(WIDTH, 1e-6)
        self.geometry = [CacheGeometry.of(LENGTH, window) for window in windows]
        self.caches = nn.ModuleList(KVCache(g.rows, 1, WIDTH, torch.float32) for g in self.geometry)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in windows)

    def forward(self, ids, pos):
        x, table = self.embed(ids) * 2.0, self.rope(pos)
        views = {g: (g.slots(pos), g.mask(pos)) for g in dict.fromkeys(self.geometry)}
        for linear, cache, geometry in zip(self.layers, self.caches, self.geometry):
            slots, mask = views[geometry]
            q, k, v = linear(self.norm(x)).view(1, 1, -1, 3 * WIDTH).split(WIDTH, -1)
            x = x + attend(rotate(q, table), *cache.write(slots, rotate(k, table), v), mask, 0.5, None)[0]
        return self.norm(x) @ self.embed.weight.T


@POSITIVE
def layers_of_two_kinds(one):
    """Two kinds of layers, of which one has a window: a block each, and one before and one after them."""
    torch.manual_seed(0)
    program = Program.of(export(Decoder([16, 16, None, 16, 16, None]), *make_ids(ROWS)))
    record = outline(program, one, lambda rows: make_ids(min(rows, 16)))
    assert calls(program) == "ABBCBBCD" and len(program.blocks) == 4 and record.rewrites == 8
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[k:\w+]]: f32[1,1,24,8] = buffer caches.0.k
        CHECK: %[[ids:ids]]: i64[1,s0] = input
        CHECK-NEXT: %[[pos:pos]]: i64[s0] = input
        CHECK-NEXT: %[[first:\w+]]: ({{.*}}) = eyas.block.default({{\w+}}, [{{.+}}], [], [%[[ids]], %[[pos]]])
        CHECK: %[[x:\w+]]: f32[1,s0,8] = getitem(%[[first]], 0)
        CHECK-NOT: aten.
        CHECK: %[[a:\w+]]: (f32[1,s0,8]) = eyas.block.default([[near:\w+]], [{{.+}}], [{{.+}}], [%[[x]], {{.+}}])
        CHECK-NEXT: %[[y:\w+]]: f32[1,s0,8] = getitem(%[[a]], 0)
        CHECK-NEXT: %[[b:\w+]]: (f32[1,s0,8]) = eyas.block.default([[near]], [{{.+}}], [{{.+}}], [%[[y]], {{.+}}])
        CHECK-NEXT: %[[z:\w+]]: f32[1,s0,8] = getitem(%[[b]], 0)
        CHECK-NEXT: eyas.block.default([[flat:\w+]], [{{.+}}], [{{.+}}], [%[[z]], {{.+}}])
        CHECK-NOT: aten.
        CHECK: return [%{{\w+}}]
        CHECK: block [[near]] where s0 in [1, 16]
        CHECK: index_copy_
        """,
    )


@POSITIVE
def layers_that_no_module_tells_apart(one):
    """A loop in one function: no hierarchy of modules, no names."""
    program = program_of(stack(), *make(ROWS), **tensors())
    record = outline(program, one)
    assert calls(program) == "AAAAA" and not record.refusals
    written = [node.args[2][0].name for node in nodes_called(program)]
    assert written == [f"b_c{i}" for i in range(LAYERS)], "each call writes the cache of its layer"


@POSITIVE
def methods_that_share_blocks(one):
    """Two methods whose layers are equal call the same block."""
    first, second = (program_of(stack(layers=n), *make(ROWS), **tensors()).methods["forward"] for n in (3, 4))
    program = Program({"prefill": first, "verify": second})
    outline(program, one)
    assert (calls(program, "prefill"), calls(program, "verify"), len(program.blocks)) == ("AAA", "AAAA", 1)


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(OutlineBlocks())


def doubled(module, i, x):
    return x + torch.tanh(x @ module.get_buffer(f"w{i}")) @ module.get_buffer(f"w{i}")


def with_taps(module, x, pos):
    kept = [x]
    for i in range(LAYERS):
        kept.append(layer(module, i, kept[-1], pos))
    return kept[-1].softmax(-1), torch.cat([kept[1], kept[3].sin()], -1)


def with_tables(module, x, pos):
    """Tables with more nodes than a layer has; they come from nothing but a size."""
    table = torch.arange(pos.shape[0]).float().sin().exp().cos()[:, None].tanh()
    for i in range(LAYERS):
        x = simple(module, i, x) * table
    return x


def with_masks(module, x, pos):
    seen = pos[:, None] >= torch.arange(LENGTH)
    for i in range(LAYERS):
        cache = module.get_buffer(f"c{i}").index_copy_(0, pos, x[0])
        x = x + (x @ cache.T).masked_fill(~seen, -1e9).softmax(-1) @ cache
    return x


def with_features_of_the_start(module, x, pos):
    """Every layer reads what is computed from the stream before the first, which so is no bottleneck."""
    x = x.sin() * 3
    start = (x @ module.w0).cos() + pos[:, None].float()
    for i in range(LAYERS):
        x = layer(module, i, x, pos) * start
    return x


def with_a_row_more(module, x, pos):
    """No layer has a value of as many rows as the call."""
    x = torch.cat([module.c0[None, :1], x], 1)
    for i in range(1, LAYERS):
        x = simple(module, i, x)
    return x


def with_sizes_of_its_own_values(module, x, pos):
    for i in range(LAYERS):
        y = torch.cat([x, x], 1)
        x = simple(module, i, x) + (torch.arange(y.shape[1])[None, :, None] + y).mean(1, keepdim=True)
    return x


def with_what_nobody_reads(module, x, pos):
    for i in range(LAYERS):
        y = x @ module.get_buffer(f"w{i}")
        y.exp()
        x = x + y.tanh()
    return x


def with_a_result_beside(module, x, pos):
    return stack()(module, x, pos), pos + 1


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (with_taps, 4), (with_tables, 4), (with_masks, 4), (with_features_of_the_start, 4), (with_a_row_more, 4),
        (with_sizes_of_its_own_values, 5), (with_what_nobody_reads, 5), (with_a_result_beside, 5),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_layers_are_found(function, least):
    """At most the first and the last of them are joined with what stands beside."""
    assert Counter(outlined(function, **tensors())).most_common(1)[0][1] >= least


def test_values_that_are_not_dense_are_laid_out_on_the_way():
    """A transposed stream, which each layer takes as one row: a view of it that a dense one would not allow."""

    def forward(module, x, pos):
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        for i in range(LAYERS):
            flat = (x.transpose(1, 2).view(1, -1) * (i % 1 + 2)).tanh().view(1, WIDTH, -1)
            x = (flat + module.get_buffer(f"w{i}")[:, :1]).transpose(1, 2)
        return x

    program = program_of(forward, *make(ROWS), **tensors())
    outline(program)
    assert Counter(calls(program)).most_common(1)[0][1] >= LAYERS - 1
    check(program, "CHECK: block\nCHECK: aten.clone.default(%{{\\w+}}, memory_format=torch.contiguous_format)")


# What differs in one thing


@pytest.mark.parametrize(
    ("change", "line"),
    [({"eps": 1e-5}, "aten.add.Tensor(%v1, {})"), ({"scale": 0.25}, "aten.mul.Tensor(%v10, {})")],
    ids=["eps", "scale"],
)
def test_another_attribute_is_another_block(change, line):
    """And the lines of both are shown, at the line of the source."""
    program = program_of(stack({2: change}), *make(ROWS), **tensors())
    (refusal,) = outline(program).refusals
    ours, theirs = (next(iter({"eps": 1e-6, "scale": 0.5, **c}[k] for k in change)) for c in (change, {}))
    assert calls(program) == "AABAA" and refusal.node.startswith(__file__)
    assert "(x1) is not block" in refusal.reason and "(x4), from which it differs in 1 places" in refusal.reason
    _, first, second = refusal.reason.replace("first: ", " instead of ").split(" instead of ")
    assert first.endswith(line.format(ours)) and second.endswith(line.format(theirs))


def shorter_cache(module, i, x, pos):
    return layer(module, i, x, pos)


def one_weight(module, i, x, pos):
    first, second = module.get_buffer(f"w{i}"), module.get_buffer(f"w{i if i == 2 else i + LAYERS}")
    return x + torch.tanh(x @ first) @ second


def arguments_swapped(module, i, x, pos):
    a, b = torch.tanh(x @ module.get_buffer(f"w{i}")), x.sin()
    return x + (b - a if i == 2 else a - b)


def another_type(module, i, x, pos):
    return x + torch.tanh(x @ module.get_buffer(f"w{i}").float())


DIFFERENT = {
    "shape of a constant": (shorter_cache, {"c2": randn(LENGTH - 1, WIDTH)}),
    "one constant for two": (one_weight, {f"w{i}": randn(WIDTH, WIDTH, seed=i) for i in range(2 * LAYERS)}),
    "arguments swapped": (arguments_swapped, {}),
    "type of a constant": (another_type, {"w2": randn(WIDTH, WIDTH).double()}),
}


@pytest.mark.parametrize(("function", "change"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_another_block(function, change):
    def forward(module, x, pos):
        for i in range(LAYERS):
            x = function(module, i, x, pos)
        return x

    assert outlined(forward, **{**tensors(), **change}) == "AABAA"


def test_another_range_is_another_block():
    """Native code may rely on it."""
    wide = program_of(stack(), *make(ROWS), **tensors()).methods["forward"]
    rows = torch.export.Dim("rows", min=1, max=MAX_ROWS + 4)
    shapes = (({1: rows}, {0: rows}),)
    other = torch.export.export(wide.module(), make(ROWS), dynamic_shapes=shapes[0], strict=False)
    program = Program({"a": wide, "b": other})
    outline(program)
    assert len(program.blocks) == 2 and calls(program, "a") == calls(program, "b") == "AAAAA"


# What stays whole


def nothing_repeats(module, x, pos):
    return (x @ module.w0).tanh().cumsum(-1).softmax(-1).exp()


def a_graph_of_its_own(module, x, pos):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (stack()(module, x, pos),))


def a_write_into_a_value(module, x, pos):
    for i in range(LAYERS):
        x = simple(module, i, x).mul_(2.0)
    return x


def a_number_that_a_tensor_holds(module, x, pos):
    numbers = module.c0.long()[0, 0].item(), module.c0.long()[0, 1].item()
    for i in range(LAYERS):
        x = simple(module, i, x) * numbers[i % 2]
    return x


def one_cache_that_all_write(module, x, pos):
    return stack(cache=0)(module, x, pos)


def one_view_that_all_write(module, x, pos):
    """It is not dense: handed on, it would be a copy, and what is written there would be lost."""
    half = module.c0[:, :4]
    for i in range(LAYERS):
        x = simple(module, i, x)
        half.index_copy_(0, pos, x[0, :, :4])
    return x


def a_view_from_before_a_write(module, x, pos):
    old = module.c0[:, :4]
    for i in range(LAYERS):
        x = simple(module, i, x) + old.mean()
        if i == 2:
            module.c0.index_copy_(0, pos, x[0])
    return x


WHOLE = {
    nothing_repeats: r"no part of it repeats",
    a_graph_of_its_own: r"is a graph of its own",
    a_write_into_a_value: r"%mul_ writes into %add, which the method computes",
    a_number_that_a_tensor_holds: r"is a number that depends on values",
    one_cache_that_all_write: r"writes into what %index_copy_ shows, which several parts read",
    one_view_that_all_write: r"shows, which several parts read",
    a_view_from_before_a_write: r"%index_copy_ writes into what %slice_1 shows, which several parts read",
}


@pytest.mark.parametrize(("function", "reason"), WHOLE.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_cut_stays_whole(function, reason):
    program = program_of(function, *make(ROWS), **tensors())
    (refusal,) = outline(program).refusals
    assert calls(program) == "A" and refusal.reason.startswith("it stays whole: ") and reason in refusal.reason


def test_a_method_is_one_block_on_request():
    program = program_of(stack(), *make(ROWS), **tensors())
    (one,) = parse_pipeline("outline_blocks{unrolled=true}")
    assert not outline(program, one).refusals
    assert calls(program) == "A"


# Writes


def test_what_is_written_is_read_afterwards():
    """Within a layer; the read stands after the write although no argument says so."""

    def forward(module, x, pos):
        for i in range(LAYERS):
            before = module.get_buffer(f"c{i}")[3:].sum(0)
            module.get_buffer(f"c{i}")[3:].mul_(0.5)
            x = simple(module, i, x) + before - module.get_buffer(f"c{i}")[3:].sum(0)
        return x

    assert outlined(forward, **tensors()) == "AAAAA"


def test_a_cache_of_an_earlier_layer():
    """As layers that share keys and values read it: those that do are one kind."""

    def forward(module, x, pos):
        for i in range(2):
            x = layer(module, i, x, pos)
        for i in range(2, 6):
            x = x + (x @ module.get_buffer(f"c{i % 2}").T).softmax(-1) @ module.get_buffer(f"c{i % 2}")
        return x

    assert Counter(outlined(forward, **tensors())).most_common(1)[0][1] >= 4


def test_a_write_that_nobody_reads_is_kept():
    def forward(module, x, pos):
        for i in range(LAYERS):
            x = simple(module, i, x)
            module.get_buffer(f"c{i}").index_copy_(0, pos, x[0])
        return x

    program = program_of(forward, *make(ROWS), **tensors())
    outline(program)
    written = [node.name for call in nodes_called(program) for node in call.args[2]]
    assert written == [f"b_c{i}" for i in range(LAYERS)] and len(program.blocks) < LAYERS


# Graphs of transformers


@pytest.mark.parametrize("form", [foreign.Plain, foreign.Positions], ids=["plain", "positions"])
@pytest.mark.parametrize("name", foreign.MODELS)
def test_layers_of_foreign_models(name, form, monkeypatch):
    """Four equal layers; of Gemma 3 both kinds, which differ in nothing but the mask and the tables that they read."""
    model, config, options = foreign.MODELS[name]
    more = {"num_hidden_layers": 4}
    if "layer_types" in options:
        more["layer_types"] = ["sliding_attention", "full_attention"] * 2
    monkeypatch.setitem(foreign.MODELS, name, (model, config, {**options, **more}))
    ids = make_ids(ROWS)[0]
    program = Program.of(export(form(name), ids, torch.arange(ROWS)))
    record = outline(program, make=lambda rows: (make_ids(rows)[0], torch.arange(rows)))
    assert calls(program) == "ABBBBC" and not record.refusals


# The operator


def test_a_block_takes_its_own_types_only():
    program = program_of(stack(), *make(ROWS), **tensors())
    outline(program)
    (key,) = program.blocks
    w, c, x, pos = randn(WIDTH, WIDTH), randn(LENGTH, WIDTH), *make(3)
    wrong = [
        ([w.double()], [c], [x, pos]), ([w], [c[1:]], [x, pos]), ([w], [c], [x[0], pos]), ([w], [c], [x, pos[1:]]),
        ([w], [c], [x, pos.int()]), ([w], [], [x, pos]),
    ]  # fmt: skip
    with FakeTensorMode() as mode:

        def call(*groups):
            return BLOCK(key, *([mode.from_tensor(value) for value in group] for group in groups))

        (y,) = call([w], [c], [x, pos])
        assert y.shape == x.shape and y.dtype == x.dtype
        for groups in wrong:
            with pytest.raises(ValueError, match=r"expected a torch|zip\(\)"):
                call(*groups)


def test_an_unknown_block_is_an_error(monkeypatch):
    program = program_of(stack(), *make(ROWS), **tensors())
    outline(program)
    monkeypatch.delitem(GRAPHS, next(iter(program.blocks)))
    with pytest.raises(RuntimeError, match=r"block '\w{12}' is not known in this process; run the pass outline_blocks"):
        results(program, make(ROWS))


# Facts, counts and texts


def test_no_other_pass_can_follow():
    program = program_of(stack(), *make(ROWS), **tensors())
    message = r"pass remove_noop \(number 3, .*\) needs no_blocks, but outline_blocks \(number 2\) breaks it .*works: "
    with pytest.raises(PassError, match=message + r".*remove_noop.*,outline_blocks"):
        run_pipeline(program, parse_pipeline("share_buffers,outline_blocks,remove_noop"))
    run_pipeline(copy_program(program), parse_pipeline("outline_blocks"))
    assert dataclasses.replace(OutlineBlocks(), unrolled=True) == parse_pipeline("outline_blocks{unrolled=true}")[0]


@pytest.mark.parametrize("layers", range(2, 9))
def test_any_number_of_layers(layers):
    def forward(module, ids, pos):
        x = F.embedding(ids, module.table) * 2.0
        return stack(layers=layers)(module, x, pos).softmax(-1) @ module.table.T

    found = outlined(forward, make_ids, **tensors(layers), table=randn(16, WIDTH))
    assert found == "A" + "B" * layers + "C"


@settings(max_examples=15, deadline=None, database=None)
@given(st.lists(st.sampled_from([0.25, 0.5]), min_size=2, max_size=8))
def test_every_node_is_called_once(scales):
    """Whatever kinds follow each other: never more kinds of layers than there are, and no node is lost or doubled."""
    program = program_of(stack({i: {"scale": s} for i, s in enumerate(scales)}, len(scales)), *make(ROWS), **tensors(8))
    nodes = len(Flow(program.methods["forward"]).nodes)
    outline(program)
    sizes = {key: block.size for key, block in program.blocks.items()}
    assert sum(sizes[node.args[0]] for node in nodes_called(program)) == nodes
    assert sum(sizes.values()) <= nodes * max(len(set(scales)), 1) / len(scales) or len(set(scales)) == len(scales)


def printed():
    program = program_of(stack({1: {"eps": 1e-5}}), *make(ROWS), **tensors())
    run_pipeline(program, parse_pipeline("share_buffers,outline_blocks"))
    return print_program(program)


def test_texts_and_keys_are_the_same_in_two_processes():
    code = "import test_outline_blocks as t; print(t.printed(), end='')"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == printed() == printed()

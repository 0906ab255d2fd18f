"""Layers that are equal but for their constants become calls of one block, wherever they stand; one that differs in
anything is another block; and every program computes, bit for bit, what it did.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ir import MAX_ROWS, ROWS, Function, Positive, assert_equal, check, check_types, export, program_of, randn, results
from torch import nn
from torch._subclasses import FakeTensorMode

from eyas.kernels.block import GRAPHS
from eyas.models.layers import CacheGeometry, KVCache, RMSNorm, Rope, RopeSpec, attend, rotate
from eyas.passes.blocks import Flow, is_dense
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


def tensors(layers=LAYERS, **more):
    """Weights ``w0``, ... and caches ``c0``, ... of so many layers, and a table."""
    weights = {f"w{i}": randn(WIDTH, WIDTH, seed=i) * 0.3 for i in range(layers)}
    caches = {f"c{i}": randn(LENGTH, WIDTH, seed=50 + i) for i in range(layers)}
    return {**weights, **caches, "table": randn(16, WIDTH), **more}


def weight(m, i):
    return m.get_buffer(f"w{i}")


def cache(m, i):
    return m.get_buffer(f"c{i}")


def simple(m, i, x, pos):
    return x + torch.tanh(x @ weight(m, i))


def layer(m, i, x, pos, eps=1e-6, scale=0.5, number=None):
    """A norm, attention over a cache that it writes first, and a product: each ends in a sum with the stream."""
    keys, y = cache(m, i if number is None else number), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    keys.index_copy_(0, pos, (y @ weight(m, i))[0])
    x = x + ((y @ keys.T) * scale).softmax(-1) @ keys
    return x + F.silu(x @ weight(m, i))


def stack(step=layer, layers=LAYERS, before=lambda m, x: x, **options):
    """So many layers in one function; ``options`` of layer ``i`` in ``options["layer_i"]``."""

    def forward(m, x, pos):
        x = before(m, x)
        for i in range(layers):
            x = step(m, i, x, pos, **options.get(f"layer_{i}", {}))
        return x

    return forward


def program_with(function=stack(), make=make, **more):  # noqa: B008  a function
    return program_of(function, *make(ROWS), **tensors(**more))


def outline(program, one=OutlineBlocks(), make=make):  # noqa: B008  a frozen dataclass
    """Runs the pass as the pipeline does. Types must be true, results and caches what they were for several numbers of
    rows, and a second run must find nothing to do.
    """
    before = copy_program(program)
    record = run_pipeline(program, [*parse_pipeline("share_buffers"), one])[-1]
    for ep in (*program.methods.values(), *(block.program for block in program.blocks.values())):
        check_types(ep)
    for block in program.blocks.values():
        named = {node.name: node.meta["val"] for node in block.program.graph.nodes if node.op != "output"}
        signature = block.program.graph_signature
        assert all(is_dense(named[name]) for name in (*signature.user_inputs, *signature.user_outputs))
    for method in program.methods:
        inputs = make(2), make(ROWS)
        assert_equal(results(program, *inputs, method=method), results(before, *inputs, method=method))
        assert record.rewrites == 0 or calls(program, method)
    assert {found.error for found in differences(before, program)} == {0.0}
    text = print_program(program)
    (again,) = run_pipeline(program, [one])
    assert again.rewrites == 0 and not again.refusals and print_program(program) == text
    assert record.rewrites == sum(len(nodes(program, method)) for method in program.methods)
    return record


def nodes(program, method="forward"):
    return [node for node in program.methods[method].graph.nodes if node.target is BLOCK]


def calls(program, method="forward"):
    """The blocks that a method calls, in order, each by a letter."""
    keys = [node.args[0] for node in nodes(program, method)]
    letters = dict(zip(dict.fromkeys(keys), "ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    return "".join(letters[key] for key in keys)


def outlined(function, make=make, **more):
    """The calls that the pass makes of a function."""
    program = program_with(function, make, **more)
    outline(program, make=make)
    return calls(program)


# What it does


class Decoder(nn.Module):
    """Embedding, layers with rotary tables, masks and caches of two kinds, and a head."""

    def __init__(self, windows):
        super().__init__()
        self.embed, self.rope = nn.Embedding(16, WIDTH), Rope(RopeSpec(100.0), WIDTH)
        self.norms = nn.ModuleList(RMSNorm(WIDTH, 1e-6) for _ in (*windows, None))
        self.geometry = [CacheGeometry.of(LENGTH, window) for window in windows]
        self.caches = nn.ModuleList(KVCache(g.rows, 1, WIDTH, torch.float32) for g in self.geometry)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in windows)

    def forward(self, ids, pos):
        x, table = self.embed(ids) * 2.0, self.rope(pos)
        views = {g: (g.slots(pos), g.mask(pos)) for g in dict.fromkeys(self.geometry)}
        for norm, linear, keys, geometry in zip(self.norms, self.layers, self.caches, self.geometry):
            slots, mask = views[geometry]
            q, k, v = linear(norm(x)).view(1, 1, -1, 3 * WIDTH).split(WIDTH, -1)
            x = x + attend(rotate(q, table), *keys.write(slots, rotate(k, table), v), mask, 0.5, None)[0]
        return self.norms[-1](x) @ self.embed.weight.T


@POSITIVE
def layers_of_two_kinds(one):
    """Of which one has a window: a block each, and one before and one after them."""
    torch.manual_seed(0)
    program = Program.of(export(Decoder([8, 8, None, 8, 8, None]), *make_ids(ROWS)))
    (refusal,) = outline(program, one, make_ids).refusals or [None]
    assert calls(program) == "ABBCBBCD" and len(program.blocks) == 4
    assert "%written_0: f32[1,1,24,8]" in refusal.reason and "instead of %written_0: f32[1,1,16,8]" in refusal.reason
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[first:\w+]]: ({{.*}}) = eyas.block.default({{\w+}}, [{{.+}}], [], [%ids, %pos])
        CHECK: %[[x:\w+]]: f32[1,s0,8] = getitem(%[[first]], 0)
        CHECK-NOT: aten.
        CHECK: %[[a:\w+]]: (f32[1,s0,8]) = eyas.block.default([[near:\w+]], [{{.+}}], [{{.+}}], [%[[x]], {{.+}}])
        CHECK-NEXT: %[[y:\w+]]: f32[1,s0,8] = getitem(%[[a]], 0)
        CHECK-NEXT: %[[b:\w+]]: (f32[1,s0,8]) = eyas.block.default([[near]], [{{.+}}], [{{.+}}], [%[[y]], {{.+}}])
        CHECK-NOT: aten.
        CHECK: return [%{{\w+}}]
        CHECK: block [[near]] where s0 in [1, 16]
        CHECK: %constant_0: f32[8] = input
        CHECK: %v0: f32[1,s0,8] = aten.
        """,
    )


@POSITIVE
def layers_that_no_module_tells_apart(one):
    """A loop in one function: no hierarchy of modules, no names."""
    program = program_with()
    assert not outline(program, one).refusals
    assert calls(program) == "AAAAA"
    assert [str(node.args[2]) for node in nodes(program)] == [f"[b_c{i}]" for i in range(LAYERS)]


@POSITIVE
def methods_that_share_blocks(one):
    program = Program({f"method_{n}": program_with(stack(layers=n)).methods["forward"] for n in (3, 4)})
    outline(program, one)
    assert (calls(program, "method_3"), calls(program, "method_4"), len(program.blocks)) == ("AAA", "AAAA", 1)


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(OutlineBlocks())


def taps(m, x, pos):
    kept = [x]
    for i in range(LAYERS):
        kept.append(layer(m, i, kept[-1], pos))
    return kept[-1].softmax(-1), torch.cat([kept[1], kept[3].sin()], -1), pos + 1


def tables(m, x, pos):
    """With more nodes than a layer has, and from nothing but a size; and a mask."""
    table, hidden = torch.arange(pos.shape[0]).float().sin().exp().cos()[:, None].tanh(), pos[:, None] < torch.arange(8)
    return stack(lambda m, i, x, pos: x + (x @ weight(m, i)).masked_fill(hidden, -1e9).softmax(-1) * table)(m, x, pos)


def features_of_the_start(m, x, pos):
    """Every layer reads what is computed from the stream before the first, which so is no bottleneck."""
    x = x.sin() * 3
    start = (x @ m.w0).cos() + pos[:, None].float()
    return stack(lambda *args: layer(*args) * start)(m, x, pos)


def an_earlier_cache(m, x, pos):
    """Layers that share the keys of another are one kind."""
    x = stack(layers=2)(m, x, pos)
    return stack(lambda m, i, x, pos: x + (x @ cache(m, i % 2).T).softmax(-1) @ cache(m, i % 2))(m, x, pos)


def sizes_of_values(m, x, pos):
    """A table that is made of how many rows a value has, and a value's own number of rows."""
    y = torch.cat([simple(m, 0, x, pos), x], 1)
    rows = torch.arange(y.shape[1]).float()
    x = stack(lambda m, i, x, pos: simple(m, i, x, pos) * rows.mean() + x.shape[1])(m, x, pos)
    return x + y.mean()


def order_of_a_cache(m, i, x, pos):
    """A read before and one after a write, of which only the names of the storage say so."""
    before = cache(m, i)[3:].sum(0)
    cache(m, i)[3:].mul_(x.mean())
    return simple(m, i, x, pos) + before - cache(m, i)[3:].sum(0)


def transposed(m, i, x, pos):
    """A stream that is not dense, and a view of it that it would not allow if it were."""
    x = x.transpose(1, 2).contiguous() if x.is_contiguous() else x.transpose(1, 2)
    return (x.view(1, -1).tanh().view(1, WIDTH, -1) + weight(m, i)[:, :1]).transpose(1, 2)


FOUND = {
    "taps, and a result beside": taps,
    "tables and masks": tables,
    "features of the start": features_of_the_start,
    "an earlier cache": an_earlier_cache,
    "no value of as many rows": stack(simple, before=lambda m, x: torch.cat([m.table[None, :1, :], x], 1)),
    "sizes of values": sizes_of_values,
    "what nobody reads": stack(lambda m, i, x, pos: (simple(m, i, x, pos), (x @ weight(m, i)).exp())[0]),
    "order of a cache": stack(order_of_a_cache),
    "not dense": stack(transposed),
}


@pytest.mark.parametrize("function", FOUND.values(), ids=FOUND)
def test_layers_are_found(function):
    """At most the first or the last of them is joined with what stands beside."""
    assert Counter(outlined(function)).most_common(1)[0][1] >= LAYERS - 1


def test_a_write_that_nobody_reads_is_kept():
    def step(m, i, x, pos):
        cache(m, i).index_copy_(0, pos, x[0])
        return simple(m, i, x, pos)

    program = program_with(stack(step))
    outline(program)
    assert [str(node.args[2]) for node in nodes(program)] == [f"[b_c{i}]" for i in range(LAYERS)]


@pytest.mark.parametrize("layers", [2, 3, 8])
def test_any_number_of_layers(layers):
    def forward(m, ids, pos):
        return stack(layers=layers, before=lambda m, x: x * 2.0)(m, m.table[ids], pos) @ m.table.T

    assert outlined(forward, make_ids, layers=layers) == "A" + "B" * layers + "C"


@settings(max_examples=8, deadline=None, database=None)
@given(st.lists(st.sampled_from([0.25, 0.5]), min_size=2, max_size=8))
def test_every_node_is_called_once(scales):
    """Whatever kinds of layers follow each other, no node is lost or doubled, and none of two equal parts is kept."""
    options = {f"layer_{i}": {"scale": scale} for i, scale in enumerate(scales)}
    program = program_with(stack(layers=len(scales), **options), layers=8)
    there = len(Flow(program.methods["forward"]).nodes)
    outline(program)
    sizes = {key: block.size for key, block in program.blocks.items()}
    assert sum(sizes[node.args[0]] for node in nodes(program)) == there
    assert sizes.keys() == {node.args[0] for node in nodes(program)}


@pytest.mark.parametrize(("name", "form"), [("gemma3", "Plain"), ("llama", "Plain"), ("qwen3", "Positions")])
def test_layers_of_transformers(name, form, monkeypatch):
    """Four equal layers; of Gemma 3 both kinds, which differ in nothing but the mask and the tables that they read."""
    import test_foreign_graphs as foreign

    model, config, options = foreign.MODELS[name]
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if "layer_types" in options else {}
    monkeypatch.setitem(foreign.MODELS, name, (model, config, {**options, "num_hidden_layers": 4, **kinds}))
    program = Program.of(export(getattr(foreign, form)(name), *make_ids(ROWS)))
    assert not outline(program, make=make_ids).refusals
    assert calls(program) == "ABBBBC"


# What differs in one thing


@pytest.mark.parametrize(
    ("option", "line"), [("eps", "aten.add.Tensor(%v1, {})"), ("scale", "aten.mul.Tensor(%v9, {})")]
)
def test_another_attribute_is_another_block(option, line):
    """The lines of both are shown, and the place in the source."""
    program = program_with(stack(layer_2={option: 0.25}))
    (refusal,) = outline(program).refusals
    assert calls(program) == "AABAA" and refusal.node.startswith(f"{__file__}:")
    assert "(x1) is not block" in refusal.reason and "(x4), from which it differs in 1 places, " in refusal.reason
    ours, theirs = refusal.reason.split(" instead of ")
    assert ours.endswith(line.format(0.25)) and theirs.endswith(line.format({"eps": 1e-06, "scale": 0.5}[option]))


def two_products(m, i, x, pos):
    return x + torch.tanh(x @ weight(m, i)) @ weight(m, i if i == 2 else i + LAYERS)


def one_of_two(m, i, x, pos):
    first, second = weight(m, i), weight(m, i + LAYERS)
    return x + torch.tanh(x @ first) @ second + torch.tanh(x @ (second if i == 2 else first))


def a_difference(m, i, x, pos):
    y, z = x.cos(), x.sin()
    return x + (y + z) * (z - y if i == 2 else y - z)


DIFFERENT = {
    "shape of a constant": (layer, {"c2": randn(LENGTH - 1, WIDTH)}),
    "type of a constant": (lambda m, i, x, pos: x + x @ weight(m, i).float(), {"w2": randn(WIDTH, WIDTH).double()}),
    "one constant for two": (two_products, {"layers": 2 * LAYERS}),
    "the other of two constants": (one_of_two, {"layers": 2 * LAYERS}),
    "arguments swapped": (a_difference, {}),
}


@pytest.mark.parametrize(("step", "change"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_another_block(step, change):
    assert outlined(stack(step), **change) == "AABAA"


def test_another_range_is_another_block():
    """Native code may rely on it."""
    rows = torch.export.Dim("rows", min=1, max=MAX_ROWS + 4)
    module, shapes = Function(stack(), **tensors()), (({1: rows}, {0: rows}),)
    wide = torch.export.export(module, make(ROWS), dynamic_shapes=shapes, strict=False)
    program = Program({"narrow": program_with().methods["forward"], "wide": wide})
    outline(program)
    assert len(program.blocks) == 2 and calls(program, "narrow") == calls(program, "wide") == "AAAAA"


# What stays whole


def numbers(m, x, pos):
    held = pos[0].item(), pos[-1].item()
    return stack(lambda m, i, x, pos: simple(m, i, x, pos) * held[i % 2])(m, x, pos)


def one_view(m, x, pos):
    """It is not dense: what is handed on would be a copy, and a write there would be lost."""
    half = m.c0[:, :4]
    for i in range(LAYERS):
        x = simple(m, i, x, pos)
        half.index_copy_(0, pos, x[0, :, :4])
    return x


def an_old_view(m, x, pos):
    old = m.c0[:, :4]
    for i in range(LAYERS):
        x = simple(m, i, x, pos) + old.mean()
        if i == 2:
            m.c0.index_copy_(0, pos, x[0])
    return x


WHOLE = {
    "nothing repeats": (lambda m, x, pos: (x @ m.w0).tanh().cumsum(-1).exp(), "no part of it repeats"),
    "a value is written": (
        stack(lambda *args: simple(*args).mul_(2.0)), "%mul_ writes into %add, which the method computes",
    ),
    "values are numbers": (numbers, "%item is a number that depends on values"),
    "all write one cache": (stack(lambda *args: layer(*args, number=0)), "no part of it repeats"),
    "all write one view": (one_view, "no part of it repeats"),
    "a view is older than a write": (
        an_old_view, "%index_copy_ writes into what %slice_1 shows, which several parts read",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("function", "reason"), WHOLE.values(), ids=WHOLE)
def test_what_cannot_be_cut_stays_whole(function, reason):
    program = program_with(function)
    (refusal,) = outline(program).refusals
    assert calls(program) == "A" and refusal.reason == f"it stays whole: {reason}"


def test_a_method_with_graphs_of_its_own_stays_whole():
    """Without the runner's checks, which do not know such graphs."""
    program = program_with(lambda m, x, pos: torch.cond(x.sum() > 0, torch.sin, torch.cos, (stack()(m, x, pos),)))
    before = copy_program(program)
    (refusal,) = OutlineBlocks().run(program).refusals
    assert calls(program) == "A" and refusal.reason == "it stays whole: %true_graph_0 is a graph of its own"
    assert_equal(*(results(p, make(2), make(ROWS)) for p in (program, before)))


def test_a_method_is_one_block_on_request():
    program = program_with()
    assert not outline(program, *parse_pipeline("outline_blocks{unrolled=true}")).refusals
    assert calls(program) == "A"


# The operator, facts and texts


def test_a_block_takes_its_own_types_only():
    program = program_with()
    outline(program)
    (key,) = program.blocks
    w, c, x, pos = randn(WIDTH, WIDTH), randn(LENGTH, WIDTH), *make(3)
    wrong = [
        ([w.double()], [c], [x, pos]), ([w], [c[1:]], [x, pos]), ([w], [c], [x[..., 0], pos]), ([w], [c], [x, pos[1:]]),
        ([w], [c], [x, pos.int()]),
    ]  # fmt: skip
    with FakeTensorMode() as mode:

        def call(*groups):
            return BLOCK(key, *([mode.from_tensor(value) for value in group] for group in groups))

        (y,) = call([w], [c], [x, pos])
        assert y.shape == x.shape and y.dtype == x.dtype
        for groups in wrong:
            with pytest.raises(ValueError, match=r"expected a torch\.\w+ of shape \[.*\], got torch\.\w+ \["):
                call(*groups)


def test_an_unknown_block_is_an_error(monkeypatch):
    program = program_with()
    outline(program)
    monkeypatch.delitem(GRAPHS, *program.blocks)
    with pytest.raises(RuntimeError, match=r"block '\w{12}' is not known in this process; run the pass outline_blocks"):
        results(program, make(ROWS))


def test_no_other_pass_can_follow():
    message = r"pass remove_noop \(number 3, .*needs no_blocks, but outline_blocks \(number 2\) breaks it .* works: "
    with pytest.raises(PassError, match=message + "share_buffers,remove_noop,outline_blocks"):
        run_pipeline(program_with(), parse_pipeline("share_buffers,outline_blocks,remove_noop"))


def printed():
    program = program_with(stack(layer_1={"eps": 1e-5}))
    run_pipeline(program, parse_pipeline("share_buffers,outline_blocks"))
    return print_program(program)


def test_texts_and_keys_are_the_same_in_two_processes():
    code = "import test_outline_blocks as t; print(t.printed(), end='')"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == printed() == printed()

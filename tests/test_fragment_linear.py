"""Layers read weights packed for the tensor core, once however many methods and uses they have; the kernels themselves
are in ``test_fragment_int4_linear``, ``test_fragment_int8_linear`` and ``test_fragment_bf16_linear``.
"""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from ir import (
    MAX_ROWS,
    ROWS,
    Function,
    Positive,
    apply,
    assert_derived,
    assert_equal,
    check,
    export,
    node_of,
    program_of,
    randn,
    results,
    unchanged,
)
from torch.utils._sympy.value_ranges import ValueRanges

from eyas.kernels import register_triton_operators
from eyas.kernels.int4_linear import dequantize, int4_linear
from eyas.models.weights import Dense, Int4, Int8, TensorSource
from eyas.passes.facts import evidence_against
from eyas.passes.fragment_linear import FragmentLinear
from eyas.passes.printer import print_program
from eyas.passes.program import Program
from eyas.passes.registry import parse_pipeline

POSITIVE = Positive()
N, K = 72, 200  # neither is a multiple of a tile's 64 rows or of a group's columns
register_triton_operators()


def weight(kind, n=N, k=K, seed=0, group=32):
    source = TensorSource(randn(n, k, seed=seed))
    made = {
        "dense": lambda s: Dense.of(s, dtype=torch.bfloat16),
        "int8": Int8,
        "int4": lambda s: Int4(s, group, False),
        "zeros": lambda s: Int4(s, group, True),
    }
    return made[kind](source)


def inputs_of(rows):
    return (randn(1, rows, K, seed=rows).bfloat16(),)


def program_over(function, make=inputs_of, **tensors):
    return program_of(function, *make(ROWS), **tensors)


def call(module, x):
    return module.w(x)


def assert_rounded_alike(got, expected):
    """Both multiply the same float32 numbers and round to bfloat16 once: at most one digit of that apart, and where
    sums of 200 products near 1 cancel, their float32 rounding.
    """
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2e-5)


def rewrite(one, program, rewrites, make=inputs_of, method="forward"):
    inputs = [make(rows) for rows in (1, 2, ROWS, MAX_ROWS)]
    expected = results(program, *inputs, method=method)
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals, record.refusals
    assert_rounded_alike(results(program, *inputs, method=method), expected)
    return program


@POSITIVE
def int4_symmetric(one):
    program = program_over(call, w=weight("int4"))
    before = program.constants()
    check(
        rewrite(one, program, 1),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: i32[2,7,2,32,4] = buffer w.qweight.fragments
        CHECK: %[[scales:\w+]]: f32[2,7,8,8] = buffer w.scales.fragments
        CHECK-NOT: buffer
        CHECK: %[[x:\w+]]: bf16[1,s0,200] = input
        CHECK: %[[rows:\w+]]: bf16[s0,200] = aten.reshape.default(%[[x]], [-1, 200])
        CHECK: %[[y:\w+]]: bf16[s0,72] = eyas.fragment_int4_linear.default(%[[rows]], %[[w]], %[[scales]], None, 32, 72,
        CHECK: %[[out:\w+]]: bf16[1,s0,72] = aten.reshape.default(%[[y]], [1, -1, 72])
        CHECK: return [%[[out]]]
        """,
    )
    assert_derived(program, before, ".fragments")


@POSITIVE
def int4_with_zeros(one):
    """Zero points are offsets, each tensor in the narrowest dtype that keeps its bits."""
    layer = weight("zeros", group=64)
    layer.scales, layer.offsets = layer.scales.bfloat16().float(), layer.offsets.half().float()
    program = program_over(call, w=layer)
    before = program.constants()
    check(
        rewrite(one, program, 1),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: i32[2,4,4,32,4] = buffer w.qweight.fragments
        CHECK: %[[scales:\w+]]: bf16[2,4,8,8] = buffer w.scales.fragments
        CHECK: %[[offsets:\w+]]: f16[2,4,8,8] = buffer w.offsets.fragments
        CHECK: eyas.fragment_int4_linear.default(%{{\w+}}, %[[w]], %[[scales]], %[[offsets]], 64, 72, 16)
        CHECK-NOT: eyas.int4_linear
        """,
    )
    assert_derived(program, before, ".fragments")


@POSITIVE
def after_int4_smallm(one):
    """Both of the operators that ``int4_smallm`` chooses between."""
    module = Function(call, w=weight("int4"))
    program = Program({"few": export(module, *inputs_of(ROWS)), "many": export(module, *inputs_of(ROWS))})
    bound(program, "many", MAX_ROWS + 1)
    (chosen,) = [apply(one, program) for one in parse_pipeline("int4_smallm")]
    assert chosen.rewrites == 2 and node_of(program, "eyas.int4_anym.default", "many")
    rewrite(one, program, 2, method="few")
    check_both_forms(program, "int4", "None, 32, 72")


def bound(program, method, rows):
    ranges = program.methods[method].range_constraints
    for symbol in ranges:
        ranges[symbol] = ValueRanges(1, rows)


def check_both_forms(program, bits, tail):
    check(
        program,
        rf"""
        CHECK-LABEL: method few
        CHECK: %[[w:\w+]]: i32{{{{.*}}}} = buffer w.qweight.fragments
        CHECK: eyas.fragment_{bits}_linear.default(%{{{{\w+}}}}, %[[w]], %{{{{\w+}}}}, {tail}, 16)
        CHECK-LABEL: method many
        CHECK: %[[v:\w+]]: i32{{{{.*}}}} = buffer w.qweight.fragments
        CHECK: eyas.fragment_{bits}_matmul.default(%{{{{\w+}}}}, %[[v]], %{{{{\w+}}}}, {tail})
        """,
    )
    states = [ep.state_dict for ep in program.methods.values()]
    assert states[0].keys() == states[1].keys() and all(states[0][name] is states[1][name] for name in states[0])


@POSITIVE
def int8_of_few_and_many_rows(one):
    """One packed table, two operators; the scales stay as they are."""
    module = Function(call, w=weight("int8"))
    program = Program({"few": export(module, *inputs_of(ROWS)), "many": export(module, *inputs_of(ROWS))})
    bound(program, "many", MAX_ROWS + 1)
    before = program.constants()
    rewrite(one, program, 2, method="many")
    check_both_forms(program, "int8", "72")
    assert_derived(program, before, ".fragments")
    assert program.constants().keys() == {"w.qweight.fragments", "w.scales"}


@POSITIVE
def dense(one):
    """Without a bias of its own: one that is added is another operation."""
    program = program_over(lambda m, x: m.w(x) + m.bias, w=weight("dense"), bias=randn(N).bfloat16())
    before = program.constants()
    check(
        rewrite(one, program, 1),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: bf16[2,7,4,2,32,8] = buffer w.weight.fragments
        CHECK: %[[rows:\w+]]: bf16[s0,200] = aten.reshape.default(%{{\w+}}, [-1, 200])
        CHECK: %[[y:\w+]]: bf16[s0,72] = eyas.fragment_bf16_linear.default(%[[rows]], %[[w]], 72, 16)
        CHECK: %[[z:\w+]]: bf16[1,s0,72] = aten.reshape.default(%[[y]], [1, -1, 72])
        CHECK: aten.add.Tensor(%[[z]], %{{\w+}})
        """,
    )
    assert_derived(program, before, ".fragments")
    assert program.constants().keys() == {"w.weight.fragments", "bias"}
    (made,) = program.derived.values()
    assert made.function == "eyas.kernels.fragment_bf16_linear:pack_bf16_fragments" and made.sources == ("w.weight",)


@POSITIVE
def dense_of_few_and_many_rows(one):
    module = Function(call, w=weight("dense"))
    program = Program({"few": export(module, *inputs_of(ROWS)), "many": export(module, *inputs_of(ROWS))})
    bound(program, "many", MAX_ROWS + 1)
    rewrite(one, program, 2, method="many")
    check(
        program,
        r"""
        CHECK-LABEL: method few
        CHECK: %[[w:\w+]]: bf16{{.*}} = buffer w.weight.fragments
        CHECK: eyas.fragment_bf16_linear.default(%{{\w+}}, %[[w]], 72, 16)
        CHECK-LABEL: method many
        CHECK: %[[v:\w+]]: bf16{{.*}} = buffer w.weight.fragments
        CHECK: eyas.fragment_bf16_matmul.default(%{{\w+}}, %[[v]], 72)
        """,
    )
    few, many = (ep.state_dict for ep in program.methods.values())
    assert few.keys() == many.keys() == {"w.weight.fragments"}
    assert few["w.weight.fragments"] is many["w.weight.fragments"]


@POSITIVE
def rows_of_the_method_choose_the_form(one):
    """A method of up to 8 rows says so, one without a limit takes the product of many rows."""
    module = Function(call, w=weight("int4"))
    program = Program({name: export(module, *inputs_of(ROWS)) for name in ("eight", "any")})
    bound(program, "eight", 8)
    program.methods["any"].range_constraints.clear()
    assert apply(one, program).rewrites == 2
    check(
        program,
        r"""
        CHECK-LABEL: method eight
        CHECK: eyas.fragment_int4_linear.default({{.*}}, 32, 72, 8)
        CHECK-LABEL: method any
        CHECK: eyas.fragment_int4_matmul.default({{.*}}, 32, 72)
        """,
    )


@POSITIVE
def other_numbers_of_dimensions(one):
    """A single vector, rows without a batch, and rows that are part of one another's dimensions."""

    def products(module, x):
        return module.w(x[0, 0]), module.w(x[0]), module.w(x.unflatten(1, (-1, 1)))

    check(
        rewrite(one, program_over(products, w=weight("zeros")), 3),
        r"""
        CHECK-LABEL: method forward
        CHECK: eyas.fragment_int4_linear.default({{.*}}, 32, 72, 1)
        CHECK: bf16[72] = aten.reshape.default(%{{\w+}}, [72])
        CHECK: %[[y:\w+]]: bf16[s0,72] = eyas.fragment_int4_linear.default({{.*}}, 32, 72, 16)
        CHECK-NOT: aten.reshape.default(%[[y]],
        CHECK: bf16[1,s0,1,72] = aten.reshape.default(%{{\w+}}, [1, -1, 1, 72])
        """,
    )


def embed_and_head(module, ids):
    return module.w(module.w.rows(ids, torch.bfloat16)), module.w.rows(ids + 1, torch.float32)


def ids_of(rows):
    return (torch.arange(rows)[None] * 7 % (N - 1),)


@POSITIVE
def tied_int8_table(one):
    program = program_over(embed_and_head, ids_of, w=weight("int8"))
    before = program.constants()
    ids = ids_of(ROWS)
    _, looked_up = results(program, ids)
    check(
        rewrite(one, program, 3, ids_of),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: i32[2,7,4,32,4] = buffer w.qweight.fragments
        CHECK: %[[scales:\w+]]: f32[72] = buffer w.scales
        CHECK-NOT: buffer
        CHECK: %[[ids:\w+]]: i64[1,s0] = input
        CHECK: bf16[1,s0,200] = eyas.fragment_int8_embedding.default(%[[ids]], %[[w]], %[[scales]], 200, bf16)
        CHECK: eyas.fragment_int8_linear.default(%{{\w+}}, %[[w]], %[[scales]], 72, 16)
        CHECK-NOT: eyas.int8_embedding
        CHECK: f32[1,s0,200] = eyas.fragment_int8_embedding.default(%{{\w+}}, %[[w]], %[[scales]], 200, f32)
        """,
    )
    assert_derived(program, before, ".fragments")
    assert_equal(results(program, ids)[1:], [looked_up])  # looking up is exact


@POSITIVE
def tied_dense_table(one):
    """What an embedding is told about its gradient changes nothing."""

    def embed_and_head(module, ids):
        return module.w(module.w.rows(ids, torch.bfloat16)), F.embedding(ids + 1, module.w.weight, padding_idx=3)

    program = program_over(embed_and_head, ids_of, w=weight("dense"))
    before = program.constants()
    ids = ids_of(ROWS)
    _, looked_up = results(program, ids)
    check(
        rewrite(one, program, 3, ids_of),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: bf16[2,7,4,2,32,8] = buffer w.weight.fragments
        CHECK-NOT: buffer
        CHECK: %[[ids:\w+]]: i64[1,s0] = input
        CHECK: bf16[1,s0,200] = eyas.fragment_bf16_embedding.default(%[[ids]], %[[w]], 200)
        CHECK: eyas.fragment_bf16_linear.default(%{{\w+}}, %[[w]], 72, 16)
        CHECK-NOT: aten.embedding
        CHECK: bf16[1,s0,200] = eyas.fragment_bf16_embedding.default(%{{\w+}}, %[[w]], 200)
        """,
    )
    assert_derived(program, before, ".fragments")
    assert_equal(results(program, ids)[1:], [looked_up])  # looking up is exact


def embed_and_head_apart(kind):
    """A program of two methods, and its weight."""
    module = Function(lambda m, ids: m.w.rows(ids, torch.bfloat16), w=weight(kind))
    head = Function(call, w=module.w)
    return Program({"embed": export(module, *ids_of(ROWS)), "head": export(head, *inputs_of(ROWS))}), module.w


def assert_one_table(one, kind, names):
    program, _ = embed_and_head_apart(kind)
    rewrite(one, program, 2, ids_of, method="embed")
    embed, head = (program.methods[method].state_dict for method in ("embed", "head"))
    assert embed.keys() == head.keys() == names
    assert all(embed[name] is head[name] for name in embed)


@POSITIVE
def an_int8_table_whose_head_is_in_another_method(one):
    assert_one_table(one, "int8", {"w.qweight.fragments", "w.scales"})


@POSITIVE
def a_dense_table_whose_head_is_in_another_method(one):
    assert_one_table(one, "dense", {"w.weight.fragments"})


@POSITIVE
def several_uses_and_layers(one):
    """One weight read twice, one input read by two layers, a product that is a result and an input, a dense layer."""

    def layers(module, x):
        first = module.w(x)
        return first, module.w(x * 2), module.other(first), module.dense(x)

    tensors = dict(w=weight("int4"), other=weight("zeros", k=N, seed=1), dense=weight("dense", seed=2))
    program = rewrite(one, program_over(layers, **tensors), 4)
    packed = ("dense.weight", "other.offsets", "other.qweight", "other.scales", "w.qweight", "w.scales")
    assert program.constants().keys() == {f"{name}.fragments" for name in packed}


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(FragmentLinear())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", ["int4", "zeros"])
def test_packed_weights_are_the_weights(kind, group):
    """The numbers that the packed constants stand for, by products with unit vectors, which round nothing that counts:
    float32 throughout.
    """
    layer = weight(kind, group=group)
    program = program_over(call, w=layer)
    assert apply(FragmentLinear(), program).rewrites == 1
    node = node_of(program, "eyas.fragment_int4_linear.default")
    names = [f"w.{part}.fragments" for part in ("qweight", "scales", "offsets")]
    words, scales, offsets = (program.constants().get(name) for name in names)
    assert node.args[4:] == (group, N, MAX_ROWS)
    made = torch.ops.eyas.fragment_int4_linear(torch.eye(K), words, scales, offsets, group, N)
    expected = int4_linear(torch.eye(K), layer.qweight, layer.scales, layer.offsets, group)
    assert_equal([made, made], [expected, dequantize(layer.qweight, layer.scales, layer.offsets, group, K).T])


def test_packed_dense_weights_are_the_weights():
    """By the rows that are looked up, and by products with unit vectors."""
    program, layer = embed_and_head_apart("dense")
    assert apply(FragmentLinear(), program).rewrites == 2
    words = program.constants()["w.weight.fragments"]
    assert torch.equal(torch.ops.eyas.fragment_bf16_embedding(torch.arange(N), words, K), layer.weight)
    eye = torch.eye(K, dtype=torch.bfloat16)
    assert torch.equal(torch.ops.eyas.fragment_bf16_linear(eye, words, N), layer.weight.T)


@pytest.mark.parametrize("kind", ["dense", "int4", "zeros", "int8"])
def test_a_row_is_what_it_is_alone(kind):
    """Where the reference's sums are exact: small whole numbers, times powers of two."""
    layer = weight(kind)
    if kind == "dense":
        layer.weight = (layer.weight * 4).round()
    else:
        layer.scales = torch.exp2(torch.randint(-3, 3, layer.scales.shape).float())
    if kind == "zeros":
        layer.offsets = -4 * layer.scales
    program = program_over(call, w=layer)
    apply(FragmentLinear(), program)
    x = torch.randint(-8, 9, (1, MAX_ROWS, K), generator=torch.Generator().manual_seed(0)).bfloat16()
    together = results(program, (x,))[0]
    alone = results(program, *[(x[:, i : i + 1],) for i in range(MAX_ROWS)])
    assert_equal([together], [torch.cat(alone, 1)])


@pytest.mark.parametrize(("kind", "name"), [("int4", "int4"), ("int8", "int8"), ("dense", "bf16")])
@pytest.mark.parametrize(("rows", "form"), [(MAX_ROWS, "linear"), (MAX_ROWS + 1, "matmul")])
def test_facts_know_what_is_packed(kind, name, rows, form):
    program = program_over(call, w=weight(kind))
    bound(program, "forward", rows)
    assert evidence_against("unpacked_weights", program) is None
    apply(FragmentLinear(), program)
    assert evidence_against("unpacked_weights", program).endswith(f"= eyas.fragment_{name}_{form}.default")


# What differs in one thing


def scaled_up(module, x):
    module.w.scales[:1].mul_(2)
    return module.w(x)


def counted(module, x):
    module.w.qweight[0, :1].add_(1)
    return module.w(x)


REFUSED = {
    "read by something else": (lambda m, x: m.w(x) + m.w.qweight.sum(), "w.qweight is also read by sum_1"),
    "written through a view": (counted, "w.qweight is written by method 'forward'"),
    "scales written": (scaled_up, "w.scales is written by method 'forward'"),
    "float32": (lambda m, x: m.w(x.float()), "activations are torch.float32; the kernel takes torch.bfloat16"),
    "two dynamic dimensions": (
        lambda m, x: m.w(x[0].unsqueeze(0).expand(x.shape[1], -1, -1)), "has more than one symbolic dimension"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_a_reason(name, kind):
    function, reason = REFUSED[name]
    unchanged(FragmentLinear(), program_over(function, w=weight(kind)), reason)


def dense_counted(module, x):
    module.w.weight[0, :1].add_(1)
    return module.w(x)


DENSE_REFUSED = {
    "a bias": (lambda m, x: F.linear(x, m.w.weight, m.bias), "it has a bias, which the kernel does not add"),
    "a vector": (lambda m, x: F.linear(x, m.vector), "its weight has 1 dimension(s); the kernel takes 2"),
    "float32": (
        lambda m, x: F.linear(x.float(), m.wide), "activations are torch.float32; the kernel takes torch.bfloat16"
    ),
    "read by something else": (lambda m, x: m.w(x) + m.w.weight.sum(), "w.weight is also read by sum_1"),
    "looked up otherwise": (
        lambda m, x: (m.w(x), m.w.weight[x[0, :, 0].long()]), "w.weight is also read by index"
    ),
    "written through a view": (dense_counted, "w.weight is written by method 'forward'"),
    "computed": (lambda m, x: F.linear(x, m.w.weight * 2), "its weight is computed, not a constant"),
    "two dynamic dimensions": (
        lambda m, x: m.w(x[0].unsqueeze(0).expand(x.shape[1], -1, -1)), "has more than one symbolic dimension"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE_REFUSED)
def test_refuses_dense_with_a_reason(name):
    function, reason = DENSE_REFUSED[name]
    tensors = dict(w=weight("dense"), bias=randn(N).bfloat16(), vector=randn(K).bfloat16(), wide=randn(N, K))
    unchanged(FragmentLinear(), program_over(function, **tensors), reason)


def test_a_bias_of_one_use_refuses_all():
    """Otherwise the weight would be stored twice."""

    def both(module, x):
        return module.w(x), F.linear(x, module.w.weight, module.bias), module.w.rows(x[..., 0].long(), x.dtype)

    program = program_over(both, w=weight("dense"), bias=randn(N).bfloat16())
    unchanged(FragmentLinear(), program, "it has a bias")


def test_a_group_size_without_a_kernel_is_refused():
    def odd(module, x):
        return torch.ops.eyas.int4_linear(x, module.q, module.scales, None, 40)

    tensors = dict(q=torch.zeros(N, K // 2, dtype=torch.uint8), scales=torch.ones(N, K // 40))
    unchanged(FragmentLinear(), program_over(odd, **tensors), "group size 40 has no kernel; allowed: 32, 64, 128, 256")


def test_a_weight_for_two_widths_is_refused():
    """Its last group is padded, so both are right; the columns that are packed are not the same."""

    def both(module, x):
        return module.w(x), torch.ops.eyas.int4_linear(x[..., : K - 8], module.w.qweight, module.w.scales, None, 32)

    program = program_over(both, w=weight("int4"))
    before = print_program(program)
    record = apply(FragmentLinear(), program)
    reason = (
        "its w.qweight would be packed in two ways: pack_fragments(w.qweight, 192, 32) and "
        "pack_fragments(w.qweight, 200, 32)"
    )
    assert [refusal.reason for refusal in record.refusals] == [reason] * 2 and print_program(program) == before


def test_a_width_that_is_not_known_is_refused():
    def shorter(module, x):
        return torch.ops.eyas.int4_linear(x[0].T, module.q, module.scales, None, 32)

    tensors = dict(q=torch.zeros(N, 16, dtype=torch.uint8), scales=torch.ones(N, 1))
    unchanged(FragmentLinear(), program_over(shorter, **tensors), "wide, which is no constant")


def test_a_reader_in_another_method_refuses_all_uses():
    """Otherwise the weight would be stored twice."""
    module = Function(call, w=weight("int8"))
    ep = export(module, *inputs_of(ROWS))
    other = export(Function(lambda m, x: x * m.w.qweight.sum(), w=module.w), *inputs_of(ROWS))
    unchanged(FragmentLinear(), Program({"verify": ep, "stats": other}), "also read by sum_1 of method 'stats'")


def test_a_computed_weight_is_refused():
    def turned(module, x):
        return torch.ops.eyas.int8_linear(x, module.w.qweight.neg(), module.w.scales)

    unchanged(FragmentLinear(), program_over(turned, w=weight("int8")), "its weight is computed, not a constant")


def test_without_layers_nothing_changes():
    unchanged(FragmentLinear(), program_over(lambda m, x: x + 1))


@pytest.mark.parametrize("kind", ["dense", "int8"])
def test_an_embedding_alone_stays(kind):
    program = program_of(lambda m, ids: m.w.rows(ids, torch.bfloat16), *ids_of(ROWS), w=weight(kind))
    unchanged(FragmentLinear(), program)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from eyas.passes.facts import FACTS
from eyas.passes.program import Program
from eyas.passes.registry import find_pass, pass_names
print(len([find_pass(name) for name in pass_names()]), FACTS["unpacked_weights"](Program({})))
try:
    find_pass(sys.argv[1])().run(Program.of(torch.export.export(torch.nn.Identity(), (torch.ones(1),))))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["fragment_linear"])
def test_passes_can_be_listed_without_triton(name):
    command = [sys.executable, "-c", WITHOUT_TRITON, name]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert f"the kernels of {name} need triton, which is not installed" in said and " None\n" in said

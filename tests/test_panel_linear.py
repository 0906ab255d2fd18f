"""Linear layers read repacked weights, which exist once however many methods and uses they have."""

import pytest
import torch
import torch.nn.functional as F
from ir import (
    MAX_ROWS,
    ROWS,
    Function,
    Positive,
    apply,
    assert_close,
    assert_derived,
    assert_equal,
    check,
    export,
    program_of,
    randn,
    results,
    transformer,
    transformer_inputs,
    unchanged,
)
from torch import nn

from eyas.kernels.panel_linear import PANEL, unpack_panels
from eyas.models.weights import Dense, Int4, Int8, TensorSource
from eyas.passes.numerics import copy_program, differences
from eyas.passes.panel_linear import PanelLinear
from eyas.passes.printer import print_program
from eyas.passes.program import Program

POSITIVE = Positive()
N, K = 40, 72  # neither is a multiple of a panel's 16 columns or of a group's 32
ATOL = 2e-5  # sums of 72 products of values near 1, in another order; measured 4e-6


def weight(kind, n=N, k=K, seed=0):
    """A matrix ``[n, k]`` in a format of ``eyas.models.weights``."""
    source = TensorSource(randn(n, k, seed=seed))
    made = {"dense": Dense.of, "int8": Int8, "int4": lambda s: Int4(s, 32, False), "zeros": lambda s: Int4(s, 32, True)}
    return made[kind](source)


def inputs_of(rows):
    return (randn(1, rows, K, seed=rows),)


def program_over(function, make=inputs_of, **tensors):
    return program_of(function, *make(ROWS), **tensors)


def rewrite(one, program, rewrites, make=inputs_of, method="forward"):
    inputs = [make(rows) for rows in (1, 2, ROWS, MAX_ROWS)]
    expected = results(program, *inputs, method=method)
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals
    assert_close(results(program, *inputs, method=method), expected, ATOL)
    return program


def call(module, x):
    return module.w(x)


@POSITIVE
def dense(one):
    program = program_over(call, w=weight("dense"))
    before = program.constants()
    check(
        rewrite(one, program, 1),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: f32[3,72,16] = buffer w.weight.panels
        CHECK-NOT: buffer
        CHECK: %[[x:\w+]]: f32[1,s0,72] = input
        CHECK: %[[rows:\w+]]: f32[s0,72] = aten.reshape.default(%[[x]], [-1, 72])
        CHECK: %[[out:\w+]]: f32[s0,40] = eyas.panel_linear.default(%[[rows]], %[[w]], 40)
        CHECK: %[[y:\w+]]: f32[1,s0,40] = aten.reshape.default(%[[out]], [1, -1, 40])
        CHECK: return [%[[y]]]
        """,
    )
    assert_derived(program, before, ".panels")
    assert_equal([unpack_panels(program.constants()["w.weight.panels"], N)], [before["w.weight"]])


@POSITIVE
def int8(one):
    program = program_over(call, w=weight("int8"))
    before = program.constants()
    check(
        rewrite(one, program, 1),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: i8[3,72,16] = buffer w.qweight.panels
        CHECK: %[[scales:\w+]]: f32[48] = buffer w.scales.panels
        CHECK-NOT: buffer
        CHECK: f32[s0,40] = eyas.panel_int8_linear.default(%{{\w+}}, %[[w]], %[[scales]], 40)
        CHECK-NOT: eyas.int8_linear
        """,
    )
    assert_derived(program, before, ".panels")


def int4(one, kind):
    program = program_over(call, w=weight(kind))
    before = program.constants()
    check(
        rewrite(one, program, 1),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: u8[3,48,16] = buffer w.qweight.panels
        CHECK: %[[so:\w+]]: f32[3,3,2,16] = buffer w.scales.panels
        CHECK-NOT: buffer
        CHECK: f32[s0,40] = eyas.panel_int4_linear.default(%{{\w+}}, %[[w]], %[[so]], 32, 40)
        CHECK-NOT: eyas.int4_linear
        """,
    )
    assert_derived(program, before, ".panels")


@POSITIVE
def int4_symmetric(one):
    int4(one, "int4")


@POSITIVE
def int4_with_zeros(one):
    int4(one, "zeros")


@POSITIVE
def rows_without_a_batch(one):
    def make(rows):
        return (randn(rows, K, seed=rows),)

    check(
        rewrite(one, program_over(call, make, w=weight("int8")), 1, make),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[x:\w+]]: f32[s0,72] = input
        CHECK-NOT: aten.reshape
        CHECK: %[[y:\w+]]: f32[s0,40] = eyas.panel_int8_linear.default(%[[x]],
        CHECK: return [%[[y]]]
        """,
    )


@POSITIVE
def other_numbers_of_dimensions(one):
    """A single vector, and rows that are part of one another's dimensions."""

    def products(module, x):
        return module.w(x[0, 0]), module.w(x.unflatten(1, (-1, 1)))

    check(
        rewrite(one, program_over(products, w=weight("dense")), 2),
        r"""
        CHECK-LABEL: method forward
        CHECK: f32[40] = aten.reshape.default(%{{\w+}}, [40])
        CHECK: f32[1,s0,1,40] = aten.reshape.default(%{{\w+}}, [1, -1, 1, 40])
        """,
    )


@POSITIVE
def biases(one):
    """Of a layer of PyTorch, whose weights want gradients, and given by name as another pass might."""
    layer = nn.Linear(K, N)

    def products(module, x):
        return F.linear(x, module.layer.weight, module.layer.bias), module.layer(x)

    program = program_over(products, layer=layer)
    node = [n for n in program.methods["forward"].graph.nodes if n.target is torch.ops.aten.linear.default][1]
    x, matrix, bias = node.args
    node.args, node.kwargs = (x,), {"weight": matrix, "bias": bias}
    before = program.constants()
    check(
        rewrite(one, program, 2),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: f32[3,72,16] = buffer layer.weight.panels
        CHECK: %[[b:\w+]]: f32[40] = parameter layer.bias
        CHECK-COUNT-2: aten.add.Tensor(%{{\w+}}, %[[b]])
        """,
    )
    assert_derived(program, before, ".panels")


def embed_and_head(module, ids):
    return module.w(module.w.rows(ids, torch.float32)), module.w.rows(ids + 1, torch.float32)


def ids_of(rows):
    return (torch.arange(rows)[None] * 7 % (N - 1),)


@POSITIVE
def tied_dense_table(one):
    program = program_over(embed_and_head, ids_of, w=weight("dense"))
    before = program.constants()
    check(
        rewrite(one, program, 3, ids_of),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: f32[3,72,16] = buffer w.weight.panels
        CHECK-NOT: buffer
        CHECK: %[[table:\w+]]: f32[3,16,72] = aten.permute.default(%[[w]], [0, 2, 1])
        CHECK: aten.index.Tensor(%[[table]], [%{{\w+}}, %{{\w+}}])
        CHECK-NOT: aten.embedding
        CHECK: eyas.panel_linear.default(%{{\w+}}, %[[w]], 40)
        """,
    )
    assert_derived(program, before, ".panels")


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
        CHECK: %[[w:\w+]]: i8[3,72,16] = buffer w.qweight.panels
        CHECK: %[[scales:\w+]]: f32[48] = buffer w.scales.panels
        CHECK-NOT: buffer
        CHECK-NOT: eyas.int8_embedding
        CHECK: aten.index.Tensor(%[[scales]], [%{{\w+}}])
        CHECK: eyas.panel_int8_linear.default(%{{\w+}}, %[[w]], %[[scales]], 40)
        """,
    )
    assert_derived(program, before, ".panels")
    assert_equal(results(program, ids)[1:], [looked_up])  # looking up is exact


@POSITIVE
def tied_table_of_transformers(one):
    """The tracer gives the tied table one of its names; it is stored once, and so is everything else."""
    program = transformer()
    parameters = program.constants()
    rewrite(one, program, 6, transformer_inputs_of)
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[table:\w+]]: f32[3,32,16] = buffer model.lm_head.weight.panels
        CHECK-NOT: parameter {{.*}}_proj
        CHECK: aten.permute.default(%[[table]], [0, 2, 1])
        CHECK-NOT: aten.linear.default
        CHECK: eyas.panel_linear.default(%{{\w+}}, %[[table]], 48)
        """,
    )
    assert_derived(program, parameters, ".panels")


def transformer_inputs_of(rows):
    return transformer_inputs(min(rows, 9))


@POSITIVE
def several_uses_and_layers(one):
    """One weight read twice, one input read by two layers, a product that is a result and an input."""

    def layers(module, x):
        first = module.w(x)
        return first, module.w(x * 2), module.other(first)

    program = rewrite(one, program_over(layers, w=weight("int8"), other=weight("zeros", k=N, seed=1)), 3)
    assert sorted(program.constants()) == [
        f"{n}.panels" for n in ("other.qweight", "other.scales", "w.qweight", "w.scales")
    ]


@POSITIVE
def names_that_differ_in_a_dot(one):
    """``a.b`` and ``a_b`` are two weights, although a node's name can hold no dot."""
    inner = nn.Module()
    inner.b = weight("dense", seed=1)
    program = program_over(lambda m, x: (m.a.b(x), m.a_b(x)), a=inner, a_b=weight("dense", seed=2))
    rewrite(one, program, 2)
    assert sorted(program.constants()) == ["a.b.weight.panels", "a_b.weight.panels"]


@POSITIVE
def two_methods_share_what_is_packed(one):
    module = Function(call, w=weight("int8"))
    head = Function(lambda m, x: m.w(x[:, -1:]) + 1, w=module.w)
    program = Program({"verify": export(module, *inputs_of(ROWS)), "prefill": export(head, *inputs_of(ROWS))})
    before = program.constants()
    rewrite(one, program, 2, method="prefill")
    assert_derived(program, before, ".panels")
    verify, prefill = (program.methods[method].state_dict for method in ("verify", "prefill"))
    assert verify.keys() == prefill.keys() == {"w.qweight.panels", "w.scales.panels"}
    assert all(verify[name] is prefill[name] for name in verify)


@POSITIVE
def inside_a_module_whose_signature_is_kept(one):
    """A program may name the nodes that go into and out of its submodules."""
    module = Function(lambda m, x: m.inner(x) * 2, inner=Function(call, w=weight("dense")))
    ep = torch.export.export(module, inputs_of(3), strict=False, preserve_module_call_signature=("inner",))
    program = Program.of(ep)
    rewrite(one, program, 1, lambda rows: inputs_of(3))
    (kept,) = (entry.signature for entry in ep.module_call_graph if entry.fqn == "inner")
    assert kept.outputs[0].name in {node.name for node in ep.graph.nodes}


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(PanelLinear())


def counted(module, x):
    module.w.weight[0, :1].add_(1)
    return module.w(x)


def scaled_up(module, x):
    module.w.scales[:1].mul_(2)
    return module.w(x)


REFUSED = {
    "read by something else": (lambda m, x: m.w(x) + m.w.weight.sum(), "dense", "w.weight is also read by sum_1"),
    "the input of another layer": (
        lambda m, x: (m.w(x), F.linear(m.w.weight, m.other.weight)), "dense", "w.weight is also read by linear_1"
    ),
    "written through a view": (counted, "dense", "w.weight is written by method 'forward'"),
    "scales written": (scaled_up, "int8", "w.scales is written by method 'forward'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_a_reason(name):
    function, kind, reason = REFUSED[name]
    other = nn.Module()
    other.register_buffer("weight", randn(8, K, seed=3).bfloat16().float())
    program = program_over(function, w=weight(kind), other=other)
    if name == "the input of another layer":
        reasons = [refusal.reason for refusal in PanelLinear().run(program).refusals]
        assert len(reasons) == 1 and reason in reasons[0]
        return
    unchanged(PanelLinear(), program, reason)


def test_a_reader_in_another_method_refuses_all_uses():
    """Otherwise the weight would be stored twice."""
    module = Function(call, w=weight("dense"))
    ep = export(module, *inputs_of(ROWS))
    other = export(Function(lambda m, x: x * m.w.weight.sum(), w=module.w), *inputs_of(ROWS))
    unchanged(PanelLinear(), Program({"verify": ep, "stats": other}), "also read by sum_1 of method 'stats'")


def test_a_refused_use_refuses_the_weight():
    """One use has a type without a kernel, so the other keeps the table too; both are told."""
    program = program_over(lambda m, x: (m.w(x), m.w(x.double())), w=weight("int8"))
    before = print_program(program)
    record = apply(PanelLinear(), program)
    assert record.rewrites == 0 and print_program(program) == before
    assert [refusal.reason for refusal in record.refusals] == [
        "activations are torch.float64; the cpu kernels take torch.float32"
    ]


def test_other_activations_are_refused():
    layer = weight("dense")
    layer.weight = layer.weight.bfloat16()
    program = program_of(call, inputs_of(ROWS)[0].bfloat16(), w=layer)
    unchanged(PanelLinear(), program, "activations are torch.bfloat16")


def test_two_dynamic_dimensions_are_refused():
    def both(module, x):
        return module.w(x[0].unsqueeze(0).expand(x.shape[1], -1, -1))

    unchanged(PanelLinear(), program_over(both, w=weight("dense")), "more than one symbolic dimension")


COMPUTED = {
    "an input": lambda m, x: F.linear(x, x[0, :2]),
    "a sum of weights": lambda m, x: F.linear(x, m.w.weight * 2),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weights_are_refused(name):
    unchanged(PanelLinear(), program_over(COMPUTED[name], w=weight("dense")), "its weight is computed, not a constant")


LEFT_ALONE = {
    "another operator": lambda m, x: x @ m.w.weight.T,
    "looked up only": lambda m, x: F.embedding(x[0, :, 0].long().clamp(0, 3), m.w.weight),
    "looked up and read": lambda m, x: F.embedding(x[0, :, 0].long().clamp(0, 3), m.w.weight) + m.w.weight.sum(),
    "absent": lambda m, x: x + 1,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name):
    unchanged(PanelLinear(), program_over(LEFT_ALONE[name], w=weight("dense")))


def test_an_int8_embedding_alone_stays():
    program = program_of(lambda m, ids: m.w.rows(ids, torch.float32), *ids_of(ROWS), w=weight("int8"))
    unchanged(PanelLinear(), program)


def test_scales_that_two_weights_share_stay_one():
    """A format may tie them; each weight's group packs them under one name."""

    def both(module, x):
        return torch.ops.eyas.int8_linear(x, module.a, module.scales), torch.ops.eyas.int8_linear(
            x, module.b, module.scales
        )

    def matrix(seed):
        return (randn(N, K, seed=seed) * 40).round().clamp(-127, 127).to(torch.int8)

    program = program_over(both, a=matrix(0), b=matrix(1), scales=randn(N).abs() / 40)
    before = program.constants()
    rewrite(PanelLinear(), program, 2)
    assert sorted(program.constants()) == ["a.panels", "b.panels", "scales.panels"]
    assert_derived(program, before, ".panels")


def test_scales_that_would_be_packed_in_two_ways_are_refused():
    """Two weights share their scales, but only one of them has offsets; both would be packed under one name."""

    def both(module, x):
        first = torch.ops.eyas.int4_linear(x, module.a, module.scales, None, 32)
        return first, torch.ops.eyas.int4_linear(x, module.b, module.scales, module.offsets, 32)

    one, other = weight("zeros"), weight("zeros", seed=1)
    program = program_over(both, a=one.qweight, b=other.qweight, scales=one.scales, offsets=one.offsets)
    before = copy_program(program)
    record = apply(PanelLinear(), program)
    assert record.rewrites == 1 and [refusal.reason for refusal in record.refusals] == [
        "its scales would be packed in two ways: pack_scale_offset(scales, offsets) and pack_scale_offset(scales)"
    ]
    assert all(found.error < ATOL for found in differences(before, program, rows={"forward": [ROWS]}))


def test_packed_weights_of_a_few_columns():
    """A single input column: packing could hand back a view of the weight itself."""
    program = program_of(call, randn(1, ROWS, 1), w=weight("dense", PANEL, 1))
    before = program.constants()
    rewrite(PanelLinear(), program, 1, lambda rows: (randn(1, rows, 1, seed=rows),))
    assert_derived(program, before, ".panels")


def test_what_is_kept_has_users():
    program = program_over(call, w=weight("int8"))
    apply(PanelLinear(), program)
    ep = program.methods["forward"]
    assert all(node.users for node in ep.graph.nodes if node.op == "placeholder")
    assert set(ep.state_dict) == set(program.constants())

"""Projections of one value become one, wherever all of their weights are read together."""

import pytest
import torch
import torch.nn.functional as F
from ir import ROWS, Function, Positive, apply, check, export, program_of, randn, results, unchanged

from eyas.lowering.lower import Constants, made_from
from eyas.passes.fragment_linear import FragmentLinear
from eyas.passes.fuse_projections import FuseProjections
from eyas.passes.pipeline import run_pipeline
from eyas.passes.printer import print_program
from eyas.passes.program import Program
from eyas.passes.split_copy_to_slice import SplitCopyToSlice

eyas = torch.ops.eyas
POSITIVE = Positive()
K = 64
X = randn(1, ROWS, K)
INPUTS = [(randn(1, rows, K, seed=rows),) for rows in (1, 2, ROWS)]


def int8(**widths):
    """Buffers of int8 projections of width K: a letter and its number of outputs."""
    made = {}
    for seed, (name, n) in enumerate(widths.items()):
        generator = torch.Generator().manual_seed(seed)
        made[f"w{name}"] = torch.randint(-127, 128, (n, K), generator=generator, dtype=torch.int8)
        made[f"s{name}"] = torch.rand(n, generator=generator)
    return made


def int4(group=32, offsets=True, **widths):
    made = {}
    for seed, (name, n) in enumerate(widths.items()):
        generator = torch.Generator().manual_seed(seed)
        made[f"w{name}"] = torch.randint(0, 256, (n, K // 2), generator=generator, dtype=torch.uint8)
        made[f"s{name}"] = torch.rand(n, K // group, generator=generator)
        if offsets:
            made[f"o{name}"] = -torch.rand(n, K // group, generator=generator)
    return made


def project8(m, x, name):
    return eyas.int8_linear(x, getattr(m, f"w{name}"), getattr(m, f"s{name}"))


def project4(m, x, name, group=32):
    return eyas.int4_linear(x, getattr(m, f"w{name}"), getattr(m, f"s{name}"), getattr(m, f"o{name}", None), group)


def rewrite(one, program, rewrites=1):
    expected = results(program, *INPUTS)
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals
    for got, want in zip(results(program, *INPUTS), expected, strict=True):  # torch's products may add in another order
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4 * float(want.abs().max()))
    return program


@POSITIVE
def query_key_value(one):
    program = program_of(lambda m, x: tuple(project8(m, x, c) for c in "qkv"), X, **int8(q=24, k=8, v=8))
    check(
        rewrite(one, program),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: i8[40,64] = buffer wq.fused
        CHECK: %[[s:\w+]]: f32[40] = buffer sq.fused
        CHECK-NOT: buffer wk
        CHECK: %[[x:\w+]]: f32[1,s0,64] = input
        CHECK: %[[all:\w+]]: f32[1,s0,40] = eyas.int8_linear.default(%[[x]], %[[w]], %[[s]])
        CHECK: f32[1,s0,24] = aten.slice.Tensor(%[[all]], 2, 0, 24)
        CHECK: f32[1,s0,8] = aten.slice.Tensor(%[[all]], 2, 24, 32)
        CHECK: f32[1,s0,8] = aten.slice.Tensor(%[[all]], 2, 32, 40)
        """,
    )


@POSITIVE
def with_zero_points(one):
    program = program_of(lambda m, x: F.silu(project4(m, x, "g")) * project4(m, x, "u"), X, **int4(g=16, u=16))
    check(
        rewrite(one, program),
        r"""
        CHECK-LABEL: method forward
        CHECK: u8[32,32] = buffer wg.fused
        CHECK: f32[32,2] = buffer og.fused
        CHECK: %[[all:\w+]]: f32[1,s0,32] = eyas.int4_linear.default(%{{\w+}}, %{{\w+}}, %{{\w+}}, %{{\w+}}, 32)
        CHECK: aten.slice.Tensor(%[[all]], 2, 0, 16)
        """,
    )


@POSITIVE
def several_groups_of_a_method(one):
    def forward(m, x):
        twice = x * 2
        return project8(m, x, "q") + project8(m, x, "k"), project8(m, twice, "g") * project8(m, twice, "u")

    program = rewrite(one, program_of(forward, X, **int8(q=8, k=8, g=16, u=16)), rewrites=2)
    check(
        program,
        """
        CHECK-LABEL: method forward
        CHECK: i8[16,64] = buffer wq.fused
        CHECK: i8[32,64] = buffer wg.fused
        CHECK: f32[1,s0,16] = eyas.int8_linear.default(
        CHECK: f32[1,s0,32] = eyas.int8_linear.default(
        """,
    )


@POSITIVE
def dense(one):
    program = program_of(lambda m, x: F.linear(x, m.a) + F.linear(x, m.b), X, a=randn(8, K), b=randn(8, K, seed=3))
    check(
        rewrite(one, program),
        "CHECK-LABEL: method forward\nCHECK: f32[16,64] = buffer a.fused\nCHECK: f32[1,s0,16] = aten.linear.default(",
    )


@POSITIVE
def in_all_methods_at_once(one):
    """Two methods that read the same weights keep reading the same ones."""
    module = Function(lambda m, x: (project8(m, x, "q"), project8(m, x, "k")), **int8(q=8, k=8))
    program = Program({name: export(module, X) for name in ("first", "second")})
    record = apply(one, program)
    assert record.rewrites == 2 and not record.refusals
    constants = [ep.state_dict for ep in program.methods.values()]
    assert all(set(one) == {"wq.fused", "sq.fused"} for one in constants)
    assert constants[0]["wq.fused"] is constants[1]["wq.fused"]


@POSITIVE
def a_projection_with_another_reader(one):
    """A second user of a result reads its slice."""

    def forward(m, x):
        q, k = project8(m, x, "q"), project8(m, x, "k")
        return q + k, q.sum(-1)

    program = rewrite(one, program_of(forward, X, **int8(q=8, k=8)))
    check(
        program,
        r"""
        CHECK: %[[q:\w+]]: f32[1,s0,8] = aten.slice.Tensor(%{{\w+}}, 2, 0, 8)
        CHECK: aten.add.Tensor(%[[q]],
        CHECK: aten.sum.dim_IntList(%[[q]],
        """,
    )


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(FuseProjections())


NEAR = {
    "one projection": (lambda m, x: project8(m, x, "q"), int8(q=8)),
    "of different values": (lambda m, x: project8(m, x, "q") + project8(m, x * 2, "k"), int8(q=8, k=8)),
    "one weight twice": (lambda m, x: project8(m, x, "q") + project8(m, x, "q"), int8(q=8)),
    "of different formats": (lambda m, x: project8(m, x, "q") + F.linear(x, m.a), {**int8(q=8), "a": randn(8, K)}),
    "group sizes": (lambda m, x: project4(m, x, "q") + project4(m, x, "k", 64),
                    {**int4(q=8), **int4(64, k=8)}),
    "group sizes beyond the width": (lambda m, x: project4(m, x, "q", 64) + project4(m, x, "k", 128),
                                     {**int4(64, q=8), **int4(64, k=8)}),
    "scales of different types": (lambda m, x: project8(m, x, "q") + project8(m, x, "k"),
                                  {**int8(q=8, k=8), "sk": torch.rand(8).half()}),
    "one with zero points": (lambda m, x: project4(m, x, "q") + project4(m, x, "k"),
                             {**int4(q=8), **int4(offsets=False, k=8)}),
    "with a bias": (lambda m, x: F.linear(x, m.a, m.c) + F.linear(x, m.b, m.c),
                    {"a": randn(8, K), "b": randn(8, K, seed=1), "c": randn(8)}),
    "computed weights": (lambda m, x: F.linear(x, m.a * 2) + F.linear(x, m.b * 2),
                         {"a": randn(8, K), "b": randn(8, K, seed=1)}),
    "nothing to project": (lambda m, x: x + 1, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_leaves_alone(name):
    function, tensors = NEAR[name]
    unchanged(FuseProjections(), program_of(function, X, **tensors))


def test_a_weight_that_something_else_reads():
    program = program_of(
        lambda m, x: (project8(m, x, "q") + project8(m, x, "k"), m.wk.float().sum()), X, **int8(q=8, k=8)
    )
    unchanged(FuseProjections(), program, "its wk is also read by")


def test_a_weight_that_is_written():
    def forward(m, x):
        y = F.linear(x, m.a) + F.linear(x, m.b)
        m.a.add_(1)
        return y

    unchanged(FuseProjections(), program_of(forward, X, a=randn(8, K), b=randn(8, K, seed=1)), "its a is written")


def test_a_method_that_reads_one_of_them_alone():
    module = Function(lambda m, x: project8(m, x, "q") + project8(m, x, "k"), **int8(q=8, k=8))
    program = Program({"both": export(module, X)})
    alone = Function(lambda m, x: project8(m, x, "k"), **int8(q=8, k=8))
    alone.wk, alone.sk = module.wk, module.sk
    program.methods["alone"] = export(alone, X)
    before = print_program(program)
    record = apply(FuseProjections(), program)
    assert record.rewrites == 0 and print_program(program) == before
    (refusal,) = record.refusals
    assert "its wk is also read by" in refusal.reason and "without the others of the group" in refusal.reason


def test_methods_that_group_the_same_weights_otherwise():
    pair = Function(lambda m, x: project8(m, x, "q") + project8(m, x, "k"), **int8(q=8, k=8))
    three = Function(lambda m, x: project8(m, x, "q") + project8(m, x, "k") + project8(m, x, "v"), **int8(v=8))
    for name in ("wq", "sq", "wk", "sk"):
        three.register_buffer(name, getattr(pair, name))
    program = Program({"pair": export(pair, X), "three": export(three, X)})
    before = print_program(program)
    record = apply(FuseProjections(), program)
    assert record.rewrites == 0 and print_program(program) == before and len(record.refusals) == 2


def test_constants_made_of_fused_ones_can_be_made_anew():
    """As lowering does for a program that it finds in its cache: from the model's own tensors."""
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in int4(q=64, k=64).items()}
    x = X.bfloat16()
    program = program_of(lambda m, x: (project4(m, x, "q"), project4(m, x, "k")), x, **tensors)
    run_pipeline(program, [FuseProjections(), FragmentLinear()])
    want = program.constants()
    derived = made_from(want, program.derived)
    assert {"wq.fused", "wq.fused.fragments"} <= set(derived)
    made = Constants(tensors, derived)
    assert all(torch.equal(made[name], value) for name, value in want.items())


def test_slices_of_slices_stay_slices():
    """What a split leaves is not touched by this pass, nor the other way round."""
    program = program_of(lambda m, x: project8(m, x, "q").chunk(2, -1)[0] + project8(m, x, "k"), X, **int8(q=16, k=8))
    rewrite(FuseProjections(), program)
    assert apply(SplitCopyToSlice(), program).rewrites == 1

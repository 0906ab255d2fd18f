"""Which INT4 kernel a projection gets follows from the rows that its method takes, and its bytes stay as they are."""

import pytest
import torch
from ir import (
    MAX_ROWS,
    ROWS,
    Positive,
    apply,
    assert_equal,
    check,
    node_of,
    program_of,
    randn,
    results,
    unchanged,
)
from torch import nn
from torch.export import Dim

from eyas.kernels.int4_linear import MAX_SMALL_ROWS
from eyas.models.layers import RMSNorm
from eyas.passes.int4_smallm import Int4Smallm
from eyas.passes.program import Program

eyas = torch.ops.eyas
POSITIVE = Positive()
K, N = 64, 24
INPUTS = [(randn(1, rows, K, seed=rows),) for rows in (1, 2, ROWS, MAX_ROWS)]


def weights(group=32, offsets=True, n=N, seed=0):
    """Buffers of one projection of width K."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        "w": torch.randint(0, 256, (n, K // 2), generator=generator, dtype=torch.uint8),
        "scales": torch.rand(n, -(-K // group), generator=generator),
    }
    return made | ({"offsets": -torch.rand(n, -(-K // group), generator=generator)} if offsets else {})


def project(group=32):
    return lambda m, x: eyas.int4_linear(x, m.w, m.scales, getattr(m, "offsets", None), group)


def rewrite(one, program, inputs=INPUTS, rewrites=1):
    expected = results(program, *inputs)
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals
    assert_equal(results(program, *inputs), expected)
    return program


@POSITIVE
def up_to_the_largest_small_count(one):
    """MAX_ROWS is what the kernel takes, so the whole range is small."""
    assert MAX_ROWS == MAX_SMALL_ROWS
    check(
        rewrite(one, program_of(project(), *INPUTS[2], **weights())),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: u8[24,32] = buffer w
        CHECK: %[[scales:\w+]]: f32[24,2] = buffer scales
        CHECK: %[[offsets:\w+]]: f32[24,2] = buffer offsets
        CHECK: %[[x:\w+]]: f32[1,s0,64] = input
        CHECK-NOT: eyas.int4_linear
        CHECK: f32[1,s0,24] = eyas.int4_smallm.default(%[[x]], %[[w]], %[[scales]], %[[offsets]], 32)
        """,
    )


@POSITIVE
def symmetric_weights(one):
    check(
        rewrite(one, program_of(project(), *INPUTS[2], **weights(offsets=False))),
        "CHECK-LABEL: method forward\nCHECK: eyas.int4_smallm.default(%{{\\w+}}, %{{\\w+}}, %{{\\w+}}, None, 32)",
    )


@POSITIVE
def a_range_that_straddles(one):
    """One row more than the kernel takes, and the one for any number of rows it is."""
    one = type(one)(max_m=MAX_ROWS - 1)
    check(
        rewrite(one, program_of(project(), *INPUTS[2], **weights())),
        r"""
        CHECK-LABEL: method forward where s0 in [1, 16]
        CHECK-NOT: eyas.int4_smallm
        CHECK: f32[1,s0,24] = eyas.int4_anym.default(
        """,
    )


@POSITIVE
def rows_times_a_batch(one):
    """Three batches of up to 16 rows are 48 rows; the projection beside them has 16."""

    def forward(m, x):
        return eyas.int4_linear(x.expand(3, -1, -1), m.w, m.scales, None, 32), eyas.int4_linear(
            x[0], m.w, m.scales, None, 32
        )

    check(
        rewrite(one, program_of(forward, *INPUTS[2], **weights(offsets=False)), rewrites=2),
        r"""
        CHECK-LABEL: method forward
        CHECK: f32[3,s0,24] = eyas.int4_anym.default(
        CHECK: f32[s0,24] = eyas.int4_smallm.default(
        """,
    )


@POSITIVE
def rows_without_a_symbol(one):
    """Known numbers of rows: one, and one more than the kernel takes."""
    few, many = randn(K), randn(2, MAX_SMALL_ROWS // 2 + 1, K)

    def forward(m, few, many):
        return project()(m, few), project()(m, many)

    check(
        rewrite(one, program_of(forward, few, many, **weights()), [(few, many)], rewrites=2),
        r"""
        CHECK-LABEL: method forward
        CHECK: f32[24] = eyas.int4_smallm.default(
        CHECK: f32[2,9,24] = eyas.int4_anym.default(
        """,
    )


@POSITIVE
def rows_without_a_limit(one):
    class Project(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in weights().items():
                self.register_buffer(name, value)

        def forward(self, x):
            return project()(self, x)

    ep = torch.export.export(Project(), INPUTS[2], dynamic_shapes=({1: Dim("rows")},), strict=False)
    check(rewrite(one, Program.of(ep)), "CHECK-LABEL: method forward\nCHECK: eyas.int4_anym.default(")


@POSITIVE
def a_bias_and_an_int8_head_stay(one):
    """The addition keeps a node of its own, and other formats are no candidates."""

    def forward(m, x):
        hidden = project()(m, x) + m.bias
        return eyas.int8_linear(hidden, m.head, m.head_scales), hidden

    head = {"head": torch.randint(-128, 128, (40, N), dtype=torch.int8), "head_scales": torch.rand(40)}
    check(
        rewrite(one, program_of(forward, *INPUTS[2], bias=randn(N), **head, **weights())),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[y:\w+]]: f32[1,s0,24] = eyas.int4_smallm.default(
        CHECK: %[[hidden:\w+]]: f32[1,s0,24] = aten.add.Tensor(%[[y]], %{{\w+}})
        CHECK: %[[logits:\w+]]: f32[1,s0,40] = eyas.int8_linear.default(%[[hidden]], %{{\w+}}, %{{\w+}})
        CHECK: return [%[[logits]], %[[hidden]]]
        """,
    )


@POSITIVE
def projections_of_one_value_and_one_weight(one):
    """Two users of the result, two projections of one input, one weight read twice."""

    def forward(m, x):
        y = project()(m, x)
        return y * y.sum(-1, keepdim=True), project()(m, x.flip(-1))

    check(
        rewrite(one, program_of(forward, *INPUTS[2], **weights()), rewrites=2),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[y:\w+]]: f32[1,s0,24] = eyas.int4_smallm.default(%[[x:\w+]], %[[w:\w+]], %[[s:\w+]],
        CHECK: aten.sum.dim_IntList(%[[y]]
        CHECK: %[[flip:\w+]]: f32[1,s0,64] = aten.flip.default(%[[x]], [-1])
        CHECK: eyas.int4_smallm.default(%[[flip]], %[[w]], %[[s]],
        """,
    )


@POSITIVE
def beside_a_group_without_a_kernel(one):
    """Arguments by name count as well."""

    def forward(m, x):
        return project()(m, x), eyas.int4_linear(x, m.w, m.scales[:, :1].expand(-1, 4), None, group_size=16)

    program = program_of(forward, *INPUTS[2], **weights())
    record = apply(one, program)
    assert record.rewrites == 1
    assert [r.reason for r in record.refusals] == ["group size 16 has no kernel; allowed: 32, 64, 128, 256"]
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: eyas.int4_smallm.default(
        CHECK: eyas.int4_linear.default({{.*}}16)
        """,
    )


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(Int4Smallm())


@pytest.mark.parametrize("group", [16, 48, 512])
def test_groups_without_a_kernel_are_refused(group):
    program = program_of(project(32), *INPUTS[2], **weights())
    node = node_of(program, "eyas.int4_linear.default")
    node.args = (*node.args[:4], group)  # what the model would have if its format had such groups
    before = node.format_node()
    (refusal,) = Int4Smallm().run(program).refusals
    assert refusal.reason == f"group size {group} has no kernel; allowed: 32, 64, 128, 256"
    assert node.format_node() == before


@pytest.mark.parametrize("max_m", [0, -1, 17])
def test_max_m_is_what_the_kernel_takes(max_m):
    with pytest.raises(ValueError, match=rf"option 'max_m' of pass 'int4_smallm' is {max_m}; allowed: 1 to 16"):
        Int4Smallm(max_m=max_m)


def test_an_int8_projection_stays():
    head = {"w": torch.randint(-128, 128, (N, K), dtype=torch.int8), "scales": torch.rand(N)}
    unchanged(Int4Smallm(), program_of(lambda m, x: eyas.int8_linear(x, m.w, m.scales), *INPUTS[2], **head))


@pytest.mark.parametrize("chosen", ["int4_smallm", "int4_anym"])
def test_what_is_chosen_already_stays(chosen):
    def forward(m, x):
        return getattr(eyas, chosen)(x, m.w, m.scales, m.offsets, 32)

    unchanged(Int4Smallm(), program_of(forward, *INPUTS[2], **weights()))


def test_without_a_projection_nothing_changes():
    unchanged(Int4Smallm(), program_of(lambda module, x: module.norm(x), *INPUTS[2], norm=RMSNorm(K, 1e-6)))

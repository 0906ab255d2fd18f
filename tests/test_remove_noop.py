"""Operators that change nothing go; those that change a type, make a second tensor or check the unknown stay."""

import pytest
import torch
from ir import MAX_ROWS, ROWS, Positive, apply, assert_equal, check, node_of, program_of, randn, results, unchanged

from eyas.models.layers import RMSNorm
from eyas.passes.program import Program, mutated_buffers
from eyas.passes.remove_noop import RemoveNoop

aten = torch.ops.aten
POSITIVE = Positive()
INPUTS = [(randn(1, rows, 8, seed=rows),) for rows in (1, ROWS, MAX_ROWS)]
LOWER = torch.bfloat16


def rewrite(one, program, inputs=INPUTS, rewrites=1):
    expected = results(program, *inputs)
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals, record.rewrites
    assert_equal(results(program, *inputs), expected)
    return program


@POSITIVE
def casts_of_a_norm(one):
    """A norm computes in float32 and casts back, which in a model of float32 is nothing; the last one is handed out."""
    check(
        rewrite(one, program_of(lambda m, x: m.norm(x), *INPUTS[1], norm=RMSNorm(8, 1e-6)), rewrites=5),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[x:\w+]]: f32[1,s0,8] = input
        CHECK-NOT: aten.to.dtype
        CHECK-NOT: _assert_tensor_metadata
        CHECK: aten.mul.Tensor(
        """,
    )


@POSITIVE
def a_cast_with_two_users(one):
    """Both read the argument itself then."""

    def forward(module, x):
        y = x.to(torch.float32)
        return y.sin() + y.cos()

    check(
        rewrite(one, program_of(forward, *INPUTS[1]), rewrites=2),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[x:\w+]]: f32[1,s0,8] = input
        CHECK-NEXT: %[[sin:\w+]]: f32[1,s0,8] = aten.sin.default(%[[x]])
        CHECK-NEXT: %[[cos:\w+]]: f32[1,s0,8] = aten.cos.default(%[[x]])
        CHECK-NEXT: aten.add.Tensor(%[[sin]], %[[cos]])
        """,
    )


@POSITIVE
def shapes_that_stay(one):
    """Expands, views and reshapes to the shape that is there, a dynamic one as well; chains of them too."""

    def forward(module, x):
        x = x.expand(1, x.shape[1], 8).view(1, x.shape[1], 8).reshape(1, -1, 8)
        return x.expand(-1, -1, -1).tanh()

    program = program_of(forward, *INPUTS[1])
    had = sum(node.op == "call_function" for node in program.methods["forward"].graph.nodes)
    shapes = sum(str(n.target).startswith(("aten.expand", "aten.view", "aten.reshape"))
                 for n in program.methods["forward"].graph.nodes)  # fmt: skip
    assert shapes >= 3 and had > shapes
    check(
        rewrite(one, program, rewrites=shapes),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[x:\w+]]: f32[1,s0,8] = input
        CHECK-NOT: aten.{{expand|view|reshape}}
        CHECK: aten.tanh.default(%[[x]])
        """,
    )


@POSITIVE
def beside_casts_that_do_something(one):
    """The pair to bfloat16 and back stays; the third cast, to what it has become, goes."""

    def forward(module, x):
        return x.to(LOWER).float().to(torch.float32).exp()

    program = program_of(forward, *INPUTS[1])
    record = apply(one, program)
    assert record.rewrites >= 2
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[low:\w+]]: bf16[1,s0,8] = aten.to.dtype(%{{\w+}}, bf16)
        CHECK-NEXT: %[[back:\w+]]: f32[1,s0,8] = aten.to.dtype(%[[low]], f32)
        CHECK-NEXT: aten.exp.default(%[[back]])
        """,
    )


@POSITIVE
def a_copy_of_what_nobody_writes(one):
    """A copy can only be told from its argument by a write, or by being handed out."""
    program = program_of(lambda m, x: x.to(torch.float32, copy=True).relu(), *INPUTS[1])
    node_of(program, "aten.to.dtype")
    rewrite(one, program, rewrites=2)
    check(program, "CHECK-LABEL: method forward\nCHECK-NOT: aten.to\nCHECK: aten.relu.default(%{{\\w+}})")


@POSITIVE
def a_cast_of_a_constant(one):
    check(
        rewrite(one, program_of(lambda m, x: x + m.w.float(), *INPUTS[1], w=randn(8)), rewrites=2),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[w:\w+]]: f32[8] = buffer w
        CHECK: aten.add.Tensor(%{{\w+}}, %[[w]])
        """,
    )


@POSITIVE
def a_view_that_is_written(one):
    """A view is its argument, so a write through it reaches the buffer with or without it."""

    def forward(module, x):
        module.cache.view(3, 8).add_(x[0, 0])
        return module.cache.sum()

    program = rewrite(one, program_of(forward, *INPUTS[1], cache=randn(3, 8)))
    assert mutated_buffers(program.methods["forward"]) == {"cache"}
    check(program, "CHECK-LABEL: method forward\nCHECK: %[[c:\\w+]]: {{.*}} = buffer cache\nCHECK: add_.Tensor(%[[c]],")


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(RemoveNoop())


def test_casts_to_another_type_stay():
    program = program_of(lambda m, x: x.to(LOWER).exp(), *INPUTS[1])
    apply(RemoveNoop(), program)  # the tracer's check of x goes
    assert node_of(program, "aten.to.dtype").meta["val"].dtype == LOWER
    unchanged(RemoveNoop(), program)


def test_expands_that_broadcast_stay():
    unchanged(RemoveNoop(), program_of(lambda m, x: x.expand(3, -1, -1).exp(), *INPUTS[1]))


def test_views_of_another_shape_stay():
    unchanged(RemoveNoop(), program_of(lambda m, x: x.view(1, -1, 2, 4).exp() + x.reshape(-1).sum(), *INPUTS[1]))


def test_casts_that_lay_a_value_out_anew_stay():
    """The shape and the type are what they were, but not the strides."""

    def forward(m, x):
        return x.transpose(1, 2).to(torch.float32, copy=True, memory_format=torch.contiguous_format).exp()

    program = program_of(forward, *INPUTS[1])
    apply(RemoveNoop(), program)
    assert any(str(n.target).startswith("aten.to") for n in program.methods["forward"].graph.nodes)


def copies(program):
    casts = (aten.to.dtype, aten._to_copy.default)
    return [node for node in program.methods["forward"].graph.nodes if node.target in casts]


def written_copy(module, x):
    y = x.to(torch.float32, copy=True)
    y.mul_(2.0)
    return x + y


def copy_of_a_written_buffer(module, x):
    old = module.cache.to(torch.float32, copy=True)
    module.cache.add_(x[0, 0])
    return old.exp() + module.cache


def copy_of_a_written_part(module, x):
    old = module.cache[1:].to(torch.float32, copy=True)
    module.cache[:2].add_(x[0, 0])
    return old.exp() + module.cache[1:]


@pytest.mark.parametrize("form", ["to", "_to_copy"])
@pytest.mark.parametrize("function", [written_copy, copy_of_a_written_buffer, copy_of_a_written_part])
def test_copies_of_what_is_written_stay(function, form):
    program = program_of(function, *INPUTS[1], cache=randn(3, 8))
    (copy,) = copies(program)
    if form == "_to_copy":
        copy.target, copy.args, copy.kwargs = aten._to_copy.default, copy.args[:1], {"dtype": torch.float32}
    expected = results(program, *INPUTS)
    apply(RemoveNoop(), program)
    assert copy in copies(program)
    assert_equal(results(program, *INPUTS), expected)


@pytest.mark.parametrize(
    "function",
    [lambda m, x: x.float(), lambda m, x: (x.float(), x + 1), lambda m, x: x.view(1, -1, 8)],
    ids=["all", "beside another", "view"],
)
def test_what_is_handed_out_stays(function):
    program = program_of(function, *INPUTS[1])
    apply(RemoveNoop(), program)
    output = next(n for n in program.methods["forward"].graph.nodes if n.op == "output")
    assert output.args[0][0].op == "call_function"


@pytest.mark.parametrize("form", ["to", "_to_copy"])
def test_a_copy_that_is_handed_out_through_a_view_stays(form):
    """A result that was a tensor of its own must not become a view of an input."""
    program = program_of(lambda m, x: x.to(torch.float32, copy=True).transpose(1, 2), *INPUTS[1])
    (copy,) = copies(program)
    if form == "_to_copy":
        copy.target, copy.args, copy.kwargs = aten._to_copy.default, copy.args[:1], {"dtype": torch.float32}
    apply(RemoveNoop(), program)
    assert copy in copies(program)


def assert_node(program):
    return node_of(program, "aten._assert_tensor_metadata.default")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (1, [1, 7, 8]), (1, [ROWS, 8]), (2, [8, 1, 8]), (3, torch.float64), (4, torch.device("meta")),
        (5, torch.sparse_coo),
    ],
    ids=["size", "rank", "stride", "dtype", "device", "layout"],
)  # fmt: skip
def test_a_check_of_something_else_stays(place, value):
    """Such a check fails when it runs, and that is for it to say."""
    program = program_of(lambda m, x: x.float().exp(), *INPUTS[1])
    node = assert_node(program)
    args = [node.args[0], None, None, None]
    names = ("a", "size", "stride", "dtype", "device", "layout")
    node.args, node.kwargs = tuple(args), {}
    if place <= 3:
        args[place] = value
        node.args = tuple(args)
    else:
        node.kwargs = {names[place]: value}
    RemoveNoop().run(program)
    assert assert_node(program) is node


def test_a_check_of_the_record_goes():
    program = program_of(lambda m, x: x.float().exp(), randn(1, 3, 8))
    node = assert_node(program)
    node.args, node.kwargs = (node.args[0], [1, 3, 8], [24, 8, 1], torch.float32), {"device": torch.device("cpu")}
    assert RemoveNoop().run(program).rewrites == 2


def test_without_such_operators_nothing_changes():
    unchanged(RemoveNoop(), program_of(lambda m, x: (x @ m.w).softmax(-1), *INPUTS[1], w=randn(8, 3)))


def test_the_functional_form_is_kept_whole():
    """Results that go back to buffers are results, too."""

    def forward(module, x):
        module.cache.copy_(x[0, 0].float())
        return x + 1

    program = program_of(forward, *INPUTS[1], cache=randn(8))
    program = Program.of(program.methods["forward"].run_decompositions({}))
    expected = results(program, *INPUTS)
    apply(RemoveNoop(), program)
    assert_equal(results(program, *INPUTS), expected)

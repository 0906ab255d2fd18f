"""What nobody reads goes; what writes, checks or is handed out stays."""

import operator

import pytest
import torch
from ir import MAX_ROWS, ROWS, Positive, apply, assert_equal, check, node_of, program_of, randn, results, unchanged

from eyas.passes.dead_code import DeadCode
from eyas.passes.midm_sdpa import MidmSdpa
from eyas.passes.program import Program

aten = torch.ops.aten
POSITIVE = Positive()
INPUTS = [(randn(1, rows, 8, seed=rows),) for rows in (1, ROWS, MAX_ROWS)]


def rewrite(one, program, inputs=INPUTS, rewrites=1):
    expected = results(program, *inputs)
    record = apply(one, program)
    assert record.rewrites == rewrites and not record.refusals
    assert_equal(results(program, *inputs), expected)
    return program


@POSITIVE
def the_mask_that_no_attention_reads(one):
    """What midm_sdpa leaves behind: the comparison and the index."""
    length = 24

    def forward(module, q, pos):
        module.k.index_copy_(2, pos, q)
        module.v.index_copy_(2, pos, q)
        mask = pos[:, None] >= torch.arange(length)
        return torch.nn.functional.scaled_dot_product_attention(q, module.k, module.v, mask)

    inputs = [(randn(1, 2, rows, 16), torch.arange(rows)) for rows in (1, ROWS)]
    caches = {"k": torch.zeros(1, 2, length, 16), "v": torch.zeros(1, 2, length, 16)}
    program = program_of(forward, *inputs[1], **caches)
    apply(MidmSdpa(), program)
    check(
        rewrite(one, program, inputs, rewrites=3),
        r"""
        CHECK-LABEL: method forward
        CHECK: buffer v
        CHECK-NEXT: input
        CHECK-NEXT: input
        CHECK-NEXT: aten.index_copy_.default(
        CHECK-NEXT: aten.index_copy_.default(
        CHECK-NEXT: eyas.sdpa_midm.default(
        CHECK-NEXT: return
        """,
    )


@POSITIVE
def chains_and_their_constants(one):
    """A chain goes from its end; a constant that only it read goes from the state as well."""

    def forward(module, x):
        (x @ module.w).relu().sum(-1)
        return x * module.kept

    program = program_of(forward, *INPUTS[1], w=randn(8, 3), kept=randn(8))
    rewrite(one, program, rewrites=4)
    ep = program.methods["forward"]
    assert set(ep.state_dict) == {"kept"} and ep.graph_signature.buffers == ("kept",)
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK-NEXT: %[[kept:\w+]]: f32[8] = buffer kept
        CHECK-NEXT: %[[x:\w+]]: f32[1,s0,8] = input
        CHECK-NEXT: %[[y:\w+]]: f32[1,s0,8] = aten.mul.Tensor(%[[x]], %[[kept]])
        CHECK-NEXT: return [%[[y]]]
        """,
    )


@POSITIVE
def constants_that_nothing_ever_read(one):
    program = program_of(lambda m, x: x + m.kept, *INPUTS[1], unread=randn(4), kept=randn(8))
    check(rewrite(one, program), "CHECK-LABEL: method forward\nCHECK-NOT: unread\nCHECK: buffer kept")


@POSITIVE
def a_piece_of_a_split(one):
    """The piece goes, the split and its other piece stay."""
    program = program_of(lambda m, x: x.chunk(2, dim=-1)[0].neg(), *INPUTS[1])
    (low,) = [node for node in program.methods["forward"].graph.nodes if node.target is operator.getitem][:1]
    with low.graph.inserting_after(low):
        high = low.graph.call_function(operator.getitem, (low.args[0], 1))
    high.meta["val"] = low.args[0].meta["val"][1]
    had = sum(node.target is operator.getitem for node in low.graph.nodes)
    check(
        rewrite(one, program, rewrites=had - 1),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[both:\w+]]: (f32[1,s0,4], f32[1,s0,4]) = aten.chunk.default(
        CHECK-NEXT: %[[low:\w+]]: f32[1,s0,4] = getitem(%[[both]], 0)
        CHECK-NEXT: aten.neg.default(%[[low]])
        """,
    )


@POSITIVE
def beside_writes_in_place(one):
    """The write stays though nobody reads its result, and so does what it writes and through which view."""

    def forward(module, x):
        module.cache[0].add_(x[0, 0])
        x.exp()
        return x.sum()

    check(
        rewrite(one, program_of(forward, *INPUTS[1], cache=randn(3, 8))),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[cache:\w+]]: f32[3,8] = buffer cache
        CHECK: %[[row:\w+]]: f32[8] = aten.select.int(%[[cache]], 0, 0)
        CHECK: aten.add_.Tensor(%[[row]],
        CHECK-NOT: aten.exp
        CHECK: aten.sum.default(
        """,
    )


@POSITIVE
def a_value_with_a_second_user(one):
    """One of its users is dead, the other is not."""

    def forward(module, x):
        y = x.relu()
        y.cos()
        return y.sin()

    check(
        rewrite(one, program_of(forward, *INPUTS[1])),
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[y:\w+]]: {{.*}} = aten.relu.default(
        CHECK-NEXT: %[[z:\w+]]: {{.*}} = aten.sin.default(%[[y]])
        CHECK-NEXT: return [%[[z]]]
        """,
    )


@POSITIVE
def in_the_functional_form(one):
    """A new value that is handed back to its buffer is a result; a constant that is not written is not."""

    def forward(module, x):
        module.cache.add_(x[0, 0])
        (x * module.unread).sum()
        return x + 1

    program = program_of(forward, *INPUTS[1], cache=randn(8), unread=randn(8))
    program = Program.of(program.methods["forward"].run_decompositions({}))
    rewrite(
        one,
        program,
        rewrites=1
        + sum(
            str(n.target) in ("aten.mul.Tensor", "aten.sum.default", "aten.sum.dim_IntList")
            for n in program.methods["forward"].graph.nodes
        ),
    )
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK-NOT: unread
        CHECK: %[[new:\w+]]: f32[8] = aten.add.Tensor(
        CHECK: return [%[[new]], %{{\w+}}], %[[new]] -> cache
        """,
    )


@pytest.mark.parametrize("case", POSITIVE, ids=lambda case: case.__name__)
def test_fires(case):
    case(DeadCode())


def test_inputs_stay():
    unchanged(DeadCode(), program_of(lambda module, x, y: x + 1, randn(1, ROWS, 8), randn(2)))


def test_writes_stay():
    def forward(module, x):
        module.cache.copy_(x[0, 0])
        return x + 1

    unchanged(DeadCode(), program_of(forward, *INPUTS[1], cache=torch.zeros(8)))


def test_checks_stay():
    def forward(module, x):
        torch.ops.aten._assert_async.msg((x < 1e9).all(), "too large")
        return x + 1

    unchanged(DeadCode(), program_of(forward, *INPUTS[1]))
    unchanged(DeadCode(), program_of(lambda module, x: x.float() + 1, *INPUTS[1]))  # the tracer adds a check here


def test_operators_without_a_schema_stay():
    """A control-flow operator may hold anything, writes too."""
    program = program_of(lambda module, x: x + 1, *INPUTS[1])
    node = node_of(program, "aten.add.Tensor")

    def opaque(x):
        return x

    with node.graph.inserting_before(node):
        node.graph.call_function(opaque, (node.args[0],)).meta["val"] = node.args[0].meta["val"]
    before = len(node.graph.nodes)
    outcome = DeadCode().run(program)
    assert outcome.rewrites == 0 and len(node.graph.nodes) == before


def test_a_graph_of_what_is_read_stays():
    unchanged(DeadCode(), program_of(lambda m, x: (x @ m.w).softmax(-1), *INPUTS[1], w=randn(8, 3)))

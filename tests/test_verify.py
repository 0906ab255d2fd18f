"""What the checks after a pass find: a changed interface, results of another type, dropped writes, dead constants."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from ir import ROWS, Function, export, node_of, program_of, randn
from torch.utils._sympy.value_ranges import ValueRanges

from eyas.passes.base import MethodPass, Outcome
from eyas.passes.pipeline import PassError, run_pipeline
from eyas.passes.program import Program
from eyas.passes.registry import PASSES, parse_pass
from eyas.passes.verify import Snapshot, VerifyError, interface, unread_constants, verify

aten = torch.ops.aten
X = randn(1, ROWS, 8)


def step(module, x):
    """Reads a weight, writes a cache, and gives two results."""
    y = (x @ module.w).relu()
    module.cache.add_(x[0, 0])
    return y, x.sum(-1) + module.cache.sum()


def make() -> Program:
    return program_of(step, X, w=randn(8, 3), cache=randn(8))


@dataclass(frozen=True)
class Does(MethodPass):
    """A pass that does to each method what it is told."""

    name: ClassVar[str] = "does"
    what: Callable = field(default=None, compare=False)

    def __str__(self):
        return self.name

    def run_method(self, method, ep):
        self.what(ep)
        ep.graph_module.recompile()
        return Outcome(1)


def nodes(ep, target):
    return [node for node in ep.graph.nodes if node.target is target]


def drops_the_write(ep):
    (write,) = nodes(ep, aten.add_.Tensor)
    write.replace_all_uses_with(write.args[0])
    ep.graph.erase_node(write)


def writes_an_input(ep):
    (relu,) = nodes(ep, aten.relu.default)
    x = next(n for n in ep.graph.nodes if n.op == "placeholder" and n.name == "args_0")
    with ep.graph.inserting_before(relu):
        ep.graph.call_function(aten.relu_.default, (x,)).meta["val"] = x.meta["val"]


def forgets_a_weight(ep):
    (product,) = nodes(ep, aten.matmul.default)
    x = product.args[0]
    with ep.graph.inserting_before(product):
        part = ep.graph.call_function(aten.slice.Tensor, (x, 2, 0, 3))
    part.meta["val"] = x.meta["val"][:, :, :3]
    product.replace_all_uses_with(part)
    ep.graph.erase_node(product)


def changes_a_result(ep):
    """Another dtype, recorded truly."""
    output = next(n for n in ep.graph.nodes if n.op == "output")
    relu = output.args[0][0]
    with ep.graph.inserting_after(relu):
        half = ep.graph.call_function(aten.to.dtype, (relu, torch.float16))
    half.meta["val"] = relu.meta["val"].half()
    output.replace_input_with(relu, half)
    ep.graph_signature.replace_all_uses(relu.name, half.name)


def hands_out_an_input(ep):
    """A result of the right type that is no longer a tensor of its own."""
    output = next(n for n in ep.graph.nodes if n.op == "output")
    relu = output.args[0][0]
    w = next(n for n in ep.graph.nodes if n.name == "args_0")
    with ep.graph.inserting_before(relu):
        view = ep.graph.call_function(aten.slice.Tensor, (w, 2, 0, 3))
    view.meta["val"] = w.meta["val"][:, :, :3]
    output.replace_input_with(relu, view)
    ep.graph_signature.replace_all_uses(relu.name, view.name)


def narrows_the_rows(ep):
    (symbol,) = ep.range_constraints
    ep.range_constraints[symbol] = ValueRanges(2, 16)


def records_another_dtype(ep):
    (relu,) = nodes(ep, aten.relu.default)
    relu.target = aten.argsort.default


def records_another_shape(ep):
    (total,) = nodes(ep, aten.sum.dim_IntList)
    total.args = (total.args[0], [1])


def records_nothing(ep):
    (relu,) = nodes(ep, aten.relu.default)
    with ep.graph.inserting_after(relu):
        ep.graph.call_function(aten.neg.default, (relu,))


def calls_what_does_not_fit(ep):
    (product,) = nodes(ep, aten.matmul.default)
    product.args = product.args[::-1]


def changes_a_type_that_others_read(ep):
    """The node that was changed is recorded truly; the one after it is not, for nobody looked at it again."""
    (product,) = nodes(ep, aten.matmul.default)
    with ep.graph.inserting_after(product):
        wide = ep.graph.call_function(aten.to.dtype, (product, torch.float64))
    wide.meta["val"] = product.meta["val"].double()
    (relu,) = nodes(ep, aten.relu.default)
    relu.replace_input_with(product, wide)


def calls_a_module_method(ep):
    (relu,) = nodes(ep, aten.relu.default)
    with ep.graph.inserting_after(relu):
        ep.graph.call_method("relu", (relu,)).meta["val"] = relu.meta["val"]


RELU, SUM = r"%relu of method 'forward' \(.*ir.py:\d+\)", r"%sum_1 of method 'forward' \(.*ir.py:\d+\)"
BROKEN = {
    drops_the_write: r"the written buffers of method 'forward' were \['cache'\] and are \[\]",
    writes_an_input: r"the written inputs of method 'forward' were \[\] and are \['args_0'\]",
    forgets_a_weight: r"nothing in method 'forward' reads its constant 'w' any more, yet it is there",
    changes_a_result: r"the results of method 'forward' were \['f32\[1,s0,3\]', 'f32\[1,s0\]'\] and are \['f16\[1,s0",
    hands_out_an_input: r"the aliases of method 'forward' were \[None, None\] and are \['args_0', None\]",
    narrows_the_rows: r"the ranges of method 'forward' were .*\[1, 16\].* and are .*\[2, 16\]",
    records_another_dtype: RELU + r" makes i64\[1,s0,3\], but f32\[1,s0,3\] is recorded",
    records_another_shape: SUM + r" makes f32\[1,8\], but f32\[1,s0\] is recorded",
    records_nothing: r"%neg_default of method 'forward' \(neg_default\) has no type: meta\['val'\] is missing",
    calls_what_does_not_fit: r"%matmul of method 'forward' \(.*\) cannot be called on the types of its arguments: ",
    changes_a_type_that_others_read: RELU + r" makes f64\[1,s0,3\], but f32\[1,s0,3\] is recorded",
    calls_a_module_method: r"is a call_method; an exported graph has functions only",
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_graph_is_found(broken):
    program = make()
    before = Snapshot.of(program)
    broken(program.methods["forward"])
    program.methods["forward"].graph_module.recompile()
    with pytest.raises(VerifyError, match=BROKEN[broken]):
        verify(program, before)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_a_pass_that_breaks_a_graph_is_named(broken):
    with pytest.raises(
        PassError, match=rf"^pass does \(number 2, after dead_code\) failed: VerifyError: .*{BROKEN[broken]}"
    ):
        run_pipeline(make(), [parse_pass("dead_code"), Does(what=broken)])


def test_without_checks_a_broken_graph_passes():
    program = make()
    assert [r.rewrites for r in run_pipeline(program, [Does(what=narrows_the_rows)], verified=False)] == [1]


def test_an_untouched_program_passes():
    program = make()
    verify(program, Snapshot.of(program))


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_leaves_a_sound_program(name):
    program = make()
    before = Snapshot.of(program)
    parse_pass(name).run(program)
    verify(program, before)


def test_only_what_changed_is_looked_at(monkeypatch):
    """An untouched node is not run again, not even where its record is wrong; that was there before the pass."""
    program = make()
    node_of(program, "aten.relu.default").meta["val"] = node_of(program, "aten.relu.default").meta["val"].half()
    before = Snapshot.of(program)
    monkeypatch.setattr(
        "eyas.passes.verify.propagate", lambda node, where, types: pytest.fail(f"{where} was run again")
    )
    verify(program, before)


def test_constants_that_were_dead_before_may_stay():
    program = program_of(lambda m, x: x + 1, X, unread=randn(3))
    ep = program.methods["forward"]
    had = unread_constants(ep)
    before = Snapshot.of(program)
    verify(program, before)
    assert had == before.methods["forward"].unread


def test_new_and_lost_methods_are_found():
    program = make()
    before = Snapshot.of(program)
    program.methods["more"] = program.methods["forward"]
    with pytest.raises(VerifyError, match="the methods were forward and are forward, more"):
        verify(program, before)
    with pytest.raises(VerifyError, match=r"the methods were forward and are $"):
        verify(Program({}), before)


def test_an_interface_is_in_words_and_the_same_for_equal_programs():
    one, two = (interface(make().methods["forward"]) for _ in range(2))
    assert one == two
    assert one["inputs"] == {"args_0": "f32[1,s0,8]"} and one["results"] == ["f32[1,s0,3]", "f32[1,s0]"]
    assert one["written buffers"] == ["cache"] and one["aliases"] == [None, None]


def test_results_that_are_views_are_part_of_the_interface():
    ep = export(Function(lambda m, x: (x[:, :, :2], m.w.view(-1), 3), w=randn(2, 2)), X)
    assert interface(ep)["aliases"] == ["args_0", "w", None]
    assert interface(ep)["results"][2] == "3"

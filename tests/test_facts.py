"""Facts are looked up in the graph: each check finds what speaks against it, and names it."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from ir import ROWS, program_of, randn

from eyas.passes.base import Outcome, Pass
from eyas.passes.facts import FACTS, evidence_against
from eyas.passes.pipeline import run_pipeline
from eyas.passes.program import Program
from eyas.passes.registry import PASSES, find_pass, parse_pipeline

eyas = torch.ops.eyas
X = randn(1, ROWS, 8)
Q = randn(1, 2, ROWS, 16)


def attend(module, q, pos):
    module.k.index_copy_(2, pos, q)
    mask = pos[:, None] >= torch.arange(24)
    return torch.nn.functional.scaled_dot_product_attention(q, module.k, module.k, mask)


def masked(module, q, mask):
    return eyas.masked_sdpa(q, q, q, mask, 0.25)


INT4 = {"w": torch.zeros(16, 4, dtype=torch.uint8), "s": torch.ones(16, 1)}
INT8 = {"w": torch.zeros(16, 8, dtype=torch.int8), "s": torch.ones(16)}
AGAINST = {
    ("no_splits", "chunk = aten.chunk.default"): lambda: program_of(lambda m, x: x.chunk(2, -1)[0], X),
    ("no_splits", "split = aten.split.Tensor"): lambda: program_of(lambda m, x: x.split(3, -1)[0], X),
    ("row_invariant_attention", "scaled_dot_product_attention = aten.scaled_dot_product_attention.default"): lambda: (
        program_of(attend, Q, torch.arange(ROWS), k=torch.zeros(1, 2, 24, 16))
    ),
    ("row_invariant_linear", "linear = aten.linear.default"): lambda: program_of(
        lambda m, x: m.f(x), X, f=torch.nn.Linear(8, 3)
    ),
    ("row_invariant_linear", "int4_linear = eyas.int4_linear.default"): lambda: program_of(
        lambda m, x: eyas.int4_linear(x, m.w, m.s, None, 32), X, **INT4
    ),
    ("row_invariant_linear", "int4_smallm = eyas.int4_smallm.default"): lambda: program_of(
        lambda m, x: eyas.int4_smallm(x, m.w, m.s, None, 32), X, **INT4
    ),
    ("row_invariant_linear", "int8_linear = eyas.int8_linear.default"): lambda: program_of(
        lambda m, x: eyas.int8_linear(x, m.w, m.s), X, **INT8
    ),
    ("visible_masks", "masked_sdpa = eyas.masked_sdpa.default"): lambda: program_of(
        masked, Q, torch.ones(ROWS, ROWS, dtype=torch.bool)
    ),
}


@pytest.mark.parametrize(("fact", "found"), AGAINST, ids=lambda text: text.split(" ")[0])
def test_the_first_node_that_speaks_against_a_fact_is_named(fact, found):
    program = AGAINST[fact, found]()
    assert evidence_against(fact, program) == f"method 'forward' has {found}"


@pytest.mark.parametrize("fact", sorted(set(FACTS) - {"shared_buffers"}))
def test_a_program_without_such_nodes_has_the_facts(fact):
    assert evidence_against(fact, program_of(lambda m, x: x.sin(), X)) is None


def test_the_node_may_be_in_any_method():
    good = program_of(lambda m, x: x.sin(), X).methods["forward"]
    bad = program_of(lambda m, x: x.chunk(2, -1)[0], X).methods["forward"]
    text = evidence_against("no_splits", Program({"one": good, "two": bad}))
    assert text == "method 'two' has chunk = aten.chunk.default"


def test_packed_weights_are_seen():
    program = program_of(lambda m, x: m.f(x), randn(1, ROWS, 16), f=torch.nn.Linear(16, 16))
    assert evidence_against("unpacked_weights", program) is None
    run_pipeline(program, parse_pipeline("panel_linear{must_fire=true}"))
    assert "eyas.panel_linear.default" in evidence_against("unpacked_weights", program)
    assert evidence_against("row_invariant_linear", program) is None


def test_buffers_are_shared_once_a_plan_names_them_all():
    program = program_of(lambda m, x: x * m.w, X, w=randn(8))
    assert evidence_against("shared_buffers", program) == "constant 'w' of method 'forward' is in no sharing plan"
    run_pipeline(program, parse_pipeline("share_buffers"))
    assert evidence_against("shared_buffers", program) is None


def test_equal_names_that_are_two_tensors_are_seen():
    one = program_of(lambda m, x: x * m.w, X, w=randn(8))
    two = program_of(lambda m, x: x + m.w, X, w=randn(8))
    program = Program({"one": one.methods["forward"], "two": two.methods["forward"]})
    run_pipeline(program, parse_pipeline("share_buffers"))
    assert evidence_against("shared_buffers", program) is None, "the pass made them one"
    program.methods["two"].state_dict["w"] = randn(8)
    assert evidence_against("shared_buffers", program) == "constant 'w' is another tensor in method 'two'"


def test_a_fact_without_a_check_is_not_believed():
    assert evidence_against("tidiness", program_of(lambda m, x: x.sin(), X)) == "no pass has ensured tidiness"


def test_what_passes_promise_can_be_looked_up():
    """Each fact of a pass of ours has a check, and each check a pass that has to do with it."""
    named = {name: find_pass(name) for name in PASSES}
    used = set().union(*(one.requires | one.ensures | one.breaks for one in named.values()))
    assert used <= set(FACTS) and set(FACTS) - used == set()


@dataclass(frozen=True)
class Liar(Pass):
    """Says that there is no split, and did nothing about it."""

    name: ClassVar[str] = "liar"
    ensures: ClassVar[frozenset[str]] = frozenset({"no_splits"})

    def run(self, program):
        return Outcome()


def test_a_promise_that_is_not_kept_is_found_out():
    program = program_of(lambda m, x: x.chunk(2, -1)[0], X)
    message = (
        r"pass liar \(number 1, after no passes\) ensures no_splits, but method 'forward' has chunk = .*, and it did"
    )
    with pytest.raises(RuntimeError, match=message):
        run_pipeline(program, [Liar()])

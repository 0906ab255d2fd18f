"""Random inputs, samples of a method before and after passes, and the pass that is to blame for a difference."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from ir import MAX_ROWS, ROWS, node_of, program_of, randn, results

from eyas.passes import numerics
from eyas.passes.base import MethodPass, Outcome
from eyas.passes.numerics import (
    TOLERANCE,
    NumericCheck,
    NumericError,
    bisect,
    copy_program,
    differences,
    distance,
    random_inputs,
    row_counts,
    sample,
)
from eyas.passes.pipeline import run_pipeline
from eyas.passes.printer import print_program
from eyas.passes.program import Program, mutated_buffers
from eyas.passes.registry import parse_pass, parse_pipeline

aten, eyas = torch.ops.aten, torch.ops.eyas
LENGTH, IDS = 24, 11


def decoder(module, tokens, positions):
    """An embedding, a cache of one head, attention under a mask, and logits."""
    x = F.embedding(tokens, module.table)
    low, high = x.chunk(2, dim=-1)
    q = (torch.cat([high, low], dim=-1) * 0.5).unsqueeze(1)
    module.k.index_copy_(2, positions, q)
    module.v.index_copy_(2, positions, x.unsqueeze(1))
    mask = positions[:, None] >= torch.arange(LENGTH)
    y = F.scaled_dot_product_attention(q, module.k, module.v, mask)[:, 0]
    return y.float() @ module.table.T, tokens + 1


def make() -> Program:
    caches = {name: torch.zeros(1, 1, LENGTH, 16) for name in ("k", "v")}
    return program_of(
        decoder, torch.ones(1, ROWS, dtype=torch.int64), torch.arange(ROWS), table=randn(IDS, 16), **caches
    )


@dataclass(frozen=True)
class Plant(MethodPass):
    """Puts one operator in the place of another, and says that no bit changes."""

    name: ClassVar[str] = "plant"
    old: str = "aten.mul.Tensor"
    new: str = "add"

    def run_method(self, method, ep):
        found = [node for node in ep.graph.nodes if str(node.target) == self.old]
        for node in found:
            node.target = getattr(aten, self.new).Tensor
        ep.graph_module.recompile()
        return Outcome(len(found))


@dataclass(frozen=True)
class Rounds(Plant):
    """As ``plant``, but says that it changes bits."""

    name: ClassVar[str] = "rounds"
    exact: ClassVar[bool] = False


GOOD = "remove_noop,split_copy_to_slice,midm_sdpa,dead_code,materialize_tables,masked_sdpa,panel_linear,share_buffers"


# Inputs and samples


@pytest.mark.parametrize("rows", [1, 2, ROWS, MAX_ROWS])
@pytest.mark.parametrize("seed", range(4))
def test_random_inputs_lie_in_the_range_of_what_they_index(rows, seed):
    tokens, positions = random_inputs(make().methods["forward"], rows, seed)
    assert tokens.shape == (1, rows) and tokens.dtype == torch.int64 and 0 <= tokens.min() <= tokens.max() < IDS
    assert torch.equal(positions, positions[0] + torch.arange(rows)) and 0 <= positions[0] <= LENGTH - rows


def test_random_inputs_follow_the_seed_and_cover_the_range():
    ep = make().methods["forward"]
    drawn = [random_inputs(ep, 8, seed) for seed in range(20)]
    assert all(torch.equal(a, b) for a, b in zip(drawn[3], random_inputs(ep, 8, 3)))
    assert len({int(positions[0]) for _, positions in drawn}) > 5
    assert set(torch.cat([tokens.flatten() for tokens, _ in drawn]).tolist()) == set(range(IDS))


def test_ids_are_followed_through_views_but_not_through_sums():
    def look_up(module, tokens):
        return F.embedding(tokens.view(-1).long(), module.table), F.embedding((tokens + 1) % 5, module.small)

    program = program_of(look_up, torch.ones(1, ROWS, dtype=torch.int64), table=randn(7, 4), small=randn(5, 4))
    drawn = [random_inputs(program.methods["forward"], MAX_ROWS, seed)[0] for seed in range(8)]
    assert {int(value) for tokens in drawn for value in tokens.flatten()} == set(range(7))


def test_tables_of_int8_bound_their_ids():
    def look_up(module, tokens):
        return eyas.int8_embedding(tokens, module.w, module.scales, torch.float32)

    tensors = {"w": torch.zeros(6, 8, dtype=torch.int8), "scales": torch.ones(6)}
    program = program_of(look_up, torch.ones(1, ROWS, dtype=torch.int64), **tensors)
    drawn = [random_inputs(program.methods["forward"], MAX_ROWS, seed)[0] for seed in range(8)]
    assert {int(value) for tokens in drawn for value in tokens.flatten()} == set(range(6))


def test_other_inputs_are_normal_numbers_and_coins():
    program = program_of(lambda m, x, b: torch.where(b, x, 0), randn(1, ROWS, 8).bfloat16(), torch.ones(ROWS, 8) > 0)
    x, b = random_inputs(program.methods["forward"], 9)
    assert x.shape == (1, 9, 8) and x.dtype == torch.bfloat16 and b.dtype == torch.bool
    assert 0.5 < float(x.float().std()) < 1.5 and 0.2 < float(b.float().mean()) < 0.8


def test_row_counts_are_the_ends_and_the_middle():
    assert row_counts(make().methods["forward"]) == [1, 8, 16]
    assert row_counts(program_of(lambda m, x: x, randn(1, 3)).methods["forward"]) == [1]


def test_a_sample_is_the_call_and_leaves_the_program_as_it_was():
    program = make()
    ep = program.methods["forward"]
    inputs = random_inputs(ep, 4)
    state = {name: value.clone() for name, value in ep.state_dict.items()}
    found = sample(ep, inputs)
    assert [tuple(r.shape) for r in found.results] == [(1, 4, IDS), (1, 4)] and set(found.state) == {"k", "v"}
    assert torch.equal(found.results[1], inputs[0] + 1)
    assert all(torch.equal(ep.state_dict[name], value) for name, value in state.items())
    at = inputs[1]
    assert torch.equal(found.state["v"][0, 0, at], ep.state_dict["table"][inputs[0][0]])
    for name, value in found.state.items():  # what the method does not write holds noise, equal in every program
        rest = [i for i in range(LENGTH) if i not in at.tolist()]
        assert value[0, 0, rest].all() and torch.equal(value[0, 0, rest], numerics.noise(name, value)[0, 0, rest])


def test_the_functional_form_gives_the_same_sample():
    program = make()
    ep = program.methods["forward"]
    functional = ep.run_decompositions({})
    inputs = random_inputs(ep, 6, seed=3)
    a, b = sample(ep, inputs), sample(functional, inputs)
    assert len(a.results) == len(b.results) and a.state.keys() == b.state.keys() == {"k", "v"}
    assert all(distance(x, y) < 1e-6 for x, y in zip(a.results, b.results))
    assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)


# Copies


def test_a_copy_is_independent():
    """Passes over the copy change neither text, results nor state of the program; the constants are the same ones."""
    program = make()
    before = print_program(program)
    inputs = tuple(random_inputs(program.methods["forward"], 3))
    expected = results(program, inputs)
    copied = copy_program(program)
    assert print_program(copied) == before
    assert all(value is program.constants()[name] for name, value in copied.constants().items())
    records = run_pipeline(copied, parse_pipeline(GOOD))
    assert sum(r.rewrites for r in records) > 3 and print_program(copied) != before
    assert print_program(program) == before and program.sharing is None and not program.derived
    assert all(torch.equal(a, b) for a, b in zip(results(program, inputs), expected))
    assert program.methods["forward"].graph_signature.buffers == make().methods["forward"].graph_signature.buffers


def test_a_copy_of_a_copy_runs():
    program = copy_program(copy_program(make()))
    assert max(d.error for d in differences(make(), program)) == 0
    assert mutated_buffers(program.methods["forward"]) == {"k", "v"}


# Distances


def test_distances():
    a = torch.tensor([1.0, 2.0, -4.0])
    assert distance(a, a) == 0 and distance(a, a + torch.tensor([0, 0, 0.5])) == pytest.approx(0.125)
    assert distance(a, a.double()) == distance(a, a[:2]) == float("inf")
    assert distance(a, torch.tensor([1.0, float("nan"), -4.0])) == float("inf")
    inf = torch.tensor([1.0, float("-inf"), -4.0])
    assert distance(inf, inf + 1) == pytest.approx(0.25)
    assert distance(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert distance(torch.zeros(0), torch.zeros(0)) == 0


def test_infinities_of_other_signs_are_apart():
    plus, minus = torch.tensor([1.0, float("inf")]), torch.tensor([1.0, float("-inf")])
    assert distance(plus, minus) == float("inf")
    assert distance(torch.tensor([1.0, float("inf")]), torch.tensor([1.0, float("nan")])) == float("inf")


def test_equal_places_of_no_number_are_equal():
    nan = torch.tensor([1.0, float("nan")])
    assert distance(nan, nan.clone()) == 0


def test_differences_name_the_method_the_rows_and_the_place():
    one, two = make(), make()
    node_of(two, "aten.mul.Tensor").target = aten.add.Tensor
    two.methods["forward"].graph_module.recompile()
    found = differences(one, two)
    assert [(d.method, d.rows) for d in found] == [("forward", 1), ("forward", 8), ("forward", 16)]
    assert all(d.where in ("result 0", "buffer k") and d.error > 0.01 for d in found)
    assert {d.where for d in differences(one, one)} == {"nowhere"}
    assert [d.rows for d in differences(one, two, rows={"forward": [3]})] == [3]


def test_a_difference_in_a_written_buffer_alone_is_found():
    one, two = make(), make()
    writes = [n for n in two.methods["forward"].graph.nodes if str(n.target) == "aten.index_copy_.default"]
    graph = two.methods["forward"].graph
    output = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        graph.call_function(aten.zero_.default, (writes[1],)).meta["val"] = writes[1].meta["val"]
    two.methods["forward"].graph_module.recompile()
    assert {d.where for d in differences(one, two)} == {"buffer v"}


# The check after each pass


def test_the_passes_of_ours_pass_the_check():
    check = NumericCheck()
    run_pipeline(make(), parse_pipeline(GOOD), observers=[check])
    assert [spec for spec, _ in check.found] == GOOD.split(",")
    for spec, found in check.found:
        worst = max((d.error for d in found), default=0.0)
        assert worst <= (0 if parse_pass(spec).exact else TOLERANCE), spec
    assert check.previous is None


def test_a_pass_that_lies_about_being_exact_is_caught():
    passes = [*parse_pipeline("remove_noop,split_copy_to_slice"), Plant(), *parse_pipeline("dead_code")]
    message = r"^pass plant \(number 3\) changes what method 'forward' computes: with \d+ rows .* allowed: 0$"
    with pytest.raises(NumericError, match=message):
        run_pipeline(make(), passes, observers=[NumericCheck()])


def test_even_a_last_bit_counts_where_a_pass_says_exact():
    program = program_of(lambda m, x: x * m.w, randn(1, ROWS, 8), w=torch.full((8,), 1 + 2**-23))
    message = r"is off by [\d.e-]+ of its largest value; allowed: 0$"
    with pytest.raises(NumericError, match=message):
        run_pipeline(program, [Drops()], observers=[NumericCheck()])


@dataclass(frozen=True)
class Drops(MethodPass):
    """Takes a factor near 1 for 1."""

    name: ClassVar[str] = "drops"

    def run_method(self, method, ep):
        (node,) = [node for node in ep.graph.nodes if str(node.target) == "aten.mul.Tensor"]
        node.args = (node.args[0], 1.0)
        node.target = aten.mul.Tensor
        for spec in list(ep.graph_signature.input_specs):
            if spec.target == "w":
                ep.graph_signature.input_specs.remove(spec)
                ep.graph.erase_node(next(n for n in ep.graph.nodes if n.name == spec.arg.name))
                ep.state_dict.pop("w")
        ep.graph_module.recompile()
        return Outcome(1)


def test_a_pass_that_changes_bits_may_not_change_more():
    with pytest.raises(NumericError, match=r"^pass rounds .* allowed: 0.0001$"):
        run_pipeline(make(), [Rounds()], observers=[NumericCheck()])


# Bisection


@pytest.mark.parametrize("place", range(6))
def test_the_pass_with_a_fault_is_found(place):
    """One operator, planted after each of the first passes in turn."""
    passes = parse_pipeline(GOOD)
    passes.insert(place, Plant())
    program = make()
    before = print_program(program)
    culprit = bisect(program, passes)
    assert (culprit.number, culprit.spec) == (place + 1, "plant")
    assert culprit.difference.method == "forward" and culprit.difference.error > TOLERANCE
    assert print_program(program) == before, "bisection works on copies"


def test_a_fault_that_shows_in_no_output_but_the_ids():
    """Integers count as well."""
    passes = [*parse_pipeline("split_copy_to_slice"), Plant("aten.add.Tensor", "sub"), *parse_pipeline("dead_code")]
    culprit = bisect(make(), passes)
    assert (culprit.number, culprit.difference.where) == (2, "result 1")


def test_good_passes_have_no_culprit():
    assert bisect(make(), parse_pipeline(GOOD)) is None
    assert bisect(make(), []) is None


def test_a_tolerance_that_is_wide_enough_finds_nothing():
    assert bisect(make(), [Plant()], tolerance=1e9) is None


def test_bisection_runs_the_methods_about_log_two_times(monkeypatch):
    calls = []
    monkeypatch.setattr(numerics, "differences", lambda *args, **kw: calls.append(1) or differences(*args, **kw))
    passes = [*parse_pipeline("dead_code," * 13), Plant(), *parse_pipeline("dead_code,dead_code")]
    assert bisect(make(), passes).number == 14
    assert len(calls) <= 5

"""The runner of pipelines: its checks, its records and its errors; and whether the tests of passes can fail at all."""

from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import pytest
import torch
from ir import ROWS, apply, node_of, program_of, randn, results

from eyas.passes.base import MethodPass, Outcome, Pass, Refusal
from eyas.passes.pipeline import PassError, arrange, nearest, run_pipeline
from eyas.passes.printer import print_program
from eyas.passes.program import Program
from eyas.passes.registry import PASSES, find_pass, parse_pipeline
from eyas.passes.share_buffers import ShareBuffers
from eyas.passes.split_copy_to_slice import SplitCopyToSlice

X = randn(1, ROWS, 8)
ALL = "remove_noop,split_copy_to_slice,midm_sdpa,dead_code,materialize_tables,masked_sdpa,panel_linear,share_buffers"


def halves(module, x):
    low, high = x.chunk(2, dim=-1)
    return torch.cat([high, low], dim=-1) @ module.w


def make() -> Program:
    return program_of(halves, X, w=randn(8, 3))


@dataclass(frozen=True)
class Gives(Pass):
    name: ClassVar[str] = "gives"
    ensures: ClassVar[frozenset[str]] = frozenset({"order"})
    refuse: bool = False

    def run(self, program):
        return Outcome(0, [Refusal("forward", "here", "it cannot be")] if self.refuse else [])


@dataclass(frozen=True)
class Needs(Pass):
    name: ClassVar[str] = "needs"
    requires: ClassVar[frozenset[str]] = frozenset({"order", "tidiness"})
    times: int = 1

    def run(self, program):
        raise AssertionError("a pass whose needs are not met must not run")


@dataclass(frozen=True)
class NeedsOrder(Needs):
    requires: ClassVar[frozenset[str]] = frozenset({"order"})

    def run(self, program):
        return Outcome()


@dataclass(frozen=True)
class Breaks(MethodPass):
    """Breaks the graph in one of several ways."""

    name: ClassVar[str] = "breaks"
    how: str = ""

    def run_method(self, method, ep):
        graph = ep.graph
        node = next(n for n in graph.nodes if n.op == "call_function")
        if self.how == "erases a node in use":
            graph.erase_node(node)
        elif self.how == "renames an output in the signature":
            ep.graph_signature.output_specs[0].arg.name = "nobody"
        elif self.how == "adds a node without a type":
            with graph.inserting_after(node):
                graph.call_function(torch.ops.aten.relu.default, (node,))
        elif self.how == "uses a node before it is made":
            first = next(iter(graph.nodes))
            with graph.inserting_before(first):
                early = graph.call_function(torch.ops.aten.relu.default, (node,))
            early.meta["val"] = node.meta["val"]
        elif self.how == "forgets a constant":
            ep.state_dict.pop("w")
        elif self.how == "calls a method":
            with graph.inserting_after(node):
                graph.call_method("relu", (node,)).meta["val"] = node.meta["val"]
        elif self.how == "names two arguments alike":
            placeholders = [n for n in graph.nodes if n.op == "placeholder"]
            placeholders[0].target = placeholders[1].target
            ep.graph_module.recompile()
        elif self.how == "finds nothing":
            next(n for n in graph.nodes if n.op == "call_module")
        else:
            raise {"value": ValueError, "key": KeyError, "runtime": NotImplementedError}[self.how]("what went wrong")
        return Outcome(1)


# Facts


@dataclass(frozen=True)
class Loses(Pass):
    """Breaks what ``gives`` gives."""

    name: ClassVar[str] = "loses"
    breaks: ClassVar[frozenset[str]] = frozenset({"order"})

    def run(self, program):
        return Outcome()


def test_a_missing_fact_names_the_pass_the_fact_and_what_came_before():
    message = (
        r"^pass needs\{times=2\} \(number 3, after split_copy_to_slice, gives\) needs tidiness, but no pass has "
        r"ensured tidiness; passes that ensure it: none$"
    )
    with pytest.raises(PassError, match=message):
        run_pipeline(make(), [SplitCopyToSlice(), Gives(), Needs(times=2)])
    with pytest.raises(PassError, match=r"^pass needs \(number 1, after no passes\) needs order, but no pass has"):
        run_pipeline(make(), [Needs()])


def test_a_fact_that_was_given_is_enough():
    assert [r.spec for r in run_pipeline(make(), [Gives(), SplitCopyToSlice(), NeedsOrder()])] == [
        "gives", "split_copy_to_slice", "needs",
    ]  # fmt: skip


def test_a_pass_that_left_a_candidate_alone_gives_no_fact():
    with pytest.raises(PassError, match=r"pass needs \(number 2, after gives\{refuse=true\}\) needs order"):
        run_pipeline(make(), [Gives(refuse=True), NeedsOrder()])


def test_a_fact_that_a_pass_breaks_names_that_pass_and_an_order():
    message = (
        r"^pass needs \(number 3, after gives, loses\) needs order, but loses \(number 2\) breaks it \(no pass has "
        r"ensured order\); an order that works: "
    )
    with pytest.raises(PassError, match=message + r"loses,gives,needs$"):
        run_pipeline(make(), [Gives(), Loses(), NeedsOrder()])


def test_a_fact_that_comes_later_names_its_pass_and_an_order():
    message = (
        r"^pass needs \(number 1, after no passes\) needs order, but gives \(number 3\), which ensures it, comes later "
        r"\(no pass has ensured order\); an order that works: split_copy_to_slice,gives,needs$"
    )
    with pytest.raises(PassError, match=message):
        run_pipeline(make(), [NeedsOrder(), SplitCopyToSlice(), Gives()])


def test_facts_of_ours_are_looked_up_and_not_believed():
    """A program that has a fact needs no pass to give it; one that a pass of ours broke names it with an order."""
    program = attention()
    assert [r.rewrites for r in run_pipeline(program, parse_pipeline("midm_sdpa,masked_sdpa"))] == [1, 0]
    message = (
        r"^pass midm_sdpa \(number 2, after masked_sdpa\) needs visible_masks, but masked_sdpa \(number 1\) breaks it "
        r"\(method 'forward' has .* = eyas.masked_sdpa.default\); an order that works: midm_sdpa,masked_sdpa$"
    )
    with pytest.raises(PassError, match=message):
        run_pipeline(attention(), parse_pipeline("masked_sdpa,midm_sdpa"))


def attention() -> Program:
    def attend(module, q, pos):
        module.k.index_copy_(2, pos, q)
        module.v.index_copy_(2, pos, q)
        mask = pos[:, None] >= torch.arange(24)
        return torch.nn.functional.scaled_dot_product_attention(q, module.k, module.v, mask)

    caches = {name: torch.zeros(1, 2, 24, 16) for name in ("k", "v")}
    return program_of(attend, randn(1, 2, ROWS, 16), torch.arange(ROWS), **caches)


# Orders


def text(passes):
    return ",".join(map(str, passes))


@pytest.mark.parametrize(
    ("given", "arranged"),
    [
        ("dead_code,remove_noop,split_copy_to_slice", "dead_code,remove_noop,split_copy_to_slice"),
        ("masked_sdpa,midm_sdpa", "midm_sdpa,masked_sdpa"),
        ("panel_linear,dead_code,int4_smallm", "dead_code,int4_smallm,panel_linear"),
        ("share_buffers,panel_linear", "panel_linear,share_buffers"),
        (
            "share_buffers,panel_linear,masked_sdpa,int4_smallm,midm_sdpa{max_m=8}",
            "int4_smallm,panel_linear,share_buffers,midm_sdpa{max_m=8},masked_sdpa",
        ),
        ("dead_code,dead_code", "dead_code,dead_code"),
        ("", ""),
    ],
)
def test_passes_are_put_in_an_order_that_their_facts_allow(given, arranged):
    """As close to the given one as that permits, and in the same way each time."""
    assert text(arrange(parse_pipeline(given))) == arranged
    assert text(arrange(parse_pipeline(arranged))) == arranged


def test_own_facts_are_ordered_as_well():
    assert text(arrange([Loses(), NeedsOrder(), Gives()])) == "loses,gives,needs"
    assert text(arrange([NeedsOrder(times=2), Gives(), NeedsOrder()])) == "gives,needs{times=2},needs"


def test_the_first_ones_keep_their_order():
    passes = parse_pipeline("dead_code,remove_noop,masked_sdpa,midm_sdpa")
    assert text(arrange(passes, kept=2)) == "dead_code,remove_noop,midm_sdpa,masked_sdpa"
    passes = parse_pipeline("masked_sdpa,dead_code,midm_sdpa")
    assert text(arrange(passes, kept=2)) == "midm_sdpa,masked_sdpa,dead_code"


def test_a_cycle_names_the_passes_in_it():
    with pytest.raises(PassError, match=r"^these passes cannot be ordered: ") as raised:
        arrange(parse_pipeline("masked_sdpa,midm_sdpa"), kept=2)
    reasons = str(raised.value).partition(": ")[2].split("; ")
    assert sorted(reasons) == [
        "masked_sdpa is asked for before midm_sdpa",
        "midm_sdpa requires visible_masks, which masked_sdpa breaks",
    ]


def test_two_passes_that_want_each_other_first():
    @dataclass(frozen=True)
    class Left(Pass):
        name: ClassVar[str] = "left"
        requires: ClassVar[frozenset[str]] = frozenset({"b"})
        ensures: ClassVar[frozenset[str]] = frozenset({"a"})

    @dataclass(frozen=True)
    class Right(Pass):
        name: ClassVar[str] = "right"
        requires: ClassVar[frozenset[str]] = frozenset({"a"})
        ensures: ClassVar[frozenset[str]] = frozenset({"b"})

    with pytest.raises(PassError) as raised:
        arrange([Left(), Right()])
    assert "right requires a, which left ensures" in str(raised.value)
    assert "left requires b, which right ensures" in str(raised.value)
    with pytest.raises(
        PassError, match=r"right \(number 2\), which ensures it, comes later .*; these passes cannot be"
    ):
        run_pipeline(make(), [Left(), Right()])


# must_fire


def test_a_pass_that_must_fire_and_has_nothing_to_do():
    message = (
        r"^pass midm_sdpa\{must_fire=true\} \(number 2, after dead_code\) must fire and did not: there is no "
        r"candidate: no node of the kind that it rewrites$"
    )
    with pytest.raises(PassError, match=message):
        run_pipeline(make(), parse_pipeline("dead_code,midm_sdpa{must_fire=true}"))


def test_a_pass_that_must_fire_gives_the_reasons_that_it_had():
    message = (
        r"^pass midm_sdpa\{must_fire=true,max_m=8\} \(number 1, after no passes\) must fire and did not: a call has up "
        r"to 16 rows; max_m is 8 \(1 times, first at .*ir.py:\d+ of method 'forward'\)$"
    )
    with pytest.raises(PassError, match=message):
        run_pipeline(attention(), parse_pipeline("midm_sdpa{must_fire=true,max_m=8}"))


def test_reasons_are_counted_the_most_frequent_first():
    refusals = [Refusal("a", "one", "rare"), Refusal("a", "two", "often"), Refusal("b", "three", "often")]
    assert nearest(refusals) == (
        "often (2 times, first at two of method 'a'); rare (1 times, first at one of method 'a')"
    )


def test_a_pass_that_must_fire_and_does():
    assert run_pipeline(attention(), parse_pipeline("midm_sdpa{must_fire=true}"))[0].rewrites == 1


# Observers


class Notes:
    """An observer that writes down what it was told."""

    def __init__(self):
        self.seen = []

    def before_pass(self, number, one, program):
        self.seen.append(("before", number, str(one), print_program(program)))

    def after_pass(self, number, one, program, record):
        self.seen.append(("after", number, record.spec, print_program(program)))


def test_observers_see_each_pass_before_and_after_it():
    notes, more = Notes(), Notes()
    program = make()
    before = print_program(program)
    run_pipeline(program, [SplitCopyToSlice(), ShareBuffers()], observers=[notes, more])
    after = print_program(program)
    assert [entry[:3] for entry in notes.seen] == [
        ("before", 1, "split_copy_to_slice"), ("after", 1, "split_copy_to_slice"),
        ("before", 2, "share_buffers"), ("after", 2, "share_buffers"),
    ]  # fmt: skip
    texts = [entry[3] for entry in notes.seen]
    assert texts[0] == before and texts[1] == texts[2] != before and texts[3] == after
    assert more.seen == notes.seen


def test_observers_do_not_hear_of_a_pass_that_failed():
    notes = Notes()
    with pytest.raises(PassError):
        run_pipeline(make(), [SplitCopyToSlice(), Breaks("value")], observers=[notes])
    assert [entry[:2] for entry in notes.seen] == [("before", 1), ("after", 1), ("before", 2)]


# Failures


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("erases a node in use", "still had 1 users"),
        ("renames an output in the signature", "nobody"),
        ("adds a node without a type", "val"),
        ("uses a node before it is made", "before it has been defined"),
        ("forgets a constant", "w"),
        ("calls a method", "relu"),
        ("names two arguments alike", "duplicate argument"),
        ("finds nothing", "StopIteration"),
        ("value", "ValueError: what went wrong"),
        ("key", "KeyError: 'what went wrong'"),
        ("runtime", "NotImplementedError: what went wrong"),
    ],
)
def test_a_broken_pass_is_named_with_its_place_and_cause(how, cause):
    with pytest.raises(PassError) as raised:
        run_pipeline(make(), [Gives(), SplitCopyToSlice(), Breaks(how)])
    message = str(raised.value)
    assert message.startswith(f"pass breaks{{how={how}}} (number 3, after gives, split_copy_to_slice) failed: ")
    assert cause in message and str(raised.value.__cause__) in message and raised.value.__cause__ is not None


def test_the_first_pass_comes_after_none():
    with pytest.raises(PassError, match=r"\(number 1, after no passes\) failed: ValueError: what went wrong"):
        run_pipeline(make(), [Breaks("value")])


def test_what_is_no_failure_of_a_pass_is_not_caught():
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(make(), [type("Slow", (Pass,), {"name": "slow", "run": interrupted})()])


def interrupted(self, program):
    raise KeyboardInterrupt


# Records


def test_records_count_rewrites_nodes_and_seconds():
    program = make()
    nodes = len(program.methods["forward"].graph.nodes)
    (split, again, share) = run_pipeline(program, [SplitCopyToSlice(), SplitCopyToSlice(), ShareBuffers()])
    assert (split.spec, split.rewrites, split.refusals) == ("split_copy_to_slice", 1, ())
    assert (split.nodes_before, split.nodes_after) == (nodes, nodes - 1), "two getitems became slices, the chunk went"
    assert (again.rewrites, again.nodes_before, again.nodes_after) == (0, nodes - 1, nodes - 1)
    assert share.rewrites == 1 and all(r.seconds >= 0 for r in (split, again, share))


def test_nodes_are_counted_over_all_methods():
    one, two = make().methods["forward"], make().methods["forward"]
    (record,) = run_pipeline(Program({"one": one, "two": two}), [SplitCopyToSlice()])
    assert record.rewrites == 2 and record.nodes_before == 2 * (len(one.graph.nodes) + 1)


def test_refusals_are_recorded():
    program = program_of(lambda m, x: x.chunk(2, dim=-1), X)
    chunk = node_of(program, "aten.chunk.default")
    with chunk.graph.inserting_after(chunk):
        whole = chunk.graph.call_function(torch.ops.aten.cat.default, (chunk, -1))
    whole.meta["val"] = chunk.args[0].meta["val"]
    (record,) = run_pipeline(program, [SplitCopyToSlice()])
    assert record.rewrites == 0 and [r.method for r in record.refusals] == ["forward"]


def test_operators_are_counted_before_and_after():
    (split,) = run_pipeline(make(), [SplitCopyToSlice()])
    before, after = Counter(split.before), Counter(split.after)
    gone, new = before - after, after - before
    assert gone == {"aten.chunk.default": 1, "<built-in function getitem>": 2} and new == {"aten.slice.Tensor": 2}


def test_without_checks_no_time_goes_to_them():
    checked, unchecked = (run_pipeline(make(), [SplitCopyToSlice()], verified=v)[0] for v in (True, False))
    assert checked.verify_seconds > unchecked.verify_seconds and checked.rewrites == unchecked.rewrites == 1


def test_without_checks_a_broken_graph_is_not_noticed():
    assert run_pipeline(make(), [Breaks("renames an output in the signature")], verified=False)[0].rewrites == 1
    with pytest.raises(PassError, match="failed: ValueError: what went wrong"):
        run_pipeline(make(), [Breaks("value")], verified=False)


def test_an_empty_pipeline_does_nothing():
    assert run_pipeline(make(), []) == []


# A bare exported program


def test_every_pass_works_on_a_bare_exported_program():
    """Without the project's own tracing: one method, called forward."""

    def block(module, x, positions):
        low, high = module.w(x.float()).chunk(2, dim=-1)
        mask = positions[:, None] >= torch.arange(24)
        table = (positions[:, None] * torch.arange(16)).cos()
        q = (low * table + high * table).unsqueeze(1)
        module.cache.index_copy_(2, positions, q)
        near = torch.arange(24) > positions[:, None] - 6
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, module.cache, module.cache, mask) + attend(q, module.cache, module.cache, near)

    def inputs(rows):
        return randn(1, rows, 8, seed=rows), torch.arange(rows)

    layer = torch.nn.Linear(8, 32)
    program = program_of(block, *inputs(ROWS), w=layer, cache=torch.zeros(1, 1, 24, 16))
    ep = program.methods["forward"]
    assert Program.of(ep).methods == {"forward": ep} and Program.of(program) is program
    expected = results(program, inputs(1), inputs(7))
    for one in parse_pipeline(ALL):
        assert apply(one, program).rewrites > 0, one
    for got, want in zip(results(program, inputs(1), inputs(7)), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert ep is program.methods["forward"]


def test_passes_do_not_remember_other_programs():
    """The same pass objects over two programs give what fresh ones give."""
    passes = parse_pipeline(ALL)
    texts = []
    for use in (passes, passes, parse_pipeline(ALL)):
        program = make()
        run_pipeline(program, use)
        texts.append(print_program(program))
    assert texts[0] == texts[1] == texts[2]


# Whether the tests of passes can fail


CASES = [(name, case) for name in PASSES for case in import_module(f"test_{name}").POSITIVE]


def idle(cls: type[Pass]) -> Pass:
    """The pass, but that it does nothing, and promises nothing."""
    return type(cls.__name__, (cls,), {"run": lambda self, program: Outcome(), "ensures": frozenset()})()


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case.__name__}" for name, case in CASES])
def test_a_positive_case_fails_without_the_pass(name, case):
    with pytest.raises(AssertionError):
        case(idle(find_pass(name)))


def test_every_pass_has_positive_cases():
    assert {name for name, _ in CASES} == set(PASSES)

"""Runs passes in order over a program, checks what each promised, and records what it did."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import networkx as nx
from torch._export.verifier import SpecViolationError

from eyas.passes.base import Pass, Refusal
from eyas.passes.facts import FACTS, evidence_against
from eyas.passes.program import Program
from eyas.passes.verify import Snapshot, verify


class PassError(RuntimeError):
    """A pass that failed, left a broken graph or stands where it cannot; the message names it and its place."""


# what rewriting, printing and checking a graph may raise; the last is what an exported program's own checks raise
FAILURES = (
    RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, StopIteration, SyntaxError,
    SpecViolationError,
)  # fmt: skip


@dataclass(frozen=True)
class PassRecord:
    """What one pass did. ``seconds`` is the pass's own time, ``verify_seconds`` that of the checks after it; ``before``
    and ``after`` count the nodes of each operator over all methods.
    """

    spec: str
    rewrites: int
    refusals: tuple[Refusal, ...]
    seconds: float
    verify_seconds: float
    before: dict[str, int]
    after: dict[str, int]

    @property
    def nodes_before(self) -> int:
        return sum(self.before.values())

    @property
    def nodes_after(self) -> int:
        return sum(self.after.values())


class Observer(Protocol):
    """Who is told of each pass before and after it ran."""

    def before_pass(self, number: int, one: Pass, program: Program) -> None: ...
    def after_pass(self, number: int, one: Pass, program: Program, record: PassRecord) -> None: ...


def run_pipeline(
    program: Program, passes: Iterable[Pass], verified: bool = True, observers: Sequence[Observer] = ()
) -> list[PassRecord]:
    """Runs ``passes`` in the order given. Raises ``PassError`` for a missing fact, a failing pass, or a graph that one
    broke (``verified``).
    """
    passes = list(passes)
    records: list[PassRecord] = []
    ensured: set[str] = set()
    counts = count_operators(program)
    snapshot = Snapshot.of(program) if verified else None
    for number, one in enumerate(passes, 1):
        place = f"pass {one} (number {number}, after {names_of(records)})"
        for fact in sorted(one.requires):
            against = None if fact in ensured else evidence_against(fact, program)
            if against:
                raise PassError(f"{place} needs {fact}, but {missing(fact, against, number, passes)}")
        for observer in observers:
            observer.before_pass(number, one, program)
        start = time.perf_counter()
        try:
            outcome = one.run(program)
            ran = time.perf_counter()
            if snapshot is not None:
                snapshot = verify(program, snapshot)
        except FAILURES as error:
            raise PassError(f"{place} failed: {type(error).__name__}: {error}") from error
        if one.must_fire and not outcome.rewrites:
            raise PassError(f"{place} must fire and did not: {nearest(outcome.refusals)}")
        ensured -= one.breaks
        for fact in sorted(one.ensures if not outcome.refusals else ()):  # one that was left alone belies the fact
            against = FACTS[fact](program) if fact in FACTS else None
            if against:
                raise PassError(f"{place} ensures {fact}, but {against}, and it did not say why it left that alone")
            ensured.add(fact)
        before, counts = counts, count_operators(program)
        records.append(
            PassRecord(
                str(one), outcome.rewrites, tuple(outcome.refusals), ran - start, time.perf_counter() - ran,
                before, counts,
            )
        )  # fmt: skip
        for observer in observers:
            observer.after_pass(number, one, program, records[-1])
    for ep in program.methods.values():
        ep.graph_module.recompile()
    return records


def missing(fact: str, against: str, number: int, passes: Sequence[Pass]) -> str:
    """Why a fact that pass ``number`` needs does not hold, and which order of the passes would give it."""
    earlier = [(n, one) for n, one in enumerate(passes[: number - 1], 1) if fact in one.breaks]
    later = [(n, one) for n, one in enumerate(passes[number:], number + 1) if fact in one.ensures]
    culprits = [f"{one} (number {n}) breaks it" for n, one in earlier[-1:]]
    culprits += [f"{one} (number {n}), which ensures it, comes later" for n, one in later[:1]]
    if not culprits:
        return f"{against}; passes that ensure it: {', '.join(givers(fact)) or 'none'}"
    try:
        advice = f"; an order that works: {','.join(map(str, arrange(passes)))}"
    except PassError as error:
        advice = f"; {error}"
    return f"{' and '.join(culprits)} ({against}){advice}"


def givers(fact: str) -> list[str]:
    """The passes of the registry that ensure a fact."""
    from eyas.passes.registry import find_pass, pass_names

    return [name for name in pass_names() if fact in find_pass(name).ensures]


def arrange(passes: Sequence[Pass], kept: int = 0) -> list[Pass]:
    """``passes`` in an order that their facts allow, as close to the given one as that permits; the first ``kept`` stay
    in theirs. Raises ``PassError`` for a cycle, naming the passes in it.

    A pass that breaks a fact comes before the one that gives it, and that one before the pass that requires it; where
    no pass gives it, the one that requires it comes before the one that breaks it.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(passes)))
    given = frozenset().union(*(one.ensures for one in passes))
    for i in range(1, kept):
        graph.add_edge(i - 1, i, why=f"{passes[i - 1]} is asked for before {passes[i]}")
    for i, one in enumerate(passes):
        for j, other in enumerate(passes):
            if i == j or one == other:
                continue
            for fact in sorted(one.ensures & other.requires):
                graph.add_edge(i, j, why=f"{other} requires {fact}, which {one} ensures")
            for fact in sorted((one.requires & other.breaks) - given):
                graph.add_edge(i, j, why=f"{one} requires {fact}, which {other} breaks")
            for fact in sorted((one.breaks - one.ensures) & other.ensures):
                graph.add_edge(i, j, why=f"{other} ensures {fact}, which {one} breaks")
    try:
        return [passes[i] for i in nx.lexicographical_topological_sort(graph, key=lambda i: i)]
    except nx.NetworkXUnfeasible as error:
        cycle = [graph.edges[edge[:2]]["why"] for edge in nx.find_cycle(graph)]
        raise PassError(f"these passes cannot be ordered: {'; '.join(cycle)}") from error


def nearest(refusals: Sequence[Refusal]) -> str:
    """Why the candidates were refused: each reason once, the most frequent first, with a node that it holds for."""
    reasons = Counter(refusal.reason for refusal in refusals)
    first = {refusal.reason: refusal for refusal in reversed(refusals)}
    texts = [
        f"{reason} ({count} times, first at {first[reason].node} of method {first[reason].method!r})"
        for reason, count in reasons.most_common()
    ]
    return "; ".join(texts) or "there is no candidate: no node of the kind that it rewrites"


def names_of(records: list[PassRecord]) -> str:
    return ", ".join(record.spec for record in records) or "no passes"


def count_operators(program: Program) -> dict[str, int]:
    """Nodes of each operator over all methods; placeholders and outputs under those names."""
    nodes = (node for ep in program.methods.values() for node in ep.graph.nodes)
    return dict(Counter(str(node.target) if node.op == "call_function" else node.op for node in nodes))

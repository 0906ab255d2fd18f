"""Runs passes in order over a program, checks what each promised, and records what it did."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from torch._export.verifier import SpecViolationError

from eyas.passes.base import Pass, Refusal
from eyas.passes.program import Program


class PassError(RuntimeError):
    """A pass that failed or left a broken graph; the message names it, its place and what came before it."""


# what rewriting, printing and checking a graph may raise; the last is what an exported program's own checks raise
FAILURES = (
    RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, StopIteration, SyntaxError,
    SpecViolationError,
)  # fmt: skip


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: rewrites, refusals, seconds, and the number of graph nodes before and after."""

    spec: str
    rewrites: int
    refusals: tuple[Refusal, ...]
    seconds: float
    nodes_before: int
    nodes_after: int


def run_pipeline(program: Program, passes: Iterable[Pass]) -> list[PassRecord]:
    """Runs ``passes`` in order. Raises ``PassError`` for a missing fact, a failing pass or a graph that one broke."""
    records: list[PassRecord] = []
    facts: set[str] = set()
    for one in passes:
        missing = one.requires - facts
        if missing:
            raise PassError(
                f"pass {one} (number {len(records) + 1}) needs {', '.join(sorted(missing))}; "
                f"what ran before it does not give that: {before(records)}"
            )
        start, nodes = time.perf_counter(), count_nodes(program)
        try:
            outcome = one.run(program)
            for ep in program.methods.values():
                ep.graph.lint()
                ep.validate()
        except FAILURES as error:
            raise PassError(
                f"pass {one} (number {len(records) + 1}, after {before(records)}) failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not outcome.refusals:  # a candidate that was left alone belies the fact
            facts |= one.ensures
        records.append(
            PassRecord(
                str(one),
                outcome.rewrites,
                tuple(outcome.refusals),
                time.perf_counter() - start,
                nodes,
                count_nodes(program),
            )
        )
    return records


def before(records: list[PassRecord]) -> str:
    return ", ".join(record.spec for record in records) or "no passes"


def count_nodes(program: Program) -> int:
    return sum(len(ep.graph.nodes) for ep in program.methods.values())

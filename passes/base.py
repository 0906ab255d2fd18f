"""What a pass is: a frozen dataclass whose fields are its options, printed as it is parsed: ``name{option=value}``."""

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar

from torch.export import ExportedProgram
from torch.fx import Node

from eyas.passes.program import Program


@dataclass(frozen=True)
class Refusal:
    """Why a candidate was left as it is: the node, and the reason in words."""

    method: str
    node: str
    reason: str


@dataclass
class Outcome:
    """What one pass did. ``rewrites`` never lies: 0 means an unchanged graph."""

    rewrites: int = 0
    refusals: list[Refusal] = dataclasses.field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        self.rewrites += other.rewrites
        self.refusals += other.refusals


@dataclass(frozen=True)
class Pass:
    """Base of all passes.

    ``requires``, ``ensures`` and ``breaks`` name facts about a program (``eyas.passes.facts``): those that must hold
    before, those that hold after unless a candidate was refused, and those that need not hold after. ``exact``: keeps
    every bit of every output. Every pass has the option ``must_fire``: making no rewrite is then an error that gives
    the reasons.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset({"no_blocks"})  # its nodes stand in the methods themselves
    ensures: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True
    must_fire: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, str) and (value != value.strip() or set(value) & set(",{}")):
                raise ValueError(
                    f"option {f.name!r} of pass {self.name!r} is {value!r}; its text must not hold a comma or braces, "
                    f"nor begin or end with space"
                )

    def __str__(self) -> str:
        options = ((f, getattr(self, f.name)) for f in dataclasses.fields(self))
        shown = [
            f"{f.name}={str(value).lower() if isinstance(value, bool) else value}"
            for f, value in options
            if value != f.default
        ]
        return self.name + (f"{{{','.join(shown)}}}" if shown else "")

    def run(self, program: Program) -> Outcome:
        """Rewrites the program in place."""
        raise NotImplementedError


@dataclass(frozen=True)
class MethodPass(Pass):
    """A pass that looks at one method at a time."""

    def run(self, program: Program) -> Outcome:
        outcome = Outcome()
        for method, ep in program.methods.items():
            outcome.add(self.run_method(method, ep))
        return outcome

    def run_method(self, method: str, ep: ExportedProgram) -> Outcome:
        raise NotImplementedError


def source_line(node: Node) -> str:
    """Where the model's source made a node, ``file:line``, or the node's name."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else node.name

"""Traces the methods of a speculator, each with a dynamic number of rows, and explains a trace that fails."""

import copy
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.value_ranges import ValueRanges

from eyas.lowering.trace_once import export_once
from eyas.models.speculator import Eagle3Speculator
from eyas.passes.program import remove_unused_constants

METHODS = ("prefill", "target_verify", "draft_decode")
EXTRA_METHODS = ("target_logits",)


@dataclass(frozen=True)
class Limits:
    """How many rows each method takes: from 1 to ``max_prefill`` for a chunk of the prompt, to ``max_chain + 1`` for a
    window.

    ``max_seq_len``: positions in the caches. ``chain``: proposals a round where the user does not say. ``max_draft``:
    rows of the draft head, None: as many as the larger of those.
    """

    max_seq_len: int
    max_prefill: int
    max_chain: int = 7
    chain: int = 4
    max_draft: int | None = None

    def rows(self, method: str) -> int:
        """The largest number of rows of a method; the smallest is always 1."""
        window = self.max_chain + 1
        draft = max(self.max_prefill, window) if self.max_draft is None else self.max_draft
        return {"prefill": self.max_prefill, "draft_decode": draft}.get(method, window)

    def check(self, target_max_call_rows: int) -> None:
        """Raises ``ValueError`` for limits that the target's caches cannot serve."""
        if self.max_seq_len < 2:
            raise ValueError(f"--max-seq-len must be at least 2 (a prompt token and a new one), got {self.max_seq_len}")
        for option, rows in (("--max-prefill", self.max_prefill), ("--max-chain plus one", self.max_chain + 1)):
            if not 1 <= rows <= target_max_call_rows:
                raise ValueError(
                    f"{option} is {rows}; the target's caches take 1 to {target_max_call_rows} rows a call "
                    f"(a ring of two windows takes one window, a flat cache its length)"
                )
        if self.max_chain < 1:
            raise ValueError(f"--max-chain must be at least 1, got {self.max_chain}")
        if not 1 <= self.chain <= self.max_chain:
            raise ValueError(f"--chain must lie in 1..{self.max_chain}, got {self.chain}")


# what a model's code, or the tracer on meeting it, may raise; the tracer's own errors are RuntimeErrors
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
TRACERS = tuple(os.path.dirname(module.__file__) + os.sep for module in (torch, sympy))


class TraceError(RuntimeError):
    """A method that cannot be traced with dynamic rows; the message names the method, the dimension and the source
    line.
    """


def trace_methods(
    speculator: Eagle3Speculator, limits: Limits, methods: Iterable[str] = METHODS
) -> dict[str, ExportedProgram]:
    """Traces ``methods`` of one speculator. Equal constant names in the results mean the same tensor object."""
    return {method: trace(speculator, method, limits.rows(method)) for method in methods}


def trace(speculator: Eagle3Speculator, method: str, max_rows: int) -> ExportedProgram:
    """One method over 1..``max_rows`` rows; with ``max_rows`` 1 its rows are no dynamic dimension. Raises
    ``TraceError``.
    """
    upper = max(max_rows, 3)  # the tracer takes both ends of a range for constants, so an example must lie between
    rows = 1 if max_rows == 1 else example_rows(upper)
    module = copy.copy(speculator)
    module.forward = getattr(speculator, method)
    M = None if max_rows == 1 else Dim("rows", min=1, max=upper)
    tokens, input_pos = torch.zeros(1, rows, dtype=torch.int64), torch.arange(rows)
    args, shapes = (tokens, input_pos), ({1: M}, {0: M})
    if method == "draft_decode":
        width, dtype = speculator.draft.config.hidden_size, speculator.draft.dtype
        args, shapes = (tokens, torch.zeros(1, rows, width, dtype=dtype), input_pos), ({1: M}, {1: M}, {0: M})

    def export() -> ExportedProgram:
        with torch.no_grad():
            return torch.export.export(module, args, dynamic_shapes=shapes, strict=False)

    try:
        ep = trace_shared(module, args, shapes, M) or export()
    except FAILURES as error:
        raise TraceError(explain(export, method, error)) from error
    check_ranges(ep, method, max_rows, upper, export)
    for symbol in ep.range_constraints:
        ep.range_constraints[symbol] = ValueRanges(1, max_rows)
    remove_unused_constants(ep)  # the tracer lifts all of the module's, whatever the method reads
    ep.graph_module.recompile()
    return ep


def trace_shared(
    module: torch.nn.Module, args: tuple[Tensor, ...], shapes: tuple[dict, ...], rows: Dim | None
) -> ExportedProgram | None:
    """The method with its equal parts traced once; None where there are none, or one cannot be traced by itself."""
    if rows is None:
        return None
    try:
        with torch.no_grad():
            return export_once(module, args, shapes, rows)
    except FAILURES:
        return None  # if the whole cannot be traced either, that says why


def check_ranges(ep: ExportedProgram, method: str, max_rows: int, upper: int, export) -> None:
    """Raises ``TraceError`` unless the method has one dynamic dimension, over 1..``upper`` (none for one row), and
    reads no tensor's value.
    """
    reads = [
        n
        for n in ep.graph.nodes
        if n.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
    ]
    if reads:
        raise TraceError(
            f"method {method!r} turns a tensor's value into a Python number; {guard_origin(export, reads=True)}. "
            f"Index with the position tensor instead"
        )
    if any(free_unbacked_symbols(symbol) for symbol in ep.range_constraints):
        raise TraceError(
            f"method {method!r} makes a tensor whose size depends on a tensor's values; "
            f"{guard_origin(export, reads=True)}. Keep all rows and mask those that do not count"
        )
    ranges = {(int(r.lower), int(r.upper)) for r in ep.range_constraints.values()}
    if ranges != ({(1, upper)} if max_rows > 1 else set()):
        got = ", ".join(f"{low} to {high}" for low, high in sorted(ranges)) or "a constant number of"
        raise TraceError(
            f"method {method!r} was traced for {got} rows instead of 1 to {upper}: its code ties the number of rows "
            f"to a constant; {guard_origin(export)}"
        )


def example_rows(upper: int) -> int:
    """A number of rows to trace with: a prime near the middle, never 1 and never a bound, so that it stands out as a
    literal.
    """
    middle = range(max(2, upper // 2 + 1), 1, -1)
    return next(n for n in middle if all(n % d for d in range(2, n)) and n < upper)


def explain(export, method: str, error: Exception) -> str:
    """What to tell the user about a trace that failed."""
    text = str(error)
    if "data-dependent" in text or "Could not guard" in text:
        return (
            f"method {method!r} cannot be traced: it turns a tensor's value into a Python number "
            f"({first_line(text)}); {frame_origin(error)}. Index with the position tensor instead"
        )
    if "Constraints violated" in text or "specialized" in text:
        return (
            f"method {method!r} cannot be traced with a dynamic number of rows (dimension 'rows' of tokens and "
            f"input_pos): its code ties it to a constant; {guard_origin(export)}. "
            f"Take lengths from the tensor's shape, and do not branch on them"
        )
    return f"method {method!r} cannot be traced: {first_line(text)}; {frame_origin(error)}"


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no detail")


class GuardRecorder(logging.Handler):
    """Notes which line of the model was running when the tracer tied down a dimension or met an unknown number."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.guards: list[str] = []
        self.reads: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        guard = re.match(r"eval (.+?) \[guard added\]", message)
        if guard and not re.fullmatch(r"Eq\(s\d+, s\d+\)", guard[1]):  # tokens and positions have equally many rows
            self.guards += [f"{line} requires {guard[1]}" for line in [user_frame()] if line]
        elif message.startswith("create_unbacked_sym"):
            self.reads += [f"{line} reads it" for line in [user_frame()] if line]


def user_frame() -> str | None:
    """``file:line`` of the innermost running frame of the model's code."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == __file__ and frame.f_code.co_name == "export":
            return None  # nothing of the model is running
        if is_model_code(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def is_model_code(file: str) -> bool:
    """Whether a file is the model's, rather than the tracer's, Python's own or none (``<string>``)."""
    library = file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file
    return not (library or file == __file__ or file.startswith(TRACERS) or file.startswith("<"))


def guard_origin(export, reads: bool = False) -> str:
    """Traces once more and names the line that first tied the number of rows to a constant, or ``reads`` a value."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    recorder, level, propagate = GuardRecorder(), logger.level, logger.propagate
    handlers = logger.handlers[:]
    logger.handlers, logger.propagate = [recorder], False
    logger.setLevel(logging.INFO)
    try:
        export()
    except FAILURES:
        pass  # the failure that is being explained
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    return next(iter(recorder.reads if reads else recorder.guards), "the line that did it could not be found")


def frame_origin(error: BaseException) -> str:
    """The line of user code at which an exception was raised."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        if is_model_code(trace.tb_frame.f_code.co_filename):
            frames.append(f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"at {frames[-1]}" if frames else "at an unknown line"

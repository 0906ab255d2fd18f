"""Bounds of symbolic sizes, from the ranges that a method declares."""

from collections.abc import Iterable
from math import prod

import torch
from torch.export import ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


def bounds(ep: ExportedProgram, sizes: Iterable[int | torch.SymInt]) -> tuple[int, int | None]:
    """The least and the largest product of ``sizes``; None where there is no largest."""
    size = prod(sizes)
    if isinstance(size, int):
        return size, size
    found = bound_sympy(size.node.expr, dict(ep.range_constraints))
    return limit(found, False) or 0, limit(found, True)


def limit(found: ValueRanges, upper: bool) -> int | None:
    end = found.upper if upper else found.lower
    return int(end) if end.is_finite and end.is_Integer else None

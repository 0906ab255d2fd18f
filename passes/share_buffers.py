"""Decides which constants of which methods are one storage: those of equal name, and nothing by guess."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from eyas.passes.base import Outcome, Pass
from eyas.passes.program import Program, SharedBuffer, constant_nodes, constant_specs, constant_value, mutated_buffers


@dataclass(frozen=True)
class ShareBuffers(Pass):
    """Makes equal names one tensor object and records who reads and who writes each in ``program.sharing``.

    Before::

        method prefill        %k: f32[1,1,1024,256] = buffer target.layers.0.self_attn.cache.k
        method verify         %k: f32[1,1,1024,256] = buffer target.layers.0.self_attn.cache.k

    After::

        target.layers.0.self_attn.cache.k: f32[1,1,1024,256]  read by prefill, verify; written by prefill, verify

    An equal name with another shape, dtype or initial value is an error, and so is memory that has two names where a
    method writes it: behind each name the program would have its own copy. Two caches of equal shape and different
    names stay apart. The tracer's own names (``lifted_tensor_0``) mean nothing beyond a method and are made distinct.
    Counts the names that were not yet recorded, not yet one tensor or not yet distinct.
    """

    name: ClassVar[str] = "share_buffers"
    ensures: ClassVar[frozenset[str]] = frozenset({"shared_buffers"})

    def run(self, program: Program) -> Outcome:
        first: dict[str, tuple[str, Tensor]] = {}
        readers: dict[str, list[str]] = {}
        writers: dict[str, list[str]] = {}
        unified = set()
        for method, ep in program.methods.items():
            unified |= rename_lifted(method, ep)
            written, nodes = mutated_buffers(ep), constant_nodes(ep)
            for name, spec in constant_specs(ep):
                value = constant_value(ep, spec)
                if name in first:
                    owner, shared = first[name]
                    check_equal(name, owner, shared, method, value)
                    if shared is not value:
                        (ep.constants if name in ep.constants else ep.state_dict)[name] = shared
                        unified.add(name)
                first.setdefault(name, (method, value))
                if nodes[name].users:
                    readers.setdefault(name, []).append(method)
                if name in written:
                    writers.setdefault(name, []).append(method)
        plan = {
            name: SharedBuffer(
                name, tuple(value.shape), value.dtype, tuple(readers.get(name, ())), tuple(writers.get(name, ()))
            )
            for name, (_, value) in sorted(first.items())
        }
        check_distinct(plan, {name: value for name, (_, value) in first.items()})
        known = program.sharing or {}
        changed = unified | {name for name, entry in plan.items() if known.get(name) != entry}
        program.sharing = plan
        return Outcome(len(changed))


def check_equal(name: str, owner: str, shared: Tensor, method: str, value: Tensor) -> None:
    """Raises ``ValueError`` where two methods mean different tensors by one name."""
    if shared.shape != value.shape or shared.dtype != value.dtype:
        raise ValueError(
            f"buffer {name!r} is {list(shared.shape)} {shared.dtype} in method {owner!r} and {list(value.shape)} "
            f"{value.dtype} in method {method!r}; an equal name must mean one storage"
        )
    same = shared.data_ptr() == value.data_ptr() and shared.stride() == value.stride()
    if not same and not torch.equal(bits(shared), bits(value)):
        raise ValueError(
            f"buffer {name!r} starts with other values in method {owner!r} than in method {method!r}; "
            f"an equal name must mean one storage"
        )


def bits(value: Tensor) -> Tensor:
    """A tensor's bytes, in which unlike in numbers a NaN equals itself."""
    return value.detach().contiguous().flatten().view(torch.uint8)


def check_distinct(plan: Mapping[str, SharedBuffer], values: Mapping[str, Tensor]) -> None:
    """Raises ``ValueError`` where a buffer that some method writes has memory in common with one of another name."""
    used = sorted((*extent(values[b.name]), b.name) for b in plan.values() if b.readers or b.writers)
    reach, owner = 0, ""  # where the memory seen so far ends, and whose that end is
    for start, stop, name in used:
        writers = (*plan[owner].writers, *plan[name].writers) if start < reach else ()
        if writers:
            raise ValueError(
                f"buffers {owner!r} and {name!r} share memory, and method {writers[0]!r} writes it; "
                f"register it once, and use it by that one name"
            )
        reach, owner = max((reach, owner), (stop, name))


def extent(value: Tensor) -> tuple[int, int]:
    """The addresses that a tensor's elements span: from the first byte to past the last."""
    if not value.numel():
        return value.data_ptr(), value.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()


def rename_lifted(method: str, ep: ExportedProgram) -> set[str]:
    """Puts the method's name before the names that the tracer gave to tensors it found in the code."""
    renamed = set()
    for name, spec in list(constant_specs(ep)):
        if spec.kind is InputKind.CONSTANT_TENSOR and re.fullmatch(r"lifted_tensor_\d+", name):
            spec.target = f"{method}.{name}"
            ep.constants[spec.target] = ep.constants.pop(name)
            renamed.add(spec.target)
    return renamed


def plan_lines(sharing: dict[str, SharedBuffer]) -> list[str]:
    """The plan in words: the mutable buffers one by one, the rest summed up."""
    lines = [
        f"{b.name}: {list(b.shape)} {str(b.dtype).removeprefix('torch.')}, read by {', '.join(b.readers)}; "
        f"written by {', '.join(b.writers)}"
        for b in sharing.values()
        if b.mutable
    ]
    fixed = [b for b in sharing.values() if not b.mutable]
    several = [b for b in fixed if len(b.readers) > 1]
    lines.append(
        f"{len(fixed)} constants ({sum(b.nbytes for b in fixed) / 1e6:.1f} MB), {len(several)} of them read by several "
        f"methods and stored once"
    )
    return lines

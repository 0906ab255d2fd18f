"""Decides which constants of which methods are one storage: those of equal name, and nothing by guess."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

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

    An equal name with another shape, dtype or initial value is an error. Two caches of equal shape and different names
    stay apart. Counts the names that were not yet recorded or not yet one tensor.
    """

    name: ClassVar[str] = "share_buffers"
    ensures: ClassVar[frozenset[str]] = frozenset({"shared_buffers"})

    def run(self, program: Program) -> Outcome:
        first: dict[str, tuple[str, Tensor]] = {}
        readers: dict[str, list[str]] = {}
        writers: dict[str, list[str]] = {}
        unified = set()
        for method, ep in program.methods.items():
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
    if not same and not torch.equal(shared, value):
        raise ValueError(
            f"buffer {name!r} starts with other values in method {owner!r} than in method {method!r}; "
            f"an equal name must mean one storage"
        )


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

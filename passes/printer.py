"""Stable, typed, compact text of a method: one line a node, the same in two processes.

``%q: f32[1,4,s0,256] = aten.view.default(%x, [1, 4, -1, 256])``. Dynamic dimensions are s0, s1, ... in the order in
which they first appear. No addresses, no generated ids.
"""

import hashlib
import operator
import re
from functools import lru_cache

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from eyas.passes.program import Program, constant_specs

DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


class Symbols:
    """Names dynamic dimensions by the order in which they appear."""

    def __init__(self):
        self.names: dict[str, str] = {}

    def rename(self, text: str) -> str:
        return re.sub(r"\b[su]\d+\b", lambda m: self.names.setdefault(m[0], f"{m[0][0]}{len(self.names)}"), text)


def print_method(ep: ExportedProgram, name: str = "forward", kind: str = "method") -> str:
    """One method, or another ``kind`` of graph."""
    symbols, lines = Symbols(), []
    constants = {spec.arg.name: (constant, spec) for constant, spec in constant_specs(ep)}
    for node in ep.graph.nodes:
        if node.op == "placeholder":
            source = "input"
            if node.name in constants:
                constant, spec = constants[node.name]
                source = f"{spec.kind.name.lower()} {constant}"
            lines.append(f"%{node.name}: {type_of(node, symbols)} = {source}")
        elif node.op == "output":
            lines.append(f"return {argument(node.args[0], symbols)}{updates(ep)}")
        else:
            arguments = [argument(a, symbols) for a in node.args]
            arguments += [f"{key}={argument(value, symbols)}" for key, value in node.kwargs.items()]
            lines.append(f"%{node.name}: {type_of(node, symbols)} = {target(node)}({', '.join(arguments)})")
    ranges = [
        f"{symbols.names[str(s)]} in [{r.lower}, {r.upper}]"
        for s, r in ep.range_constraints.items()
        if str(s) in symbols.names
    ]
    head = f"{kind} {name}" + (f" where {', '.join(sorted(ranges))}" if ranges else "")
    return "\n".join([head, *("  " + line for line in lines)]) + "\n"


def print_program(program: Program) -> str:
    """Every method, and who shares which buffer."""
    parts = [print_method(ep, name) for name, ep in program.methods.items()]
    parts += [print_method(block.program, key, kind="block") for key, block in program.blocks.items()]
    if program.sharing is not None:
        lines = [
            f"  {b.name}: {dtype_name(b.dtype)}[{','.join(map(str, b.shape))}]"
            + f" read by {', '.join(b.readers) or 'nobody'}"
            + (f"; written by {', '.join(b.writers)}" if b.writers else "")
            for b in program.sharing.values()
        ]
        parts.append("\n".join(["buffers", *lines]) + "\n")
    return "\n".join(parts)


def program_hash(program: Program) -> str:
    """16 hex digits that tell one program's text from another's."""
    return hashlib.sha256(print_program(program).encode()).hexdigest()[:16]


def updates(ep: ExportedProgram) -> str:
    """Which results a method without writes in place hands back as the new values of its buffers."""
    signature = ep.graph_signature
    new = {**signature.buffers_to_mutate, **signature.parameters_to_mutate, **signature.user_inputs_to_mutate}
    return "".join(f", %{node} -> {name}" for node, name in new.items())


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def size_text(size: int | torch.SymInt) -> str:
    """A size in words, with the tracer's names of dynamic ones."""
    return str(size) if isinstance(size, int) else expression_text(size.node.expr)


@lru_cache(maxsize=4096)
def expression_text(expression: sympy.Expr) -> str:
    return str(expression)


def type_of(node: Node, symbols: Symbols) -> str:
    return value_type(node.meta.get("val"), symbols)


def value_type(value: object, symbols: Symbols) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{','.join(symbols.rename(size_text(d)) for d in value.shape)}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(value_type(v, symbols) for v in value) + ")"
    if isinstance(value, torch.SymInt):
        return f"sym({symbols.rename(str(value))})"
    return "none" if value is None else type(value).__name__


def target(node: Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def argument(value: object, symbols: Symbols) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(argument(v, symbols) for v in value) + "]"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return symbols.rename(str(value))

"""Facts about a program that passes require, ensure or break: each is looked up in the graph, never believed.

``FACTS`` maps a fact's name to its check, which gives None where the fact holds and otherwise the first thing that
speaks against it. Another package's passes may use facts of their own, which have no check here: those hold once a pass
that ensures them has run and left nothing alone.
"""

from collections.abc import Callable, Collection

import torch

import eyas.kernels  # noqa: F401  registers the operators
from eyas.passes.program import Program
from eyas.passes.split_copy_to_slice import SPLITS

aten, own = torch.ops.aten, torch.ops.eyas

STOCK_ATTENTION = (aten.scaled_dot_product_attention.default,)
STOCK_PRODUCTS = (
    aten.linear.default, aten.addmm.default, aten.mm.default, own.int8_linear.default, own.int4_linear.default,
    own.int4_smallm.default, own.int4_anym.default,
)  # fmt: skip
PACKED = (
    "eyas.panel_linear.default",
    "eyas.panel_int8_linear.default",
    "eyas.panel_int4_linear.default",
    "eyas.fragment_bf16_linear.default",
    "eyas.fragment_bf16_matmul.default",
    "eyas.fragment_int4_linear.default",
    "eyas.fragment_int4_matmul.default",
    "eyas.fragment_int8_linear.default",
    "eyas.fragment_int8_matmul.default",
)  # fmt: skip  by name: those of Triton need not be registered


def none_of(targets: Collection[object]) -> Callable[[Program], str | None]:
    """The check that no node of a program calls one of ``targets``, operators or their names."""

    def check(program: Program) -> str | None:
        for method, ep in program.methods.items():
            for node in ep.graph.nodes:
                if node.op == "call_function" and (node.target in targets or str(node.target) in targets):
                    return f"method {method!r} has {node.name} = {node.target}"
        return None

    return check


def shared(program: Program) -> str | None:
    """Whether the sharing plan covers every constant, and equal names are one tensor object."""
    plan, seen = program.sharing or {}, {}
    for method, ep in program.methods.items():
        for name, value in Program({method: ep}).constants().items():
            if name not in plan:
                return f"constant {name!r} of method {method!r} is in no sharing plan"
            if seen.setdefault(name, value) is not value:
                return f"constant {name!r} is another tensor in method {method!r}"
    return None


FACTS: dict[str, Callable[[Program], str | None]] = {
    "no_blocks": none_of((own.block.default,)),
    "no_splits": none_of(SPLITS),
    "row_invariant_attention": none_of(STOCK_ATTENTION),
    "row_invariant_linear": none_of(STOCK_PRODUCTS),
    "shared_buffers": shared,
    "unpacked_weights": none_of(PACKED),
    "visible_masks": none_of((own.masked_sdpa.default,)),
}


def evidence_against(fact: str, program: Program) -> str | None:
    """Why a fact does not hold, None where it holds; facts without a check never hold by themselves."""
    check = FACTS.get(fact)
    return f"no pass has ensured {fact}" if check is None else check(program)

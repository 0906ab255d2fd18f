"""Linear layers on CUDA read weights as the tensor core's own fragments, packed once for all methods."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from eyas.kernels import register_triton_operators
from eyas.passes.base import Outcome, Pass
from eyas.passes.packed_weights import Form, Use, packed_by, product, repack
from eyas.passes.program import Derived, Program, given

aten, eyas = torch.ops.aten, torch.ops.eyas
BF16 = "eyas.kernels.fragment_bf16_linear"
INT4, INT8 = "eyas.kernels.fragment_linear", "eyas.kernels.fragment_int8_linear"


@dataclass(frozen=True)
class FragmentLinear(Pass):
    """Repacks the weight of each linear layer and calls the fragment kernels.

    Before (s0 in [1, 8])::

        %w: u8[2048,320] = buffer target.layers.0.mlp.up_proj.qweight
        %scales: f32[2048,20] = buffer target.layers.0.mlp.up_proj.scales
        %y: bf16[1,s0,2048] = eyas.int4_linear.default(%x, %w, %scales, None, 32)

    After::

        %w: i32[32,20,2,32,4] = buffer target.layers.0.mlp.up_proj.qweight.fragments
        %scales: bf16[32,20,8,8] = buffer target.layers.0.mlp.up_proj.scales.fragments
        %rows: bf16[s0,640] = aten.reshape.default(%x, [-1, 640])
        %out: bf16[s0,2048] = eyas.fragment_int4_linear.default(%rows, %w, %scales, None, 32, 2048, 8)
        %y: bf16[1,s0,2048] = aten.reshape.default(%out, [1, -1, 2048])

    A method of more rows than the kernel takes calls ``fragment_int4_matmul`` on the same packed bytes, which makes the
    weight into bfloat16 numbers first. INT8 and dense bfloat16 go the same way, and a table that also serves as an
    embedding is read from its fragments there too, so it exists once. Weights, scales and offsets are kept to the bit,
    scales and offsets of INT4 in the narrowest dtype that holds them. Left alone: tables that are only looked up; with
    a reason, dense layers with a bias, weights that are not constants, that some method writes, that something else in
    any method reads or that two uses would pack differently, group sizes and activations without a kernel, and inputs
    with more than one symbolic dimension. Not exact: sums run in another order than in the stock kernel, and many rows
    read rounded weights where they are quantised.
    """

    name: ClassVar[str] = "fragment_linear"
    exact: ClassVar[bool] = False
    breaks: ClassVar[frozenset[str]] = frozenset({"unpacked_weights", "shared_buffers"})

    def run(self, program: Program) -> Outcome:
        if not register_triton_operators():
            raise RuntimeError("the kernels of fragment_linear need triton, which is not installed: pip install triton")
        return repack(program, FORMS)


def few(use: Use) -> bool:
    """Whether every call has as few rows as the kernels for few rows take."""
    from eyas.kernels.fragment_linear import MAX_ROWS  # here, and below: it imports triton

    return use.rows is not None and use.rows <= MAX_ROWS


def width(use: Use) -> int | torch.SymInt:
    return given(use.node, 0).meta["val"].shape[-1]


def fragments(function: str, *sources: str, options: tuple[int, ...] = ()) -> tuple[str, Derived]:
    return packed_by(function, "fragments", *sources, options=options)


def refuse_dense(use: Use) -> str | None:
    from eyas.kernels.fragment_bf16_linear import supports

    if given(use.node, 2) is not None:
        return "it has a bias, which the kernel does not add"
    if (dimensions := given(use.node, 1).meta["val"].ndim) != 2:
        return f"its weight has {dimensions} dimension(s); the kernel takes 2"
    return supports(given(use.node, 0).meta["val"].dtype, use.rows if few(use) else 1)


def refuse_int4(use: Use) -> str | None:
    from eyas.kernels.fragment_linear import supports

    if not isinstance(width(use), int):
        return f"its input is {width(use)} wide, which is no constant"
    return supports(given(use.node, 4), given(use.node, 0).meta["val"].dtype, use.rows if few(use) else 1)


def refuse_int8(use: Use) -> str | None:
    from eyas.kernels.fragment_int8_linear import supports

    return supports(given(use.node, 0).meta["val"].dtype, use.rows if few(use) else 1)


def pack_dense(use: Use) -> list[tuple[str, Derived | None]]:
    return [fragments(f"{BF16}:pack_bf16_fragments", use.tensors["weight"])]


def pack_int4(use: Use) -> list[tuple[str, Derived | None]]:
    scales = [use.tensors[role] for role in ("scales", "offsets") if role in use.tensors]
    shape = (width(use), given(use.node, 4))
    return [
        fragments(f"{INT4}:pack_fragments", use.tensors["weight"], options=shape),
        *(fragments(f"{INT4}:pack_exact_scales", name, options=shape) for name in scales),
    ]


def pack_int8(use: Use) -> list[tuple[str, Derived | None]]:
    return [fragments(f"{INT8}:pack_int8_fragments", use.tensors["weight"]), (use.tensors["scales"], None)]


def emit_dense(emit, use: Use, constants: list[Node], shape: torch.Size) -> Node:
    if few(use):
        return product(emit, use.node, shape[0], eyas.fragment_bf16_linear.default, *constants, shape[0], use.rows)
    return product(emit, use.node, shape[0], eyas.fragment_bf16_matmul.default, *constants, shape[0])


def emit_dense_rows(emit, use: Use, constants: list[Node], shape: torch.Size) -> Node:
    return emit(eyas.fragment_bf16_embedding.default, given(use.node, 1), *constants, shape[1])


def emit_int4(emit, use: Use, constants: list[Node], shape: torch.Size) -> Node:
    words, scales, *offsets = constants
    operands = (words, scales, offsets[0] if offsets else None, given(use.node, 4), shape[0])
    if few(use):
        return product(emit, use.node, shape[0], eyas.fragment_int4_linear.default, *operands, use.rows)
    return product(emit, use.node, shape[0], eyas.fragment_int4_matmul.default, *operands)


def emit_int8(emit, use: Use, constants: list[Node], shape: torch.Size) -> Node:
    if few(use):
        return product(emit, use.node, shape[0], eyas.fragment_int8_linear.default, *constants, shape[0], use.rows)
    return product(emit, use.node, shape[0], eyas.fragment_int8_matmul.default, *constants, shape[0])


def emit_int8_rows(emit, use: Use, constants: list[Node], shape: torch.Size) -> Node:
    ids, dtype = given(use.node, 0), given(use.node, 3)
    return emit(eyas.fragment_int8_embedding.default, ids, *constants, shape[1], dtype)


FORMS = {
    aten.linear.default: Form({"weight": 1}, pack_dense, emit_dense, refuse_dense),
    # what else an embedding is told is about its gradient
    aten.embedding.default: Form({"weight": 0}, pack_dense, emit_dense_rows, lambda use: None, product=False),
    **{
        target: Form({"weight": 1, "scales": 2, "offsets": 3}, pack_int4, emit_int4, refuse_int4)
        for target in (eyas.int4_linear.default, eyas.int4_smallm.default, eyas.int4_anym.default)
    },
    eyas.int8_linear.default: Form({"weight": 1, "scales": 2}, pack_int8, emit_int8, refuse_int8),
    eyas.int8_embedding.default: Form(
        {"weight": 1, "scales": 2}, pack_int8, emit_int8_rows, lambda use: None, product=False
    ),
}

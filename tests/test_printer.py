"""The text of a method: stable, typed, and telling apart what must be told apart."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from ir import ROWS, Function, apply, check, export, node_of, program_of, randn

from eyas.passes.printer import DTYPES, Symbols, print_method, print_program, value_type
from eyas.passes.program import Program, SharedBuffer, given, schema_arguments
from eyas.passes.share_buffers import ShareBuffers

X = randn(1, ROWS, 4)


def layer(module, x):
    module.cache.index_copy_(1, torch.arange(x.shape[1]), x)
    return (x @ module.w, x.argmax(-1)), {"b": x.to(torch.bfloat16)}


def make():
    """The program that two processes print."""
    return program_of(layer, X, w=randn(4, 3), cache=torch.zeros(1, 16, 4))


def text_of(function, *args, **tensors):
    return print_program(program_of(function, *(args or (X,)), **tensors))


# Stability


def test_the_text_is_the_same_in_two_processes():
    code = "import test_printer as t; print(t.print_method(t.make().methods['forward']), end='')"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == print_method(make().methods["forward"])
    assert "0x" not in done.stdout and "object at" not in done.stdout


def test_the_text_is_the_same_for_two_exports():
    assert print_program(make()) == print_program(make())


def test_what_a_line_looks_like():
    check(
        make(),
        r"""
        CHECK-LABEL: method forward where s0 in [1, 16]
        CHECK-NEXT: {{^  }}%[[w:\w+]]: f32[4,3] = buffer w{{$}}
        CHECK-NEXT: {{^  }}%[[cache:\w+]]: f32[1,16,4] = buffer cache{{$}}
        CHECK-NEXT: {{^  }}%[[x:\w+]]: f32[1,s0,4] = input{{$}}
        CHECK-NEXT: %[[rows:\w+]]: sym(s0) = aten.sym_size.int(%[[x]], 1)
        CHECK-NEXT: %[[arange:\w+]]: i64[s0] = aten.arange.default(%[[rows]], device=cpu, pin_memory=False)
        CHECK-NEXT: aten.index_copy_.default(%[[cache]], 1, %[[arange]], %[[x]])
        CHECK-NEXT: %[[y:\w+]]: f32[1,s0,3] = aten.matmul.default(%[[x]], %[[w]])
        CHECK: %[[ids:\w+]]: i64[1,s0] = aten.argmax.default(%{{\w+}}, -1)
        CHECK: %[[b:\w+]]: bf16[1,s0,4] = aten.to.dtype(%[[x]], bf16)
        CHECK-NEXT: {{^  }}return [%[[y]], %[[ids]], %[[b]]]
        """,
    )


# Symbols and types


def test_symbols_are_numbered_in_the_order_of_appearance():
    symbols = Symbols()
    assert symbols.rename("s77 + 1") == "s0 + 1"
    assert symbols.rename("Max(u4, s3*s77)") == "Max(u1, s2*s0)"
    assert symbols.rename("us77 s7x bus3") == "us77 s7x bus3"
    assert Symbols().rename("s3") == "s0"


def test_symbols_do_not_depend_on_their_history():
    """The tracer names a dimension after its source; a second input of rows brings its own name along."""
    one = text_of(lambda m, x, y: x.unsqueeze(0) + y, X, randn(ROWS, 4))
    assert re.findall(r"\bs\d+\b", one) and set(re.findall(r"\bs\d+\b", one)) == {"s0"}


def test_expressions_and_lists_of_types():
    text = text_of(lambda m, x: (torch.cat([x, x], 1), x.topk(2, -1).values))
    check(text, "CHECK: f32[1,2*s0,4] = aten.cat.default([%[[x:\\w+]], %[[x]]], 1)")
    check(text, "CHECK: (f32[1,s0,2], i64[1,s0,2]) = aten.topk.default(%{{\\w+}}, 2)")


def test_every_dtype_has_a_name():
    kinds = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    kinds -= {kind for kind in kinds if "q" in str(kind) or kind is torch.complex32}  # deprecated, or warned of
    names = {value_type(torch.empty(2, dtype=kind, device="meta"), Symbols()) for kind in kinds}
    assert len(names) == len(kinds) and len(set(DTYPES.values())) == len(DTYPES)
    assert {"f32[2]", "bf16[2]", "i64[2]", "u8[2]", "bool[2]", "complex64[2]", "float8_e4m3fn[2]", "uint16[2]"} <= names


def test_a_program_of_an_unusual_dtype_is_printed():
    program = program_of(lambda m, x: m.table.abs() * x, X, table=torch.ones(4, dtype=torch.complex64))
    apply(ShareBuffers(), program)
    check(program, "CHECK: complex64[4] = buffer table\nCHECK: table: complex64[4] read by forward")


# Values


def test_the_text_holds_no_values():
    one, two = (program_of(lambda m, x: x * m.small, X, small=randn(4, seed=seed)) for seed in (0, 1))
    assert print_program(one) == print_program(two) and "#" not in print_program(one)


def test_two_updates_are_told_apart():
    """Without writes in place the graph only hands results back; which buffer each is for belongs to the text."""

    def keep(module, x, which):
        getattr(module, which).copy_(x[0, :1] * 2)
        return x + module.a + module.b

    texts = []
    for which in "ab":
        program = program_of(lambda m, x, which=which: keep(m, x, which), X, a=torch.zeros(1, 4), b=torch.zeros(1, 4))
        texts.append(print_method(program.methods["forward"].run_decompositions({})))
    check(texts[0], r"CHECK: return [%[[new:\w+]], %{{\w+}}], %[[new]] -> a")
    check(texts[1], r"CHECK: return [%[[new:\w+]], %{{\w+}}], %[[new]] -> b")


# Programs


def test_a_program_lists_its_methods_and_who_shares_what():
    def fill(module, x):
        module.cache.add_(1)
        return x * module.w

    module = Function(fill, w=randn(4), cache=torch.zeros(4), idle=torch.zeros(2))
    reader = Function(lambda m, x: x * m.w, w=module.w)
    program = Program({"fill": export(module, X), "read": export(reader, X)})
    assert print_program(program).startswith(print_method(program.methods["fill"], "fill"))
    assert "buffers" not in print_program(program)
    apply(ShareBuffers(), program)
    check(
        program,
        """
        CHECK-LABEL: method fill where s0 in [1, 16]
        CHECK-LABEL: method read where s0 in [1, 16]
        CHECK-LABEL: buffers
        CHECK-NEXT: cache: f32[4] read by fill; written by fill{{$}}
        CHECK-NEXT: idle: f32[2] read by nobody{{$}}
        CHECK-NEXT: w: f32[4] read by fill, read{{$}}
        """,
    )


def test_a_shared_buffer_knows_its_size():
    buffer = SharedBuffer("k", (2, 3), torch.bfloat16, ("read",), ())
    assert buffer.nbytes == 12 and not buffer.mutable


# How operators are given their arguments


def test_arguments_by_position_and_by_name():
    node = node_of(program_of(lambda m, x: torch.nn.functional.linear(x, m.w, m.b), X, w=randn(3, 4), b=randn(3)),
                   "aten.linear.default")  # fmt: skip
    assert [given(node, i).name for i in range(3)] == ["args_0", "b_w", "b_b"]
    node.args, node.kwargs = node.args[:1], {"bias": node.args[2], "weight": node.args[1]}
    assert [given(node, i).name for i in range(3)] == ["args_0", "b_w", "b_b"]
    assert [(a.name, value.name) for a, value in schema_arguments(node)] == [
        ("input", "args_0"), ("weight", "b_w"), ("bias", "b_b"),
    ]  # fmt: skip
    node.kwargs = {"weight": node.kwargs["weight"]}
    assert given(node, 2) is None

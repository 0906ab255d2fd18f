"""Packing of int8 fragments, the ops on cpu, and what the compiler makes of the kernel; products are in ``cuda/``."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fragment_int4_linear import resource_usage

from eyas.kernels.fragment_int8_linear import (
    fragment_int8_embedding,
    fragment_int8_linear,
    fragment_int8_matmul,
    pack_int8_fragments,
    plan,
    supports,
    unpack_int8_fragments,
)
from eyas.kernels.int8_linear import int8_embedding, int8_linear


def random_weight(n, k):
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
    return q, torch.rand(n, generator=generator)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 150), st.integers(1, 300))
def test_packing_loses_nothing(n, k):
    q, _ = random_weight(n, k)
    words = pack_int8_fragments(q)
    assert words.shape == (-(-n // 64), -(-k // 32), 4, 32, 4) and words.dtype == torch.int32
    assert torch.equal(unpack_int8_fragments(words, n, k), q)


def test_a_thread_has_its_part_of_a_fragment():
    """The layout itself, of one weight: row 26, column 45."""
    q = torch.zeros(64, 64, dtype=torch.int8)
    q[26, 45] = -3
    data = pack_int8_fragments(q).view(torch.int8).flatten()
    (place,) = data.nonzero().flatten().tolist()
    # second unit; second fragment, of rows 16 to 31; row 10 = 8 rh + g; column 13 = 8 q + 4 s + 2 kh + e
    lane, word, byte = 4 * 2 + 1, 2 * 1 + 0, 2 * 1 + 1
    assert place == 64 * 32 + 16 * 32 + 16 * lane + 4 * word + byte and data[place] == -3


def test_ops_on_cpu():
    q, scales = random_weight(70, 300)
    words = pack_int8_fragments(q)
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    for op in (fragment_int8_linear, fragment_int8_matmul):
        assert torch.equal(op(x, words, scales, 70), int8_linear(x, q, scales))
        assert op(x.to("meta"), words.to("meta"), scales.to("meta"), 70).shape == (5, 70)
    ids = torch.tensor([[0, 69, 5], [3, 3, 64]])
    made = fragment_int8_embedding(ids, words, scales, 300, torch.bfloat16)
    assert torch.equal(made, int8_embedding(ids, q, scales, torch.bfloat16))
    fake = fragment_int8_embedding(ids.to("meta"), words.to("meta"), scales.to("meta"), 300, torch.bfloat16)
    assert (fake.shape, fake.dtype) == (made.shape, made.dtype)


def test_operands_that_do_not_belong_together():
    q, scales = random_weight(64, 128)
    with pytest.raises(ValueError, match="x has 96 columns, the weight 4 units of 32"):
        fragment_int8_linear(torch.zeros(1, 96, dtype=torch.bfloat16), pack_int8_fragments(q), scales, 64)


def test_supports():
    assert supports(torch.bfloat16, 16) is None
    assert supports(torch.float32, 1) == "activations are torch.float32; the kernel takes torch.bfloat16"
    assert supports(torch.bfloat16, 17) == "a call has up to 17 rows; the kernel takes 16"


@pytest.mark.parametrize(("n", "k"), [(64, 128), (1, 32), (640, 1024), (5376, 21504), (262144, 640)], ids=str)
def test_every_warp_of_a_plan_has_work(n, k):
    layout = plan(n, k)
    units = -(-k // 32)
    a_split = -(-units // layout.splits)
    assert (layout.splits - 1) * a_split < units, "the last split has none"
    assert layout.splits == 1 or a_split >= 2


COMPILE = """
import json, sys
from importlib import import_module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
name, n, k, rows = json.loads(sys.argv[1])
module = import_module(f"eyas.kernels.fragment_{name}_linear")
kernel, layout = getattr(module, f"fragment_{name}_kernel"), module.plan(n, k)
values = dict(N=n, K=k, TILE=64, ROWS=rows, TILES=layout.tiles, SPLITS=layout.splits, UNITS=layout.units,
              STAGES=layout.stages, ASM=True)
names = kernel.arg_names
pointers = dict(x_ptr="*bf16", words_ptr={"int8": "*i32", "bf16": "*bf16"}[name], scales_ptr="*fp32", out_ptr="*fp32")
pointers = {name: kind for name, kind in pointers.items() if name in names}
done = compile(
    ASTSource(kernel, {**pointers, "M": "i32", **dict.fromkeys(values, "constexpr")},
              {(names.index(name),): value for name, value in values.items()},
              {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}),
    target=GPUTarget("cuda", 90, 32), options={"num_warps": layout.tiles})
print(json.dumps({"ttgir": done.asm["ttgir"], "ptx": done.asm["ptx"], "cubin": done.asm["cubin"].hex()}))
"""


def assert_weights_go_through_registers_alone(kernel, case, registers, path):
    """For Hopper, without a GPU: wide loads, products on the tensor core, no copies into shared memory, no spills.

    ``kernel``: the part of its name. ``case``: N, K and rows. ``registers``: the most that a thread may have.
    """
    command = [sys.executable, "-c", COMPILE, json.dumps([kernel, *case])]
    facts = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    loop = facts["ttgir"].split("scf.for")[1].split("scf.yield")[0]
    assert "tt.dot" in loop and "local_alloc" not in loop and "convert_layout" not in loop
    assert "cp.async.cg.shared.global" in facts["ptx"] and "mma.sync.aligned.m16n8k16" in facts["ptx"]
    assert resource_usage(bytes.fromhex(facts["cubin"]), path) <= registers


@pytest.mark.slow
@pytest.mark.parametrize("case", [(262144, 640, 8), (5376, 21504, 16)])
def test_weights_go_through_registers_alone(case, tmp_path):
    assert_weights_go_through_registers_alone("int8", case, 96, tmp_path / "kernel.cubin")

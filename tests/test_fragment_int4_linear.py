"""Packing of int4 fragments, the ops on cpu, and what the compiler makes of the kernel; products are in ``cuda/``."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.kernels import fragment_linear
from eyas.kernels.fragment_linear import (
    GROUP_SIZES,
    exact_dtype,
    fragment_int4_linear,
    fragment_int4_matmul,
    pack_fragments,
    pack_scales,
    plan,
    program_tiles,
    supports,
    unit_columns,
    unpack_fragments,
    unpack_scales,
)
from eyas.kernels.int4_linear import int4_linear, unpack_nibbles

SHAPES = [(64, 128), (70, 200), (1, 32), (640, 1024), (5376, 8192), (43008, 5376), (262144, 640)]


def random_weight(n, k, group, seed=0):
    generator = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    qweight = torch.randint(0, 256, (n, groups * group // 2), dtype=torch.uint8, generator=generator)
    scales, offsets = (torch.rand(n, groups, generator=generator) + i for i in range(2))
    return qweight, scales, offsets


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 150), st.integers(1, 300), st.sampled_from(GROUP_SIZES), st.sampled_from([32, 64, 128]))
def test_packing_loses_nothing(n, k, group, tile):
    qweight, scales, _ = random_weight(n, k, group)
    words = pack_fragments(qweight, k, group, tile)
    assert words.shape == (-(-n // tile), -(-k // unit_columns(group)), tile * unit_columns(group) // 1024, 32, 4)
    assert torch.equal(unpack_fragments(words, n, k, group), unpack_nibbles(qweight)[:, :k])
    packed = pack_scales(scales, k, group, tile)
    assert packed.shape == (words.shape[0], scales.shape[1], 8, tile // 8) and packed.is_contiguous()
    assert torch.equal(unpack_scales(packed, n, k, group), scales)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("tiles", [2, 3])
def test_tiles_lie_together(group, tiles, monkeypatch):
    """What the tiles of a program have of 64 columns follows one another, and what was packed is found again."""
    n, k = tiles * 128, 384
    qweight, scales, _ = random_weight(n, k, group)
    apart, scales_apart = pack_fragments(qweight, k, group), pack_scales(scales, k, group)
    monkeypatch.setattr(fragment_linear, "program_tiles", lambda *_: tiles)
    words, packed = pack_fragments(qweight, k, group), pack_scales(scales, k, group)
    assert words.shape == apart.shape and packed.shape == scales_apart.shape
    assert words.is_contiguous() and packed.is_contiguous()
    # of the second program, the third 64 columns of its second tile
    at_once = words.view(2, k // 64, tiles, -1)[1, 2, 1]
    assert torch.equal(at_once, apart.view(2, tiles, k // 64, -1)[1, 1, 2])
    groups = packed.view(2, -1, tiles, max(1, 64 // group), 64)[1, 1, 1]
    assert torch.equal(groups, scales_apart.view(2, tiles, -1, max(1, 64 // group), 64)[1, 1, 1])
    assert torch.equal(unpack_fragments(words, n, k, group), unpack_nibbles(qweight)[:, :k])
    assert torch.equal(unpack_scales(packed, n, k, group), scales)


def test_large_weights_lie_together():
    """A function of the weight alone. Inputs that are no steps, outputs that are no programs, too few or too many of
    them, groups without a kernel and splits that shared memory has no room for lie tile by tile.
    """
    large = [(43008, 5376), (16384, 5376), (18432, 5376), (135168, 1024), (32768, 8192), (8192, 5376)]
    assert all(program_tiles(n, k, group) == 16 for n, k in large for group in (32, 64, 128))
    assert all(program_tiles(5376, k, 32) == 14 for k in (8192, 16384, 21504))
    tiles = {(26624, 5376): 13, (49152, 1024): 12, (6144, 4096): 12, (30720, 3840): 15, (12288, 4096): 16}
    assert {shape: program_tiles(*shape, 32) for shape in tiles} == tiles
    small = [(43008, 5384, 32), (43072, 5376, 32), (43009, 5376, 32), (43008, 5376, 256), (136192, 1024, 32)]
    small += [(135168, 5376, 32), (262144, 640, 32), (4096, 4096, 32)]
    small += [(69632, 1024, 32), (16384, 128, 32), (4608, 4096, 32)]  # much of the card would be idle
    small += [(5120, 5120, 32), (16384, 896, 32)]  # too many splits, of one step
    assert all(program_tiles(*shape) == 1 for shape in small), [program_tiles(*shape) for shape in small]


def test_what_lies_together_is_multiplied_on_cpu():
    qweight, scales, _ = random_weight(16384, 1792, 128)
    words, packed = pack_fragments(qweight, 1792, 128), pack_scales(scales, 1792, 128)
    assert not torch.equal(words, fragment_linear.lay_apart(words, 16, 64))
    x = torch.randn(2, 1792, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(
        fragment_int4_linear(x, words, packed, None, 128, 16384), int4_linear(x, qweight, scales, None, 128)
    )


def test_other_cards_have_tritons_kernel_for_what_lies_together(monkeypatch):
    """Where a weight's tiles lie does not depend on the card, so neither does a packed weight."""
    shape = (43008, 5376, 128)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cards = ((8, 0), 132, False), ((9, 0), 132, True), ((9, 0), 78, False), ((12, 0), 170, False)
    for capability, processors, mma in cards:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        card = SimpleNamespace(multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card=card: card)
        assert plan(*shape).mma == mma and program_tiles(*shape) == 16
        assert mma or plan(*shape) == fragment_linear.triton_plan(*shape)


def test_a_thread_has_its_part_of_a_fragment():
    """The layout itself, of one weight: row 9, column 45 of a unit of 64 columns."""
    q = torch.zeros(64, 64, dtype=torch.uint8)
    q[9, 45] = 11
    words = pack_fragments(q[:, 0::2] | q[:, 1::2] << 4, 64, 64).flatten()
    (place,) = words.nonzero().flatten().tolist()
    # row 9: second half of 16, quad 1. Column 45: half t=1 of 64, then 13 = 8 q + 4 s + 2 kh + e with q=1, s=1, e=1
    assert place == 4 * (4 * 1 + 1) + 2 * 1 + 1
    field = 16 * 1 + 8 * 0 + 4 * 1  # upper half for e, then kh, then the half of the rows
    assert words[place].item() & 0xFFFFFFFF == 11 << field + 3


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("zero_points", [False, True])
def test_ops_on_cpu_are_int4_linear(group, zero_points):
    n, k = 70, 300
    qweight, scales, offsets = random_weight(n, k, group)
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = int4_linear(x, qweight, scales, offsets if zero_points else None, group)
    operands = (
        pack_fragments(qweight, k, group), pack_scales(scales, k, group),
        pack_scales(offsets, k, group) if zero_points else None, group, n,
    )  # fmt: skip
    for op in (fragment_int4_linear, fragment_int4_matmul):
        assert torch.equal(op(x, *operands), expected)
        assert op(x.to("meta"), *(t.to("meta") if isinstance(t, torch.Tensor) else t for t in operands)).shape == (5, n)


def test_operands_that_do_not_belong_together():
    qweight, scales, _ = random_weight(64, 128, 32)
    operands = pack_fragments(qweight, 128, 32), pack_scales(scales, 128, 32), None, 32, 64
    with pytest.raises(ValueError, match="x has 96 columns, the weight 4 units of 32 and 4 groups of 32"):
        fragment_int4_linear(torch.zeros(1, 96, dtype=torch.bfloat16), *operands)
    x, (words, packed, *_) = torch.zeros(1, 128, dtype=torch.bfloat16), operands
    with pytest.raises(ValueError, match=r"128 outputs have 2 tiles; words, scales and offsets are \[1, 4, 2, 32, 4\]"):
        fragment_int4_linear(x, words, packed, None, 32, 128)
    with pytest.raises(ValueError, match=r"64 outputs have 1 tiles; .*, \[1, 2, 8, 8\]"):
        fragment_int4_linear(x, words, packed, packed[:, :2], 32, 64)
    with pytest.raises(
        ValueError, match=r"scales or offsets are torch.float64; allowed: torch.bfloat16, torch.float16"
    ):
        fragment_int4_linear(x, words, packed.double(), None, 32, 64)


def test_scales_keep_every_bit():
    """GGUF's scales are float16 (Q4_0) or products of one with 6 bits (Q4_K); others' are bfloat16."""
    ones = torch.arange(1, 9).float()
    assert exact_dtype(ones / 3) == torch.float32
    assert exact_dtype((ones / 3).half().float()) == torch.float16
    assert exact_dtype((ones / 3).bfloat16().float(), ones) == torch.bfloat16
    assert exact_dtype((ones * 1e6).bfloat16().float(), (ones / 3).half().float()) == torch.float32
    assert exact_dtype((ones / 3).half().float() * 63) == torch.float32


def test_supports():
    assert supports(32, torch.bfloat16, 16) is None
    assert supports(48, torch.bfloat16, 1) == "group size 48 has no kernel; allowed: 32, 64, 128, 256"
    assert supports(32, torch.float32, 1) == "activations are torch.float32; the kernel takes torch.bfloat16"
    assert supports(32, torch.bfloat16, 17) == "a call has up to 17 rows; the kernel takes 16"


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_every_warp_of_a_plan_has_work(n, k, group):
    layout = plan(n, k, group)
    units = -(-k // unit_columns(group))
    steps = -(-units // layout.units)
    a_split = -(-steps // layout.splits)
    assert (layout.splits - 1) * a_split < steps, "the last split has none"
    if layout.mma:
        assert layout.splits * n // (64 * layout.tiles) <= 132 and layout.units * unit_columns(group) == 128
        return
    assert layout.units * unit_columns(group) <= group or layout.units == 1, "a step has one scale a row"
    assert layout.splits == 1 or a_split * layout.units >= 2


COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from eyas.kernels.fragment_linear import fragment_kernel as kernel, triton_plan
def facts(n, k, group, offsets, rows):
    layout = triton_plan(n, k, group)
    values = dict(N=n, K=k, GROUP=group, TILE=64, ROWS=rows, TILES=layout.tiles, SPLITS=layout.splits,
                  UNITS=layout.units, STAGES=layout.stages, TOGETHER=1, OFFSETS=offsets, ASM=True)
    pointers = dict(x_ptr="*bf16", words_ptr="*i32", scales_ptr="*bf16", offsets_ptr="*bf16", out_ptr="*fp32")
    names = kernel.arg_names
    done = compile(
        ASTSource(kernel, {**pointers, "M": "i32", **dict.fromkeys(values, "constexpr")},
                  {(names.index(name),): value for name, value in values.items()},
                  {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}),
        target=GPUTarget("cuda", 90, 32), options={"num_warps": layout.tiles})
    return {"ttgir": done.asm["ttgir"], "ptx": done.asm["ptx"], "cubin": done.asm["cubin"].hex()}
print(json.dumps(facts(*json.loads(sys.argv[1]))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", [(43008, 5376, 128, False, 16), (5376, 8192, 32, True, 16), (1024, 640, 32, True, 8)])
def test_weights_go_through_registers_alone(case, tmp_path):
    """For Hopper, without a GPU: wide loads, products on the tensor core, no copies into shared memory, no spills."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(case)], stdout=subprocess.PIPE, text=True, check=True
    )
    facts = json.loads(done.stdout)
    loop = facts["ttgir"].split("scf.for")[1].split("scf.yield")[0]
    assert "tt.dot" in loop and "local_alloc" not in loop
    assert "cp.async.cg.shared.global" in facts["ptx"] and "mma.sync.aligned.m16n8k16" in facts["ptx"]
    assert "st.shared" not in facts["ptx"].split("mma.sync")[-2] and "st.local" not in facts["ptx"]
    assert resource_usage(bytes.fromhex(facts["cubin"]), tmp_path / "kernel.cubin") <= 128  # 16 warps a multiprocessor


def resource_usage(cubin, path, spilled=0):
    """Registers of a thread; more than so many bytes of spilled ones fail."""
    import triton

    path.write_bytes(cubin)
    tool = f"{triton.__path__[0]}/backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", path], stdout=subprocess.PIPE, text=True, check=True).stdout
    fields = dict(
        field.split(":") for field in usage.split() if field.count(":") == 1 and field.split(":")[1].isdigit()
    )
    assert int(fields["STACK"]) <= spilled and fields["LOCAL"] == "0"
    return int(fields["REG"])

"""Attention split over the keys: the op on cpu, and what the compiler makes of the kernel (numbers: ``cuda/``)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from test_fragment_int4_linear import resource_usage

from eyas.kernels import wgmma_sdpa
from eyas.kernels.splitk_sdpa import TILE_ROWS, Plan, plan, splitk_sdpa, supports

SHARED = 227 * 1024  # bytes that a program may have of a Hopper multiprocessor
REAL = [
    (32, 4, 512, 0),
    (32, 4, 512, 1024),
    (32, 16, 256, 1024),
    (4, 1, 256, 0),
    (4, 1, 256, 512),
    (32, 8, 128, 0),
    (24, 8, 64, 0),
]


def problem(heads, kv_heads, width, size, rows):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, rows, heads, width, generator=generator).bfloat16().transpose(1, 2)
    return q, *(torch.randn(1, kv_heads, size, width, generator=generator).bfloat16() for _ in range(2))


def attention(q, k, v, mask):
    q, k, v = (t.float() for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True).bfloat16()


def test_the_op_on_cpu_is_attention_over_the_keys_so_far():
    q, k, v = problem(6, 2, 64, 50, 5)
    positions = torch.tensor([7, 0, 49, 3, 20])
    mask = torch.arange(50) <= positions[:, None]
    expected = attention(q, k, v, mask)
    torch.testing.assert_close(splitk_sdpa(q, k, v, positions, 0.3), expected)


@pytest.mark.parametrize("last", [3, 12, 19, 20, 61])
def test_the_op_on_cpu_reads_a_ring(last):
    """Of 20 rows, for a window of 13 and 4 rows a call; it has gone round three times at the end."""
    q, k, v = problem(4, 2, 64, last + 1, 4)
    positions = torch.arange(last - 3, last + 1)
    age = positions[:, None] - torch.arange(last + 1)
    mask = (age >= 0) & (age < 13)
    expected = attention(q, k, v, mask)
    rings = []
    for history in (k, v):
        ring = torch.full((1, 2, 20, 64), float("nan"), dtype=torch.bfloat16)
        for j in range(max(0, last - 19), last + 1):
            ring[:, :, j % 20] = history[:, :, j]
        rings.append(ring)
    torch.testing.assert_close(splitk_sdpa(q, *rings, positions, 0.3, 13, 4), expected)


def test_its_fake_has_its_type():
    q, k, v = problem(4, 2, 64, 50, 3)
    positions = torch.tensor([1, 2, 3])
    made = splitk_sdpa(q, k, v, positions, 0.3)
    fake = splitk_sdpa(*(t.to("meta") for t in (q, k, v, positions)), 0.3)
    assert (fake.shape, fake.dtype, fake.stride()) == (made.shape, made.dtype, made.stride())
    assert made.transpose(1, 2).is_contiguous()


def test_operands_that_do_not_belong_together():
    q, k, v = problem(4, 2, 64, 50, 3)
    positions = torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match=r"q \[1, 4, 3, 64\], k \[1, 2, 50, 64\] and v \[1, 2, 49, 64\] do not belong"):
        splitk_sdpa(q, k, v[:, :, :49], positions, 0.3)
    with pytest.raises(ValueError, match=r"q \[1, 3, 3, 64\], k .* do not belong together"):
        splitk_sdpa(q[:, :3], k, v, positions, 0.3)
    with pytest.raises(ValueError, match="a ring of 50 rows; a window of 48 and 4 rows a call need 51"):
        splitk_sdpa(q, k, v, positions, 0.3, 48, 4)


def test_supports():
    assert supports(256, torch.bfloat16, 1, 16) is None
    assert supports(96, torch.bfloat16, 1, 1) == "head width 96 has no kernel; allowed: 64, 128, 256, 512"
    assert supports(64, torch.float32, 1, 1) == "the query is torch.float32; the kernel takes torch.bfloat16"
    assert supports(64, torch.bfloat16, 2, 1) == "the batch is 2; the kernel takes 1"
    assert supports(64, torch.bfloat16, 1, 17) == "a call has up to 17 rows; the kernel takes 16"


@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize("case", REAL)
def test_plans(case, rows):
    """A tile holds a call's rows where they fit, and no multiprocessor is left without a split but by a few."""
    heads, kv_heads, width, window = case
    layout = plan(heads, kv_heads, width, rows, window)
    assert layout.rows >= min(TILE_ROWS, rows * heads // kv_heads) and layout.rows in (16, 32, 64)
    splits = layout.splits * layout.warps // 4 if layout.warps < 4 else layout.splits
    assert splits == 64 or 132 - kv_heads < splits * kv_heads <= 132
    assert layout.rows * width <= 128 * 32 * layout.warps, "a thread's share of the sums is half of its registers"


def test_plans_at_width_512(monkeypatch):
    """Products by ``wgmma`` on a Hopper, and where there is no card; elsewhere and with a window Triton's."""
    wide, narrow = Plan(64, 32, 33, warps=8, stages=2, wgmma=True), Plan(64, 16, 33, warps=8, stages=3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan(32, 4, 512, 8) == plan(32, 4, 512, 1) == wide
    assert plan(32, 4, 512, 8, 1024) == narrow
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, found in (((8, 0), narrow), ((9, 0), wide), ((10, 0), narrow)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert plan(32, 4, 512, 8) == found


COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from eyas.kernels.splitk_sdpa import plan, splitk_kernel
from eyas.kernels.wgmma_sdpa import wide_kernel
heads, kv_heads, width, window, size, rows = json.loads(sys.argv[1])
layout = plan(heads, kv_heads, width, rows, window)
kernel = wide_kernel if layout.wgmma else splitk_kernel
values = dict(HEADS=heads, KV_HEADS=kv_heads, D=width, L=size, WINDOW=window, ROWS=layout.rows, KEYS=layout.keys,
              SPLITS=layout.splits, STAGES=layout.stages, INTERPRETED=False)
values = {name: value for name, value in values.items() if name in kernel.arg_names} | json.loads(sys.argv[3])
pointers = dict(q_ptr="*bf16", k_ptr="*bf16", v_ptr="*bf16", pos_ptr="*i64", sums_ptr="*fp32", state_ptr="*fp32")
numbers = dict(M="i32", q_head_stride="i32", q_row_stride="i32", scale=sys.argv[2])
names = kernel.arg_names
aligned = [*pointers, "q_head_stride", "q_row_stride"]
done = compile(
    ASTSource(kernel, {**pointers, **numbers, **dict.fromkeys(values, "constexpr")},
              {(names.index(name),): value for name, value in values.items()},
              {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}),
    target=GPUTarget("cuda", 90, 32), options={"num_warps": layout.warps})
print(json.dumps({"ptx": done.asm["ptx"], "cubin": done.asm["cubin"].hex(), "shared": done.metadata.shared}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "scale"),
    [
        ((*REAL[1], 2048, 8), "fp32"),
        ((*REAL[1], 2048, 16), "fp64"),
        ((*REAL[2], 2048, 8), "fp32"),
        ((*REAL[4], 1024, 8), "fp64"),
        ((*REAL[4], 1024, 16), "fp64"),
    ],
    ids=str,
)
def test_keys_and_values_are_fetched_ahead(case, scale, tmp_path):
    """For Hopper, without a GPU: 16 bytes at a time, straight into shared memory; no spills. AOTInductor's scale is a
    float64.
    """
    facts = compiled(case, scale)
    assert facts["shared"] <= SHARED and "cp.async.cg.shared.global" in facts["ptx"]
    tile = plan(case[0], case[1], case[2], case[5], case[3])
    product = "wgmma.mma_async.sync.aligned.m64" if tile.rows == 64 else "mma.sync.aligned.m16n8k16"
    assert product in facts["ptx"]
    assert resource_usage(facts["cubin"], tmp_path / "kernel.cubin") <= 65536 // (32 * tile.warps)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "known"), [("fp32", {}), ("fp64", {}), ("fp64", {"M": 1})], ids=str)
def test_products_by_wgmma(scale, known, tmp_path):
    """At width 512, also where the number of rows is known: all of the shared memory that the assembly uses, no spills,
    and nothing that has ptxas wait for every product.
    """
    facts = compiled((*REAL[0], 131072, 8), scale, **known)
    assert facts["shared"] == wgmma_sdpa.QUERY_BYTES + 2 * wgmma_sdpa.TURN_BYTES == 192 * 1024 <= SHARED
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 16, size", facts["ptx"])
    assert len(copies) == 16 + 5 * wgmma_sdpa.COPIES, "queries, three loads before the turns and two in each"
    assert "bar.sync" in wgmma_sdpa.ASSEMBLY.value.split("cp.async")[0], "what Triton had there is read before"
    for product in ("m64n32k16", "m64n256k16"):
        assert f"wgmma.mma_async.sync.aligned.{product}.f32.bf16.bf16" in facts["ptx"]
    assert resource_usage(facts["cubin"], tmp_path / "kernel.cubin") <= 255
    assert "serialized" not in said_by_ptxas(facts["ptx"], tmp_path)
    declared = facts["ptx"].count(".shared .align")
    assert declared == 1, "what wgmma reads lies at multiples of 1024 bytes of the only shared memory"


def test_the_assembly_in_the_source_of_a_program():
    """Inductor of torch 2.11 puts it there without escapes."""
    assert "\\" not in repr(wgmma_sdpa.ASSEMBLY.value) and "'" not in wgmma_sdpa.ASSEMBLY.value
    assert "*/" not in wgmma_sdpa.ASSEMBLY.value, "AOTInductor writes kernels into comments of C++"


def said_by_ptxas(ptx: str, folder: Path) -> str:
    """What the assembler of Triton has to say of a program."""
    (folder / "kernel.ptx").write_text(ptx)
    tool = f"{triton.__path__[0]}/backends/nvidia/bin/ptxas"
    command = [tool, "-v", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", folder / "again.cubin"]
    said = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    assert "registers" in said
    return said


def compiled(case, scale, **known):
    """What the compiler makes of the plan's kernel for Hopper: ``ptx``, ``cubin``, bytes of ``shared`` memory."""
    command = [sys.executable, "-c", COMPILE, json.dumps(case), scale, json.dumps(known)]
    facts = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return facts | {"cubin": bytes.fromhex(facts["cubin"])}

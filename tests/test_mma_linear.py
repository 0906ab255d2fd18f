"""The assembly of ``mma_linear`` as a compiler takes it; what it computes is tested in ``tests/cuda``."""

import json
import re
import subprocess
import sys

import pytest
from test_fragment_int4_linear import resource_usage

pytest.importorskip("triton")

from eyas.kernels import fragment_linear, mma_linear

COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from eyas.kernels.fragment_linear import plan
from eyas.kernels.mma_linear import assembly, constraints, mma_kernel as kernel
n, k, group, scales, offsets, rows = json.loads(sys.argv[1])
pointers = dict(x_ptr="*bf16", words_ptr="*i32", scales_ptr="*" + scales, offsets_ptr="*" + (offsets or scales))
pointers["out_ptr"] = "*fp32"
tiles, splits = plan(n, k, group).tiles, plan(n, k, group).splits
steps = -(-k // (128 * splits))
values = dict(N=n, K=k, GROUP=group, ROWS=rows, TILES=tiles, SPLITS=splits, CONSTRAINTS=constraints(rows),
              ASSEMBLY=assembly(rows, group, scales, offsets, steps, tiles))
names = kernel.arg_names
done = compile(
    ASTSource(kernel, {**pointers, "M": "i32", **dict.fromkeys(values, "constexpr")},
              {(names.index(name),): value for name, value in values.items()},
              {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}),
    target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
print(json.dumps({"ptx": done.asm["ptx"], "cubin": done.asm["cubin"].hex(), "shared": done.metadata.shared}))
"""
CASES = [
    (43008, 5376, 128, "bf16", None, 8),
    (43008, 5376, 128, "bf16", None, 16),
    (43008, 5376, 32, "bf16", "bf16", 8),
    (5376, 21504, 32, "bf16", "bf16", 16),
    (5376, 8192, 64, "bf16", "bf16", 16),
    (43008, 5376, 32, "fp32", "fp32", 16),
    (18432, 5376, 64, "fp16", "fp32", 16),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sixteen_warps_fit_a_multiprocessor(case, tmp_path):
    """Without spills; weights by the copy engine, once a slot; addresses that the compiler knows to be a warp's."""
    *_, offsets, rows = case
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(case)], stdout=subprocess.PIPE, text=True, check=True
    )
    facts = json.loads(done.stdout)
    assert facts["shared"] == mma_linear.SHARED_BYTES
    assert facts["ptx"].count("cp.async.bulk.shared::cluster") == 4 * (3 if offsets else 2)
    after = facts["ptx"].split("bra TURN")[1]
    assert ".shared" in after.split("st.global")[0] and ".shared" not in after.split("st.global", 1)[1], "Triton's own"
    copies = re.findall(r"cp\.async\.bulk.*?cache_hint", facts["ptx"])
    assert (
        len(copies) == 4 * (3 if offsets else 2) and "evict_first" in facts["ptx"] and "evict_last" not in facts["ptx"]
    )
    assert facts["ptx"].count("mma.sync.aligned.m16n8k8.") == (2 * 4 * rows // 8 if offsets == "bf16" else 0)
    sums = 4 * rows // 8 * 2  # of x, for the first step
    assert facts["ptx"].count("mma.sync.aligned.m16n8k16") == 2 * 16 * rows // 8 + sums
    assert resource_usage(bytes.fromhex(facts["cubin"]), tmp_path / "kernel.cubin") <= 128


@pytest.mark.parametrize("group", mma_linear.GROUP_SIZES)
@pytest.mark.parametrize("scales", mma_linear.SCALES)
@pytest.mark.parametrize("offsets", [None, *mma_linear.SCALES])
def test_shared_memory_has_room(group, scales, offsets):
    """For the longest split that is taken: x, slots, and sums of a warp in its slots."""
    bytes_each = mma_linear.SCALES[scales] + (mma_linear.SCALES[offsets] if offsets else 0)
    for rows, steps in ((8, mma_linear.MOST_STEPS), (16, mma_linear.MOST_STEPS), (16, 8)):
        code = mma_linear.assembly(rows, group, scales, offsets, steps)
        slot = int(re.search(r"expect_tx.shared.b64 _, \[\w+\], (\d+);", code).group(1))
        assert slot == 2048 + max(1, 64 // group) * 64 * bytes_each and slot % 128 == 0
        copied = re.search(r"bra KEPT0; mbarrier(.*?)KEPT0:", code).group(1)
        assert sum(map(int, re.findall(r"\], \[\w+\], (\d+), \[\w+\], once", copied))) == slot, "waited for, copied"
        slots = int(re.search(r"mad.lo.u32 slots, warp, (\d+), slots;", code).group(1)) // slot
        assert slots == len(re.findall("mbarrier.init", code))
        x = int(re.search(r"add.u32 slots, x, (\d+);", code).group(1))
        assert slots == (3 if rows == 16 and x + 16 * 3 * slot <= mma_linear.SHARED_BYTES else 2)
        most_read = max(int(place) for place in re.findall(r"\[x \+ (\d+)\]", code.split("TURN:")[1]))
        assert x == (steps - 1) * 128 * rows * 2 + most_read + 512
        assert x + 16 * slots * slot <= mma_linear.SHARED_BYTES and slots * slot >= rows * mma_linear.PITCH * 4
        held = sum(map(int, re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", code)))
        assert mma_linear.SHARED_BYTES + held <= 227 << 10


def test_scales_and_offsets_have_types_of_their_own():
    """As they are packed: each in the narrowest that loses nothing."""
    code = mma_linear.assembly(8, 32, "fp32", "fp16", 4)
    assert "add.s64 scales, scales, 8192;" in code and "add.s64 offsets, offsets, 4096;" in code
    assert "mul.lo.u32 scales_place, quad, 32;" in code and "mul.lo.u32 offsets_place, quad, 16;" in code
    assert "cvt.f32.f16 f0, h0;" in code and "mov.b32 f0, s0;" in code


@pytest.mark.parametrize(("rows", "refilled"), [(8, "[slot], [words]"), (16, "mov.u32 free, slot;")])
def test_all_threads_have_read_a_slot_that_is_filled_again(rows, refilled):
    """What no run shows where threads of a warp go on together, and the order of memory as the copy engine sees it."""
    code = mma_linear.assembly(rows, 128, "bf16", None, 4)
    for half in (0, 1):
        turn = code.split(f"bra WAIT{half};")[1]
        read, after = turn.split("bar.warp.sync -1;", 1)
        assert read.count("mma.sync") == 16 * rows // 8 and "mma.sync" not in after.split(refilled)[0]
        assert refilled not in read and refilled in after
    assert code.index("mbarrier.init") < code.index("fence.proxy.async.shared::cta;") < code.index("cp.async.bulk")


def test_what_has_no_assembly():
    with pytest.raises(
        ValueError, match="groups of 256, 4 steps a split and 16 tiles have no kernel here; allowed: 32"
    ):
        mma_linear.assembly(8, 256, "bf16", None, 4)
    with pytest.raises(ValueError, match="groups of 32, 17 steps a split and 16 tiles have no kernel here"):
        mma_linear.assembly(8, 32, "bf16", None, 17)
    with pytest.raises(ValueError, match=r"4 steps a split and 17 tiles .* up to 16, up to 16$"):
        mma_linear.assembly(8, 32, "bf16", None, 4, 17)


def test_splits():
    """As few as leave the fewest steps a split, all with some, for programs that fill the card once."""
    assert fragment_linear.mma_splits(42, 42) == 3 and fragment_linear.mma_splits(16, 42) == 7
    for programs in range(6, 133):
        for steps in range(1, 60):
            splits = fragment_linear.mma_splits(programs, steps)
            each = -(-steps // splits)
            assert programs * splits <= 132 and (splits - 1) * each < steps
            assert each == -(-steps // min(steps, 132 // programs))


def test_one_line():
    """Compilers of programs that embed kernels write the text into a program."""
    code = mma_linear.assembly(8, 128, "bf16", None, 14)
    assert not any(text in code for text in ("\n", "\\", '"', "'", "*/"))

"""The products of ``splitk_sdpa`` at head width 512 in PTX, for what Triton cannot say: when a load of keys or values
is issued, and which of the tensor core's products are waited for. For Hopper alone: ``wgmma`` is sm_90a's. What it
takes of registers and shared memory is in ``tests/test_splitk_kernel.py``.

Two warpgroups, each with all 64 rows and half of the width: both compute every score, so neither needs anything of the
other but the keys and values that they load together. Shared memory holds the queries, and two turns of keys and
values. A turn's keys make room for those of the next but one as soon as its scores are known, so that 64 to 96 KiB are
on their way at any time.

What ``wgmma`` reads lies in blocks of 64 columns, 128 bytes a row, one block after the other. Chunk c of 16 bytes of
row r is at place ``c ^ r % 8`` of its row: the swizzle that descriptors name.

A block of assembly within a Triton kernel, so that what embeds Triton kernels embeds it: Triton finds the addresses,
stores the sums and allocates the shared memory.
"""

import re
from collections.abc import Iterable

import triton
import triton.language as tl

WIDTH, ROWS, KEYS, WARPS = 512, 64, 32, 8
THREADS = 32 * WARPS
ROW_BYTES = 2 * WIDTH
QUERY_BLOCK, TURN_BLOCK = ROWS * 128, KEYS * 128  # bytes of 64 columns of the queries, of a turn's keys or values
QUERY_BYTES, TURN_BYTES = ROWS * ROW_BYTES, 2 * KEYS * ROW_BYTES
COPIES = KEYS * ROW_BYTES // 16 // THREADS  # of 16 bytes that a thread issues for the keys or values of a turn
SUMS = 128  # of a thread: two rows of each of 32 fragments of 8 columns, two columns each
ZERO, ONE, LOWEST = "0f00000000", "0f3F800000", "0fFF800000"  # float32 0, 1 and -inf
INPUTS = {
    "thread": "r",  # its number in the program
    "q": "l",  # where the thread's first 16 bytes of queries are
    "known": "r",  # 16, or 0 where that row of queries is none of the call's
    "k": "l",  # where the keys of the head begin
    "v": "l",
    "row": "r",  # position of the first row of the first turn
    "turns": "r",
    "last": "r",  # position of the last key that any row sees
    "pos0": "r",  # positions of the two rows whose scores the thread has
    "pos1": "r",
    "factor": "f",  # of scores
    "step_bytes": "l",  # of keys, or of values, from one turn to the next
    "step": "r",  # positions
}
RESULTS = SUMS + 4  # then the highest scores of the two rows, and their sums of weights
CONSTRAINTS = tl.constexpr(",".join(["=f"] * RESULTS + [*INPUTS.values()]))


def _lines(lines: Iterable[str]) -> str:
    """Instructions, one a line."""
    return "\n".join(lines)


def _registers(name: str, indices: Iterable[int]) -> str:
    """An operand of several registers."""
    return "{" + ", ".join(f"{name}{i}" for i in indices) + "}"


def _descriptor(leading: int = 16) -> str:
    """The upper bits of a ``wgmma`` descriptor of the swizzle, whose groups of eight rows follow one another. For
    values, whose rows are what products add over, with the bytes from one block to the next.
    """
    return f"{1 << 62 | (8 * 128 >> 4) << 32 | (leading >> 4) << 16:#x}"


def _places() -> str:
    """``even``, ``odd``: where a thread's copies go within the keys or values of a turn. It copies chunk
    ``thread % 64`` of every fourth row, so the places of its rows in the swizzle take turns. ``row`` becomes the first
    of these rows, ``k`` and ``v`` the addresses of its chunk of it.
    """
    return f"""
    shr.u32 x, thread, 6;
    add.s32 row, row, x;
    and.b32 y, thread, 63;
    mad.wide.u32 offset, y, 16, 0;
    mad.wide.s32 offset, row, {ROW_BYTES}, offset;
    add.s64 k, k, offset;
    add.s64 v, v, offset;
    shr.u32 even, y, 3;
    mul.lo.u32 even, even, {TURN_BLOCK};
    shl.b32 z, x, 7;
    add.s32 odd, even, z;
    and.b32 y, thread, 7;
    xor.b32 z, y, x;
    shl.b32 z, z, 4;
    add.s32 even, odd, z;
    xor.b32 z, z, 64;
    add.s32 odd, odd, z;
    add.s32 odd, odd, 512;"""


def _copies(source: str, target: str) -> str:
    """The keys or values of one turn; rows after the last one become zeros without being read."""
    lines = [f"add.s32 x, {target}, even;", f"add.s32 y, {target}, odd;", "sub.s32 left, last, row;"]
    for i in range(COPIES):
        place = f"{'y' if i % 2 else 'x'} + {i // 2 * 1024}"
        lines += [
            f"setp.ge.s32 p, left, {4 * i};",
            "selp.s32 size, 16, 0, p;",
            f"cp.async.cg.shared.global [{place}], [{source} + {4 * i * ROW_BYTES}], 16, size;",
        ]
    return _lines([*lines, "cp.async.commit_group;"])


def _queries() -> str:
    """The queries, four threads a row, each with one chunk of every four; they join the copies that follow."""
    lines = [
        "shr.u32 x, thread, 2;",
        "and.b32 y, x, 7;",
        "shl.b32 x, x, 7;",
        "add.s32 x, x, queries;",
        "mov.u32 size, known;",
    ]
    for i in range(WIDTH // 32):
        block, inside = divmod(4 * i, 8)
        lines += [
            "and.b32 z, thread, 3;",
            f"add.s32 z, z, {inside};",
            "xor.b32 z, z, y;",
            "shl.b32 z, z, 4;",
            "add.s32 z, z, x;",
            f"cp.async.cg.shared.global [z + {block * QUERY_BLOCK}], [q + {64 * i}], 16, size;",
        ]
    return _lines(lines)


def _arrived(pending: int) -> str:
    """All loads but the last ``pending`` groups are there, and everyone's; everyone is done with what came before."""
    return _lines([f"cp.async.wait_group {pending};", "fence.proxy.async.shared::cta;", "bar.sync 0;"])


def _products(lines: Iterable[str]) -> str:
    """Products of the tensor core, waited for."""
    wait = ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    return _lines(["wgmma.fence.sync.aligned;", *lines, *wait])


def _scores() -> str:
    """``s``: products of all queries with the keys of the turn."""
    lines = []
    for k in range(WIDTH // 16):
        block, inside = divmod(k, 4)
        lines += [
            f"add.s64 a, queries_at, {block * (QUERY_BLOCK >> 4) + inside * 2};",
            f"add.s64 b, keys_at, {block * (TURN_BLOCK >> 4) + inside * 2};",
            f"wgmma.mma_async.sync.aligned.m64n{KEYS}k16.f32.bf16.bf16 {_registers('s', range(KEYS // 2))}, a, b, "
            f"{'yes' if k else 'no'}, 1, 1, 0, 0;",
        ]
    return _products(lines)


def _weights() -> str:
    """Weights ``w`` from scores ``s``, two bfloat16 numbers a word, in the order in which they are an operand, and
    ``fade``, what the sums so far are to be multiplied by.
    """
    lines = []
    for half in range(2):  # rows g and g + 8 of a warp
        mine = [4 * j + 2 * half + e for j in range(KEYS // 8) for e in range(2)]
        lines += [f"mov.f32 higher, highest{half};"]
        for i in mine:
            lines += [
                f"add.s32 x, column, {i // 4 * 8 + i % 2};",
                f"setp.le.s32 p, x, pos{half};",
                f"mul.f32 s{i}, s{i}, factor;",
                f"selp.f32 s{i}, s{i}, {LOWEST}, p;",
                f"max.f32 higher, higher, s{i};",
            ]
        for lanes in (1, 2):
            lines += [f"shfl.sync.bfly.b32 f, higher, {lanes}, 31, -1;", "max.f32 higher, higher, f;"]
        lines += [
            f"setp.eq.f32 p, higher, {LOWEST};",  # no key is seen yet
            f"selp.f32 base, {ZERO}, higher, p;",
            f"sub.f32 f, highest{half}, base;",
            f"ex2.approx.f32 fade{half}, f;",
            f"mov.f32 highest{half}, higher;",
            f"mul.f32 weights{half}, weights{half}, fade{half};",
        ]
        for i in mine:
            lines += [f"sub.f32 s{i}, s{i}, base;", f"ex2.approx.f32 s{i}, s{i};"]
            lines += [f"add.f32 weights{half}, weights{half}, s{i};"]
    return _lines([*lines, *(f"cvt.rn.bf16x2.f32 w{i}, s{2 * i + 1}, s{2 * i};" for i in range(KEYS // 4))])


def _fade() -> str:
    """Sums become those relative to the new highest score, unless that is the old one for all rows of the warp."""
    lines = [f"setp.ne.f32 p, fade0, {ONE};", f"setp.ne.or.f32 p, fade1, {ONE}, p;"]
    lines += ["vote.sync.any.pred p, p, -1;", "@!p bra KEPT;"]
    lines += [f"mul.f32 o{i}, o{i}, fade{i // 2 % 2};" for i in range(SUMS)]
    return _lines([*lines, "KEPT:"])


def _sums() -> str:
    """``o`` plus the products of the weights with the values of the turn, half of the width."""
    lines = []
    for k in range(KEYS // 16):
        lines += [
            f"add.s64 b, values_at, {k * (16 * 128 >> 4)};",
            f"wgmma.mma_async.sync.aligned.m64n{WIDTH // 2}k16.f32.bf16.bf16 {_registers('o', range(SUMS))}, "
            f"{_registers('w', range(4 * k, 4 * k + 4))}, b, yes, 1, 1, 1;",
        ]
    return _products(lines)


def _row_weights() -> str:
    """Sums of weights over the four threads of a row."""
    lines = []
    for half in range(2):
        for lanes in (1, 2):
            lines += [f"shfl.sync.bfly.b32 f, weights{half}, {lanes}, 31, -1;"]
            lines += [f"add.f32 weights{half}, weights{half}, f;"]
    return _lines(lines)


def _assembly() -> str:
    """``RESULTS`` numbers of a thread from ``INPUTS``. ``row`` goes ahead with the copies; ``column`` is the position
    of the thread's first score. Names with ``_at`` are descriptors; x, y, z are for anything.
    """
    types = {"r": "u32", "l": "u64", "f": "f32"}
    results = [*(f"o{i}" for i in range(SUMS)), "highest0", "highest1", "weights0", "weights1"]
    return f"""{{
    .reg .pred p, yes, no;
    .reg .f32 o<{SUMS}>, s<{KEYS // 2}>, f, higher, base, factor, highest<2>, weights<2>, fade<2>;
    .reg .b32 thread, known, row, turns, last, pos<2>, step, w<{KEYS // 4}>, x, y, z, left, size, column, even, odd,
        queries, turn, values, half;
    .reg .b64 q, k, v, step_bytes, offset, a, b, queries_at, keys_at, values_at;
    {_lines(f"mov.{types[kind]} {name}, ${RESULTS + i};" for i, (name, kind) in enumerate(INPUTS.items()))}
    mov.u32 queries, global_smem;
    setp.eq.s32 yes, 0, 0;
    setp.ne.s32 no, 0, 0;
    and.b32 x, thread, 3;
    shl.b32 x, x, 1;
    add.s32 column, row, x;
    {_places()}
    /* what Triton last had in shared memory has been read by all */
    bar.sync 0;
    {_queries()}
    add.s32 turn, queries, {QUERY_BYTES};
    {_copies("k", "turn")}
    add.s32 values, turn, {TURN_BYTES // 2};
    {_copies("v", "values")}
    add.s64 k, k, step_bytes;
    add.s32 row, row, step;
    add.s32 z, turn, {TURN_BYTES};
    {_copies("k", "z")}
    add.s64 k, k, step_bytes;
    add.s64 v, v, step_bytes;
    shr.u32 x, queries, 4;
    cvt.u64.u32 queries_at, x;
    or.b64 queries_at, queries_at, {_descriptor()};
    /* the half of the width that the warpgroup has, four blocks, as descriptors count */
    shr.u32 half, thread, 7;
    mul.lo.u32 half, half, {4 * TURN_BLOCK >> 4};
    {_lines(f"mov.f32 o{i}, {ZERO};" for i in range(SUMS))}
    mov.f32 highest0, {LOWEST};
    mov.f32 highest1, {LOWEST};
    mov.f32 weights0, {ZERO};
    mov.f32 weights1, {ZERO};
    setp.le.s32 p, turns, 0;
    @p bra DONE;
    TURN:
    {_arrived(2)}
    /* values of the next turn, in the place of those of the one before */
    sub.s32 values, turn, queries;
    sub.s32 values, values, {QUERY_BYTES};
    xor.b32 values, values, {TURN_BYTES};
    add.s32 values, values, queries;
    add.s32 values, values, {QUERY_BYTES + TURN_BYTES // 2};
    {_copies("v", "values")}
    add.s64 v, v, step_bytes;
    shr.u32 x, turn, 4;
    cvt.u64.u32 keys_at, x;
    or.b64 keys_at, keys_at, {_descriptor()};
    {_scores()}
    {_weights()}
    {_arrived(2)}
    /* keys of the next turn but one, in the place of those of this one */
    add.s32 row, row, step;
    {_copies("k", "turn")}
    add.s64 k, k, step_bytes;
    {_fade()}
    add.s32 x, turn, {TURN_BYTES // 2};
    shr.u32 x, x, 4;
    add.s32 x, x, half;
    cvt.u64.u32 values_at, x;
    or.b64 values_at, values_at, {_descriptor(TURN_BLOCK)};
    {_sums()}
    add.s32 column, column, step;
    add.s32 turn, values, {-(TURN_BYTES // 2)};
    add.s32 turns, turns, -1;
    setp.gt.s32 p, turns, 0;
    @p bra TURN;
    DONE:
    cp.async.wait_all;
    bar.sync 0;
    {_row_weights()}
    {_lines(f"mov.f32 ${i}, {name};" for i, name in enumerate(results))}
    }}"""


# In one line and without its comments: Inductor of torch 2.11 writes a constexpr into a program without escapes, where
# a line break would end it, and AOTInductor a kernel's text into a comment of C++, which a comment's end would end.
ASSEMBLY = tl.constexpr(" ".join(re.sub(r"/\*.*?\*/", "", _assembly()).split()))
# numbers above, as a Triton kernel can read them
_WIDTH, _ROWS, _KEYS, _THREADS = (tl.constexpr(number) for number in (WIDTH, ROWS, KEYS, THREADS))
_SUMS, _RESULTS = tl.constexpr(SUMS), tl.constexpr(RESULTS)


@triton.jit(do_not_specialize=["M"])
def wide_kernel(
    q_ptr, k_ptr, v_ptr, pos_ptr, sums_ptr, state_ptr, M, q_head_stride, q_row_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, L: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """As ``splitk_kernel`` without a window, at this file's width and numbers of rows, keys and warps. Every row of the
    operands must lie where 16 bytes can be copied.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    split = tl.program_id(1)
    kv_head = tl.program_id(2)
    block = tl.program_id(0) * _ROWS
    m = (block + tl.arange(0, _ROWS)) // GROUP
    last = tl.max(tl.load(pos_ptr + m, mask=m < M, other=-1)).to(tl.int32)
    # Never so, but the compiler does not know it: for this product Triton allocates the shared memory that the assembly
    # uses. A condition on M would be decided, and the product dropped, where M is specialised.
    if last < -1:
        LOADED: tl.constexpr = 4 * _KEYS  # keys and values of two turns
        d = tl.arange(0, _WIDTH)
        a = tl.load(q_ptr + tl.arange(0, _ROWS)[:, None] * _WIDTH + d[None, :])
        b = tl.load(k_ptr + tl.arange(0, LOADED)[:, None] * _WIDTH + d[None, :])
        tl.store(sums_ptr + tl.arange(0, _ROWS)[:, None] * LOADED + tl.arange(0, LOADED)[None, :], tl.dot(a, b.T))
    turns = tl.cdiv(last // _KEYS + 1 - split, SPLITS)
    thread = tl.arange(0, _THREADS)
    zero = thread * 0
    far = zero.to(tl.int64)
    copied = block + thread // 4  # the row whose query the thread copies
    m = copied // GROUP
    head = kv_head * GROUP + copied % GROUP
    q = (q_ptr + head * q_head_stride + m * q_row_stride + thread % 4 * 8).to(tl.int64, bitcast=True)
    known = tl.where(m < M, 16, 0)
    row = block + thread // 32 % 4 * 16 + thread % 32 // 4  # of the sums, and the one eight further
    m0 = row // GROUP
    m1 = (row + 8) // GROUP
    pos0 = tl.load(pos_ptr + m0, mask=m0 < M, other=-1).to(tl.int32)
    pos1 = tl.load(pos_ptr + m1, mask=m1 < M, other=-1).to(tl.int32)
    k = (k_ptr + kv_head.to(tl.int64) * (L * _WIDTH)).to(tl.int64, bitcast=True)
    v = (v_ptr + kv_head.to(tl.int64) * (L * _WIDTH)).to(tl.int64, bitcast=True)
    factor = tl.full([_THREADS], scale, tl.float32)  # AOTInductor's scale is a float64
    STEP: tl.constexpr = SPLITS * _KEYS
    made = tl.inline_asm_elementwise(
        ASSEMBLY,
        CONSTRAINTS,
        [
            thread, q, known, k + far, v + far, split * _KEYS + zero, turns + zero, last + zero, pos0, pos1, factor,
            far + STEP * _WIDTH * 2, zero + STEP,
        ],
        dtype=(tl.float32,) * _RESULTS,
        is_pure=True,
        pack=1,
    )  # fmt: skip
    at0 = (split * HEADS + kv_head * GROUP + row % GROUP) * M + m0
    at1 = (split * HEADS + kv_head * GROUP + (row + 8) % GROUP) * M + m1
    column = thread // 128 * (_WIDTH // 2) + thread % 4 * 2
    pair = tl.arange(0, 2)[None, :]
    known0 = (m0 < M) & (turns > 0)
    known1 = (m1 < M) & (turns > 0)
    to0 = sums_ptr + (at0.to(tl.int64) * _WIDTH + column)[:, None] + pair
    to1 = sums_ptr + (at1.to(tl.int64) * _WIDTH + column)[:, None] + pair
    for i in tl.static_range(_SUMS // 4):
        tl.store(to0 + i * 8, tl.join(made[4 * i], made[4 * i + 1]), mask=known0[:, None])
        tl.store(to1 + i * 8, tl.join(made[4 * i + 2], made[4 * i + 3]), mask=known1[:, None])
    once = (thread % 4 == 0) & (thread < 128)
    tl.store(state_ptr + at0, made[_SUMS], mask=known0 & once)
    tl.store(state_ptr + at1, made[_SUMS + 1], mask=known1 & once)
    tl.store(state_ptr + SPLITS * HEADS * M + at0, made[_SUMS + 2], mask=known0 & once)
    tl.store(state_ptr + SPLITS * HEADS * M + at1, made[_SUMS + 3], mask=known1 & once)

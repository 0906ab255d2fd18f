"""The products of ``fragment_linear`` for large weights in PTX, for what Triton cannot say: which warp waits for which
load. For Hopper, on which it was tried.

A program has up to 16 tiles of 64 outputs, a warp each, and a split of the input width. The copy engine brings a warp's
words and scales, 64 columns at a time, into one of two slots that are the warp's own, so that warps wait for no other
(with 16 rows of x, which take longer to multiply, a third slot is read meanwhile, where there is room for it);
what the tiles have at a time follows one another in memory (``program_tiles`` of ``fragment_linear``), which is what
DRAM is fast at, and is the first to leave the cache, which so keeps x and the results. The split of x is brought once,
in the order of the tensor core's operand, and with it come its sums over groups: the products of a group begin at them,
and offsets are multiplied with them.

A block of assembly within a Triton kernel, so that what embeds Triton kernels embeds it: Triton finds the addresses,
stores the sums and allocates the shared memory. What is taken of registers is in ``tests/test_mma_linear.py``.
"""

from collections.abc import Iterable
from functools import cache

import triton
import triton.language as tl

TILE, WARPS = 64, 16  # outputs of a warp; warps of a program, of which some may have no tile
MOST_STEPS = WARPS  # of a split: a warp brings one of x
STEP, HALF = 128, 64  # columns of a turn of the loop; of a slot
SLOTS = 2  # of a warp, on their way at a time; even, as the two halves of a step take turns at them
WORD_BYTES = TILE * HALF // 2  # of a slot
PITCH = 68  # numbers of a row of sums in shared memory: what keeps banks apart
SHARED_BYTES = (64 + 128) * 512 * 2  # of operands of the product that allocates them
GROUP_SIZES = (32, 64, 128)
SCALES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a scale or an offset
INPUTS = {
    "thread": "r",  # its number in the program
    "words": "l",  # where the first words of the warp are
    "scales": "l",
    "offsets": "l",
    "x0": "l",  # where the thread's first eight numbers are, of the row of its quad and of the one eight further
    "x1": "l",
    "turns": "r",  # steps of the split
}


def constraints(rows: int) -> str:
    """Of the assembly's results and ``INPUTS``, in LLVM's letters."""
    return ",".join(["=f"] * (2 * rows) + [*INPUTS.values()])


@cache
def assembly(rows: int, group_size: int, scales: str, offsets: str | None, steps: int, tiles: int = WARPS) -> str:
    """The sums of a warp's tile, ``2 * rows`` a thread: of row j, results 2 j and 2 j + 1 are those of outputs
    ``2 * lane`` and the one after it; of a warp without a tile, anything. ``rows`` 8 or 16 of x; ``group_size`` one of
    ``GROUP_SIZES``; ``scales`` and, with zero points, ``offsets`` each one of ``SCALES``; up to ``steps`` a split, at
    most ``MOST_STEPS``; ``tiles`` at most ``WARPS``. Raises ``ValueError`` for other groups, steps and tiles.
    """
    if group_size not in GROUP_SIZES or steps > MOST_STEPS or tiles > WARPS:
        allowed = f"{', '.join(map(str, GROUP_SIZES))}, up to {MOST_STEPS}, up to {WARPS}"
        got = f"groups of {group_size}, {steps} steps a split and {tiles} tiles"
        raise ValueError(f"{got} have no kernel here; allowed: {allowed}")
    parts = rows // 8  # fragments of x
    group = min(group_size, HALF)  # columns that products are added over before they are scaled
    per_half = HALF // group
    kinds = {"scales": scales} | ({"offsets": offsets} if offsets else {})
    group_bytes = {kind: TILE * SCALES[dtype] for kind, dtype in kinds.items()}
    scale_bytes = {kind: per_half * size for kind, size in group_bytes.items()}
    places = {"scales": WORD_BYTES, "offsets": WORD_BYTES + scale_bytes["scales"]}  # in a slot
    slot = WORD_BYTES + sum(scale_bytes.values())
    step_groups = STEP // group
    group_sums = rows * 8  # bytes of sums of x of a group, each pair of rows twice, as a fragment begins at them
    by_product = offsets == "bf16"  # offsets times sums of x by the tensor core
    triples = 128 * parts  # bytes of sums of x of a slot's groups, as three bfloat16 each
    chunk = 512  # bytes of 8 rows and 32 columns of x
    x_bytes = steps * STEP * rows * 2 + chunk * parts  # and what is read past the end
    spare = rows == 16 and x_bytes + WARPS * (SLOTS + 1) * slot <= SHARED_BYTES  # a slot more than are waited for
    slots = SLOTS + spare

    def mma(out: list[str], a: list[str], b: list[str], c: list[str]) -> str:
        operands = ", ".join("{" + ", ".join(names) + "}" for names in (out, a, b, c))
        return f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {operands};"

    def numbers(name: str, *indices: int) -> list[str]:
        """The four registers of a fragment's sums or a load."""
        first = 4 * (indices[0] * parts + indices[1] if len(indices) == 2 else indices[0])
        return [f"{name}{first + i}" for i in range(4)]

    def vector(names: Iterable[str]) -> str:
        return "{" + ", ".join(names) + "}"

    def copies(to: str, bar: str) -> list[str]:
        """By one lane: what the next slot holds."""
        engine = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        lines = [
            f"mbarrier.arrive.expect_tx.shared.b64 _, [{bar}], {slot};",
            f"{engine} [{to}], [words], {WORD_BYTES}, [{bar}], once;",
        ]
        for kind in kinds:
            lines += [f"add.u32 at, {to}, {places[kind]};"]
            lines += [f"{engine} [at], [{kind}], {scale_bytes[kind]}, [{bar}], once;"]
        return lines

    def copied(half: int) -> list[str]:
        """By all lanes, so that addresses are known to be one: scales of 128 columns are copied for both halves."""
        done = group_size < STEP or half == 1
        return [
            f"add.s64 words, words, {tiles * WORD_BYTES};",
            *(f"add.s64 {kind}, {kind}, {tiles * scale_bytes[kind]};" for kind in kinds if done),
        ]

    def load_x(column_chunk: int) -> list[str]:
        """The operand of 32 columns, while those before are multiplied."""
        return [
            f"ld.shared.v4.b32 {vector(numbers('b', column_chunk % 2, part))}, "
            f"[x + {chunk * (column_chunk * parts + part)}];"
            for part in range(parts)
        ]

    def multiply_offsets(half: int) -> list[str]:
        """A slot's offsets times the sums of x of their groups: a step of eight columns of the tensor core, of which a
        group has four, its sum in three bfloat16 and nothing.
        """
        lines = ["add.u32 at, slot, offset_pairs;", f"ld.shared.v4.b32 {vector(f'o{i}' for i in range(4))}, [at];"]
        lines += [f"ld.shared.b32 e{part}, [triples + {half * triples + 128 * part}];" for part in range(parts)]
        for r in range(4):
            lines += [f"prmt.b32 a0, o{r}, o{r}, 0x1010;", f"prmt.b32 a1, o{r}, o{r}, 0x3232;"]
            for part in range(parts):
                acc = vector(numbers("acc", r, part))
                product = "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32"
                lines += [f"{product} {acc}, {{a0, a1}}, {{e{part}}}, {acc};"]
        return lines

    def load_scales(kind: str, index: int) -> list[str]:
        """A thread's eight of a group, as they are."""
        place = places[kind] + index * group_bytes[kind]
        return [
            f"ld.shared.v4.b32 {vector(f'{kind[0]}{4 * i + j}' for j in range(4))}, [my_{kind} + {place + 16 * i}];"
            for i in range(SCALES[kinds[kind]] // 2)
        ]

    def spread(kind: str) -> list[str]:
        """What ``load_scales`` got as float32 ``f``."""
        lines = []
        for i in range(2 * SCALES[kinds[kind]]):
            name = f"{kind[0]}{i}"
            if kinds[kind] == "bf16":
                lines += [f"shl.b32 t, {name}, 16;", f"mov.b32 f{2 * i}, t;"]
                lines += [f"and.b32 t, {name}, 0xFFFF0000;", f"mov.b32 f{2 * i + 1}, t;"]
            elif kinds[kind] == "fp16":
                lines += [f"mov.b32 {{h0, h1}}, {name};"]
                lines += [f"cvt.f32.f16 f{2 * i + j}, h{j};" for j in range(2)]
            else:
                lines += [f"mov.b32 f{i}, {name};"]
        return lines

    def begin_group(index: int) -> list[str]:
        """Sums of x, times -16 or -24, and what the group is scaled by."""
        lines = [
            f"ld.shared.v4.f32 {vector(numbers('c', part))}, [sums + {index * group_sums + 64 * part}];"
            for part in range(parts)
        ]
        for kind in ("scales",) if by_product else kinds:
            lines += load_scales(kind, index % per_half)
        return lines

    def add(source: str) -> list[str]:
        """Sums of the tile plus ``source`` times ``f``."""
        lines = []
        for r in range(4):
            for part in range(parts):
                for i, total in enumerate(numbers("acc", r, part)):
                    number = numbers("d", r, part)[i] if source == "d" else f"c{4 * part + i}"
                    lines += [f"fma.rn.f32 {total}, {number}, f{2 * r + i // 2}, {total};"]
        return lines

    def end_group() -> list[str]:
        lines = [*spread("scales"), *add("d")]
        if offsets and not by_product:  # sums are those of x times -16
            lines += [*spread("offsets"), *(f"mul.f32 f{i}, f{i}, 0fBD800000;" for i in range(8)), *add("c")]
        return lines

    def multiply(column_chunk: int) -> list[str]:
        """32 columns: two steps of the tensor core for each of four fragments of outputs."""
        lines = []
        for s in range(2):
            for r in range(4):
                load, place = (
                    (r, column_chunk % 2 * 2) if group_size > 32 else (column_chunk % 2 * 2 + r // 2, r % 2 * 2)
                )
                word = numbers("w", load)[place + s]
                for i in range(4):
                    turned = word if i == 0 else "t"
                    lines += [f"shf.r.wrap.b32 t, {word}, {word}, {4 * i};"] if i else []
                    lines += [f"lop3.b32 a{i}, {turned}, 0x00780078, 0x41804180, 0xea;"]
                for part in range(parts):
                    d = numbers("d", r, part)
                    begins = s == 0 and column_chunk * 32 % group == 0
                    before = numbers("c", part) if begins else d
                    lines += [mma(d, numbers("a", 0), numbers("b", column_chunk % 2, part)[2 * s : 2 * s + 2], before)]
        return lines

    def copies_of_next(half: int) -> list[str]:
        """By the warp: the slot that is free is filled again, if anything is left."""
        return [
            "setp.le.s32 p, left, 0;",
            f"@p bra KEPT{half};",
            "elect.sync _|p, -1;",
            f"@!p bra KEPT{half};",
            *(copies("free", "free_bar") if spare else copies("slot", "bar")),
            f"KEPT{half}:",
            *copied(half),
            "add.s32 left, left, -1;",
        ]

    def half(h: int) -> list[str]:
        lines = [
            f"WAIT{h}:",
            "mbarrier.try_wait.parity.shared.b64 p, [bar], phase;",
            f"@!p bra WAIT{h};",
            *(copies_of_next(h) if spare else []),
            "add.u32 at, slot, lane_bytes;",
            *(f"ld.shared.v4.b32 {vector(numbers('w', i))}, [at + {512 * i}];" for i in range(4)),
            *(f"add.u32 my_{kind}, slot, {kind}_place;" for kind in kinds),
        ]
        for c in (2 * h, 2 * h + 1):
            lines += load_x(c + 1)  # the last one's are not used: they lie between x and the slots, if steps are all
            lines += begin_group(c * 32 // group) if c * 32 % group == 0 else []
            lines += multiply(c)
            lines += end_group() if (c + 1) * 32 % group == 0 else []
        lines += multiply_offsets(h) if by_product else []
        return [
            *lines,
            "bar.warp.sync -1;",  # the slot is read
            *([] if spare else copies_of_next(h)),
            *(["mov.u32 free, slot;", "mov.u32 free_bar, bar;"] if spare else []),
            f"add.u32 slot, slot, {slot};",
            "add.u32 bar, bar, 8;",
            "setp.eq.u32 p, bar, bars_end;",
            "@p mov.u32 slot, slots;",
            "@p mov.u32 bar, bars;",
            "@p xor.b32 phase, phase, 1;",
        ]

    def fetch_x() -> list[str]:
        """The warp's step of the split of x."""
        lines = ["setp.lt.s32 p, warp, turns;"]
        for part in range(parts):
            lines += [f"mad.wide.s32 from, warp, {2 * STEP}, x{part};"]
            for c in range(4):
                lines += [f"@p ld.global.nc.v4.b32 {vector(numbers('y', c, part))}, [from + {64 * c}];"]
        return lines

    def place_triples(sums: list[str]) -> list[str]:
        """Two rows' sums of x of a group where ``multiply_offsets`` reads them: exactly, down to 2**-110, where the
        last of three bfloat16 gets too small.
        """
        lines = ["mov.b16 zero, 0;", "mov.u32 into, sum_triples;", f"mad.lo.u32 into, warp, {2 * triples}, into;"]
        lines += ["and.b32 t, lane, 3;", "mad.lo.u32 into, t, 32, into;", "mov.u32 i, quad;"]
        for count, entries in ((parts, 128), (per_half, 8), (2, triples)):  # the quad's fragment, group and half
            lines += [f"and.b32 t, i, {count - 1};", f"mad.lo.u32 into, t, {entries}, into;"]
            lines += [f"shr.u32 i, i, {count.bit_length() - 1};"]
        for place, number in zip((0, 16), sums, strict=True):
            lines += [f"mul.f32 f0, {number}, 0fBD800000;"]  # times -1/16
            for digits in ("h0", "h1", "h2"):
                lines += [f"cvt.rn.bf16.f32 {digits}, f0;", f"mov.b32 t, {{zero, {digits}}};"]
                lines += ["mov.b32 f1, t;", "sub.f32 f0, f0, f1;"]
            lines += ["mov.b32 e0, {h0, h1};", "mov.b32 e1, {h2, zero};", "mov.b32 t, 0;"]
            words = "v2.b32 [into + {}], {{e0, e1}};" if per_half == 2 else "v4.b32 [into + {}], {{e0, e1, t, t}};"
            lines += ["@p st.shared." + words.format(place)]
        return lines

    def place_x() -> list[str]:
        """Into shared memory, with the sums of its groups, which are products with one number. Each quad of lanes gets
        all of them, and keeps those of one group and fragment.
        """
        kept = step_groups * parts
        lines = [
            "setp.lt.s32 known, warp, turns;",
            f"mad.lo.u32 at, warp, {4 * chunk * parts}, x;",
            "mov.u32 to, group_sums;",
            f"mad.lo.u32 to, warp, {step_groups * group_sums}, to;",
            "add.u32 to, to, lane_bytes;",
        ]
        for part in range(parts):
            for c in range(4):
                loaded = vector(numbers("y", c, part))
                lines += [f"@known st.shared.v4.b32 [at + {chunk * (c * parts + part)}], {loaded};"]
        lines += [f"mov.f32 d{i}, 0f00000000;" for i in range(4 * kept)]
        for g in range(step_groups):
            for part in range(parts):
                d = numbers("d", g, part)
                for c in range(g * group // 32, (g + 1) * group // 32):
                    loaded = numbers("y", c, part)
                    lines += [mma(d, ["factor"] * 4, loaded[2 * s : 2 * s + 2], d) for s in range(2)]
        for other in range(1, kept):
            lines += [f"setp.eq.u32 p, quad, {other};"]
            lines += [f"selp.f32 d{i}, d{4 * other + i}, d{i}, p;" for i in range(2)]
        lines += [f"setp.lt.and.u32 p, quad, {kept}, known;", "@p st.shared.v4.f32 [to], {d0, d1, d0, d1};"]
        return lines + (place_triples(["d0", "d1"]) if by_product else [])

    def turned_sums() -> list[str]:
        """The tile's sums through the warp's slots, so that a row's outputs follow one another in a warp."""
        lines = ["and.b32 i, lane, 3;", "shr.u32 t, lane, 2;", f"mad.lo.u32 at, i, {2 * PITCH}, t;"]
        lines += ["mad.lo.u32 at, at, 4, slots;"]
        for r in range(4):
            for part in range(parts):
                for i, number in enumerate(numbers("acc", r, part)):
                    place = (8 * part + i % 2) * PITCH + 16 * r + i // 2 * 8
                    lines += [f"st.shared.f32 [at + {4 * place}], {number};"]
        lines += ["bar.warp.sync -1;", "mad.lo.u32 at, lane, 8, slots;"]
        return lines + [
            f"ld.shared.v2.f32 {{acc{2 * j}, acc{2 * j + 1}}}, [at + {4 * j * PITCH}];" for j in range(rows)
        ]

    def one_address(name: str) -> list[str]:
        """The same number in a register that the compiler knows to be one for the warp."""
        lanes = [f"shfl.sync.idx.b32 {part}, {part}, 0, 31, -1;" for part in ("at", "to")]
        return [f"mov.b64 {{at, to}}, {name};", *lanes, f"mov.b64 {name}, {{at, to}};"]

    def begin(index: int) -> list[str]:
        """The copies into a slot before the loop."""
        return [
            f"setp.gt.and.s32 p, left, {index}, first_lane;",
            f"@!p bra BEGUN{index};",
            f"add.u32 i, slot, {index * slot};",
            f"add.u32 t, bar, {8 * index};",
            *copies("i", "t"),
            f"BEGUN{index}:",
            *copied(index % 2),
        ]

    types = {"r": "u32", "l": "u64"}
    lines = [
        f".shared .align 8 .b8 full[{WARPS * slots * 8}];",
        f".shared .align 16 .b8 group_sums[{steps * step_groups * group_sums}];",
        *([f".shared .align 16 .b8 sum_triples[{steps * 2 * triples}];"] if by_product else []),
        ".reg .pred p, known, first_lane, idle;",
        f".reg .f32 acc<{2 * rows}>, d<{2 * rows}>, c<{4 * parts}>, f<8>;",
        f".reg .b32 a<4>, b<{8 * parts}>, w<16>, y<{16 * parts}>, s<8>, o<8>, e<2>, t, i, at, to, into, factor;",
        ".reg .b32 thread, turns, warp, lane, lane_bytes, slot, slots, bar, bars, bars_end, phase, left, x, sums;",
        ".reg .b32 quad, free, free_bar, triples, my_scales, my_offsets, scales_place, offsets_place, offset_pairs;",
        ".reg .b16 h<3>, zero;",
        ".reg .b64 once, words, scales, offsets, x0, x1, from;",
        *(f"mov.{types[kind]} {name}, ${2 * rows + i};" for i, (name, kind) in enumerate(INPUTS.items())),
        "createpolicy.fractional.L2::evict_first.b64 once, 1.0;",
        "and.b32 lane, thread, 31;",
        "shr.u32 warp, thread, 5;",
        *(f"shfl.sync.idx.b32 {name}, {name}, 0, 31, -1;" for name in ("warp", "turns")),
        *(line for name in ("words", *kinds) for line in one_address(name)),
        "setp.eq.u32 first_lane, lane, 0;",
        f"setp.ge.u32 idle, warp, {tiles};",
        "shl.b32 lane_bytes, lane, 4;",
        "shr.u32 quad, lane, 2;",
        *(f"mul.lo.u32 {kind}_place, quad, {8 * SCALES[dtype]};" for kind, dtype in kinds.items()),
        "mov.u32 x, global_smem;",
        f"add.u32 slots, x, {x_bytes};",
        f"mad.lo.u32 slots, warp, {slots * slot}, slots;",
        "mov.u32 bars, full;",
        f"mad.lo.u32 bars, warp, {slots * 8}, bars;",
        f"add.u32 bars_end, bars, {slots * 8};",
        "mov.u32 slot, slots;",
        "mov.u32 bar, bars;",
        "mov.u32 phase, 0;",
        "shl.b32 left, turns, 1;",
        "@idle mov.u32 left, 0;",
        "@!first_lane bra READY;",
        *(f"mbarrier.init.shared.b64 [bar + {8 * i}], 1;" for i in range(slots)),
        "fence.proxy.async.shared::cta;",
        "READY:",
        *fetch_x(),  # asked for before the weights, which the memory has enough to do with
        *begin(0),
        f"mov.b32 factor, {'0xC180C180' if offsets else '0xC1C0C1C0'};",  # bfloat16 -16, -24
        "and.b32 at, lane, 3;",
        "add.u32 x, x, lane_bytes;",
        "mov.u32 sums, group_sums;",
        "mad.lo.u32 sums, at, 16, sums;",
        "bar.warp.sync -1;",
        *place_x(),
        *(line for index in range(1, SLOTS) for line in begin(index)),  # what would keep x waiting
        f"add.s32 left, left, {-SLOTS};",
        f"add.u32 free, slot, {SLOTS * slot};",
        f"add.u32 free_bar, bar, {SLOTS * 8};",
        "bar.sync 0;",
        *(f"mov.f32 acc{i}, 0f00000000;" for i in range(2 * rows)),
        "@idle bra DONE;",
    ]
    if by_product:  # offsets of a thread's two columns of a slot's step: of one group
        lines += ["mov.u32 triples, sum_triples;", "mad.lo.u32 triples, lane, 4, triples;"]
        lines += [f"and.b32 t, lane, {2 * (per_half - 1)};", f"mad.lo.u32 t, t, {TILE}, {places['offsets']};"]
        lines += ["add.u32 offset_pairs, t, offsets_place;"]
    lines += [
        *load_x(0),
        "TURN:",
        *half(0),
        *half(1),
        f"add.u32 x, x, {4 * chunk * parts};",
        f"add.u32 sums, sums, {step_groups * group_sums};",
        *([f"add.u32 triples, triples, {2 * triples};"] if by_product else []),
        "add.s32 turns, turns, -1;",
        "setp.gt.s32 p, turns, 0;",
        "@p bra TURN;",
        *turned_sums(),
        "DONE:",
        *(f"mov.f32 ${i}, acc{i};" for i in range(2 * rows)),
    ]
    # in one line, as compilers of programs that embed kernels want it: see wgmma_sdpa
    return " ".join(["{", *lines, "}"])


# numbers above, as a Triton kernel can read them
_TILE, _WARPS, _STEP = tl.constexpr(TILE), tl.constexpr(WARPS), tl.constexpr(STEP)


@triton.jit(do_not_specialize=["M"])
def mma_kernel(
    x_ptr, words_ptr, scales_ptr, offsets_ptr, out_ptr, M,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, SPLITS: tl.constexpr, ASSEMBLY: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """As ``fragment_kernel`` with ``TILES`` that lie together a program: ``out`` of ``[S, M, N]``. Rows of x lie where
    16 bytes can be loaded. ``ASSEMBLY`` is ``assembly`` for ``ROWS``, ``TILES`` and the steps of a split, and no split
    is without a step.
    """
    ALL_STEPS: tl.constexpr = K // _STEP
    STEPS: tl.constexpr = (ALL_STEPS + SPLITS - 1) // SPLITS
    split = tl.program_id(1)
    # Zero, but the compiler does not know it: for this product Triton allocates the shared memory that the assembly
    # uses.
    never = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [split], dtype=tl.int32, is_pure=True, pack=1)
    if never != 0:
        d = tl.arange(0, 512)
        a = tl.load(x_ptr + tl.arange(0, 64)[:, None] * 512 + d[None, :])
        b = tl.load(x_ptr + tl.arange(0, 128)[:, None] * 512 + d[None, :])
        tl.store(out_ptr + tl.arange(0, 64)[:, None] * 128 + tl.arange(0, 128)[None, :], tl.dot(a, b.T))
    thread = tl.arange(0, 32 * _WARPS)
    zero = thread * 0
    warp = thread // 32
    step = split * STEPS
    program = tl.program_id(0).to(tl.int64)
    words = words_ptr + (program * (K * 8) + step * 1024) * TILES + warp * 512
    GROUPS_AT_ONCE: tl.constexpr = max(1, 64 // GROUP)
    first = (program * (K // GROUP) + step * _STEP // GROUP) * (TILES * _TILE) + warp * (GROUPS_AT_ONCE * _TILE)
    column = step * _STEP + thread % 4 * 8
    row = thread % 32 // 4
    x0 = x_ptr + tl.minimum(row, M - 1) * K + column  # what is no row of the call is a row twice
    x1 = x_ptr + tl.minimum(row + 8, M - 1) * K + column
    turns = tl.minimum(STEPS, ALL_STEPS - step) + zero
    made = tl.inline_asm_elementwise(
        ASSEMBLY,
        CONSTRAINTS,
        [
            thread, words.to(tl.int64, bitcast=True), (scales_ptr + first).to(tl.int64, bitcast=True),
            (offsets_ptr + first).to(tl.int64, bitcast=True), x0.to(tl.int64, bitcast=True),
            x1.to(tl.int64, bitcast=True), turns,
        ],
        dtype=(tl.float32,) * (2 * ROWS),
        is_pure=True,
        pack=1,
    )  # fmt: skip
    n = (tl.program_id(0) * TILES + warp) * _TILE + thread % 32 * 2
    n = n[:, None] + tl.arange(0, 2)[None, :]
    out_ptr += split * (M * N)
    for m in tl.static_range(ROWS):
        tl.store(out_ptr + m * N + n, tl.join(made[2 * m], made[2 * m + 1]), mask=(m < M) & (warp < TILES)[:, None])

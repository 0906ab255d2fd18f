"""Linear layers on CUDA over 4-bit weights stored as the tensor core's own fragments: one pass over the weights for
1 to 16 rows, and bits that do not depend on how many rows there are.

A 32-bit word holds the eight weights that a thread of ``mma.m16n8k16`` needs of a 16x16 tile, and a thread's words of
a unit are 16 contiguous bytes, so weights reach the tensor core without a change of layout. Rotating a word and one
``lop3`` make two weights into the bfloat16 numbers ``16 + q``, exactly; the group's scale and offset are applied to the
float32 sums:

    sum_k (q * scale + offset) * x  =  scale * (sum_k (16 + q) * x - 16 * sum_k x)  +  offset * sum_k x

so no weight is ever rounded. A warp has a tile of outputs and a split of the input width; the sums of the splits are
added in their order, which is one for every number of rows, by elementwise additions that a compiler puts into the
kernel of the elementwise operations that read the result.

Weights of some size are a program's tiles together: what the tiles of a program have of 64 columns follows one another
in memory, tile by tile, so that a program reads it as one. Their kernel is that of ``mma_linear`` on a Hopper, else the
one here.

Dimensions: T tiles of outputs, U units of columns, R fragments of a unit, W warps, S splits, M rows of x, N outputs,
K inputs.
Weights of a fragment: ``q`` thread of a quad, ``g`` quad of a warp, ``rh`` and ``kh`` half of the rows and columns,
``s`` step of 16 columns, ``e`` column of a pair, ``t`` the rest of a unit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels import mma_linear
from eyas.kernels.int4_linear import unpack_nibbles
from eyas.kernels.splitk_sdpa import MULTIPROCESSORS, hopper, moved

GROUP_SIZES = (32, 64, 128, 256)
MAX_ROWS = 16  # rows of x: what two fragments of the tensor core take
UNIT_WEIGHTS = 1024  # weights of a unit: 32 threads x 4 words x 8
TILE = mma_linear.TILE  # outputs of a tile: what a warp has registers for
# Of a program of ``mma_linear``: tiles, a warp each, and steps of a split, fewer of which leave nothing to overlap.
LEAST_TOGETHER, LEAST_STEPS = 12, 2
LEAST_PROGRAMS = 6  # of a weight: fewer would have more than 22 splits, whose sums are stored and read again
EVEN = 0.75  # of what the multiprocessors could do while the one with most to do is at it, without idle warps
SCALE_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ASM = not triton.knobs.runtime.interpret  # the interpreter knows no assembly, and has no bfloat16 products
wrap = torch.library.wrap_triton if ASM else lambda kernel: kernel


def supports(group_size: int, dtype: torch.dtype, rows: int) -> str | None:
    """Why calls of at most ``rows`` rows of ``dtype`` have no kernel here, or None if they have one."""
    if group_size not in GROUP_SIZES:
        return f"group size {group_size} has no kernel; allowed: {', '.join(map(str, GROUP_SIZES))}"
    if dtype != torch.bfloat16:
        return f"activations are {dtype}; the kernel takes torch.bfloat16"
    if rows > MAX_ROWS:
        return f"a call has up to {rows} rows; the kernel takes {MAX_ROWS}"
    return None


def exact_dtype(*tensors: Tensor) -> torch.dtype:
    """The narrowest of ``SCALE_DTYPES`` that holds every number of the float32 ``tensors`` as it is."""
    for dtype in SCALE_DTYPES:  # the last one holds all
        if all(torch.equal(tensor.to(dtype).float(), tensor) for tensor in tensors):
            break
    return dtype


def unit_columns(group_size: int) -> int:
    """Columns of a unit: it lies within one group, so it has one scale a row."""
    return min(64, group_size)


def program_tiles(out_features: int, in_features: int, group_size: int) -> int:
    """How many tiles lie together: those of a program of ``mma_linear`` where such programs, with as many splits as the
    card holds at a time, share the weight out evenly enough; else 1. A function of the weight alone, not of the card.
    """
    tiles, rest = divmod(out_features, TILE)
    if rest or in_features % mma_linear.STEP != 0 or group_size not in mma_linear.GROUP_SIZES:
        return 1
    steps, found = in_features // mma_linear.STEP, {}
    for together in range(LEAST_TOGETHER, mma_linear.WARPS + 1):
        programs, rest = divmod(tiles, together)
        if rest or not LEAST_PROGRAMS <= programs <= MULTIPROCESSORS:
            continue
        each = -(-steps // mma_splits(programs, steps))  # steps of a split
        if LEAST_STEPS <= each <= mma_linear.MOST_STEPS and tiles * steps >= EVEN * MULTIPROCESSORS * together * each:
            found[together] = together * each
    return min(found, key=lambda together: (found[together], -together), default=1)


def mma_splits(programs: int, steps: int) -> int:
    """Splits for ``programs``, one a multiprocessor: as few as leave the fewest steps a split."""
    return -(-steps // -(-steps // (MULTIPROCESSORS // programs)))


def lay_together(packed: Tensor, tiles: int, columns: int) -> Tensor:
    """Of ``[T, U, ...]``, with so many ``columns`` an entry of the second dimension: for every ``tiles`` tiles, what
    they have of 64 columns, one after the other. The shape stays.
    """
    at_once = max(1, mma_linear.HALF // columns)
    together = packed.view(-1, tiles, packed.shape[1] // at_once, at_once, *packed.shape[2:])
    return together.transpose(1, 2).contiguous().view_as(packed)


def lay_apart(packed: Tensor, tiles: int, columns: int) -> Tensor:
    """The inverse of ``lay_together``."""
    at_once = max(1, mma_linear.HALF // columns)
    together = packed.view(-1, packed.shape[1] // at_once, tiles, at_once, *packed.shape[2:])
    return together.transpose(1, 2).contiguous().view_as(packed)


def pack_fragments(qweight: Tensor, in_features: int, group_size: int, tile: int = TILE) -> Tensor:
    """Nibbles of ``eyas::int4_linear``, uint8 ``[N, C]`` -> int32 ``[T, U, R, 32, 4]``, rows and columns past the end
    zero, tiles of ``program_tiles`` together; ``tile``: outputs of a tile, a multiple of 32.
    """
    together = program_tiles(qweight.shape[0], in_features, group_size) if tile == TILE else 1
    columns = unit_columns(group_size)
    n_tiles, n_units = -(-qweight.shape[0] // tile), -(-in_features // columns)
    q = unpack_nibbles(qweight)[:, :in_features]
    q = torch.nn.functional.pad(q, (0, n_units * columns - q.shape[1], 0, n_tiles * tile - q.shape[0])).int()
    if columns == 64:  # 16 rows x 64 columns: t is half of the columns
        q = q.view(n_tiles, tile // 16, 2, 8, n_units, 2, 4, 2, 2, 2)  # T R rh g U t q s kh e
        q = q.permute(0, 4, 1, 3, 6, 5, 7, 9, 8, 2)  # T U R g q t s e kh rh
    else:  # 32 rows x 32 columns: t is half of the rows
        q = q.view(n_tiles, tile // 32, 2, 2, 8, n_units, 4, 2, 2, 2)  # T R t rh g U q s kh e
        q = q.permute(0, 5, 1, 4, 6, 2, 7, 9, 8, 3)  # T U R g q t s e kh rh
    q = q.reshape(n_tiles, n_units, -1, 32, 4, 8).long()
    word = (q << torch.arange(0, 32, 4, device=q.device)).sum(-1)
    word = (word << 3 | word >> 29) & 0xFFFFFFFF  # rotated, so that the first fields lie where bfloat16 wants them
    word = torch.where(word >= 1 << 31, word - (1 << 32), word).int().contiguous()
    return lay_together(word, together, columns) if together > 1 else word


def unpack_fragments(fragments: Tensor, out_features: int, in_features: int, group_size: int) -> Tensor:
    """The inverse of ``pack_fragments``: int32 ``[T, U, R, 32, 4]`` -> uint8 ``[out_features, in_features]`` 0..15."""
    n_tiles, n_units, n_fragments = fragments.shape[:3]
    tile = n_fragments * UNIT_WEIGHTS // unit_columns(group_size)
    if tile == TILE and (together := program_tiles(out_features, in_features, group_size)) > 1:
        fragments = lay_apart(fragments, together, unit_columns(group_size))
    word = fragments.long() & 0xFFFFFFFF
    word = (word >> 3 | word << 29) & 0xFFFFFFFF
    q = word.unsqueeze(-1) >> torch.arange(0, 32, 4, device=word.device) & 15
    q = q.view(n_tiles, n_units, n_fragments, 8, 4, 2, 2, 2, 2, 2)  # T U R g q t s e kh rh
    order = (0, 2, 9, 3, 1, 5, 4, 6, 8, 7) if unit_columns(group_size) == 64 else (0, 2, 5, 9, 3, 1, 4, 6, 8, 7)
    q = q.permute(order).reshape(n_tiles * tile, -1)
    return q[:out_features, :in_features].to(torch.uint8)


def pack_scales(scales: Tensor, in_features: int, group_size: int, tile: int = TILE) -> Tensor:
    """``[N, groups]`` of any dtype -> ``[T, groups, 8, tile / 8]``: what a thread needs of a group is contiguous. Tiles
    of ``program_tiles`` lie together.
    """
    n, groups = scales.shape
    n_tiles = -(-n // tile)
    packed = torch.nn.functional.pad(scales, (0, 0, 0, n_tiles * tile - n)).view(n_tiles, tile // 8, 8, groups)
    packed = packed.permute(0, 3, 2, 1).contiguous()
    together = program_tiles(n, in_features, group_size) if tile == TILE else 1
    return lay_together(packed, together, group_size) if together > 1 else packed


def pack_exact_scales(scales: Tensor, in_features: int, group_size: int) -> Tensor:
    """``pack_scales`` in the narrowest dtype that loses nothing: they are a good part of what a product reads."""
    return pack_scales(scales.to(exact_dtype(scales.float())), in_features, group_size)


def unpack_scales(packed: Tensor, out_features: int, in_features: int, group_size: int) -> Tensor:
    """The inverse of ``pack_scales``: ``[T, groups, 8, tile / 8]`` -> ``[out_features, groups]``."""
    if 8 * packed.shape[3] == TILE and (together := program_tiles(out_features, in_features, group_size)) > 1:
        packed = lay_apart(packed, together, group_size)
    return packed.permute(0, 3, 2, 1).flatten(0, 2)[:out_features]


@triton.jit
def _unpack(words, ASM: tl.constexpr):
    """int32 ``[..., 4]`` words of a lane -> bfloat16 ``[..., 4, 2, 2, 2]`` numbers 16 + q.

    Of the four numbers of a lane's axis, an even one is the lower half of a register and an odd one the upper.
    """
    if ASM:
        y0, y1, y2, y3, y4, y5, y6, y7 = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            lop3.b32 $0, $8, 0x00780078, 0x41804180, 0xea;
            shf.r.wrap.b32 t, $8, $8, 4;
            lop3.b32 $1, t, 0x00780078, 0x41804180, 0xea;
            shf.r.wrap.b32 t, $8, $8, 8;
            lop3.b32 $2, t, 0x00780078, 0x41804180, 0xea;
            shf.r.wrap.b32 t, $8, $8, 12;
            lop3.b32 $3, t, 0x00780078, 0x41804180, 0xea;
            lop3.b32 $4, $9, 0x00780078, 0x41804180, 0xea;
            shf.r.wrap.b32 t, $9, $9, 4;
            lop3.b32 $5, t, 0x00780078, 0x41804180, 0xea;
            shf.r.wrap.b32 t, $9, $9, 8;
            lop3.b32 $6, t, 0x00780078, 0x41804180, 0xea;
            shf.r.wrap.b32 t, $9, $9, 12;
            lop3.b32 $7, t, 0x00780078, 0x41804180, 0xea;
            }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
        halves = tl.join(tl.join(tl.join(y0, y4), tl.join(y2, y6)), tl.join(tl.join(y1, y5), tl.join(y3, y7)))
    else:  # the same for the interpreter, which knows no assembly
        word = words.to(tl.uint32, bitcast=True)
        word = (word >> 3) | (word << 29)
        # the pair of words [..., t, s] gives the numbers [..., t, e, s, kh, rh]
        A: tl.constexpr = word.shape[0]
        B: tl.constexpr = word.shape[1]
        C: tl.constexpr = word.shape[2] // 4
        even, odd = tl.split(tl.reshape(word, [A, B, C, 2, 2]))
        pair = tl.join(even, odd)  # [A, B, C, t, s]
        e = tl.arange(0, 2)[None, None, None, None, :, None, None, None] * 16
        kh = tl.arange(0, 2)[None, None, None, None, None, None, :, None] * 8
        rh = tl.arange(0, 2)[None, None, None, None, None, None, None, :] * 4
        q = (tl.reshape(pair, [A, B, C, 2, 1, 2, 1, 1]) >> (e + kh + rh).to(tl.uint32)) & 15
        halves = q.to(tl.float32) + 16.0
    return halves


@triton.jit
def _fragments(words, W: tl.constexpr, UNITS: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Words of some units a warp, int32 ``[W, UNITS * R, 128]`` -> their numbers 16 + q, bfloat16 ``[W, TILE, UNITS *
    COLUMNS]``."""
    a = tl.reshape(_unpack(words, ASM), [W, UNITS, R, 8, 4, 2, 2, 2, 2, 2])  # W U R g q t e s kh rh
    if COLUMNS == 64:
        a = tl.permute(a, [0, 2, 9, 3, 1, 5, 8, 4, 7, 6])  # W R rh g | U t kh q s e
    else:
        a = tl.permute(a, [0, 2, 5, 9, 3, 1, 8, 4, 7, 6])  # W R t rh g | U kh q s e
    return tl.reshape(a, [W, R * 1024 // COLUMNS, UNITS * COLUMNS])


@triton.jit
def ordered_rows(x, TILES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """x of some columns, ``[COLUMNS / 32, ROWS / 8, 256]`` -> twice ``[TILES, COLUMNS, ROWS]``: columns in the order of
    ``_fragments``, and in that of a product with something of 16 bits."""
    x = tl.reshape(x, [1, COLUMNS // 32, ROWS // 8, 8, 4, 2, 2, 2])  # . c mh ml q s kh e
    x = tl.broadcast_to(x, [TILES, COLUMNS // 32, ROWS // 8, 8, 4, 2, 2, 2])
    b = tl.permute(x, [0, 1, 6, 4, 5, 7, 2, 3])
    any_order = tl.permute(x, [0, 1, 5, 6, 4, 7, 2, 3])
    shape: tl.constexpr = [TILES, COLUMNS, ROWS]
    return tl.reshape(b, shape), tl.reshape(any_order, shape)


@triton.jit
def places_of_x(COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Rows and columns of x for the loads that ``ordered_rows`` takes, ``[1, ROWS / 8, 256]`` and ``[COLUMNS / 32, 1,
    256]``: the last dimension goes over the threads of a warp.
    """
    entry = tl.arange(0, 256)[None, None, :]
    row = tl.arange(0, ROWS // 8)[None, :, None] * 8 + entry // 32
    return row, tl.arange(0, COLUMNS // 32)[:, None, None] * 32 + entry % 32


@triton.jit
def store_sums(out_ptr, sums, split, M, N: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):
    """A program's sums ``[OUTPUTS, ROWS]`` of a split into ``out`` of ``[S, M, N]``."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    m = tl.arange(0, ROWS)[None, :]
    out_ptr += split * (M * N)
    tl.store(out_ptr + m * N + n, sums.to(out_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def _tile_place(tile, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr, AT_ONCE: tl.constexpr):
    """Where a tile begins, counted in entries of the second dimension: ``ENTRIES`` of them a tile, of which a program's
    ``TOGETHER`` tiles have ``AT_ONCE`` at a time.
    """
    if TOGETHER == 1:
        place = tile * ENTRIES
    else:
        place = tile // TOGETHER * (TOGETHER * ENTRIES) + tile % TOGETHER * AT_ONCE
    return place


@triton.jit
def _entry_place(entry, TOGETHER: tl.constexpr, AT_ONCE: tl.constexpr):
    """Where an entry lies, counted from the beginning of its tile."""
    if TOGETHER == 1:
        place = entry
    else:
        place = entry // AT_ONCE * (TOGETHER * AT_ONCE) + entry % AT_ONCE
    return place


@triton.jit(do_not_specialize=["M"])
def fragment_kernel(
    x_ptr, words_ptr, scales_ptr, offsets_ptr, out_ptr, M,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, SPLITS: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
    TOGETHER: tl.constexpr, OFFSETS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One split of the input width for ``TILES`` tiles of outputs, a warp each: ``out`` of ``[S, M, N]``.

    ``ROWS``: M rounded up to 8 or 16. ``UNITS`` of a step lie within one group. ``TOGETHER``: tiles that lie together.
    """
    UNIT_COLUMNS: tl.constexpr = min(64, GROUP)
    ALL_UNITS: tl.constexpr = (K + UNIT_COLUMNS - 1) // UNIT_COLUMNS
    COLUMNS: tl.constexpr = UNIT_COLUMNS * UNITS  # of a step
    ALL_STEPS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (ALL_STEPS + SPLITS - 1) // SPLITS
    EVEN: tl.constexpr = ALL_STEPS % SPLITS == 0
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    N_TILES: tl.constexpr = (N + TILE - 1) // TILE
    R: tl.constexpr = TILE * UNIT_COLUMNS // 1024
    split = tl.program_id(1)
    tile = tl.minimum(tl.program_id(0) * TILES + tl.arange(0, TILES), N_TILES - 1)
    UNITS_AT_ONCE: tl.constexpr = 64 // UNIT_COLUMNS
    GROUPS_AT_ONCE: tl.constexpr = max(1, 64 // GROUP)
    # The last dimension of a load goes over the threads of a warp, the first one over the warps.
    fragment = tl.arange(0, UNITS * R)[None, :, None]
    lane_word = tl.arange(0, 128)[None, None, :]
    word = fragment * 128 + lane_word
    tile_place = _tile_place(tile.to(tl.int64), ALL_UNITS, TOGETHER, UNITS_AT_ONCE)[:, None, None]
    words_ptr += tile_place * (R * 128) + (word if TOGETHER == 1 else fragment % R * 128 + lane_word)
    scale = (_tile_place(tile, GROUPS, TOGETHER, GROUPS_AT_ONCE) * TILE)[:, None] + tl.arange(0, TILE)[None, :]
    row, column = places_of_x(COLUMNS, ROWS)
    acc = tl.zeros([TILES, TILE, ROWS], tl.float32)
    bias = tl.full([TILES, 16, COLUMNS], -16.0 if OFFSETS else -24.0, tl.float32)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        step = split * STEPS + i
        group = tl.minimum(step * COLUMNS // GROUP, GROUPS - 1)
        group = _entry_place(group, TOGETHER, GROUPS_AT_ONCE) * TILE
        at = step * COLUMNS + column
        known = (row < M) & (at < K) if K % COLUMNS != 0 or not EVEN else row < M
        scales = tl.load(scales_ptr + scale + group)
        if OFFSETS:
            offsets = tl.load(offsets_ptr + scale + group)
        if TOGETHER == 1:
            place = step * (UNITS * R * 128)
        else:
            place = _entry_place(step * UNITS + fragment // R, TOGETHER, UNITS_AT_ONCE) * (R * 128)
        if ALL_UNITS % UNITS == 0 and EVEN:
            words = tl.load(words_ptr + place)
        else:
            inside = step * (UNITS * R * 128) + word < ALL_UNITS * R * 128
            words = tl.load(words_ptr + place, mask=inside, other=0)
        x = tl.load(x_ptr + row * K + at, mask=known, other=0.0)
        if not ASM:
            x = x.to(tl.float32)
        ordered, any_order = ordered_rows(x, TILES, COLUMNS, ROWS)
        # [W, 16, M], equal rows: where the tensor core has its sums
        sums = tl.dot(bias.to(x.dtype), any_order)
        sums = tl.broadcast_to(tl.reshape(sums, [TILES, 1, 16, ROWS]), [TILES, TILE // 16, 16, ROWS])
        sums = tl.reshape(sums, [TILES, TILE, ROWS])
        products = tl.dot(_fragments(words, TILES, UNITS, R, UNIT_COLUMNS, ASM), ordered, acc=sums)
        scales = tl.permute(tl.reshape(scales.to(tl.float32), [TILES, 8, TILE // 8]), [0, 2, 1])
        acc += products * tl.reshape(scales, [TILES, TILE])[:, :, None]
        if OFFSETS:  # sums are those of x times -16
            offsets = offsets.to(tl.float32) * -0.0625
            offsets = tl.permute(tl.reshape(offsets, [TILES, 8, TILE // 8]), [0, 2, 1])
            acc += sums * tl.reshape(offsets, [TILES, TILE])[:, :, None]
    store_sums(out_ptr, tl.reshape(acc, [TILES * TILE, ROWS]), split, M, N, TILES * TILE, ROWS)


@triton.jit
def dequantize_kernel(
    words_ptr, scales_ptr, offsets_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SOME_UNITS: tl.constexpr,
    TOGETHER: tl.constexpr, OFFSETS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Some units of a tile as numbers of ``out``'s dtype, ``[N, K]``. ``TOGETHER``: tiles that lie together."""
    COLUMNS: tl.constexpr = min(64, GROUP)
    UNITS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    R: tl.constexpr = TILE * COLUMNS // 1024
    tile = tl.program_id(0)
    unit = tl.program_id(1) * SOME_UNITS + tl.arange(0, SOME_UNITS)
    word = tl.arange(0, R)[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    place = _entry_place(unit, TOGETHER, 64 // COLUMNS)[:, None, None]
    words_ptr += (_tile_place(tile.to(tl.int64), UNITS, TOGETHER, 64 // COLUMNS) + place) * (R * 128)
    words = tl.load(words_ptr + word, mask=unit[:, None, None] < UNITS, other=0)
    group = tl.minimum(unit * COLUMNS // GROUP, GROUPS - 1)
    GROUPS_AT_ONCE: tl.constexpr = max(1, 64 // GROUP)
    group = _tile_place(tile, GROUPS, TOGETHER, GROUPS_AT_ONCE) + _entry_place(group, TOGETHER, GROUPS_AT_ONCE)
    scale = group[:, None] * TILE + tl.arange(0, TILE)[None, :]
    scales = tl.load(scales_ptr + scale).to(tl.float32)
    q = tl.reshape(_unpack(words, ASM).to(tl.float32) - 16, [SOME_UNITS, R, 8, 4, 2, 2, 2, 2, 2])  # U R g q t e s kh rh
    if COLUMNS == 64:
        q = tl.permute(q, [0, 1, 8, 2, 4, 3, 6, 7, 5])  # U R rh g | t q s kh e
    else:
        q = tl.permute(q, [0, 1, 4, 8, 2, 3, 6, 7, 5])  # U R t rh g | q s kh e
    q = tl.reshape(q, [SOME_UNITS, TILE, COLUMNS])
    scales = tl.reshape(tl.permute(tl.reshape(scales, [SOME_UNITS, 8, TILE // 8]), [0, 2, 1]), [SOME_UNITS, TILE])
    if OFFSETS:
        offsets = tl.load(offsets_ptr + scale).to(tl.float32)
        offsets = tl.permute(tl.reshape(offsets, [SOME_UNITS, 8, TILE // 8]), [0, 2, 1])
        w = q * scales[:, :, None] + tl.reshape(offsets, [SOME_UNITS, TILE])[:, :, None]
    else:
        w = (q - 8) * scales[:, :, None]
    n = tile * TILE + tl.arange(0, TILE)[None, :, None]
    k = unit[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    tl.store(out_ptr + n.to(tl.int64) * K + k, w.to(out_ptr.dtype.element_ty), mask=(n < N) & (k < K))


@dataclass(frozen=True)
class Plan:
    """How a product is laid over the card: ``tiles`` a program, a warp each; ``splits`` of the input width; ``units``
    of columns a step, ``stages`` of which are in flight; ``mma``: by the kernel of ``mma_linear``.
    """

    tiles: int
    splits: int
    units: int
    stages: int
    mma: bool = False


def plan(out_features: int, in_features: int, group_size: int) -> Plan:
    """The layout for a weight, a function of its shape and the card, so that every number of rows has the same bits."""
    tiles = program_tiles(out_features, in_features, group_size)
    if tiles == 1 or not has_mma():
        return triton_plan(out_features, in_features, group_size)
    splits = mma_splits(out_features // (TILE * tiles), in_features // mma_linear.STEP)
    return Plan(tiles, splits, mma_linear.STEP // unit_columns(group_size), mma_linear.SLOTS, mma=True)


def has_mma() -> bool:
    """Whether the card at hand is one that ``mma_linear`` is for: one program a multiprocessor, all at a time."""
    if not ASM or not hopper():
        return False
    card = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    return card is None or card.multi_processor_count >= MULTIPROCESSORS


def triton_plan(out_features: int, in_features: int, group_size: int) -> Plan:
    """The layout for ``fragment_kernel``, found by trying layouts on an H200: two units a step and four programs a
    multiprocessor, where groups and outputs allow it, else one unit and eight programs.
    """
    programs, units = -(-out_features // (2 * TILE)), -(-in_features // unit_columns(group_size))
    if group_size >= 128:
        splits = choose_splits(programs, -(-units // 2), 4)
        if splits == -(-units // 2) or programs * splits >= 3 * MULTIPROCESSORS:
            return Plan(2, splits, units=2, stages=3)
    splits = choose_splits(programs, units, 8, least=2)
    return Plan(2, splits, units=1, stages=3 if group_size >= 64 else 4)


def choose_splits(programs: int, steps: int, resident: int, least: int = 1) -> int:
    """Splits for ``programs`` that have ``steps`` each, of which a multiprocessor holds ``resident``: as many as leave
    the fewest steps a split, at least ``least``. A last split with fewer steps costs every step a test.
    """
    most = min(resident * MULTIPROCESSORS // programs, steps // least)
    return min(range(1, max(1, most) + 1), key=lambda n: (-(-steps // n) * (1.0 if steps % n == 0 else 1.15), n))


def _checked(
    x: Tensor, words: Tensor, scales: Tensor, offsets: Tensor | None, group_size: int, out_features: int
) -> int:
    """K. Raises ``ValueError`` where the operands do not belong together."""
    tiles = -(-out_features // TILE)
    if words.shape[0] != tiles or scales.shape[0] != tiles or (offsets is not None and offsets.shape != scales.shape):
        shapes = ", ".join(str(list(t.shape)) for t in (words, scales, offsets) if t is not None)
        raise ValueError(f"{out_features} outputs have {tiles} tiles; words, scales and offsets are {shapes}")
    if unknown := [t.dtype for t in (scales, offsets) if t is not None and t.dtype not in SCALE_DTYPES]:
        raise ValueError(f"scales or offsets are {unknown[0]}; allowed: {', '.join(map(str, SCALE_DTYPES))}")
    columns, units, groups = unit_columns(group_size), words.shape[1], scales.shape[1]
    k = x.shape[1]
    if -(-k // columns) != units or -(-k // group_size) != groups:
        raise ValueError(
            f"x has {k} columns, the weight {units} units of {columns} and {groups} groups of {group_size}"
        )
    return k


def reference(
    x: Tensor, words: Tensor, scales: Tensor, offsets: Tensor | None, group_size: int, out_features: int
) -> Tensor:
    """What the ops compute, from the same operands, in float32: the implementation on cpu."""
    k = _checked(x, words, scales, offsets, group_size, out_features)
    q = unpack_fragments(words, out_features, k, group_size).float()
    scale, offset = (
        None if t is None else unpack_scales(t, out_features, k, group_size).float().repeat_interleave(group_size, 1)
        for t in (scales, offsets)
    )
    scale, offset = scale[:, :k], None if offset is None else offset[:, :k]
    w = (q - 8) * scale if offset is None else q * scale + offset
    return (x.float() @ w.T).to(x.dtype)


def launch_splits(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    group_size: int,
    out_features: int,
    max_rows: int = MAX_ROWS,
) -> Tensor:
    """The products of ``launch_linear`` before the sums of the splits are added: float32 ``[S, M, out_features]``."""
    k = _checked(x, words, scales, offsets, group_size, out_features)
    x, rows, layout = x.contiguous(), x.shape[0], plan(out_features, k, group_size)
    parts = x.new_empty((layout.splits, rows, out_features), dtype=torch.float32)
    padded = 8 if max_rows <= 8 else 16
    if layout.mma:
        if x.storage_offset() % 8:
            x = moved(x)  # to where 16 bytes can be loaded
        steps = -(-k // (mma_linear.STEP * layout.splits))
        dtypes = [None if t is None else SCALE_DTYPES[t.dtype] for t in (scales, offsets)]
        code = mma_linear.assembly(padded, group_size, *dtypes, steps, layout.tiles)
        wrap(mma_linear.mma_kernel)[(words.shape[0] // layout.tiles, layout.splits)](
            x, words, scales, scales if offsets is None else offsets, parts, rows,
            N=out_features, K=k, GROUP=group_size, ROWS=padded, TILES=layout.tiles, SPLITS=layout.splits,
            ASSEMBLY=code, CONSTRAINTS=mma_linear.constraints(padded),
            num_warps=mma_linear.WARPS,
        )  # fmt: skip
        return parts
    wrap(fragment_kernel)[(-(-words.shape[0] // layout.tiles), layout.splits)](
        x, words, scales, scales if offsets is None else offsets, parts, rows,
        N=out_features, K=k, GROUP=group_size, TILE=TILE, ROWS=padded,
        TILES=layout.tiles, SPLITS=layout.splits, UNITS=layout.units, STAGES=layout.stages,
        TOGETHER=program_tiles(out_features, k, group_size), OFFSETS=offsets is not None, ASM=ASM,
        num_warps=layout.tiles,
    )  # fmt: skip
    return parts


def add_splits(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums float32 ``[S, M, N]`` in the order of the splits -> ``[M, N]``. Elementwise, so that a compiler has the next
    operation do it.
    """
    total = parts[0]
    for split in range(1, parts.shape[0]):
        total = total + parts[split]
    return total.to(dtype)


def launch_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    group_size: int,
    out_features: int,
    max_rows: int = MAX_ROWS,
) -> Tensor:
    """``x @ w.T`` for int4 ``w`` and 1 to ``max_rows`` rows, each with the bits that it has alone.

    Shapes: ``x`` bfloat16 ``[M, K]`` with dense rows; ``words`` int32 ``[T, U, R, 32, 4]`` of ``pack_fragments``;
    ``scales`` and, with zero points, ``offsets`` ``[T, groups, 8, 8]`` of ``pack_scales``, in one of ``SCALE_DTYPES``;
    all laid as ``program_tiles`` says; result ``[M, out_features]`` in ``x``'s dtype, accumulated in float32. With
    ``max_rows`` of at most 8 the tensor core has half of the work; it does not change a bit. Raises ``ValueError`` for
    operands that do not belong together.
    """
    return add_splits(launch_splits(x, words, scales, offsets, group_size, out_features, max_rows), x.dtype)


def launch_matmul(
    x: Tensor, words: Tensor, scales: Tensor, offsets: Tensor | None, group_size: int, out_features: int
) -> Tensor:
    """``launch_linear`` for many rows: the weight as bfloat16 numbers, then one matrix product."""
    k = _checked(x, words, scales, offsets, group_size, out_features)
    weight = x.new_empty((out_features, k))
    wrap(dequantize_kernel)[(words.shape[0], triton.cdiv(words.shape[1], 4))](
        words, scales, scales if offsets is None else offsets, weight,
        N=out_features, K=k, GROUP=group_size, TILE=TILE, SOME_UNITS=4,
        TOGETHER=program_tiles(out_features, k, group_size), OFFSETS=offsets is not None, ASM=ASM,
        num_warps=4,
    )  # fmt: skip
    return x @ weight.T


fragment_int4_linear = torch.library.triton_op("eyas::fragment_int4_linear", launch_linear, mutates_args=())
fragment_int4_matmul = torch.library.triton_op("eyas::fragment_int4_matmul", launch_matmul, mutates_args=())


@fragment_int4_linear.register_fake
def _(x, words, scales, offsets, group_size, out_features, max_rows=MAX_ROWS):
    return x.new_empty((x.shape[0], out_features))


@fragment_int4_matmul.register_fake
def _(x, words, scales, offsets, group_size, out_features):
    return x.new_empty((x.shape[0], out_features))


@fragment_int4_linear.register_kernel("cpu")
def _(x, words, scales, offsets, group_size, out_features, max_rows=MAX_ROWS):
    return reference(x, words, scales, offsets, group_size, out_features)


fragment_int4_matmul.register_kernel("cpu")(reference)

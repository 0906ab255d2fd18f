"""Linear layers on CUDA over 8-bit weights with one scale a row, stored as the tensor core's own fragments: heads and
embeddings. What ``fragment_linear`` is for 4 bits; its words, tiles and splits are those of that file.

A 32-bit word holds four of the weights that a thread of ``mma.m16n8k16`` needs of a 16x16 tile. Of a byte, the lower
seven bits and the sign make the bfloat16 numbers ``128 + low`` and ``128`` or ``256``; their difference is the weight,
exactly. A row's scale is applied to its float32 sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.fragment_linear import (
    ASM,
    MAX_ROWS,
    TILE,
    Plan,
    add_splits,
    choose_splits,
    ordered_rows,
    places_of_x,
    store_sums,
    wrap,
)
from eyas.kernels.int8_linear import dequantize

COLUMNS = 32  # of a unit


def supports(dtype: torch.dtype, rows: int) -> str | None:
    """Why calls of at most ``rows`` rows of ``dtype`` have no kernel here, or None if they have one."""
    if dtype != torch.bfloat16:
        return f"activations are {dtype}; the kernel takes torch.bfloat16"
    if rows > MAX_ROWS:
        return f"a call has up to {rows} rows; the kernel takes {MAX_ROWS}"
    return None


def pack_int8_fragments(qweight: Tensor) -> Tensor:
    """int8 ``[N, K]`` -> int32 ``[T, U, R, 32, 4]``, rows and columns past the end zero: T tiles of 64 rows, U units of
    32 columns, R fragments of 16 rows, 32 threads.
    """
    n, k = qweight.shape
    n_tiles, n_units = -(-n // TILE), -(-k // COLUMNS)
    q = torch.nn.functional.pad(qweight, (0, n_units * COLUMNS - k, 0, n_tiles * TILE - n))
    q = q.view(n_tiles, TILE // 16, 2, 8, n_units, 4, 2, 2, 2)  # T R rh g U q s kh e
    q = q.permute(0, 4, 1, 3, 5, 6, 7, 8, 2).contiguous()  # T U R g q s kh e rh
    return q.view(n_tiles, n_units, TILE // 16, 32, 16).view(torch.int32)


def unpack_int8_fragments(fragments: Tensor, out_features: int, in_features: int) -> Tensor:
    """The inverse of ``pack_int8_fragments``: int32 ``[T, U, R, 32, 4]`` -> int8 ``[out_features, in_features]``."""
    n_tiles, n_units, n_fragments = fragments.shape[:3]
    q = fragments.view(torch.int8).view(n_tiles, n_units, n_fragments, 8, 4, 2, 2, 2, 2)  # T U R g q s kh e rh
    q = q.permute(0, 2, 8, 3, 1, 4, 5, 6, 7).reshape(n_tiles * TILE, n_units * COLUMNS)
    return q[:out_features, :in_features]


@triton.jit
def _unpack(words, ASM: tl.constexpr):
    """int32 ``[..., 4]`` words of a lane -> bfloat16 ``[..., 4, 2, 2]`` weights.

    Of the four numbers of a lane's axis, an even one is the lower half of a register and an odd one the upper.
    """
    if ASM:
        y0, y1, y2, y3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, low, sign;
            lop3.b32 low, $4, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 sign, $4, 0x00800080, 0x43004300, 0xea;
            sub.rn.bf16x2 $0, low, sign;
            shr.b32 t, $4, 8;
            lop3.b32 low, t, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 sign, t, 0x00800080, 0x43004300, 0xea;
            sub.rn.bf16x2 $1, low, sign;
            lop3.b32 low, $5, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 sign, $5, 0x00800080, 0x43004300, 0xea;
            sub.rn.bf16x2 $2, low, sign;
            shr.b32 t, $5, 8;
            lop3.b32 low, t, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 sign, t, 0x00800080, 0x43004300, 0xea;
            sub.rn.bf16x2 $3, low, sign;
            }""",
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.bfloat16,) * 4,
            is_pure=True,
            pack=2,
        )
        q = tl.join(tl.join(y0, y2), tl.join(y1, y3))  # of two words [..., s, kh]: [..., s, e, kh, rh]
    else:  # the same for the interpreter, which knows no assembly
        A: tl.constexpr = words.shape[0]
        B: tl.constexpr = words.shape[1]
        C: tl.constexpr = words.shape[2] // 4
        even, odd = tl.split(tl.reshape(words, [A, B, C, 2, 2]))
        word = tl.reshape(tl.join(even, odd), [A, B, C, 2, 1, 2, 1])  # s . kh .
        e = tl.arange(0, 2)[None, None, None, None, :, None, None] * 16
        rh = tl.arange(0, 2)[None, None, None, None, None, None, :] * 8
        q = (word << (24 - e - rh)) >> 24
        q = q.to(tl.float32)
    return q


@triton.jit
def _fragments(words, W: tl.constexpr, UNITS: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr):
    """Words of some units a warp, int32 ``[W, UNITS * R, 128]`` -> their weights ``[W, TILE, UNITS * 32]``, columns in
    the order of ``ordered_rows``.
    """
    a = tl.reshape(_unpack(words, ASM), [W, UNITS, TILE // 16, 8, 4, 2, 2, 2, 2])  # W U R g q s e kh rh
    return tl.reshape(tl.permute(a, [0, 2, 8, 3, 1, 7, 4, 5, 6]), [W, TILE, UNITS * 32])  # W R rh g | U kh q s e


@triton.jit(do_not_specialize=["M"])
def fragment_int8_kernel(
    x_ptr, words_ptr, scales_ptr, out_ptr, M,
    N: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, SPLITS: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One split of the input width for ``TILES`` tiles of outputs, a warp each: ``out`` of ``[S, M, N]``.

    ``ROWS``: M rounded up to 8 or 16. ``UNITS`` of a step.
    """
    ALL_UNITS: tl.constexpr = (K + 31) // 32
    COLUMNS: tl.constexpr = 32 * UNITS  # of a step
    ALL_STEPS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (ALL_STEPS + SPLITS - 1) // SPLITS
    EVEN: tl.constexpr = ALL_STEPS % SPLITS == 0
    N_TILES: tl.constexpr = (N + TILE - 1) // TILE
    R: tl.constexpr = TILE // 16
    split = tl.program_id(1)
    tile = tl.minimum(tl.program_id(0) * TILES + tl.arange(0, TILES), N_TILES - 1)
    # The last dimension of a load goes over the threads of a warp, the first one over the warps.
    word = tl.arange(0, UNITS * R)[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    words_ptr += tile.to(tl.int64)[:, None, None] * (ALL_UNITS * R * 128) + word
    row, column = places_of_x(COLUMNS, ROWS)
    acc = tl.zeros([TILES, TILE, ROWS], tl.float32)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        step = split * STEPS + i
        at = step * COLUMNS + column
        known = (row < M) & (at < K) if K % COLUMNS != 0 or not EVEN else row < M
        if ALL_UNITS % UNITS == 0 and EVEN:
            words = tl.load(words_ptr + step * (UNITS * R * 128))
        else:
            inside = step * (UNITS * R * 128) + word < ALL_UNITS * R * 128
            words = tl.load(words_ptr + step * (UNITS * R * 128), mask=inside, other=0)
        x = tl.load(x_ptr + row * K + at, mask=known, other=0.0)
        if not ASM:
            x = x.to(tl.float32)
        ordered, _ = ordered_rows(x, TILES, COLUMNS, ROWS)
        acc = tl.dot(_fragments(words, TILES, UNITS, TILE, ASM), ordered, acc=acc)
    out = tl.reshape(acc, [TILES * TILE, ROWS])
    n = tl.program_id(0) * (TILES * TILE) + tl.arange(0, TILES * TILE)[:, None]
    out *= tl.load(scales_ptr + n, mask=n < N, other=0.0)
    store_sums(out_ptr, out, split, M, N, TILES * TILE, ROWS)


@triton.jit
def dequantize_int8_kernel(
    words_ptr, scales_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, UNITS_AT_ONCE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Some units of a tile as numbers of ``out``'s dtype, ``[N, K]``."""
    UNITS: tl.constexpr = (K + 31) // 32
    R: tl.constexpr = TILE // 16
    tile = tl.program_id(0)
    unit = tl.program_id(1) * UNITS_AT_ONCE + tl.arange(0, UNITS_AT_ONCE)
    word = tl.arange(0, R)[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    words_ptr += (tile.to(tl.int64) * UNITS + unit[:, None, None]) * (R * 128)
    words = tl.load(words_ptr + word, mask=unit[:, None, None] < UNITS, other=0)
    q = tl.reshape(_unpack(words, ASM).to(tl.float32), [UNITS_AT_ONCE, R, 8, 4, 2, 2, 2, 2])  # U R g q s e kh rh
    q = tl.reshape(tl.permute(q, [0, 1, 7, 2, 3, 4, 6, 5]), [UNITS_AT_ONCE, TILE, 32])  # U R rh g | q s kh e
    n = tile * TILE + tl.arange(0, TILE)[None, :, None]
    k = unit[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
    w = q * tl.load(scales_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n.to(tl.int64) * K + k, w.to(out_ptr.dtype.element_ty), mask=(n < N) & (k < K))


@triton.jit
def gather_kernel(
    ids_ptr, words_ptr, scales_ptr, out_ptr,
    K: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` columns of row ``ids[i]`` of the weight, as numbers of ``out``'s dtype, ``[M, K]``."""
    UNITS: tl.constexpr = (K + 31) // 32
    i = tl.program_id(0)
    n = tl.load(ids_ptr + i)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r = n % TILE
    lane = r % 8 * 4 + k % 32 // 8
    at = ((n // TILE * UNITS + k // 32) * (TILE // 16) + r // 16) * 128 + lane * 4 + k % 8 // 2  # s and kh: the word
    byte = k % 2 * 2 + r % 16 // 8  # e and rh
    q = ((tl.load(words_ptr + at, mask=k < K, other=0) << (24 - 8 * byte).to(tl.int32)) >> 24).to(tl.float32)
    tl.store(out_ptr + i * K + k, (q * tl.load(scales_ptr + n)).to(out_ptr.dtype.element_ty), mask=k < K)


def plan(out_features: int, in_features: int) -> Plan:
    """The layout for a weight, a function of its shape alone, so that every number of rows has the same bits."""
    programs, units = -(-out_features // (2 * TILE)), -(-in_features // COLUMNS)
    return Plan(2, choose_splits(programs, units, 8, least=2), units=1, stages=4)


def checked_width(x: Tensor, words: Tensor) -> int:
    """K. Raises ``ValueError`` where the operands do not belong together."""
    k, units = x.shape[1], words.shape[1]
    if -(-k // COLUMNS) != units:
        raise ValueError(f"x has {k} columns, the weight {units} units of {COLUMNS}")
    return k


def launch_int8_splits(x: Tensor, words: Tensor, scales: Tensor, out_features: int, max_rows: int = MAX_ROWS) -> Tensor:
    """The products of ``launch_int8_linear`` before the splits are added: float32 ``[S, M, out_features]``."""
    k = checked_width(x, words)
    x, rows, layout = x.contiguous(), x.shape[0], plan(out_features, k)
    parts = x.new_empty((layout.splits, rows, out_features), dtype=torch.float32)
    wrap(fragment_int8_kernel)[(-(-words.shape[0] // layout.tiles), layout.splits)](
        x, words, scales, parts, rows,
        N=out_features, K=k, TILE=TILE, ROWS=8 if max_rows <= 8 else 16,
        TILES=layout.tiles, SPLITS=layout.splits, UNITS=layout.units, STAGES=layout.stages, ASM=ASM,
        num_warps=layout.tiles,
    )  # fmt: skip
    return parts


def launch_int8_linear(x: Tensor, words: Tensor, scales: Tensor, out_features: int, max_rows: int = MAX_ROWS) -> Tensor:
    """``x @ w.T`` for int8 ``w`` and 1 to ``max_rows`` rows, each with the bits that it has alone.

    Shapes: ``x`` bfloat16 ``[M, K]`` with dense rows; ``words`` int32 ``[T, U, 4, 32, 4]`` of ``pack_int8_fragments``;
    ``scales`` float32 ``[out_features]``; result ``[M, out_features]`` in ``x``'s dtype, accumulated in float32. With
    ``max_rows`` of at most 8 the tensor core has half of the work; it does not change a bit. Raises ``ValueError`` for
    operands that do not belong together.
    """
    return add_splits(launch_int8_splits(x, words, scales, out_features, max_rows), x.dtype)


def launch_int8_matmul(x: Tensor, words: Tensor, scales: Tensor, out_features: int) -> Tensor:
    """``launch_int8_linear`` for many rows: the weight as bfloat16 numbers, then one matrix product."""
    k = checked_width(x, words)
    weight = x.new_empty((out_features, k))
    wrap(dequantize_int8_kernel)[(words.shape[0], triton.cdiv(words.shape[1], 8))](
        words, scales, weight, N=out_features, K=k, TILE=TILE, UNITS_AT_ONCE=8, ASM=ASM, num_warps=4,
    )  # fmt: skip
    return x @ weight.T


def launch_int8_embedding(ids: Tensor, words: Tensor, scales: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """Rows of a table from the words that a head reads.

    Shapes: ``ids`` int64 ``[...]`` in ``[0, N)``; ``words`` and ``scales`` as in ``launch_int8_linear``; result
    ``[..., in_features]`` in ``dtype``.
    """
    flat = ids.reshape(-1)
    out = torch.empty((flat.shape[0], in_features), dtype=dtype, device=ids.device)
    wrap(gather_kernel)[(flat.shape[0], triton.cdiv(in_features, 1024))](
        flat, words, scales, out, K=in_features, TILE=TILE, BLOCK=1024,
    )  # fmt: skip
    return out.view(*ids.shape, in_features)


fragment_int8_linear = torch.library.triton_op("eyas::fragment_int8_linear", launch_int8_linear, mutates_args=())
fragment_int8_matmul = torch.library.triton_op("eyas::fragment_int8_matmul", launch_int8_matmul, mutates_args=())
fragment_int8_embedding = torch.library.triton_op(
    "eyas::fragment_int8_embedding", launch_int8_embedding, mutates_args=()
)


@fragment_int8_linear.register_fake
def _(x, words, scales, out_features, max_rows=MAX_ROWS):
    return x.new_empty((x.shape[0], out_features))


@fragment_int8_matmul.register_fake
def _(x, words, scales, out_features):
    return x.new_empty((x.shape[0], out_features))


@fragment_int8_embedding.register_fake
def _(ids, words, scales, in_features, dtype):
    return scales.new_empty((*ids.shape, in_features), dtype=dtype)


def reference(x: Tensor, words: Tensor, scales: Tensor, out_features: int) -> Tensor:
    """What the products compute, from the same operands, in float32: the implementation on cpu."""
    w = dequantize(unpack_int8_fragments(words, out_features, checked_width(x, words)), scales)
    return (x.float() @ w.T).to(x.dtype)


@fragment_int8_linear.register_kernel("cpu")
def _(x, words, scales, out_features, max_rows=MAX_ROWS):
    return reference(x, words, scales, out_features)


fragment_int8_matmul.register_kernel("cpu")(reference)


@fragment_int8_embedding.register_kernel("cpu")
def _(ids, words, scales, in_features, dtype):
    return dequantize(unpack_int8_fragments(words, scales.shape[0], in_features), scales)[ids].to(dtype)

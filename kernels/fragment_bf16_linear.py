"""Linear layers on CUDA over bfloat16 weights, stored as the tensor core's own fragments: what ``fragment_linear`` is
for 4 bits; its tiles and splits are those of that file, its units and plan those of ``fragment_int8_linear``.

A thread's weights of a 16x16 tile, the A operand of ``mma.m16n8k16``, are 16 contiguous bytes in the order of its
registers, so they reach the tensor core as they are loaded. The order saves no bytes: what is gained is that each row
of a product has the bits that it has alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels.fragment_int8_linear import COLUMNS, checked_width, plan
from eyas.kernels.fragment_int8_linear import supports as supports
from eyas.kernels.fragment_linear import (
    ASM,
    MAX_ROWS,
    TILE,
    add_splits,
    ordered_rows,
    places_of_x,
    store_sums,
    wrap,
)


def pack_bf16_fragments(weight: Tensor) -> Tensor:
    """``[N, K]`` -> ``[T, U, R, 2, 32, 8]``, rows and columns past the end zero: T tiles of 64 rows, U units of 32
    columns, R fragments of 16 rows, 2 steps of 16 columns, 32 threads.
    """
    n, k = weight.shape
    n_tiles, n_units = -(-n // TILE), -(-k // COLUMNS)
    w = torch.nn.functional.pad(weight, (0, n_units * COLUMNS - k, 0, n_tiles * TILE - n))
    w = w.view(n_tiles, TILE // 16, 2, 8, n_units, 4, 2, 2, 2)  # T R rh g U q s kh e
    w = w.permute(0, 4, 1, 6, 3, 5, 7, 2, 8)  # T U R s g q kh rh e
    return w.reshape(n_tiles, n_units, TILE // 16, 2, 32, 8)


def unpack_bf16_fragments(fragments: Tensor, out_features: int, in_features: int) -> Tensor:
    """The inverse of ``pack_bf16_fragments``: ``[T, U, R, 2, 32, 8]`` -> ``[out_features, in_features]``."""
    n_tiles, n_units, n_fragments = fragments.shape[:3]
    w = fragments.view(n_tiles, n_units, n_fragments, 2, 8, 4, 2, 2, 2)  # T U R s g q kh rh e
    w = w.permute(0, 2, 7, 4, 1, 5, 3, 6, 8).reshape(n_tiles * TILE, n_units * COLUMNS)
    return w[:out_features, :in_features]


@triton.jit
def _fragments(words, W: tl.constexpr, UNITS: tl.constexpr, TILE: tl.constexpr):
    """Weights of some units a warp, ``[W, UNITS * R * 2, 256]`` -> ``[W, TILE, UNITS * 32]``, columns in the order that
    ``ordered_rows`` has for 16 bits.
    """
    a = tl.reshape(words, [W, UNITS, TILE // 16, 2, 8, 4, 2, 2, 2])  # W U R s g q kh rh e
    return tl.reshape(tl.permute(a, [0, 2, 7, 4, 1, 3, 6, 5, 8]), [W, TILE, UNITS * 32])  # W R rh g | U s kh q e


@triton.jit(do_not_specialize=["M"])
def fragment_bf16_kernel(
    x_ptr, words_ptr, out_ptr, M,
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
    UNIT: tl.constexpr = TILE * 32  # weights of a unit
    split = tl.program_id(1)
    tile = tl.minimum(tl.program_id(0) * TILES + tl.arange(0, TILES), N_TILES - 1)
    # The last dimension of a load goes over the threads of a warp, the first one over the warps.
    word = tl.arange(0, UNITS * UNIT // 256)[None, :, None] * 256 + tl.arange(0, 256)[None, None, :]
    words_ptr += tile.to(tl.int64)[:, None, None] * (ALL_UNITS * UNIT) + word
    row, column = places_of_x(COLUMNS, ROWS)
    acc = tl.zeros([TILES, TILE, ROWS], tl.float32)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        step = split * STEPS + i
        at = step * COLUMNS + column
        known = (row < M) & (at < K) if K % COLUMNS != 0 or not EVEN else row < M
        if ALL_UNITS % UNITS == 0 and EVEN:
            words = tl.load(words_ptr + step * (UNITS * UNIT))
        else:
            inside = step * (UNITS * UNIT) + word < ALL_UNITS * UNIT
            words = tl.load(words_ptr + step * (UNITS * UNIT), mask=inside, other=0.0)
        x = tl.load(x_ptr + row * K + at, mask=known, other=0.0)
        if not ASM:
            words, x = words.to(tl.float32), x.to(tl.float32)
        _, ordered = ordered_rows(x, TILES, COLUMNS, ROWS)
        acc = tl.dot(_fragments(words, TILES, UNITS, TILE), ordered, acc=acc)
    store_sums(out_ptr, tl.reshape(acc, [TILES * TILE, ROWS]), split, M, N, TILES * TILE, ROWS)


@triton.jit
def rows_bf16_kernel(
    words_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, UNITS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Some units of a tile as rows, ``[N, K]``."""
    UNITS: tl.constexpr = (K + 31) // 32
    R: tl.constexpr = TILE // 16
    tile = tl.program_id(0)
    unit = tl.program_id(1) * UNITS_AT_ONCE + tl.arange(0, UNITS_AT_ONCE)
    word = tl.arange(0, R * 2)[None, :, None] * 256 + tl.arange(0, 256)[None, None, :]
    words_ptr += (tile.to(tl.int64) * UNITS + unit[:, None, None]) * (R * 512)
    words = tl.load(words_ptr + word, mask=unit[:, None, None] < UNITS, other=0.0)
    w = tl.reshape(words, [UNITS_AT_ONCE, R, 2, 8, 4, 2, 2, 2])  # U R s g q kh rh e
    w = tl.reshape(tl.permute(w, [0, 1, 6, 3, 4, 2, 5, 7]), [UNITS_AT_ONCE, TILE, 32])  # U R rh g | q s kh e
    n = tile * TILE + tl.arange(0, TILE)[None, :, None]
    k = unit[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
    tl.store(out_ptr + n.to(tl.int64) * K + k, w, mask=(n < N) & (k < K))


@triton.jit
def gather_bf16_kernel(
    ids_ptr, words_ptr, out_ptr,
    K: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` columns of row ``ids[i]`` of the weight, ``[M, K]``."""
    UNITS: tl.constexpr = (K + 31) // 32
    i = tl.program_id(0).to(tl.int64)
    n = tl.load(ids_ptr + i).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r = n % TILE
    fragment = (n // TILE * UNITS + k // 32) * (TILE // 16) + r // 16
    lane = r % 8 * 4 + k % 32 // 8
    place = k % 4 // 2 * 4 + r % 16 // 8 * 2 + k % 2  # kh, rh and e
    at = fragment * 512 + k % 8 // 4 * 256 + lane * 8 + place
    tl.store(out_ptr + i * K + k, tl.load(words_ptr + at, mask=k < K, other=0.0), mask=k < K)


def launch_bf16_splits(x: Tensor, words: Tensor, out_features: int, max_rows: int = MAX_ROWS) -> Tensor:
    """The products of ``launch_bf16_linear`` before the splits are added: float32 ``[S, M, out_features]``."""
    k = checked_width(x, words)
    x, rows, layout = x.contiguous(), x.shape[0], plan(out_features, k)
    parts = x.new_empty((layout.splits, rows, out_features), dtype=torch.float32)
    wrap(fragment_bf16_kernel)[(-(-words.shape[0] // layout.tiles), layout.splits)](
        x, words, parts, rows,
        N=out_features, K=k, TILE=TILE, ROWS=8 if max_rows <= 8 else 16,
        TILES=layout.tiles, SPLITS=layout.splits, UNITS=layout.units, STAGES=layout.stages, ASM=ASM,
        num_warps=layout.tiles,
    )  # fmt: skip
    return parts


def launch_bf16_linear(x: Tensor, words: Tensor, out_features: int, max_rows: int = MAX_ROWS) -> Tensor:
    """``x @ w.T`` for bfloat16 ``w`` and 1 to ``max_rows`` rows, each with the bits that it has alone.

    Shapes: ``x`` bfloat16 ``[M, K]`` with dense rows; ``words`` bfloat16 ``[T, U, 4, 2, 32, 8]`` of
    ``pack_bf16_fragments``; result ``[M, out_features]`` in ``x``'s dtype, accumulated in float32. With ``max_rows`` of
    at most 8 the tensor core has half of the work; it does not change a bit. Raises ``ValueError`` for operands that do
    not belong together.
    """
    return add_splits(launch_bf16_splits(x, words, out_features, max_rows), x.dtype)


def launch_bf16_matmul(x: Tensor, words: Tensor, out_features: int) -> Tensor:
    """``launch_bf16_linear`` for many rows: the weight in rows, then one matrix product."""
    k = checked_width(x, words)
    weight = x.new_empty((out_features, k))
    wrap(rows_bf16_kernel)[(words.shape[0], triton.cdiv(words.shape[1], 8))](
        words, weight, N=out_features, K=k, TILE=TILE, UNITS_AT_ONCE=8, num_warps=4,
    )  # fmt: skip
    return x @ weight.T


def launch_bf16_embedding(ids: Tensor, words: Tensor, in_features: int) -> Tensor:
    """Rows of a table from the words that a head reads.

    Shapes: ``ids`` int64 or int32 ``[...]`` in ``[0, N)``; ``words`` as in ``launch_bf16_linear``; result bfloat16
    ``[..., in_features]``.
    """
    flat = ids.reshape(-1)
    out = words.new_empty((flat.shape[0], in_features))
    wrap(gather_bf16_kernel)[(flat.shape[0], triton.cdiv(in_features, 1024))](
        flat, words, out, K=in_features, TILE=TILE, BLOCK=1024,
    )  # fmt: skip
    return out.view(*ids.shape, in_features)


fragment_bf16_linear = torch.library.triton_op("eyas::fragment_bf16_linear", launch_bf16_linear, mutates_args=())
fragment_bf16_matmul = torch.library.triton_op("eyas::fragment_bf16_matmul", launch_bf16_matmul, mutates_args=())
fragment_bf16_embedding = torch.library.triton_op(
    "eyas::fragment_bf16_embedding", launch_bf16_embedding, mutates_args=()
)


@fragment_bf16_linear.register_fake
def _(x, words, out_features, max_rows=MAX_ROWS):
    return x.new_empty((x.shape[0], out_features))


@fragment_bf16_matmul.register_fake
def _(x, words, out_features):
    return x.new_empty((x.shape[0], out_features))


@fragment_bf16_embedding.register_fake
def _(ids, words, in_features):
    return words.new_empty((*ids.shape, in_features))


def reference(x: Tensor, words: Tensor, out_features: int) -> Tensor:
    """What the products compute, from the same operands, in float32: the implementation on cpu."""
    w = unpack_bf16_fragments(words, out_features, checked_width(x, words))
    return (x.float() @ w.float().T).to(x.dtype)


@fragment_bf16_linear.register_kernel("cpu")
def _(x, words, out_features, max_rows=MAX_ROWS):
    return reference(x, words, out_features)


fragment_bf16_matmul.register_kernel("cpu")(reference)


@fragment_bf16_embedding.register_kernel("cpu")
def _(ids, words, in_features):
    return unpack_bf16_fragments(words, words.shape[0] * TILE, in_features)[ids]

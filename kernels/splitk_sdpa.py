"""Attention of a few rows over a long cache on CUDA, split over the keys: keys and values are read once a key head, and
a row's bits depend on nothing but its own query, position and keys.

Flash-decoding with these differences. The query heads of a key head and the rows of the call are the rows of one tile
of the tensor core. Keys are dealt out to S splits in turns, ``KEYS`` at a time, by their position alone: split s has
the tiles s, s + S, s + 2 S and so on, whatever the length, so that every length keeps all splits busy and a row's sums
are added in one order whoever is in the call with it. Tiles that a row does not see change nothing of it, to the bit.
How many keys are live is read on the device, from ``input_pos``.

With a window, the cache may be a ring: position j lies in row ``j % L``, and only the window's tiles are read.

At width 512 without a window, a Hopper has the first of the two kernels from ``wgmma_sdpa``.

Dimensions: H query heads, KV key heads, M rows, D head width, L rows of a cache, S splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.kernels import wgmma_sdpa

WIDTHS = (64, 128, 256, 512)
MAX_ROWS = 16  # of a call
TILE_ROWS = 64  # query heads x rows of a tile: what a multiprocessor has registers for at the largest width
MULTIPROCESSORS = 132  # of the card that splits were chosen for; the bits depend on it
INTERPRETED = triton.knobs.runtime.interpret  # by Triton's interpreter, which has no bfloat16 products
wrap = (lambda kernel: kernel) if INTERPRETED else torch.library.wrap_triton


def supports(head_width: int, dtype: torch.dtype, batch: int, rows: int) -> str | None:
    """Why a problem of at most ``rows`` rows has no kernel here, or None if it has one."""
    if head_width not in WIDTHS:
        return f"head width {head_width} has no kernel; allowed: {', '.join(map(str, WIDTHS))}"
    if dtype != torch.bfloat16:
        return f"the query is {dtype}; the kernel takes torch.bfloat16"
    if batch != 1:
        return f"the batch is {batch}; the kernel takes 1"
    if rows > MAX_ROWS:
        return f"a call has up to {rows} rows; the kernel takes {MAX_ROWS}"
    return None


@dataclass(frozen=True)
class Plan:
    """How a problem is laid over the card: ``rows`` of a tile, ``keys`` of a turn, ``splits`` of a key head, turns in
    flight; ``wgmma``: products by ``wgmma_sdpa``, which fixes all but the splits.
    """

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int
    wgmma: bool = False


def hopper() -> bool:
    """Whether the card at hand is a Hopper. Where there is none, plans are for one."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)


def plan(heads: int, kv_heads: int, width: int, max_rows: int, window: int = 0) -> Plan:
    """The layout for calls of 1 to ``max_rows`` rows: one program a multiprocessor and block of rows.

    At width 512 the sums fill the registers of one program a multiprocessor, so nothing else hides its loads and
    products: ``wgmma_sdpa`` orders them by hand, and Triton's turns are short, three of them in flight. A ``window``
    has few keys: its programs are small and twice as many, with a turn or some each, where their sums leave room.
    """
    rows = min(TILE_ROWS, max(16, triton.next_power_of_2(max_rows * heads // kv_heads)))
    splits = min(64, max(1, MULTIPROCESSORS // kv_heads))
    if width == wgmma_sdpa.WIDTH and not window and hopper():
        return Plan(wgmma_sdpa.ROWS, wgmma_sdpa.KEYS, splits, wgmma_sdpa.WARPS, stages=2, wgmma=True)
    if width == 512:
        return Plan(rows, 16, splits, warps=8, stages=3)
    if window and rows * width <= 32 * 256:
        return Plan(rows, 16, 2 * splits, warps=2, stages=3)
    return Plan(rows, 64, splits, warps=4, stages=3)


@triton.jit
def _turns(first, last, KEYS: tl.constexpr, SPLITS: tl.constexpr, split):
    """The tiles of a split that hold positions ``first`` to ``last``: where they begin, and where all tiles end."""
    low = first // KEYS
    return low + (split + SPLITS - low % SPLITS) % SPLITS, last // KEYS + 1


@triton.jit
def _cached(ptr, j, first, last, D: tl.constexpr, L: tl.constexpr, RING: tl.constexpr, INTERPRETED: tl.constexpr):
    """Keys or values at positions ``j``, ``[KEYS, D]``, zeros outside of ``first`` to ``last``: what is not live may
    hold anything.
    """
    slot = j % L if RING else j
    at = slot[:, None] * D + tl.arange(0, D)[None, :]
    found = tl.load(ptr + at, mask=((j >= first) & (j <= last))[:, None], other=0)
    return found.to(tl.float32) if INTERPRETED else found


@triton.jit(do_not_specialize=["M"])
def splitk_kernel(
    q_ptr, k_ptr, v_ptr, pos_ptr, sums_ptr, state_ptr, M, q_head_stride, q_row_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, L: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One split of one key head for ``ROWS`` of its GROUP x M query rows.

    Leaves sums of values weighted by ``2 ** (score - highest)``, float32 ``[S, H, M, D]``, and of each the highest
    score and the sum of weights, float32 ``[2, S, H, M]``. ``scale`` is times log2(e). ``WINDOW`` 0: all keys.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    split = tl.program_id(1)
    kv_head = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = row // GROUP
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, D)
    pos = tl.load(pos_ptr + m, mask=m < M, other=-1).to(tl.int32)
    last = tl.max(pos)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.min(tl.where(m < M, pos, 0x7FFFFFFF)) - WINDOW + 1, 0)
    begin, end = _turns(first, last, KEYS, SPLITS, split)
    q = tl.load(q_ptr + (head * q_head_stride + m * q_row_stride)[:, None] + d[None, :], mask=(m < M)[:, None], other=0)
    if INTERPRETED:
        q = q.to(tl.float32)
    k_ptr += kv_head.to(tl.int64) * (L * D)
    v_ptr += kv_head.to(tl.int64) * (L * D)
    factor = tl.full([1, 1], scale, tl.float32)  # AOTInductor's scale is a float64
    sums = tl.zeros([ROWS, D], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    RING: tl.constexpr = WINDOW > 0
    # the interpreter cannot loop as often as the device says; tiles past the end change nothing
    MOST: tl.constexpr = L // KEYS // SPLITS + 2
    for turn in tl.range(0, MOST if INTERPRETED else tl.cdiv(end - begin, SPLITS), num_stages=STAGES):
        j = (begin + turn * SPLITS) * KEYS + tl.arange(0, KEYS)
        v = _cached(v_ptr, j, first, last, D, L, RING, INTERPRETED)
        k = _cached(k_ptr, j, first, last, D, L, RING, INTERPRETED)
        products = tl.dot(q, tl.trans(k))
        seen = j[None, :] <= pos[:, None]
        if RING:
            seen &= j[None, :] > pos[:, None] - WINDOW
        scores = tl.where(seen, products * factor, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # none seen yet
        p = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        weights = weights * fade + tl.sum(p, 1)
        sums = tl.dot(p.to(v.dtype), v, acc=sums * fade[:, None])
        highest = higher
    at = (split * HEADS + head) * M + m
    known = (m < M) & (begin < end)
    tl.store(sums_ptr + at[:, None].to(tl.int64) * D + d[None, :], sums, mask=known[:, None])
    tl.store(state_ptr + at, highest, mask=known)
    tl.store(state_ptr + SPLITS * HEADS * M + at, weights, mask=known)


@triton.jit(do_not_specialize=["M"])
def merge_kernel(
    sums_ptr, state_ptr, pos_ptr, out_ptr, M,
    HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` values of one row of one head from those splits that hold keys which the row sees."""
    head, m = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, PADDED)
    pos = tl.load(pos_ptr + m).to(tl.int32)
    first = tl.maximum(pos - WINDOW + 1, 0) if WINDOW > 0 else 0
    begin, end = _turns(first, pos, KEYS, SPLITS, split)
    known = (split < SPLITS) & (begin < end)
    at = (split * HEADS + head) * M + m
    highest = tl.load(state_ptr + at, mask=known, other=float("-inf"))
    weights = tl.load(state_ptr + SPLITS * HEADS * M + at, mask=known, other=0.0)
    fade = tl.exp2(highest - tl.max(highest, 0))
    sums = tl.load(sums_ptr + at[:, None].to(tl.int64) * D + d[None, :], mask=known[:, None], other=0.0)
    out = tl.sum(sums * fade[:, None], 0) / tl.sum(weights * fade, 0)
    tl.store(out_ptr + (m * HEADS + head) * D + d, out.to(out_ptr.dtype.element_ty))


def _check(q: Tensor, k: Tensor, v: Tensor, input_pos: Tensor, window: int, max_rows: int) -> None:
    """Raises ``ValueError`` where the operands do not belong together."""
    _, heads, _, width = q.shape
    if k.shape != v.shape or k.shape[0] != 1 or k.shape[3] != width or heads % k.shape[1]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not belong together")
    if window and k.shape[2] < window + max_rows - 1:
        raise ValueError(
            f"a ring of {k.shape[2]} rows; a window of {window} and {max_rows} rows a call need {window + max_rows - 1}"
        )


def _aligned(x: Tensor) -> Tensor:
    """``x``, or a dense copy of it where its vectors do not lie so that 16 bytes at a time can be copied."""
    return moved(x) if x.storage_offset() % 8 or x.stride(1) % 8 or x.stride(2) % 8 else x


def moved(x: Tensor) -> Tensor:
    """A dense copy at the beginning of memory of its own. ``clone`` will not do: a compiler drops it where a copy would
    differ in nothing but its place.
    """
    return torch.nn.functional.pad(x.reshape(-1), (0, 8))[: x.numel()].view(x.shape)


def reference(
    q: Tensor, k: Tensor, v: Tensor, input_pos: Tensor, scale: float, window: int = 0, max_rows: int = MAX_ROWS
) -> Tensor:
    """What the op computes, from the same operands, in float32: the implementation on cpu."""
    _check(q, k, v, input_pos, window, max_rows)
    size, last = k.shape[2], input_pos.max()
    slot = torch.arange(size, device=q.device)
    j = last - (last - slot) % size if window else slot  # the position that a row of the cache holds
    seen = (j >= 0) & (j <= input_pos[:, None])
    if window:
        seen &= j > input_pos[:, None] - window
    live = seen.any(0)[:, None]
    k, v = (torch.where(live, t.float(), 0.0).repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q.float() @ k.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def launch(
    q: Tensor, k: Tensor, v: Tensor, input_pos: Tensor, scale: float, window: int = 0, max_rows: int = MAX_ROWS
) -> Tensor:
    """softmax(scale * q k^T over the keys that a row sees) v, for 1 to ``max_rows`` rows, each with the bits that it
    has alone.

    Shapes: ``q`` bfloat16 ``[1, H, M, D]`` with dense vectors; ``k``, ``v`` bfloat16 ``[1, KV, L, D]``, dense; H a
    multiple of KV; ``input_pos`` int64 ``[M]``: the row at position p sees the keys at positions j <= p and, with a
    ``window``, j > p - window. Position j lies in row j of a cache, with a window in row ``j % L``, L at least
    ``window + max_rows - 1``; every position up to the highest one of the call has been written, and what else the
    cache holds does not matter. Result bfloat16 ``[1, H, M, D]``, laid out as ``[1, M, H, D]``. Sums are float32,
    weights of values rounded to bfloat16. ``max_rows`` and the heads decide the order of sums. Raises ``ValueError``
    for operands that do not belong together.
    """
    _check(q, k, v, input_pos, window, max_rows)
    _, heads, rows, width = q.shape
    kv_heads, size = k.shape[1], k.shape[2]
    layout = plan(heads, kv_heads, width, max_rows, window)
    k, v = k.contiguous(), v.contiguous()
    sums = q.new_empty((layout.splits, heads, rows, width), dtype=torch.float32)
    state = q.new_empty((2, layout.splits, heads, rows), dtype=torch.float32)
    out = q.new_empty((1, rows, heads, width))
    grid = triton.cdiv(rows * (heads // kv_heads), layout.rows), layout.splits, kv_heads
    factor = scale * 1.4426950408889634
    if layout.wgmma and not INTERPRETED:
        q, k, v = _aligned(q.transpose(1, 2)).transpose(1, 2), _aligned(k), _aligned(v)
        wrap(wgmma_sdpa.wide_kernel)[grid](
            q, k, v, input_pos, sums, state, rows, q.stride(1), q.stride(2), factor,
            HEADS=heads, KV_HEADS=kv_heads, L=size, SPLITS=layout.splits, num_warps=layout.warps,
        )  # fmt: skip
    else:
        wrap(splitk_kernel)[grid](
            q, k, v, input_pos, sums, state, rows, q.stride(1), q.stride(2), factor,
            HEADS=heads, KV_HEADS=kv_heads, D=width, L=size, WINDOW=window,
            ROWS=layout.rows, KEYS=layout.keys, SPLITS=layout.splits, STAGES=layout.stages, INTERPRETED=INTERPRETED,
            num_warps=layout.warps,
        )  # fmt: skip
    wrap(merge_kernel)[(heads * rows, width // 64)](
        sums, state, input_pos, out, rows,
        HEADS=heads, D=width, WINDOW=window, KEYS=layout.keys, SPLITS=layout.splits,
        PADDED=triton.next_power_of_2(layout.splits), BLOCK=64, num_warps=4,
    )  # fmt: skip
    return out.transpose(1, 2)


splitk_sdpa = torch.library.triton_op("eyas::splitk_sdpa", launch, mutates_args=())


@splitk_sdpa.register_fake
def _(q, k, v, input_pos, scale, window=0, max_rows=MAX_ROWS):
    _, heads, rows, width = q.shape
    return q.new_empty((1, rows, heads, width)).transpose(1, 2)


splitk_sdpa.register_kernel("cpu")(reference)

"""Packing of bfloat16 fragments, the ops on cpu, what the compiler makes of the kernel; products are in ``cuda/``."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fragment_int8_linear import assert_weights_go_through_registers_alone

from eyas.kernels.fragment_bf16_linear import (
    fragment_bf16_embedding,
    fragment_bf16_linear,
    fragment_bf16_matmul,
    pack_bf16_fragments,
    plan,
    supports,
    unpack_bf16_fragments,
)


def random_bits(*shape):
    """Every kind of number: the signs of zeros, infinities and the payloads of NaN count."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 150), st.integers(1, 300))
def test_packing_loses_nothing(n, k):
    w = random_bits(n, k)
    words = pack_bf16_fragments(w)
    assert words.shape == (-(-n // 64), -(-k // 32), 4, 2, 32, 8) and words.dtype == torch.bfloat16
    assert words.is_contiguous()
    assert torch.equal(unpack_bf16_fragments(words, n, k).view(torch.int16), w.view(torch.int16))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (70, 330), (64, 33), (65, 32)], ids=str)
def test_what_is_past_the_end_is_zero(n, k):
    words = pack_bf16_fragments(torch.ones(n, k, dtype=torch.bfloat16))
    every = unpack_bf16_fragments(words, words.shape[0] * 64, words.shape[1] * 32)
    assert every[:n, :k].sum() == n * k == every.view(torch.int16).count_nonzero()


def test_a_thread_has_its_part_of_a_fragment():
    """The layout itself, of one weight: row 26, column 47."""
    w = torch.zeros(64, 64, dtype=torch.bfloat16)
    w[26, 47] = -3
    data = pack_bf16_fragments(w).flatten()
    (place,) = data.nonzero().flatten().tolist()
    # second unit; second fragment, of rows 16 to 31; row 10 = 8 rh + g; column 15 = 8 q + 4 s + 2 kh + e
    lane, kh, rh, e = 4 * 2 + 1, 1, 1, 1
    assert place == 64 * 32 + 16 * 32 + 16 * 16 * 1 + 8 * lane + 4 * kh + 2 * rh + e and data[place] == -3


def test_halves_are_in_the_order_of_the_registers():
    """Row g, columns 2q and 2q + 1; row g + 8; then the same of the upper columns."""
    w = torch.arange(16.0)[:, None] * 100 + torch.arange(32)
    thread = pack_bf16_fragments(w.bfloat16())[0, 0, 0, 0, 4 * 3 + 2]  # g = 3, q = 2, s = 0
    rows, columns = [3, 3, 11, 11] * 2, [16, 17, 16, 17, 18, 19, 18, 19]
    assert torch.equal(thread, w.bfloat16()[rows, columns])


def test_ops_on_cpu():
    generator = torch.Generator().manual_seed(1)
    w, x = (torch.randn(n, 300, generator=generator).bfloat16() for n in (70, 5))
    words = pack_bf16_fragments(w)
    for op in (fragment_bf16_linear, fragment_bf16_matmul):
        assert torch.equal(op(x, words, 70), (x.float() @ w.float().T).bfloat16())
        fake = op(x.to("meta"), words.to("meta"), 70)
        assert (fake.shape, fake.dtype) == ((5, 70), torch.bfloat16)
    ids = torch.tensor([[0, 69, 5], [3, 3, 64]])
    made = fragment_bf16_embedding(ids, words, 300)
    assert torch.equal(made, torch.nn.functional.embedding(ids, w))
    fake = fragment_bf16_embedding(ids.to("meta"), words.to("meta"), 300)
    assert (fake.shape, fake.dtype) == (made.shape, made.dtype)


def test_operands_that_do_not_belong_together():
    words = pack_bf16_fragments(torch.zeros(64, 128, dtype=torch.bfloat16))
    for op in (fragment_bf16_linear, fragment_bf16_matmul):
        with pytest.raises(ValueError, match="x has 96 columns, the weight 4 units of 32"):
            op(torch.zeros(1, 96, dtype=torch.bfloat16), words, 64)


def test_supports():
    assert supports(torch.bfloat16, 16) is None
    assert supports(torch.float32, 1) == "activations are torch.float32; the kernel takes torch.bfloat16"
    assert supports(torch.bfloat16, 17) == "a call has up to 17 rows; the kernel takes 16"


@pytest.mark.parametrize(("n", "k"), [(1, 32), (2048, 640), (5376, 21504), (262144, 640)], ids=str)
def test_eight_programs_find_room_on_a_multiprocessor(n, k):
    """``stages`` steps of a program's weights and rows, all but one in shared memory, of which there are 227 KiB."""
    layout = plan(n, k)
    step = 32 * layout.units * 2 * (64 * layout.tiles + 16)
    assert 8 * ((layout.stages - 1) * step + 1024) <= 227 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("case", [(2048, 640, 8), (262144, 640, 8), (5376, 21504, 16)])
def test_weights_go_through_registers_alone(case, tmp_path):
    assert_weights_go_through_registers_alone("bf16", case, 80, tmp_path / "kernel.cubin")

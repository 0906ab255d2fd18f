"""The Gemma decoder against transformers: logits and every boundary, however the rows come in."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch
from tiny_gemma import FAMILIES, WINDOW, decoder, hf_model, hf_run, make_case, our_run, tokens_of
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3 import modeling_gemma3

from eyas.models.hf_reader import open_folder
from eyas.models.layers import CacheGeometry, RopeSpec

ATOL = 1e-4  # float32 in another order of operations; measured 2e-5 or less


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return make_case(request.param, tmp_path_factory.mktemp(request.param))


def assert_same(case, got):
    logits, streams = got
    torch.testing.assert_close(logits, case.logits, atol=ATOL, rtol=0)
    assert len(streams) == len(case.streams) == case.checkpoint.config.n_layers + 1
    for boundary, (ours, theirs) in enumerate(zip(streams, case.streams)):
        torch.testing.assert_close(ours, theirs, atol=ATOL, rtol=0, msg=lambda m, b=boundary: f"boundary {b}: {m}")


# Rows and calls


def test_one_call_of_a_window(case):
    logits, streams = our_run(decoder(case.checkpoint), case.tokens[:, :WINDOW], [WINDOW])
    torch.testing.assert_close(logits, case.logits[:WINDOW], atol=ATOL, rtol=0)
    torch.testing.assert_close(streams[-1], case.streams[-1][:WINDOW], atol=ATOL, rtol=0)


@pytest.mark.parametrize("rows", [1, WINDOW // 2, WINDOW - 1, WINDOW])
def test_calls_of_equal_rows_over_several_rings(case, rows):
    assert_same(case, our_run(decoder(case.checkpoint), case.tokens, itertools.repeat(rows)))


def test_calls_of_mixed_rows(case):
    shuffled = random.Random(0)
    assert_same(case, our_run(decoder(case.checkpoint), case.tokens, (shuffled.randint(1, WINDOW) for _ in range(99))))


def test_last_boundary_is_before_the_norm(case):
    """transformers' last hidden state is after the final norm; ours, as an EAGLE head wants it, is before."""
    model = decoder(case.checkpoint)
    tokens, positions = case.tokens[:, :WINDOW], torch.arange(WINDOW)
    hidden, (last,) = model(tokens, positions, (model.n_layers,))
    theirs = case.model(tokens, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(hidden, theirs, atol=ATOL, rtol=0)
    assert (last - theirs).abs().max() > 0.1


def test_boundaries_come_in_the_order_asked_for(case):
    model = decoder(case.checkpoint)
    _, taps = model(case.tokens[:, :4], torch.arange(4), (5, 0, 2))
    for boundary, tap in zip((5, 0, 2), taps, strict=True):
        torch.testing.assert_close(tap[0], case.streams[boundary][:4], atol=ATOL, rtol=0)


@pytest.mark.parametrize("rows", [2, 5, WINDOW])
def test_rows_of_rejected_tokens_leave_no_trace(case, rows):
    """Each round writes wrong tokens past the accepted ones, at times past the ring's seam, and goes on from there."""
    model, rng = decoder(case.checkpoint), random.Random(rows)
    length = case.tokens.shape[1]
    start = 0
    with torch.no_grad():
        while start < length:
            m = min(rows, length - start)
            right = rng.randint(1, m)
            part = case.tokens[:, start : start + m].clone()
            part[:, right:] = (part[:, right:] + 7) % 128
            hidden, _ = model(part, torch.arange(start, start + m), ())
            got = model.logits(hidden)[0, :right]
            torch.testing.assert_close(got, case.logits[start : start + right], atol=ATOL, rtol=0)
            start += right


@pytest.mark.parametrize(("max_seq_len", "rows"), [(64, 8), (17, 8), (16, 8), (12, 8), (8, 8), (5, 5)])
def test_the_most_rows_a_call_may_have(case, max_seq_len, rows):
    model = decoder(case.checkpoint, max_seq_len)
    assert model.max_call_rows == rows
    length = min(max_seq_len, case.tokens.shape[1])
    logits, _ = our_run(model, case.tokens[:, :length], itertools.repeat(rows))
    torch.testing.assert_close(logits, case.logits[:length], atol=ATOL, rtol=0)


def test_flat_layers_alone_take_as_many_rows_as_fit(case):
    layers = tuple(replace(layer, window=None) for layer in case.checkpoint.config.layers)
    assert decoder(case.checkpoint, 40, layers=layers).max_call_rows == 40
    logits, _ = our_run(decoder(case.checkpoint, 64, layers=layers), case.tokens, [53])
    assert (logits[:WINDOW] - case.logits[:WINDOW]).abs().max() < ATOL
    assert (logits[3 * WINDOW :] - case.logits[3 * WINDOW :]).abs().max() > 0.1, "the window must matter to this test"


def test_gemma4_layers_differ_in_heads_widths_and_values(tmp_path):
    model = decoder(make_case("gemma4", tmp_path, length=4).checkpoint)
    shapes = [tuple(layer.self_attn.cache.k.shape) for layer in model.layers]
    assert shapes == [(1, 2, 16, 16), (1, 2, 16, 16), (1, 1, 64, 32)] * 2
    assert [layer.self_attn.v_proj is None for layer in model.layers] == [False, False, True] * 2


# Numbers that are easily lost


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_bit_for_bit(family, tmp_path):
    """sqrt(96) is 9.798 in float32 and 9.8125 in bfloat16: the scale takes the dtype of the weights."""
    tokens = tokens_of(WINDOW)
    for dtype in (torch.float32, torch.bfloat16):
        model = hf_model(family).to(dtype)
        model.save_pretrained(tmp_path / str(dtype))
        checkpoint = open_folder(tmp_path / str(dtype))
        expected = model.model.embed_tokens(tokens)
        _, (rounded,) = decoder(checkpoint, dtype=dtype)(tokens, torch.arange(WINDOW), (0,))
        _, (kept,) = decoder(checkpoint, dtype=dtype, embed_scale_rounded=False)(tokens, torch.arange(WINDOW), (0,))
        assert rounded.dtype == dtype and torch.equal(rounded, expected)
        assert torch.equal(kept, expected) == (dtype == torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_exact_as_transformers(family, tmp_path):
    rounded = hf_model(family).bfloat16()
    rounded.save_pretrained(tmp_path)
    tokens = tokens_of(40)
    theirs, _ = hf_run(rounded, tokens)
    exact, _ = hf_run(rounded.float(), tokens)
    ours, streams = our_run(decoder(open_folder(tmp_path), dtype=torch.bfloat16), tokens, itertools.repeat(WINDOW))
    assert ours.dtype == torch.float32 and streams[3].dtype == torch.bfloat16
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


def test_norms_bit_for_bit(case):
    """float32 inside, the factor included, and one rounding at the end: the other orders differ in bfloat16."""
    width = case.checkpoint.config.hidden_size
    x = (3 * torch.randn(20, width, generator=torch.Generator().manual_seed(0))).bfloat16()
    ours, theirs = decoder(case.checkpoint).norm, case.model.model.norm
    assert torch.equal(ours(x), theirs(x))
    assert ours(x).dtype == torch.bfloat16


def test_linear_rope_factor_is_for_global_layers_only(tmp_path):
    options = dict(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=128,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    )
    case = make_case("gemma3", tmp_path, length=3001, **options)
    sliding, full = case.checkpoint.config.layers
    assert (sliding.rope, full.rope) == (RopeSpec(10000.0), RopeSpec(1e6, "linear", 8.0))

    def error_at_3000(*ropes):
        layers = tuple(replace(layer, rope=rope) for layer, rope in zip((sliding, full), ropes))
        logits, _ = our_run(decoder(case.checkpoint, 3072, layers=layers), case.tokens, itertools.repeat(128))
        return (logits[3000] - case.logits[3000]).abs().max().item()

    assert error_at_3000(sliding.rope, full.rope) < ATOL
    assert error_at_3000(sliding.rope, RopeSpec(1e6)) > 0.01, "the factor left out must show"
    assert error_at_3000(RopeSpec(10000.0, "linear", 8.0), full.rope) > 0.01, "the factor on sliding layers must show"


def test_query_scale_comes_from_the_configuration(tmp_path):
    case = make_case("gemma3", tmp_path, query_pre_attn_scalar=4)
    assert case.checkpoint.config.attn_scale == 0.5
    assert_same(case, our_run(decoder(case.checkpoint), case.tokens, itertools.repeat(WINDOW)))
    other, _ = our_run(decoder(case.checkpoint, attn_scale=16**-0.5), case.tokens, itertools.repeat(WINDOW))
    assert (other - case.logits).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_final_softcap(family, tmp_path):
    case = make_case(family, tmp_path, final_logit_softcapping=2.0)
    assert case.logits.abs().max() < 2.0
    assert_same(case, our_run(decoder(case.checkpoint), case.tokens, itertools.repeat(WINDOW)))
    other, _ = our_run(decoder(case.checkpoint, final_softcap=None), case.tokens, itertools.repeat(WINDOW))
    assert (other - case.logits).abs().max() > 0.5


def test_attention_softcap(tmp_path, monkeypatch):
    """transformers reads this option for Gemma 3 but does not hand it to attention; its own function takes it."""
    capped = functools.partial(modeling_gemma3.eager_attention_forward, softcap=0.5)
    monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", capped)
    case = make_case("gemma3", tmp_path, attn_logit_softcapping=0.5)
    assert_same(case, our_run(decoder(case.checkpoint), case.tokens, itertools.repeat(WINDOW)))
    other, _ = our_run(decoder(case.checkpoint, attn_softcap=None), case.tokens, itertools.repeat(WINDOW))
    assert (other - case.logits).abs().max() > 0.1


class NormedKeys(nn.Module):
    """Values from the keys after their norm; the model takes them before."""

    def __init__(self, attention):
        super().__init__()
        self.k_proj, self.k_norm = attention.k_proj, attention.k_norm

    def forward(self, x):
        return self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.k_norm.weight.numel()))).flatten(-2)


@pytest.mark.parametrize("change", ["v_norm", "k_eq_v", "layer_scalar"])
def test_gemma4_pieces_all_matter(change, tmp_path):
    """The comparison with transformers would notice each piece that only Gemma 4 has."""
    case = make_case("gemma4", tmp_path)
    model = decoder(case.checkpoint)
    for layer in model.layers:
        attention = layer.self_attn
        if change == "v_norm":
            attention.v_norm = None
        elif change == "k_eq_v" and attention.v_proj is None:
            attention.v_proj = NormedKeys(attention)
        elif change == "layer_scalar":
            layer.layer_scalar.fill_(1.0)
    logits, _ = our_run(model, case.tokens, itertools.repeat(WINDOW))
    assert (logits - case.logits).abs().max() > 0.05


# Rotary frequencies


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        (RopeSpec(10000.0, "linear", 8.0), {"rope_type": "linear", "factor": 8.0}),
        (RopeSpec(10000.0, "proportional", 2.0, 0.25), {"rope_type": "proportional", "factor": 2.0, "partial": 0.25}),
        (RopeSpec(10000.0, "proportional", partial=0.3), {"rope_type": "proportional", "partial": 0.3}),
        (
            RopeSpec(10000.0, "llama3", 8.0, 1.0, 1.0, 4.0, 512),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, RopeSpec) else "",
)
def test_inverse_frequencies(spec, parameters):
    parameters = dict(parameters, rope_theta=10000.0)
    if "partial" in parameters:
        parameters["partial_rotary_factor"] = parameters.pop("partial")
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS[spec.kind](config, torch.device("cpu"))
    ours = spec.inverse_frequencies(128)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


def test_unknown_rope_kind():
    with pytest.raises(ValueError, match=r"'yarn'; allowed: default, linear, proportional, llama3"):
        RopeSpec(10000.0, "yarn")


# Masks


def seen_by_brute_force(geometry: CacheGeometry, calls: list[tuple[int, int]]) -> None:
    """Plays calls ``(first position, rows)`` on a model cache that records positions, and checks each row's view."""
    held: dict[int, int] = {}
    for first, rows in calls:
        positions = torch.arange(first, first + rows)
        slots = geometry.slots(positions)
        assert len(set(slots.tolist())) == rows, "one call must not write a slot twice"
        held.update(zip(slots.tolist(), positions.tolist()))
        mask = geometry.mask(positions)
        assert mask.shape == (rows, geometry.rows) and mask.dtype == torch.bool
        for row, position in enumerate(positions.tolist()):
            seen = sorted(held[slot] for slot in mask[row].nonzero().flatten().tolist())
            oldest = 0 if geometry.window is None else max(0, position - geometry.window + 1)
            assert seen == list(range(oldest, position + 1)), f"row {row} at position {position} after {first}"


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_mask_row_by_row(window, rows):
    seen_by_brute_force(CacheGeometry.of(40, window), [(first, rows) for first in range(0, 40 - rows + 1, rows)])


@pytest.mark.parametrize("window", [1, 3, WINDOW])
def test_window_holds_exactly_its_rows(window):
    geometry = CacheGeometry.of(64, window)
    for position, count in ((window - 1, window), (window, window), (window + 1, window), (0, 1)):
        positions = torch.arange(position + 1)
        seen = [int(geometry.mask(positions[i : i + 1]).sum()) for i in range(position + 1)]
        assert seen[position] == count
    assert int(CacheGeometry.of(64, None).mask(torch.tensor([window + 1])).sum()) == window + 2


@pytest.mark.parametrize("window", [None, 4])
def test_mask_with_rejected_rows_rewritten(window):
    """Rows are written past the accepted ones, up to a whole window, and written again with others in their place."""
    rng = random.Random(0)
    for _ in range(200):
        calls, first = [], 0
        while first < 36:
            rows = rng.randint(1, 4)
            calls.append((first, rows))
            first += rng.randint(1, rows)
        seen_by_brute_force(CacheGeometry.of(40, window), calls)


@pytest.mark.parametrize("max_seq_len", [1, 3, 5, 7, 8, 9])
def test_mask_of_a_ring_cut_short(max_seq_len):
    geometry = CacheGeometry.of(max_seq_len, 4)
    assert geometry.rows == min(8, max_seq_len) and geometry.max_call_rows() == min(4, max_seq_len)
    for rows in range(1, geometry.max_call_rows() + 1):
        calls = [(first, min(rows, max_seq_len - first)) for first in range(0, max_seq_len, rows)]
        seen_by_brute_force(geometry, calls)


def test_brute_force_notices_a_call_of_too_many_rows():
    """What the limit of one window a call protects from."""
    with pytest.raises((AssertionError, KeyError)):
        seen_by_brute_force(CacheGeometry.of(40, 4), [(0, 4), (4, 4), (8, 7)])

"""The EAGLE-3 head against a second implementation, its cached form against a recompute, and the loops around it."""

import cmath
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eyas.models.eagle3 import Eagle3Config, Eagle3Head, default_boundaries
from eyas.models.layers import RopeSpec
from eyas.models.recipe import RECIPES, materialize
from eyas.models.speculator import Acceptance, Eagle3Speculator, _chain, greedy_reference, speculative_reference
from eyas.models.tiny_targets import build, open_checkpoint, random_tensors

ROWS = 9
BASE = Eagle3Config(
    vocab_size=64,
    draft_vocab_size=20,
    target_hidden_size=24,
    hidden_size=24,
    intermediate_size=40,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    boundaries=(1, 2, 4),
    rope=RopeSpec(100.0),
    rms_eps=1e-3,
)
LLAMA3 = RopeSpec(1000.0, "llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max=64)
VARIANTS = {
    "plain": {},
    "norm_before_residual": dict(norm_before_residual=True),
    "norm_before_fc": dict(fc_norm="concat"),
    "fc_norm": dict(fc_norm="per_tap"),
    "norm_output": dict(norm_output=True),
    "window": dict(window=3),
    "window of one": dict(window=1),
    "two layers": dict(n_layers=2),
    "three layers, window": dict(n_layers=3, window=4, norm_before_residual=True),
    "qk_norm": dict(qk_norm=True),
    "biases": dict(attention_bias=True),
    "linear rope": dict(rope=RopeSpec(100.0, "linear", 4.0)),
    "llama3 rope": dict(rope=LLAMA3),
    "one tap": dict(boundaries=(3,)),
    "four taps, wider target": dict(boundaries=(0, 1, 2, 3), target_hidden_size=40, own_embed=True),
    "one key head": dict(n_kv_heads=1),
    "everything": dict(
        n_layers=2,
        window=5,
        norm_before_residual=True,
        fc_norm="per_tap",
        norm_output=True,
        qk_norm=True,
        attention_bias=True,
    ),
}


def make_head(config: Eagle3Config, seed: int = 0, rows: int = 24, dtype: torch.dtype = torch.float32) -> Eagle3Head:
    head = Eagle3Head(config, rows, dtype)
    materialize(head, "draft.", random_tensors(Eagle3Head(config, 1), seed), RECIPES["none"], dtype)
    spread = config.vocab_size // config.draft_vocab_size
    head.d2t.copy_(torch.arange(config.draft_vocab_size) * (spread - 1) + spread - 1)
    return head


def inputs_of(config: Eagle3Config) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Embedding rows ``[1, ROWS, E]`` and taps ``[1, ROWS, Et]``."""
    generator = torch.Generator().manual_seed(11)
    embed = torch.randn(1, ROWS, config.hidden_size, generator=generator)
    taps = [3 * torch.randn(1, ROWS, config.target_hidden_size, generator=generator) for _ in config.boundaries]
    return embed, tuple(taps)


# --- A second implementation, one row, head and key at a time in float64, from the description of the architecture ---


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def turn(x: Tensor, position: int, spec: RopeSpec) -> Tensor:
    """``[D]`` with element i as the real and i + D/2 as the imaginary part, turned by position * frequency i."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        frequency = spec.theta ** (-2 * i / len(x))
        if spec.kind == "linear":
            frequency /= spec.factor
        if spec.kind == "llama3":
            wavelength = 2 * math.pi / frequency
            if wavelength > spec.original_max / spec.low_freq_factor:
                frequency /= spec.factor
            elif wavelength > spec.original_max / spec.high_freq_factor:
                share = (spec.original_max / wavelength - spec.low_freq_factor) / (
                    spec.high_freq_factor - spec.low_freq_factor
                )
                frequency = (1 - share) * frequency / spec.factor + share * frequency
        z = complex(x[i], x[i + half]) * cmath.exp(1j * position * frequency)
        out[i], out[i + half] = z.real, z.imag
    return out


def plain_features(c: Eagle3Config, w: dict[str, Tensor], taps: list[Tensor]) -> Tensor:
    """Taps ``[rows, Et]`` -> features ``[rows, E]``."""
    rows = []
    for row in zip(*taps):
        if c.fc_norm == "per_tap":
            row = [norm(tap, w[f"fc_norm.{i}.weight"], c.rms_eps) for i, tap in enumerate(row)]
        joined = torch.cat(list(row))
        if c.fc_norm == "concat":
            joined = norm(joined, w["input_norm.weight"], c.rms_eps)
        rows.append(w["fc.weight"] @ joined)
    return torch.stack(rows)


def plain_head(c: Eagle3Config, w: dict[str, Tensor], embed: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings and features ``[rows, E]`` at positions 0.. -> (what the logits are taken of, what is fed back)."""
    h = features
    for i in range(c.n_layers):
        name = f"layers.{i}."
        x, residual = [], []
        for e_row, h_row in zip(embed, h):
            if i == 0:
                g = norm(h_row, w[name + "hidden_norm.weight"], c.rms_eps)
                x.append(torch.cat([norm(e_row, w[name + "input_layernorm.weight"], c.rms_eps), g]))
                residual.append(g if c.norm_before_residual else h_row)
            else:
                x.append(norm(h_row, w[name + "input_layernorm.weight"], c.rms_eps))
                residual.append(h_row)
        x = plain_attention(c, w, name + "self_attn.", x)
        h = []
        for x_row, residual_row in zip(x, residual):
            row = residual_row + x_row
            m = norm(row, w[name + "post_attention_layernorm.weight"], c.rms_eps)
            gate = w[name + "mlp.gate_proj.weight"] @ m
            gate = gate / (1 + torch.exp(-gate))
            h.append(row + w[name + "mlp.down_proj.weight"] @ (gate * (w[name + "mlp.up_proj.weight"] @ m)))
    normed = torch.stack([norm(row, w["norm.weight"], c.rms_eps) for row in h])
    return normed, normed if c.norm_output else torch.stack(list(h))


def plain_attention(c: Eagle3Config, w: dict[str, Tensor], name: str, x: list[Tensor]) -> list[Tensor]:
    def project(which: str, row: Tensor) -> Tensor:
        y = w[f"{name}{which}_proj.weight"] @ row
        return y + w[f"{name}{which}_proj.bias"] if c.attention_bias else y

    def heads(which: str, row: Tensor, position: int) -> list[Tensor]:
        parts = list(project(which, row).split(c.head_dim))
        if which != "v":
            if c.qk_norm:
                parts = [norm(part, w[f"{name}{which}_norm.weight"], c.rms_eps) for part in parts]
            parts = [turn(part, position, c.rope) for part in parts]
        return parts

    q, k, v = ([heads(which, row, i) for i, row in enumerate(x)] for which in "qkv")
    out = []
    for i in range(len(x)):
        seen = [j for j in range(i + 1) if c.window is None or j > i - c.window]
        joined = []
        for head in range(c.n_heads):
            shared = head // (c.n_heads // c.n_kv_heads)
            scores = torch.stack([q[i][head] @ k[j][shared] / math.sqrt(c.head_dim) for j in seen])
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            joined.append(sum(weight * v[j][shared] for weight, j in zip(weights, seen)))
        out.append(project("o", torch.cat(joined)))
    return out


def plain_weights(config: Eagle3Config, seed: int = 0) -> dict[str, Tensor]:
    return {name: source.tensor.double() for name, source in random_tensors(Eagle3Head(config, 1), seed).items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_agrees_with_the_second_implementation(variant):
    config = replace(BASE, **VARIANTS[variant])
    head, w = make_head(config), plain_weights(config)
    embed, taps = inputs_of(config)
    features = head.combine(taps)
    expected = plain_features(config, w, [tap[0].double() for tap in taps])
    torch.testing.assert_close(features[0].double(), expected, atol=1e-5, rtol=1e-5)
    normed, g = head.recompute(embed, features)
    logits, feedback = plain_head(config, w, embed[0].double(), expected)
    torch.testing.assert_close(normed[0].double(), logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(g[0].double(), feedback, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("plain", "four taps, wider target")])
def test_each_variant_is_another_function(variant):
    """Otherwise the agreement above would not show that the variant is there at all."""
    config = replace(BASE, **VARIANTS[variant])
    embed, taps = inputs_of(BASE)
    outputs = []
    for c in (BASE, config):
        head = make_head(c)
        shared = dict(make_head(BASE).named_buffers()) | dict(make_head(BASE).named_parameters())
        for name, value in [*head.named_buffers(), *head.named_parameters()]:
            if name in shared and shared[name].shape == value.shape and "inv_freq" not in name:
                value.copy_(shared[name])
        features = head.combine(taps[: len(c.boundaries)])
        outputs.append(torch.cat([features, *head.recompute(embed, features)]))
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2


# --- The cached form ---

SPLITS = [(ROWS,), (1,) * ROWS, (4, 5), (3, 1, 5), (1, 8), (2, 2, 2, 3)]


def spoil(head: Eagle3Head) -> None:
    """Leaves finite rubbish in every cache row, as rejected proposals do."""
    generator = torch.Generator().manual_seed(1)
    for name, buffer in head.named_buffers():
        if "cache" in name:
            buffer.copy_(5 * torch.randn(buffer.shape, generator=generator))


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "+".join(map(str, split)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_calls_equal_a_recompute(variant, split):
    config = replace(BASE, **VARIANTS[variant])
    head = make_head(config)
    spoil(head)
    embed, taps = inputs_of(config)
    features = head.combine(taps)
    parts, start = [], 0
    for rows in split:
        rows = slice(start, start + rows)
        parts.append(head(embed[:, rows], features[:, rows], torch.arange(rows.start, rows.stop)))
        start = rows.stop
    for cached, expected in zip(zip(*parts), head.recompute(embed, features)):
        torch.testing.assert_close(torch.cat(cached, dim=1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["plain", "window", "two layers", "everything"])
def test_rows_written_again_replace_the_old_ones(variant):
    """Rows of rejected proposals, at positions 4 to 7, are written over by what came instead."""
    config = replace(BASE, **VARIANTS[variant])
    head = make_head(config)
    embed, taps = inputs_of(config)
    features = head.combine(taps)
    head(embed[:, :4], features[:, :4], torch.arange(4))
    head(embed[:, :4].flip(1), features[:, :4].flip(1), torch.arange(4, 8))
    normed, _ = head(embed[:, 4:], features[:, 4:], torch.arange(4, ROWS))
    expected, _ = head.recompute(embed, features)
    torch.testing.assert_close(normed, expected[:, 4:], atol=1e-5, rtol=1e-5)


def test_recompute_leaves_the_cache_alone():
    head = make_head(BASE)
    spoil(head)
    before = {name: buffer.clone() for name, buffer in head.named_buffers()}
    embed, taps = inputs_of(BASE)
    head.recompute(embed, head.combine(taps))
    assert all(torch.equal(buffer, before[name]) for name, buffer in head.named_buffers())


def test_bfloat16_throughout():
    head, exact = make_head(BASE, dtype=torch.bfloat16), make_head(BASE)
    embed, taps = inputs_of(BASE)
    features = head.combine(tuple(tap.bfloat16() for tap in taps))
    normed, g = head(embed.bfloat16(), features, torch.arange(ROWS))
    assert features.dtype == normed.dtype == g.dtype == head.layers[0].self_attn.cache.k.dtype == torch.bfloat16
    expected, _ = exact.recompute(embed, exact.combine(taps))
    assert torch.cosine_similarity(normed.float(), expected, dim=-1).min() > 0.999


# --- Configuration ---


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(fc_norm="layer"), "unknown fc_norm 'layer'; allowed: none, concat, per_tap"),
        (dict(boundaries=()), r"ascending and distinct boundaries from 0 on, got \[\]"),
        (dict(boundaries=(2, 1)), r"got \[2, 1\]"),
        (dict(boundaries=(1, 1, 2)), r"got \[1, 1, 2\]"),
        (dict(boundaries=(-1, 2)), r"got \[-1, 2\]"),
        (dict(draft_vocab_size=65), "65 does not fit the target's 64"),
        (dict(n_kv_heads=3), "4 query heads cannot share 3"),
        (dict(hidden_size=32), "width 32 cannot share the embedding of a target of width 24"),
        (dict(own_head=False), "without lm_head must have the target's vocabulary and width, got 20 of 64"),
    ],
)
def test_impossible_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)


@pytest.mark.parametrize(
    "boundaries, words",
    [
        ((2, 9, 15), "after layers 1, 8, 14"),
        ((3,), "after layer 2"),
        ((0, 1), "the scaled embedding and after layer 0"),
        ((0,), "the scaled embedding"),
    ],
)
def test_taps_in_words(boundaries, words):
    assert replace(BASE, boundaries=boundaries).taps() == words


def test_usual_taps():
    assert default_boundaries(18) == (2, 9, 15)
    assert default_boundaries(60) == (2, 30, 57)
    assert default_boundaries(7) == (2, 3, 4)
    for layers in range(1, 7):
        with pytest.raises(ValueError, match=f"of {layers} layers .* has to name its own"):
            default_boundaries(layers)


# --- With a target ---

VOCAB, WIDTH = 128, 48
PROMPT = [2, 17, 90, 4, 33, 61, 5]
BUDGET = 12


@pytest.fixture(scope="module", params=["gemma3", "gemma4"])
def target(request):
    checkpoint = open_checkpoint(None, request.param, n_layers=6)
    module = build(checkpoint.config, 48, torch.float32)
    offset = checkpoint.config.norm_offset
    materialize(module, "target.", checkpoint.tensors, RECIPES["none"], torch.float32, offset)
    return module


def make_speculator(target, kind: type = Eagle3Speculator, **changes) -> Eagle3Speculator:
    fields = dict(vocab_size=VOCAB, draft_vocab_size=32, target_hidden_size=WIDTH, hidden_size=WIDTH, fc_norm="per_tap")
    return kind(target, make_head(replace(BASE, **(fields | changes)), rows=48))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(vocab_size=100, draft_vocab_size=20), "vocabulary of 100, the target has 128"),
        (dict(target_hidden_size=24, own_embed=True), "target of width 24, this one has 48"),
        (dict(boundaries=(2, 7)), "taps boundary 7, the target has 6 layers"),
    ],
)
def test_a_head_of_another_target_is_refused(changes, message, target):
    with pytest.raises(ValueError, match=message):
        make_speculator(target, **changes)


def plain_chain(speculator: Eagle3Speculator, text: list[int], taps: list[Tensor], chain: int) -> list[int]:
    """Row i joins the tap at i with the embedding of the token at i + 1; then each output with the token it led to."""
    head, c = speculator.draft, speculator.draft.config
    w = plain_weights(c)
    table = speculator.target.embed_tokens.weight.double()  # raw: the draft does not scale it
    features, tokens = plain_features(c, w, taps), list(text[1:])
    assert len(features) == len(tokens)
    proposals = []
    for _ in range(chain):
        normed, g = plain_head(c, w, table[tokens], features)
        best = int((w["lm_head.weight"] @ normed[-1]).argmax())
        proposals.append(best + int(head.d2t[best]))
        tokens.append(proposals[-1])
        features = torch.cat([features, g[-1:]])
    return proposals


@pytest.mark.parametrize("norm_output", [False, True])
def test_proposals_pair_features_and_tokens_as_described(norm_output, target):
    speculator = make_speculator(target, norm_output=norm_output)
    tokens, boundaries = torch.tensor([PROMPT[:-1]]), speculator.draft.config.boundaries
    _, taps = target(tokens, torch.arange(len(PROMPT) - 1), boundaries)
    expected = plain_chain(speculator, PROMPT, [tap[0].double() for tap in taps], 3)
    assert list(_chain(speculator, PROMPT, speculator.draft.combine(taps), 3)) == expected
    late = plain_chain(speculator, PROMPT, [tap[0].double().roll(1, 0) for tap in taps], 3)
    assert late != expected  # features of one position earlier: the check can tell


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_cached_rounds_propose_what_a_recompute_proposes(accepted, target):
    """A chain from the prefill, a verification that accepts some of it, and the next chain from verify's features."""
    speculator = make_speculator(target, window=4)
    chain, n = 3, len(PROMPT)
    spoil(speculator.draft)

    def propose(tokens: list[int], features: Tensor, start: int) -> list[int]:
        position = torch.arange(start, start + len(tokens))
        ids, g = speculator.draft_decode(torch.tensor([tokens]), features, position)
        proposals, last = [int(ids[0, -1])], start + len(tokens)
        for step in range(chain - 1):
            ids, g = speculator.draft_decode(ids[:, -1:], g[:, -1:], torch.tensor([last + step]))
            proposals.append(int(ids[0, -1]))
        return proposals

    token, features = speculator.prefill(torch.tensor([PROMPT]), torch.arange(n))
    text = [*PROMPT, int(token)]
    proposals = propose(text[1:], features, 0)
    assert proposals == list(_chain(speculator, text, features, chain))
    # Whatever the target says: take `accepted` proposals, then a token that none of them proposed.
    window = [text[-1], *proposals]
    _, more = speculator.target_verify(torch.tensor([window]), torch.arange(n, n + len(window)))
    emitted = [*proposals[:accepted], 77]
    second = propose(emitted, more[:, : accepted + 1], n)
    features = torch.cat([features, more[:, : accepted + 1]], dim=1)
    assert second == list(_chain(speculator, [*text, *emitted], features, chain))


class Scripted(Eagle3Speculator):
    """Proposes ``text``, the greedy one, except for proposal ``wrong`` of each round (counted from 0; None: never)."""

    text: tuple[int, ...]
    wrong: int | None
    chain: int
    calls = 0

    def draft_embed(self, tokens: Tensor) -> Tensor:
        self.position = tokens.shape[1] + 1  # the tokens are those from position 1 on
        return super().draft_embed(tokens)

    def draft_ids(self, normed: Tensor) -> Tensor:
        step, self.calls = self.calls % self.chain, self.calls + 1
        token = self.text[self.position]
        return torch.tensor([[(token + 1) % VOCAB if step == self.wrong else token]])


@pytest.mark.parametrize("chain", [1, 2, 4])
@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_speculative_text_is_the_greedy_text(wrong, chain, target):
    """Accept-all, reject-first and mid-reject give the same tokens, and the counts that were forced."""
    greedy = greedy_reference(make_speculator(target), PROMPT, BUDGET + chain + 2)
    assert len(set(greedy)) > 3  # not a constant text, which would be right by accident
    speculator = make_speculator(target, Scripted)
    speculator.text, speculator.wrong, speculator.chain = (*PROMPT, *greedy), wrong, chain
    tokens, counts = speculative_reference(speculator, PROMPT, chain, BUDGET)
    assert tokens == greedy[:BUDGET]
    expected = chain if wrong is None else min(wrong, chain)
    assert set(counts.accepted) == {expected}
    assert counts.rounds == math.ceil((BUDGET - 1) / (expected + 1))
    assert counts.emitted == BUDGET - 1


def test_an_honest_random_head_changes_nothing_either(target):
    speculator = make_speculator(target)
    greedy = greedy_reference(speculator, PROMPT, BUDGET)
    for chain in (1, 3):
        tokens, counts = speculative_reference(speculator, PROMPT, chain, BUDGET)
        assert tokens == greedy and counts.emitted == BUDGET - 1
    stop = greedy[4]
    first = greedy.index(stop)
    assert greedy_reference(speculator, PROMPT, BUDGET, [stop]) == greedy[: first + 1]
    assert speculative_reference(speculator, PROMPT, 3, BUDGET, [stop])[0] == greedy[: first + 1]


def test_counts():
    counts = Acceptance(3, accepted=[0, 3, 1], emitted=7)
    assert counts.rounds == 3 and counts.tau == pytest.approx(7 / 3)
    assert counts.by_position() == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert Acceptance(2).tau == 0.0 and Acceptance(2).by_position() == [0.0, 0.0]

"""The reader of EAGLE-3 heads: every spelling gives the same head, and what cannot be settled is refused by name."""

import dataclasses
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.models.eagle3 import FC_NORMS, Eagle3Config, Eagle3Head
from eyas.models.eagle3_checkpoint import DraftCheckpoint, expected_shapes, untrained_head, write_head
from eyas.models.eagle3_reader import read_head
from eyas.models.layers import RopeSpec
from eyas.models.recipe import RECIPES, materialize
from eyas.models.speculator import Eagle3Speculator
from eyas.models.tiny_targets import build, open_checkpoint, random_tensors
from eyas.models.weights import TensorSource

V, LAYERS, WIDTH = 96, 8, 32  # the target
BOUNDARIES = (2, 4, 5)  # also the usual ones of 8 layers
OFFSETS = torch.tensor([0, 0, 3, 3, 3, 7, 11, 11, 40, 40, 41, 60, 60, 60, 60, 80])
TARGET_IDS = [0, 1, 5, 6, 7, 12, 17, 18, 48, 49, 51, 71, 72, 73, 74, 95]  # by hand: index + offset
BASE = Eagle3Config(
    vocab_size=V,
    draft_vocab_size=16,
    target_hidden_size=WIDTH,
    hidden_size=WIDTH,
    intermediate_size=40,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,  # not the width over the heads
    boundaries=BOUNDARIES,
    rms_eps=1e-5,
    max_positions=512,
)


def weights_of(config: Eagle3Config, seed: int = 0) -> dict[str, Tensor]:
    sources = random_tensors(Eagle3Head(config, 1), seed)
    return {name: source.tensor for name, source in sources.items()}


def tables(config: Eagle3Config = BASE, offsets: Tensor = OFFSETS) -> dict[str, Tensor]:
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(offsets)) + offsets] = True
    return {"d2t": offsets, "t2d": t2d}


def layer_settings(c: Eagle3Config) -> dict:
    return {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_eps,
        "attention_bias": c.attention_bias,
        "max_position_embeddings": c.max_positions,
        "rope_theta": c.rope.theta,
    }


def speculators(c: Eagle3Config = BASE) -> dict:
    """A speculators configuration, written out here so that no fault of the writer can hide one of the reader."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
        "transformer_layer_config": layer_settings(c),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": None if c.target_hidden_size == c.hidden_size else c.target_hidden_size,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.fc_norm == "concat",
        "fc_norm": c.fc_norm == "per_tap",
        "norm_output": c.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(c.boundaries),
        "tie_word_embeddings": False,
    }


def flat(c: Eagle3Config = BASE) -> dict:
    """As SafeAILab writes it: no taps, and no word on the norms."""
    return {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": c.draft_vocab_size, **layer_settings(c)}


def save(folder: Path, data: dict, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def read(folder: Path, **changes) -> DraftCheckpoint:
    sizes = dict(target_vocab_size=V, target_hidden_size=WIDTH, target_layers=LAYERS)
    return read_head(folder, **(sizes | changes))


def load(checkpoint: DraftCheckpoint, rows: int = 32) -> Eagle3Head:
    head = Eagle3Head(checkpoint.config, rows)
    materialize(head, "draft.", checkpoint.tensors, RECIPES["none"], torch.float32)
    head.d2t.copy_(checkpoint.d2t)
    return head


def behaviour(head: Eagle3Head) -> tuple[Tensor, ...]:
    """What a head computes on fixed inputs: features, normed output, feedback, and proposals where it has a head."""
    c = head.config
    generator = torch.Generator().manual_seed(5)
    taps = [torch.randn(1, 6, c.target_hidden_size, generator=generator) for _ in c.boundaries]
    embed = torch.randn(1, 6, c.hidden_size, generator=generator)
    features = head.combine(tuple(taps))
    normed, g = head.recompute(embed, features)
    proposals = () if head.lm_head is None else (head.to_target(head.lm_head(normed).argmax(-1)),)
    return features, normed, g, *proposals


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b))


def warnings_of(checkpoint: DraftCheckpoint) -> list[str]:
    return [note for note in checkpoint.notes if note.startswith("warning:")]


# --- Spellings (FIELD A10): one head, saved in each ---


def renamed(tensors: dict[str, Tensor], *rules: tuple[str, str]) -> dict[str, Tensor]:
    for pattern, new in rules:
        tensors = {re.sub(pattern, new, name): tensor for name, tensor in tensors.items()}
    return tensors


def without(data: dict, *keys: str) -> dict:
    return {key: value for key, value in data.items() if key not in keys}


def nested(data: dict, **changes) -> dict:
    return data | {"transformer_layer_config": data["transformer_layer_config"] | changes}


def old_rope(data: dict) -> dict:
    return nested(data, rope_theta=10000.0, rope_scaling=None, head_dim=16)


WHOLE = weights_of(BASE) | tables()
MIDLAYER = renamed(WHOLE, (r"^layers\.0\.", "midlayer."))
NEMO_EXTRAS = dict(
    architectures=["LlamaEagle3DraftModel"],
    model_type="qwen3",  # NeMo copies the target's configuration; its layer is Llama's all the same
    num_hidden_layers=LAYERS,
    layer_types=["full_attention"] * LAYERS,
    target_hidden_size=WIDTH,
    parallel_drafting=False,
    norm_output=False,
)
SPELLINGS = {
    "speculators": (speculators(), WHOLE),
    "speculators, no taps named": (without(speculators(), "eagle_aux_hidden_state_layer_ids"), WHOLE),
    "speculators, rope of transformers 4": (old_rope(speculators()), WHOLE),
    "speculators, rope of transformers 5": (
        nested(speculators(), rope_theta=None, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}),
        WHOLE,
    ),
    "speculators, 0.9 trainer": (
        nested(speculators(), layer_types=["full_attention"], use_sliding_window=False, sliding_window=None)
        | {"architectures": ["Eagle3DraftModel"], "speculators_version": "0.9.0", "dtype": "bfloat16"},
        WHOLE,
    ),
    "SafeAILab": (flat(), MIDLAYER),
    "SafeAILab, no rope_theta": (without(flat(), "rope_theta"), MIDLAYER),
    "flat, layers.0": (flat(), WHOLE),
    "flat, no t2d": (flat(), without(WHOLE, "t2d")),
    "SGLang": (
        flat()
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        },
        MIDLAYER,
    ),
    "ModelOpt": (
        flat()
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
            },
        },
        MIDLAYER,
    ),
    "vLLM": (
        flat() | {"architectures": ["Eagle3LlamaForCausalLM"], "eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
        renamed(WHOLE, (r"^(?!lm_head)", "model.")),
    ),
    "NeMo": (flat() | NEMO_EXTRAS, renamed(WHOLE, (r"^(?!lm_head|d2t|t2d)", "model."))),
    "nebius": (without(flat(), "draft_vocab_size") | {"truncated_vocab_size": 16}, WHOLE),
    "draft_model. prefix": (flat(), renamed(MIDLAYER, (r"^", "draft_model."))),
    "both prefixes": (flat(), renamed(WHOLE, (r"^", "draft_model.model."))),
    "draft_vocab_size null": (flat() | {"draft_vocab_size": None}, WHOLE),
    "int32 table": (flat(), WHOLE | {"d2t": OFFSETS.to(torch.int32), "t2d": WHOLE["t2d"].to(torch.uint8)}),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_the_same_head(name, tmp_path):
    reference = load(read(save(tmp_path / "reference", *SPELLINGS["speculators"])))
    checkpoint = read(save(tmp_path / "head", *SPELLINGS[name]))
    assert checkpoint.config == BASE
    assert same(behaviour(load(checkpoint)), behaviour(reference))
    assert checkpoint.d2t.dtype == torch.int64
    assert json.loads(json.dumps(checkpoint.identity)) == checkpoint.identity
    assert not warnings_of(checkpoint)


def test_every_container_is_the_same_head(tmp_path):
    reference = behaviour(load(read(save(tmp_path / "whole", flat(), WHOLE))))

    def folder(name: str) -> Path:
        save(tmp_path / name, flat(), {})
        (tmp_path / name / "model.safetensors").unlink()
        return tmp_path / name

    torch.save(WHOLE, folder("bin") / "pytorch_model.bin")
    torch.save(WHOLE, folder("old bin") / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    halves = [dict(list(WHOLE.items())[:7]), dict(list(WHOLE.items())[7:])]
    for suffix in ("safetensors", "bin"):
        stem = "model" if suffix == "safetensors" else "pytorch_model"
        target = folder(f"parts {suffix}")
        places = {}
        for i, half in enumerate(halves):
            file = target / f"{stem}-0000{i + 1}-of-00002.{suffix}"
            save_file(half, file) if suffix == "safetensors" else torch.save(half, file)
            places |= dict.fromkeys(half, file.name)
        (target / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": places}))
    for name in ("bin", "old bin", "parts safetensors", "parts bin"):
        checkpoint = read(tmp_path / name)
        assert same(behaviour(load(checkpoint)), reference), name
    assert len(checkpoint.identity["sha256"]) == 3  # config.json and two parts
    (tmp_path / "parts safetensors" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        read(tmp_path / "parts safetensors")


def test_weights_are_read_a_range_of_rows_at_a_time(tmp_path):
    checkpoint = read(save(tmp_path, speculators(), WHOLE))
    assert torch.equal(checkpoint.tensors["fc.weight"].read(3, 5), WHOLE["fc.weight"][3:5])
    assert checkpoint.identity["sha256"].keys() == {"config.json", "model.safetensors"}
    assert checkpoint.identity["made_for"] == "some/target"


FULL = replace(
    BASE, n_layers=2, fc_norm="per_tap", qk_norm=True, attention_bias=True, own_embed=True, boundaries=(1, 4, 8)
)


def test_later_layers_under_sglang_names(tmp_path):
    two = replace(BASE, n_layers=2)
    tensors = weights_of(two) | tables()
    reference = behaviour(load(read(save(tmp_path / "reference", flat(two), tensors))))
    hidden = renamed(tensors, (r"^layers\.1\.input_layernorm", "layers.1.hidden_norm"))
    old = renamed(hidden, (r"^layers\.0\.", "midlayer."), (r"^layers\.1\.", "additional_layers.0."))
    for name, spelled in (("hidden", hidden), ("old", old)):
        assert same(behaviour(load(read(save(tmp_path / name, flat(two), spelled)))), reference)


def test_legacy_names_of_the_tap_norms(tmp_path):
    config = replace(BASE, fc_norm="per_tap")
    tensors = weights_of(config) | tables()
    reference = behaviour(load(read(save(tmp_path / "new", flat() | {"fc_norm": True}, tensors))))
    rules = [(rf"^fc_norm\.{i}\.", f"aux_norm_{tap}.") for i, tap in enumerate(("low", "mid", "high"))]
    legacy = save(tmp_path / "old", flat() | {"eagle_config": {"use_aux_norm": True}}, renamed(tensors, *rules))
    assert same(behaviour(load(read(legacy))), reference)


# --- What the configuration says reaches the head (FIELD A5, G5) ---


def with_taps(config: Eagle3Config, **changes) -> tuple[dict, dict[str, Tensor]]:
    """A head of ``config`` changed, with the tensors of both forms equal where they share a name."""
    changed = replace(config, **changes)
    return speculators(changed), {**weights_of(changed), **tables()}


FLIPS = {
    "norm_before_residual": dict(norm_before_residual=True),
    "norm_before_fc": dict(fc_norm="concat"),
    "fc_norm": dict(fc_norm="per_tap"),
    "norm_output": dict(norm_output=True),
    "rope_theta": dict(rope=RopeSpec(500.0)),
    "rms_norm_eps": dict(rms_eps=0.1),
    "qk_norm": dict(qk_norm=True),
    "attention_bias": dict(attention_bias=True),
    "layers": dict(n_layers=2),
    "heads": dict(n_heads=8, head_dim=8),
}


@pytest.mark.parametrize("flip", FLIPS)
def test_each_setting_changes_what_the_head_computes(flip, tmp_path):
    plain = read(save(tmp_path / "plain", speculators(), WHOLE))
    data, tensors = with_taps(BASE, **FLIPS[flip])
    tensors |= {name: WHOLE[name] for name in tensors if name in WHOLE and tensors[name].shape == WHOLE[name].shape}
    flipped = read(save(tmp_path / "flipped", data, tensors))
    assert flipped.config == replace(BASE, **FLIPS[flip])
    assert not same(behaviour(load(plain))[:3], behaviour(load(flipped))[:3])


@pytest.mark.parametrize(
    "extra, spec",
    [
        (dict(rope_scaling={"type": "linear", "factor": 4.0}), RopeSpec(10000.0, "linear", 4.0)),
        (
            dict(
                rope_theta=None,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            ),
            RopeSpec(500000.0, "llama3", 8.0, 1.0, 1.0, 4.0, 64),
        ),
        (dict(rope_theta=250.0), RopeSpec(250.0)),
        (dict(rope_theta=None), RopeSpec(10000.0)),
    ],
)
def test_rope_is_the_drafts_own(extra, spec, tmp_path):
    checkpoint = read(save(tmp_path, nested(speculators(), **extra), WHOLE))
    assert checkpoint.config.rope == spec
    assumed = any(note.startswith("rope:") and "assumed" in note for note in checkpoint.notes)
    assert assumed == (extra == dict(rope_theta=None))


def test_rope_tables_by_formula(tmp_path):
    """Positions 0, 1 and 1000 against the formula (FIELD G5): half-split, all of head_dim, the draft's theta."""
    head = load(read(save(tmp_path, nested(speculators(), rope_theta=500.0), WHOLE)))
    cos, sin = head.rope(torch.tensor([0, 1, 1000]))
    for row, position in enumerate((0, 1, 1000)):
        for i in range(16):
            angle = position * 500.0 ** (-2 * (i % 8) / 16)
            assert cos[row, i].item() == pytest.approx(math.cos(angle), abs=2e-4)
            assert sin[row, i].item() == pytest.approx(math.sin(angle), abs=2e-4)


def test_sliding_window(tmp_path):
    sliding = dict(layer_types=["sliding_attention"], sliding_window=3, use_sliding_window=True)
    head = read(save(tmp_path / "a", nested(speculators(), **sliding), WHOLE))
    assert head.config.window == 3
    assert "attention: sliding window of 3 positions" in head.notes
    plain = behaviour(load(read(save(tmp_path / "b", speculators(), WHOLE))))
    normed, reference = behaviour(load(head))[1], plain[1]
    assert torch.equal(normed[:, :3], reference[:, :3])  # the first rows see everything in either
    assert not torch.allclose(normed[:, 3:], reference[:, 3:], atol=1e-3, rtol=0)
    idle = nested(speculators(), sliding_window=3, use_sliding_window=False)
    assert read(save(tmp_path / "c", idle, WHOLE)).config.window is None


def test_head_dim_null_is_width_over_heads(tmp_path):
    config = replace(BASE, head_dim=8)
    data = nested(speculators(config), head_dim=None)
    assert read(save(tmp_path, data, weights_of(config) | tables())).config == config


def test_norm_before_residual_default_by_format(tmp_path):
    absent = read(save(tmp_path / "a", without(speculators(), "norm_before_residual"), WHOLE))
    assert absent.config.norm_before_residual
    assert len(warnings_of(absent)) == 1 and "norm_before_residual" in warnings_of(absent)[0]
    plain = read(save(tmp_path / "b", flat(), WHOLE))
    assert not plain.config.norm_before_residual and not warnings_of(plain)
    assert any("norm_before_residual False (assumed" in note for note in plain.notes)
    assert read(save(tmp_path / "c", flat() | {"norm_before_residual": True}, WHOLE)).config.norm_before_residual


@pytest.mark.parametrize("value", [True, False])
def test_norm_output_is_ambiguous_in_a_flat_configuration(value, tmp_path):
    folder = save(tmp_path / "flat", flat() | {"norm_output": value}, WHOLE)
    with pytest.raises(
        ValueError, match=r"norm_output = (True|False) is ambiguous.*SpecForge up to 0\.2\.0.*remove the"
    ):
        read(folder)
    for choice in (True, False):
        assert read(folder, norm_output=choice).config.norm_output is choice
    assert read(save(tmp_path / "plain", flat(), WHOLE)).config.norm_output is False
    nemo = save(tmp_path / "nemo", flat() | NEMO_EXTRAS | {"norm_output": value}, WHOLE)
    assert read(nemo).config.norm_output is value


def test_biases_without_one_for_the_output(tmp_path):
    config = replace(BASE, attention_bias=True)
    tensors = weights_of(config) | tables()
    zero = tensors | {"layers.0.self_attn.o_proj.bias": torch.zeros(WIDTH)}
    whole = read(save(tmp_path / "zero", speculators(config), zero))
    bare = read(save(tmp_path / "bare", speculators(config), without(tensors, "layers.0.self_attn.o_proj.bias")))
    assert same(behaviour(load(whole)), behaviour(load(bare)))
    assert "biases: on q, k and v; the file has none for o_proj, taken as zero" in bare.notes
    vllm = save(tmp_path / "vllm", without(flat(config), "attention_bias") | {"bias": True}, zero)
    assert same(behaviour(load(read(vllm))), behaviour(load(whole)))
    idle = read(save(tmp_path / "idle", without(flat(), "attention_bias") | {"bias": True}, WHOLE))
    assert idle.config == BASE and any(note.startswith("bias: true, without effect") for note in idle.notes)


# --- Taps (FIELD B) ---


@pytest.mark.parametrize(
    "data, boundaries, spelled",
    [
        (speculators(replace(BASE, boundaries=(1, 4, 8))), (1, 4, 8), "after layers 0, 3, 7 .*listed as boundaries"),
        (flat() | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}}, (2, 5, 8), "one added"),
        (
            flat() | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}},
            (1, 4, 8),
            "8 can only be a boundary",
        ),
        (flat(), (2, 4, 5), "after layers 1, 3, 4 .*assumed: the configuration names none"),
        (
            flat() | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
            (0, 1, 2),
            "the scaled embedding and after layers 0, 1",
        ),
        (
            flat()
            | {
                "eagle_aux_hidden_state_layer_ids": [3, 4, 6],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]},
            },
            (3, 4, 6),
            "listed as boundaries",
        ),
    ],
)
def test_tap_conventions(data, boundaries, spelled, tmp_path):
    checkpoint = read(save(tmp_path, data, WHOLE))
    assert checkpoint.config.boundaries == boundaries
    assert checkpoint.identity["boundaries"] == list(boundaries)
    assert checkpoint.identity["taps"] == checkpoint.config.taps()
    assert re.match(rf"taps: .*{spelled}", checkpoint.notes[1])


def test_a_list_of_the_other_convention_is_pointed_out(tmp_path):
    lifted = read(save(tmp_path / "a", speculators(replace(BASE, boundaries=(1, 3, 4))), WHOLE))
    assert lifted.config.boundaries == (1, 3, 4)
    assert any("are the usual [2, 4, 5] less one" in note for note in warnings_of(lifted))
    inner = flat() | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}
    assert any("the usual boundaries" in note for note in warnings_of(read(save(tmp_path / "b", inner, WHOLE))))


@pytest.mark.parametrize("layers", range(1, 7))
def test_shallow_targets_have_no_usual_taps(layers, tmp_path):
    folder = save(tmp_path, flat(), WHOLE)
    with pytest.raises(
        ValueError, match=f"names no taps; the default taps of a target of {layers} layers.*layer_ids to"
    ):
        read(folder, target_layers=layers)


@pytest.fixture(scope="module")
def tiny():
    """A tiny target, and its residual streams at every boundary for five tokens, taken by hooks."""
    checkpoint = open_checkpoint(None, "gemma3", n_layers=6)
    target = build(checkpoint.config, 32, torch.float32)
    materialize(target, "target.", checkpoint.tensors, RECIPES["none"], torch.float32, checkpoint.config.norm_offset)
    tokens = torch.tensor([[2, 17, 90, 4, 33]])
    streams = []
    hooks = [target.layers[0].register_forward_pre_hook(lambda _, args: streams.append(args[0]))]
    hooks += [layer.register_forward_hook(lambda _, args, out: streams.append(out)) for layer in target.layers]
    target(tokens, torch.arange(5), ())
    for hook in hooks:
        hook.remove()
    return target, tokens, streams


@pytest.mark.parametrize("ids, boundaries", [([1, 2, 4], (2, 3, 5)), ([0, 1, 3], (1, 2, 4)), ([1, 2, 6], (1, 2, 6))])
def test_features_come_from_the_streams_that_the_list_means(ids, boundaries, tiny, tmp_path):
    """Against hooks on the eager target; a list shifted by one gives other features (FIELD B2, B3)."""
    target, tokens, streams = tiny
    config = replace(BASE, vocab_size=128, target_hidden_size=48, hidden_size=48, boundaries=(1, 2, 3))
    data = flat(config) | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    tensors = weights_of(config) | tables(config)
    sizes = dict(target_vocab_size=128, target_hidden_size=48, target_layers=6)
    head = load(read(save(tmp_path, data, tensors), **sizes))
    _, features = Eagle3Speculator(target, head).prefill(tokens, torch.arange(5))
    meant = torch.cat([streams[b] for b in boundaries], dim=-1) @ tensors["fc.weight"].T
    torch.testing.assert_close(features, meant, atol=1e-4, rtol=1e-5)
    for shift in (-1, 1):
        moved = [streams[min(max(b + shift, 0), 6)] for b in boundaries]
        assert (features - torch.cat(moved, dim=-1) @ tensors["fc.weight"].T).abs().max() > 0.1


@pytest.mark.parametrize("boundaries", [(3,), (1, 5), (1, 2, 6), (0, 2, 3, 5)])
@pytest.mark.parametrize("fc_norm", FC_NORMS)
def test_any_number_of_taps_and_another_width(boundaries, fc_norm, tiny, tmp_path):
    """Target 48 wide, draft 32, with its own embedding (FIELD A6)."""
    target, tokens, _ = tiny
    config = replace(
        BASE, vocab_size=128, target_hidden_size=48, own_embed=True, boundaries=boundaries, fc_norm=fc_norm
    )
    folder = save(tmp_path, speculators(config), weights_of(config) | tables(config))
    checkpoint = read(folder, target_vocab_size=128, target_hidden_size=48, target_layers=6)
    assert checkpoint.config == config
    speculator = Eagle3Speculator(target, load(checkpoint))
    _, features = speculator.prefill(tokens, torch.arange(5))
    ids, g = speculator.draft_decode(tokens, features, torch.arange(5))
    assert features.shape == g.shape == (1, 5, 32) and ids.shape == (1, 5)


# --- Vocabulary (FIELD A7, A8, A11) ---


def test_draft_ids_map_to_the_ids_worked_out_by_hand(tmp_path):
    head = load(read(save(tmp_path, flat(), WHOLE)))
    assert head.to_target(torch.arange(16)).tolist() == TARGET_IDS


def test_equal_vocabulary_without_tables_is_identity(tmp_path):
    config = replace(BASE, draft_vocab_size=V)
    checkpoint = read(save(tmp_path / "own", flat(config), weights_of(config)))
    assert checkpoint.config == config
    assert load(checkpoint).to_target(torch.arange(V)).tolist() == list(range(V))
    assert "vocabulary: all 96 ids of the target, no table (identity)" in checkpoint.notes
    zeros = read(
        save(tmp_path / "zeros", flat(config), weights_of(config) | {"d2t": torch.zeros(V, dtype=torch.int64)})
    )
    assert same(behaviour(load(zeros)), behaviour(load(checkpoint))) and not warnings_of(zeros)


def test_head_without_lm_head_shares_the_targets(tmp_path):
    config = replace(BASE, draft_vocab_size=V, own_head=False)
    for name, size in (("null", None), ("equal", V)):
        checkpoint = read(save(tmp_path / name, flat(config) | {"draft_vocab_size": size}, weights_of(config)))
        assert checkpoint.config == config
        assert any(note.startswith("lm_head: the target's (the file has none)") for note in checkpoint.notes)


def test_a_table_that_was_never_filled_is_pointed_out(tmp_path):
    checkpoint = read(save(tmp_path, flat(), WHOLE | tables(offsets=torch.zeros(16, dtype=torch.int64))))
    assert any("d2t is all zeros" in note for note in warnings_of(checkpoint))


# --- Embeddings (FIELD A2, A3) ---


def test_whose_embedding_is_used(tmp_path):
    target = torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(3))
    trained = target + 0.3 * torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(4))
    random = torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(5))
    one_row_off = target.clone()
    one_row_off[-1, -1] += 1
    key = "embed_tokens.weight"
    cases = {
        "absent": (None, False, r"embedding: the target's \(the file has none\)", 0),
        "equal": (target, False, r"embedding: the target's \(the file's equals it", 0),
        "rounded": (target.bfloat16(), False, r"embedding: the target's \(the file's equals it", 0),
        "trained": (trained, True, r"embedding: the file's own \(mean cosine with the target's 0\.9\d+\)", 0),
        "near": (one_row_off, True, r"embedding: the file's own \(.*before it was quantised", 0),
        "random": (random, True, r"embedding: the file's own", 1),
    }
    for name, (table, own, note, warned) in cases.items():
        tensors = WHOLE if table is None else WHOLE | {key: table}
        checkpoint = read(save(tmp_path / name, speculators(), tensors), target_embed=TensorSource(target))
        assert checkpoint.config.own_embed is own, name
        assert (key in checkpoint.tensors) is own, name
        assert any(re.match(note, line) for line in checkpoint.notes), (name, checkpoint.notes)
        assert len(warnings_of(checkpoint)) == warned, name
        head = load(checkpoint)
        assert (head.embed_tokens is not None) is own
        if own:
            assert torch.equal(head.embed_tokens.weight, table)
    unknown = read(save(tmp_path / "unknown", speculators(), WHOLE | {key: target}))
    assert unknown.config.own_embed and any("no table of the target" in note for note in unknown.notes)


def test_own_tables_are_the_ones_that_propose(tiny, tmp_path):
    """A head and an embedding of its own decide the proposals, not the target's (FIELD A3)."""
    target, tokens, _ = tiny
    config = replace(BASE, vocab_size=128, target_hidden_size=48, hidden_size=48, boundaries=(1, 2, 3), own_embed=True)
    sizes = dict(target_vocab_size=128, target_hidden_size=48, target_layers=6)
    tensors = weights_of(config) | tables(config)
    outputs = {}
    for name, changes in {
        "plain": {},
        "head": {"lm_head.weight": -tensors["lm_head.weight"]},
        "embed": {"embed_tokens.weight": tensors["embed_tokens.weight"].flip(0)},
    }.items():
        folder = save(tmp_path / name, speculators(config), tensors | changes)
        head = load(read(folder, **sizes, target_embed=TensorSource(target.embed_tokens.weight)))
        speculator = Eagle3Speculator(target, head)
        _, features = speculator.prefill(tokens, torch.arange(5))
        outputs[name] = speculator.draft_decode(tokens, features, torch.arange(5))
    assert not torch.equal(outputs["plain"][0], outputs["head"][0])
    assert torch.equal(outputs["plain"][1], outputs["head"][1])
    assert not torch.equal(outputs["plain"][1], outputs["embed"][1])


# --- What is missing, left over or contradictory (FIELD A4, A5) ---

FULL_TENSORS = weights_of(FULL) | tables(FULL)
FALLBACKS = {
    "embed_tokens.weight": "embedding: the target's (the file has none)",
    "t2d": "vocabulary: 16 of the target's 96 ids, d2t holds offsets, with no t2d to check them by",
}


@pytest.mark.parametrize("name", FULL_TENSORS)
def test_a_deleted_tensor_is_named_or_has_a_documented_fallback(name, tmp_path):
    folder = save(tmp_path, speculators(FULL), without(FULL_TENSORS, name))
    if name in FALLBACKS:
        assert FALLBACKS[name] in read(folder).notes
    else:
        with pytest.raises(ValueError, match=re.escape(name)):
            read(folder)


def test_deleting_nothing_reads(tmp_path):
    """The counterpart of the deletions: with all tensors there, that head does read."""
    assert read(save(tmp_path, speculators(FULL), FULL_TENSORS)).config == FULL


@pytest.mark.parametrize("name", ["fc.bias", "input_norm.weight", "fc_norm.0.weight", "mask_hidden", "layers.0.extra"])
def test_a_tensor_without_a_place_is_named(name, tmp_path):
    folder = save(tmp_path, speculators(), WHOLE | {name: torch.ones(3)})
    with pytest.raises(ValueError, match=f"without a place: {re.escape(name)}"):
        read(folder)


def test_unknown_keys_are_listed(tmp_path):
    data = nested(speculators(), initializer_range=0.02, mystery=3) | {"colour": "red"}
    notes = read(save(tmp_path, data, WHOLE)).notes
    assert "warning: unknown configuration keys, not used: colour, transformer_layer_config.mystery" in notes
    assert any(note.startswith("configuration keys without effect") and "initializer_range" in note for note in notes)


def flat_with(**changes) -> dict:
    return flat() | changes


REFUSALS = {
    # name: (configuration, tensors, what the message must say)
    "vocabulary": (flat_with(vocab_size=100), WHOLE, r"vocabulary of 100 \(vocab_size\), this target has 96"),
    "mask of another vocabulary": (
        flat_with(vocab_size=None),
        WHOLE | {"t2d": torch.ones(90, dtype=torch.bool)},
        r"vocabulary of 90 \(t2d\), this target has 96",
    ),
    "embedding of another vocabulary": (
        flat_with(vocab_size=None),
        WHOLE | {"embed_tokens.weight": torch.ones(90, WIDTH)},
        r"vocabulary of 90 \(embed_tokens.weight\), this target has 96",
    ),
    "draft vocabulary": (flat_with(draft_vocab_size=20), WHOLE, r"contradictory: .*'draft_vocab_size': 20.*16"),
    "no table": (flat(), without(WHOLE, "d2t", "t2d"), r"'d2t' is missing.* 16 of the target's 96"),
    "no lm_head": (flat(), without(WHOLE, "lm_head.weight"), r"'lm_head.weight' is missing.* 16 of the target's 96"),
    "absolute, by the mask": (flat(), WHOLE | {"d2t": torch.tensor(TARGET_IDS)}, r"absolute.*Subtract arange\(16\)"),
    "absolute, no mask": (
        flat(),
        without(WHOLE, "t2d") | {"d2t": torch.tensor(TARGET_IDS)},
        r"absolute.*add the mask t2d",
    ),
    "a range": (flat(), WHOLE | {"d2t": torch.arange(16)}, r"maps to 16 target ids that start \[0, 2, 4, 6\]"),
    "a range, no mask": (flat(), without(WHOLE, "t2d") | {"d2t": torch.arange(16)}, r"reads as absolute"),
    "mask of another head": (flat(), WHOLE | {"t2d": WHOLE["t2d"].roll(1)}, r"t2d marks 16 that start \[0, 1, 2, 6\]"),
    "mask that is none": (flat(), WHOLE | {"t2d": torch.arange(V)}, r"expected a mask of 96"),
    "ids past the end": (
        flat(),
        without(WHOLE, "t2d") | {"d2t": OFFSETS + (torch.arange(16) > 14)},
        r"target ids from 0 to 96; allowed: 0 to 95",
    ),
    "negative ids": (flat(), without(WHOLE, "t2d") | {"d2t": OFFSETS - 1}, r"target ids from -1 to 94"),
    "ids out of order": (
        flat(),
        without(WHOLE, "t2d") | {"d2t": OFFSETS.clone().index_fill_(0, torch.tensor([3]), -1)},
        r"draft id 2 and the next to target ids \[5, 2\]",
    ),
    "a float table": (flat(), without(WHOLE, "t2d") | {"d2t": OFFSETS.float()}, r"d2t is torch.float32 \[16\]"),
    "target width": (flat_with(target_hidden_size=48), WHOLE, r"target of width 48, this one has 32"),
    "fc of another target": (flat(), WHOLE | {"fc.weight": torch.ones(32, 144)}, r"reads 144 .* 3 taps .* are 96"),
    "fc for four taps": (flat(), WHOLE | {"fc.weight": torch.ones(32, 128)}, r"reads 128 .* 3 taps"),
    "number of taps": (flat_with(num_aux_hidden_states=4), WHOLE, r"num_aux_hidden_states is 4, but the 3 taps"),
    "number of taps, as fc has it": (
        flat_with(num_aux_hidden_states=4),
        WHOLE | {"fc.weight": torch.ones(32, 128)},
        r"fc.weight reads 128 features and num_aux_hidden_states is 4, but the 3 taps \[2, 4, 5\] \(assumed",
    ),
    "not a head": (flat(), without(WHOLE, "fc.weight"), r"'fc.weight' is missing; is this an EAGLE-3 head"),
    "q_proj": (
        flat(),
        WHOLE | {"layers.0.self_attn.q_proj.weight": torch.ones(64, 32)},
        r"q_proj.weight reads 32 features; .* 64, twice hidden_size 32",
    ),
    "a shape": (flat_with(intermediate_size=48), WHOLE, r"mlp\.\w+_proj.weight' has shape \[.*40.*48"),
    "quantised": (
        flat(),
        WHOLE | {"norm.weight": torch.ones(32, dtype=torch.int8)},
        r"'norm.weight' is torch.int8; allowed: torch.float16",
    ),
    "taps not ascending": (flat_with(eagle_aux_hidden_state_layer_ids=[4, 2, 5]), WHOLE, r"\[4, 2, 5\].*ascending"),
    "taps twice": (flat_with(eagle_aux_hidden_state_layer_ids=[2, 2, 5]), WHOLE, r"\[2, 2, 5\].*distinct"),
    "taps past the end": (flat_with(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), WHOLE, r"8 layers; .*from 0 to 8"),
    "taps that are no numbers": (flat_with(eagle_aux_hidden_state_layer_ids="2,4,5"), WHOLE, r"expected a list"),
    "two lists of taps": (
        flat_with(
            eagle_aux_hidden_state_layer_ids=[2, 4, 5], eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
        ),
        WHOLE,
        r"boundaries \[2, 4, 5\].*makes \[3, 5, 6\]",
    ),
    "unknown taps": (flat_with(target_layer_ids=[1, 2, 3]), WHOLE, r"target_layer_ids = \[1, 2, 3\] is unknown"),
    "unknown flag": (flat_with(norm_everything=True), WHOLE, r"norm_everything = True is unknown"),
    "flag that is none": (flat_with(fc_norm="yes"), WHOLE, r"fc_norm = 'yes'; expected true or false"),
    "both norms": (flat_with(fc_norm=True, norm_before_fc=True), WHOLE, r"both true"),
    "tap norms by two names": (flat_with(fc_norm=True, use_aux_norm=False), WHOLE, r"contradict"),
    "a setting twice": (
        speculators() | {"vocab_size": 100},
        WHOLE,
        r"vocab_size = 100 and transformer_layer_config.vocab_size = 96 contradict",
    ),
    "norm flag without the norm": (flat_with(fc_norm=True), WHOLE, r"Missing: fc_norm.0.weight, fc_norm.1.weight"),
    "activation": (flat_with(hidden_act="gelu"), WHOLE, r"hidden_act = 'gelu' is not supported; allowed: 'silu'"),
    "parallel drafting": (flat_with(parallel_drafting=True), WHOLE, r"parallel_drafting = True is not supported"),
    "without taps": (flat_with(eagle_config={"use_aux_hidden_state": False}), WHOLE, r"use_aux_hidden_state = False"),
    "yarn": (
        flat_with(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        WHOLE,
        r"'yarn' is not supported.*allowed: default, linear, llama3",
    ),
    "rope a layer kind": (
        flat_with(rope_parameters={"full_attention": {"rope_theta": 1.0}}),
        WHOLE,
        r"not one set of rotary parameters",
    ),
    "rope parameter unknown": (
        flat_with(rope_scaling={"rope_type": "linear", "factor": 2.0, "beta": 1.0}),
        WHOLE,
        r"exactly, as positive numbers: factor",
    ),
    "rope parameter missing": (flat_with(rope_scaling={"type": "linear"}), WHOLE, r"exactly.*: factor"),
    "rope twice": (
        flat_with(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
        WHOLE,
        r"rope_parameters and rope_scaling contradict",
    ),
    "theta twice": (flat_with(rope_parameters={"rope_theta": 500.0}), WHOLE, r"theta 500.0 and 10000.0"),
    "partial rotation": (flat_with(partial_rotary_factor=0.5), WHOLE, r"partial_rotary_factor = 0.5"),
    "mixed attention": (
        flat_with(layer_types=["sliding_attention", "full_attention"], sliding_window=4),
        WHOLE,
        r"for 1 draft layers; allowed: one entry a layer",
    ),
    "window without a width": (flat_with(layer_types=["sliding_attention"]), WHOLE, r"sliding_window is None"),
    "window switched off": (
        flat_with(layer_types=["sliding_attention"], sliding_window=4, use_sliding_window=False),
        WHOLE,
        r"use_sliding_window False",
    ),
    "window without kinds": (flat_with(use_sliding_window=True, sliding_window=4), WHOLE, r"layer_types is absent"),
    "layers": (flat_with(num_hidden_layers=2), WHOLE, r"num_hidden_layers is 2, the file has 1"),
    "kind of layer": (flat_with(model_type="llama4_text"), WHOLE, r"'llama4_text'.*allowed: llama, qwen3"),
    "q norms missing": (flat_with(model_type="qwen3"), WHOLE, r"Missing: layers.0.self_attn.k_norm.weight"),
    "biases missing": (flat_with(attention_bias=True), WHOLE, r"Missing: .*q_proj.bias"),
    "heads": (flat_with(num_attention_heads=3), WHOLE, r"3 query heads cannot share 2"),
    "no head_dim": (flat_with(num_attention_heads=5, head_dim=None), WHOLE, r"5 heads do not divide a width of 32"),
    "no width": (flat_with(hidden_size=None), WHOLE, r"has no 'hidden_size'"),
    "a number that is none": (flat_with(intermediate_size=0), WHOLE, r"intermediate_size = 0; expected a positive int"),
    "two spellings of a tensor": (
        flat(),
        WHOLE | {"midlayer.hidden_norm.weight": torch.ones(32)},
        r"two spellings of 'layers.0.hidden_norm.weight'",
    ),
    "tied head": (
        flat(replace(BASE, draft_vocab_size=V)) | {"tie_word_embeddings": True},
        without(WHOLE, "lm_head.weight", "d2t", "t2d"),
        r"tie_word_embeddings is true",
    ),
    "peagle": (speculators() | {"speculators_model_type": "peagle"}, WHOLE, r"kind peagle; allowed: eagle3"),
    "dflash": (speculators() | {"speculators_model_type": "dflash"}, WHOLE, r"kind dflash"),
    "mtp": (speculators() | {"speculators_model_type": "mtp"}, WHOLE, r"kind mtp"),
    "PEagleDraftModel": (flat_with(architectures=["PEagleDraftModel"]), WHOLE, r"kind PEagleDraftModel"),
    "another algorithm": (speculators() | {"speculators_config": {"algorithm": "eagle"}}, WHOLE, r"kind eagle;"),
    "no layer": (without(speculators(), "transformer_layer_config"), WHOLE, r"needs the object 'transformer_layer"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_is_wrong(name, tmp_path):
    data, tensors, message = REFUSALS[name]
    folder = save(tmp_path, data, tensors)
    with pytest.raises(ValueError, match=message) as error:
        read(folder)
    assert str(error.value).startswith(str(folder))


def test_another_width_needs_its_own_tables(tmp_path):
    narrow = replace(BASE, hidden_size=16, own_embed=True)
    tensors = weights_of(narrow) | tables()
    assert read(save(tmp_path / "whole", speculators(narrow), tensors)).config == narrow
    folder = save(tmp_path / "bare", speculators(narrow), without(tensors, "embed_tokens.weight"))
    with pytest.raises(ValueError, match=r"'embed_tokens.weight' is missing.*it is 32 wide, the head 16"):
        read(folder)


def test_files_that_are_not_a_head(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        read(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        read(empty)
    (empty / "config.json").write_text(json.dumps(flat()))
    with pytest.raises(FileNotFoundError, match=r"no weights, found config\.json; expected model\.safetensors"):
        read(empty)
    for name in ("model.safetensors", "pytorch_model.bin"):
        for content in ("", "version https://git-lfs.github.com/spec/v1\n"):
            (empty / name).write_text(content)
            with pytest.raises(ValueError, match=rf"{name} cannot be read as weights .*git-lfs"):
                read(empty)
        (empty / name).unlink()
    torch.save({"model": WHOLE}, empty / "pytorch_model.bin")
    with pytest.raises(ValueError, match="plain dictionary of tensors"):
        read(empty)
    (empty / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read(empty)


# --- Writing ---


def head_configs() -> st.SearchStrategy[Eagle3Config]:
    ropes = st.one_of(
        st.builds(RopeSpec, st.sampled_from([10000.0, 5e5])),
        st.builds(RopeSpec, st.just(1e6), st.just("linear"), st.sampled_from([2.0, 8.0])),
        st.builds(RopeSpec, st.just(5e5), st.just("llama3"), st.just(8.0), original_max=st.sampled_from([512, 8192])),
    )

    @st.composite
    def build_config(draw):
        width, reduced, shared_head = draw(st.sampled_from([16, 32])), draw(st.booleans()), draw(st.booleans())
        same_width = width == WIDTH
        return Eagle3Config(
            vocab_size=V,
            draft_vocab_size=16 if reduced else V,
            target_hidden_size=WIDTH,
            hidden_size=width,
            intermediate_size=8,
            n_heads=2,
            n_kv_heads=draw(st.sampled_from([1, 2])),
            head_dim=8,
            boundaries=tuple(sorted(draw(st.sets(st.integers(0, LAYERS), min_size=1, max_size=4)))),
            n_layers=draw(st.integers(1, 3)),
            rms_eps=draw(st.sampled_from([1e-5, 1e-6])),
            rope=draw(ropes),
            window=draw(st.sampled_from([None, 8])),
            norm_before_residual=draw(st.booleans()),
            fc_norm=draw(st.sampled_from(FC_NORMS)),
            norm_output=draw(st.booleans()),
            own_embed=not same_width or draw(st.booleans()),
            own_head=reduced or not same_width or not shared_head,
            qk_norm=draw(st.booleans()),
            attention_bias=draw(st.booleans()),
            max_positions=draw(st.sampled_from([None, 2048])),
        )

    return build_config()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    config=head_configs(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    max_file_bytes=st.sampled_from([1, 40_000, 1 << 30]),
)
def test_written_heads_read_back_the_same(config, dtype, max_file_bytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads") / "head"
    tensors = weights_of(config)
    offsets = OFFSETS if config.draft_vocab_size == 16 else torch.zeros(V, dtype=torch.int64)
    write_head(folder, config, tensors, offsets, dtype, target_name="some/target", max_file_bytes=max_file_bytes)
    checkpoint = read(folder)
    assert checkpoint.config == config
    assert torch.equal(checkpoint.d2t, offsets)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensors[name].read(), tensor.to(dtype)), name
    assert checkpoint.identity["made_for"] == "some/target" and not [
        n for n in warnings_of(checkpoint) if "usual" not in n
    ]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["head"]  # nothing left of the work in progress


def test_large_heads_are_written_in_parts(tmp_path):
    tensors = weights_of(BASE)
    most = max(tensor.nbytes // 2 for tensor in tensors.values())
    write_head(tmp_path / "head", BASE, tensors, OFFSETS, max_file_bytes=most)
    parts = sorted((tmp_path / "head").glob("model-*.safetensors"))
    sizes = [sum(t.nbytes for t in load_file(part).values()) for part in parts]
    assert len(parts) > 1 and max(sizes) <= most < sizes[0] + sizes[1]
    assert not (tmp_path / "head" / "model.safetensors").exists()


def test_every_setting_survives_writing_and_reading(tmp_path):
    """A head in which nothing has its default value, so that a field that is not written, or not read, shows."""
    config = replace(
        BASE,
        draft_vocab_size=V,
        boundaries=(1, 8),
        n_layers=2,
        rope=RopeSpec(500.0, "llama3", 8.0, low_freq_factor=2.0, high_freq_factor=5.0, original_max=64),
        window=8,
        norm_before_residual=True,
        fc_norm="per_tap",
        norm_output=True,
        own_embed=True,
        own_head=False,
        qk_norm=True,
        attention_bias=True,
    )
    kept = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) == f.default]
    assert not kept
    write_head(tmp_path / "head", config, weights_of(config), torch.zeros(V, dtype=torch.int64))
    assert read(tmp_path / "head").config == config
    layer = json.loads((tmp_path / "head" / "config.json").read_text())["transformer_layer_config"]
    assert layer["rope_parameters"] == {"rope_theta": 500.0, **layer["rope_scaling"]}  # for transformers 5, and before


def test_the_writer_refuses_what_it_cannot_keep(tmp_path):
    tensors = weights_of(BASE)
    with pytest.raises(ValueError, match=r"misshapen for this configuration: norm\.weight"):
        write_head(tmp_path / "a", BASE, without(tensors, "norm.weight"), OFFSETS)
    with pytest.raises(ValueError, match=r"misshapen for this configuration: norm\.weight"):
        write_head(tmp_path / "a", BASE, tensors | {"norm.weight": torch.ones(3)}, OFFSETS)
    with pytest.raises(ValueError, match="target ids from 0 to 110"):
        write_head(tmp_path / "a", BASE, tensors, torch.tensor(TARGET_IDS))
    with pytest.raises(ValueError, match=r"cannot be written as torch\.int8"):
        write_head(tmp_path / "a", BASE, tensors, OFFSETS, torch.int8)
    with pytest.raises(ValueError, match="rope kind 'proportional' cannot be written"):
        write_head(tmp_path / "a", replace(BASE, rope=RopeSpec(1e4, "proportional", partial=0.25)), tensors, OFFSETS)
    assert not list(tmp_path.iterdir())
    (tmp_path / "b").mkdir()
    write_head(tmp_path / "b", BASE, tensors, OFFSETS)  # an empty folder is as good as none
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        write_head(tmp_path / "b", BASE, tensors, OFFSETS)


# --- Without training ---


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6, 7, 18])
def test_untrained_heads_fit_their_target(layers):
    embed = torch.randn(128, 48, generator=torch.Generator().manual_seed(1))
    sizes = dict(target_vocab_size=128, target_hidden_size=48, target_layers=layers, target_embed=TensorSource(embed))
    checkpoint = untrained_head(**sizes)
    config = checkpoint.config
    assert config.boundaries[-1] <= layers and config.boundaries[0] >= 1
    assert (config.boundaries == (2, 9, 15)) == (layers == 18)
    assert len(config.boundaries) == min(3, layers)
    assert config.head_dim == 16 and config.draft_vocab_size == 64
    head = load(checkpoint)
    ids = head.to_target(torch.arange(64))
    assert ids.tolist() == [i for i in range(128) if i // 8 % 2]  # every other block of 8
    assert torch.equal(head.lm_head.weight, embed[ids])
    assert "UNTRAINED" in checkpoint.notes[0] and "almost never be accepted" in checkpoint.notes[0]
    assert checkpoint.notes[1].startswith(f"taps: {config.taps()}")
    assert same(behaviour(head), behaviour(load(untrained_head(**sizes))))
    assert not same(behaviour(head), behaviour(load(untrained_head(**sizes, seed=1))))


def test_untrained_head_for_gemma3_270m():
    class Zeros:
        shape = (262144, 640)

        def read(self, start: int = 0, stop: int | None = None) -> Tensor:
            return torch.zeros(262144 if stop is None else stop - start, 640)

    sizes = dict(target_vocab_size=262144, target_hidden_size=640, target_layers=18)
    config = untrained_head(**sizes, target_embed=Zeros()).config
    assert (config.hidden_size, config.n_heads, config.n_kv_heads, config.head_dim) == (640, 4, 1, 256)
    assert (config.intermediate_size, config.draft_vocab_size, config.boundaries) == (2048, 16384, (2, 9, 15))
    assert config.fc_norm == "per_tap" and config.norm_output and config.norm_before_residual


def test_untrained_head_with_chosen_taps_and_vocabulary(tmp_path):
    embed = torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(1))
    sizes = dict(target_vocab_size=V, target_hidden_size=WIDTH, target_layers=LAYERS, target_embed=TensorSource(embed))
    checkpoint = untrained_head(**sizes, boundaries=[1, 8], ids=torch.tensor(TARGET_IDS))
    assert checkpoint.config.boundaries == (1, 8) and torch.equal(checkpoint.d2t, OFFSETS)
    assert torch.equal(checkpoint.tensors["lm_head.weight"].read(2, 9), embed[TARGET_IDS[2:9]])
    tensors = {name: source.read() for name, source in checkpoint.tensors.items()}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected_shapes(checkpoint.config)
    write_head(tmp_path / "head", checkpoint.config, tensors, checkpoint.d2t, torch.float32)
    assert same(behaviour(load(read(tmp_path / "head"))), behaviour(load(checkpoint)))
    with pytest.raises(ValueError, match="must ascend"):
        untrained_head(**sizes, ids=torch.tensor([5, 3]))
    with pytest.raises(ValueError, match=r"target_embed has shape \[96, 32\], expected \[96, 48\]"):
        untrained_head(**sizes | {"target_hidden_size": 48})


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(data, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("eyas.models.eagle3_checkpoint.save_file", full)
    tensors = weights_of(BASE)
    with pytest.raises(OSError, match=r"head could not be written: .*No space left on device"):
        write_head(tmp_path / "head", BASE, tensors, OFFSETS)
    assert not list(tmp_path.iterdir())

"""Hugging Face folders: both generations of configuration, names, shards, heads, special ids, templates, refusals."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gemma import COMMON, FAMILIES, OWN, WINDOW, decoder, make_case, our_run
from transformers import AutoConfig

from eyas.models.gemma import GemmaConfig, GemmaLayer
from eyas.models.gemma_targets import open_checkpoint
from eyas.models.hf_reader import open_folder
from eyas.models.layers import RopeSpec
from eyas.models.target import Checkpoint, TokenizerSource

LAYER_TYPES = ["sliding_attention"] * 5 + ["full_attention"]
# The configuration that Gemma 3 4B was published with, its text part complete: the rest is the class's defaults.
GEMMA3_4B = {
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}
GEMMA3_270M = {
    "model_type": "gemma3_text",
    "_sliding_window_pattern": 6,
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
}
GEMMA3_270M_NEW = {key: value for key, value in GEMMA3_270M.items() if "rope" not in key} | {
    "layer_types": LAYER_TYPES * 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
GEMMA4_31B = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "layer_types": LAYER_TYPES * 10,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return make_case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def folder(case, tmp_path):
    """A copy of the case's folder, free to be changed."""
    shutil.copytree(case.folder, tmp_path / "copy")
    return tmp_path / "copy"


def edit(path: Path, **changes) -> None:
    """Changes keys of a JSON object; a value of ``...`` removes the key."""
    data = json.loads(path.read_text()) if path.exists() else {}
    data = {key: value for key, value in {**data, **changes}.items() if value is not ...}
    path.write_text(json.dumps(data))


def opened(tmp_path: Path, values: dict) -> Checkpoint:
    """What the reader makes of a configuration; weights are checked later, so one tensor is enough."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"model.embed_tokens.weight": torch.zeros(1, 1)}, tmp_path / "model.safetensors")
    return open_folder(tmp_path)


def config_of(tmp_path: Path, values: dict) -> GemmaConfig:
    return opened(tmp_path, values).config


def by_transformers(values: dict) -> GemmaConfig:
    """The same from transformers' own reading of it."""
    c = AutoConfig.for_model(**values).get_text_config()
    gemma4 = c.model_type == "gemma4_text"

    def layer(i: int, kind: str) -> GemmaLayer:
        own, parameters = (c.per_layer_config[i] if gemma4 else c), c.rope_parameters[kind]
        return GemmaLayer(
            n_heads=c.num_attention_heads,
            n_kv_heads=own.num_key_value_heads,
            head_dim=own.head_dim,
            rope=RopeSpec(
                parameters["rope_theta"],
                parameters["rope_type"],
                parameters.get("factor", 1.0),
                parameters.get("partial_rotary_factor", 1.0),
            ),
            window=c.sliding_window if kind == "sliding_attention" else None,
            k_eq_v=gemma4 and c.attention_k_eq_v and kind == "full_attention",
        )

    return GemmaConfig(
        family="gemma4" if gemma4 else "gemma3",
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        layers=tuple(layer(i, kind) for i, kind in enumerate(c.layer_types)),
        attn_scale=1.0 if gemma4 else c.query_pre_attn_scalar**-0.5,
        rms_eps=c.rms_norm_eps,
        norm_offset=0.0 if gemma4 else 1.0,
        v_norm=gemma4,
        layer_scalar=gemma4,
        attn_softcap=None if gemma4 else c.attn_logit_softcapping,
        final_softcap=c.final_logit_softcapping,
        tied_head=True,
        embed_scale_rounded=True,
        max_positions=c.max_position_embeddings,
    )


# Configuration


@pytest.mark.parametrize(
    "values",
    [
        GEMMA3_4B,
        GEMMA3_270M,
        GEMMA3_270M_NEW,
        {**GEMMA3_270M, "_sliding_window_pattern": ..., "sliding_window_pattern": 3},
        {
            **GEMMA3_270M,
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 4},
        },
        {**GEMMA3_270M, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-5},
        GEMMA4_31B,
        {**GEMMA4_31B["text_config"], "rope_parameters": None},
        {**GEMMA4_31B["text_config"], "layer_types": ...},
        {**GEMMA4_31B["text_config"], "layer_types": ["sliding_attention"] * 60},
        {**GEMMA4_31B["text_config"], "attention_k_eq_v": False, "global_head_dim": ...},
        {**GEMMA4_31B["text_config"], "num_global_key_value_heads": None},
    ],
    ids=lambda values: values["model_type"],
)
def test_configuration_as_transformers_reads_it(values, tmp_path):
    values = {key: value for key, value in values.items() if value is not ...}
    assert config_of(tmp_path, values) == by_transformers(json.loads(json.dumps(values)))


def test_gemma3_4b_is_what_is_known_of_it(tmp_path):
    """Not by way of transformers, whose defaults could move."""
    config = config_of(tmp_path, GEMMA3_4B)
    heads = dict(n_heads=8, n_kv_heads=4, head_dim=256)
    sliding = GemmaLayer(**heads, rope=RopeSpec(10000.0), window=1024)
    full = GemmaLayer(**heads, rope=RopeSpec(1e6, "linear", 8.0))
    assert [i for i, layer in enumerate(config.layers) if layer == full] == [5, 11, 17, 23, 29]
    assert set(config.layers) == {sliding, full}
    assert (config.vocab_size, config.max_positions, config.attn_scale) == (262208, 131072, 256**-0.5)
    assert (config.norm_offset, config.embed_scale_rounded, config.rms_eps) == (1.0, True, 1e-6)
    assert (opened(tmp_path, GEMMA3_4B).bos_id, opened(tmp_path, GEMMA3_4B).stop_ids) == (2, (1, 106))


def test_gemma4_31b_is_what_is_known_of_it(tmp_path):
    config = config_of(tmp_path, GEMMA4_31B)
    sliding = GemmaLayer(32, 16, 256, RopeSpec(10000.0), window=1024)
    full = GemmaLayer(32, 4, 512, RopeSpec(1e6, "proportional", partial=0.25), k_eq_v=True)
    assert [i for i, layer in enumerate(config.layers) if layer == full] == list(range(5, 60, 6))
    assert set(config.layers) == {sliding, full}
    assert (config.attn_scale, config.norm_offset, config.final_softcap) == (1.0, 0.0, 30.0)
    assert config.v_norm and config.layer_scalar and config.tied_head and config.embed_scale_rounded


def test_old_and_new_spelling_are_the_same_model(tmp_path):
    assert config_of(tmp_path, GEMMA3_270M) == config_of(tmp_path, GEMMA3_270M_NEW)
    text = GEMMA4_31B["text_config"]
    again = {key: value for key, value in text.items() if "global" not in key}
    per_layer = {f"{i:02}": {"head_dim": 512, "num_key_value_heads": 4} for i in range(5, 60, 6)}
    assert config_of(tmp_path, {**again, "per_layer_config": per_layer}) == config_of(tmp_path, text)
    assert config_of(tmp_path, {**text, "per_layer_config": per_layer}) == config_of(tmp_path, text)
    assert config_of(tmp_path, {**text, "per_layer_config": {}}) != config_of(tmp_path, text)


def test_what_transformers_saves_again_is_the_same_model(case, folder):
    assert "per_layer_config" in (folder / "config.json").read_text() or case.family == "gemma3"
    original = {**COMMON, **OWN[case.family], "model_type": f"{case.family}_text"}
    (folder / "config.json").write_text(json.dumps(original))
    assert open_folder(folder).config == case.checkpoint.config


def test_the_oldest_name_of_the_rope_type(tmp_path):
    """transformers 4 read ``type`` as well; transformers 5 takes such a Gemma 3 file for unscaled, which it is not."""
    config = config_of(tmp_path, {**GEMMA3_270M, "rope_scaling": {"type": "linear", "factor": 8.0}})
    assert config.layers[5].rope == RopeSpec(1e6, "linear", 8.0)
    assert config.layers[4].rope == RopeSpec(10000.0)


TEXT4 = GEMMA4_31B["text_config"]
FULL_ONLY = {"full_attention": {"rope_theta": 1e6, "rope_type": "yarn"}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama"}, "'llama' is not supported; allowed: gemma3_text, gemma3, gemma4_text, gemma4"),
        ({"model_type": "gemma3n_text"}, "'gemma3n_text' is not supported"),
        ({}, "model_type None is not supported"),
        ({"model_type": "gemma3"}, "needs a text_config, got None"),
        ({**GEMMA3_4B, "text_config": {"model_type": "llama"}}, "'llama'; allowed: gemma3_text"),
        ({**TEXT4, "hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input is 256, .* allowed: 0"),
        (dict(list(TEXT4.items())[:5]), "hidden_size_per_layer_input is 256"),  # absent means 256
        ({**TEXT4, "num_kv_shared_layers": 20}, "num_kv_shared_layers is 20"),
        ({**TEXT4, "enable_moe_block": True}, "enable_moe_block is True"),
        ({**TEXT4, "use_double_wide_mlp": True}, "use_double_wide_mlp is True"),
        ({**TEXT4, "attention_bias": True}, "attention_bias is True"),
        ({**TEXT4, "use_bidirectional_attention": "all"}, "is 'all', .* allowed: absent, \"vision\""),
        ({**GEMMA3_270M, "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({**GEMMA3_270M, "attention_bias": True}, "attention_bias is True"),
        (
            {**GEMMA3_270M, "hidden_activation": "silu"},
            "hidden_activation is 'silu', .* allowed: \"gelu_pytorch_tanh\"",
        ),
        ({**GEMMA3_270M, "quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({**GEMMA3_4B, "quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({**GEMMA3_270M, "rope_scaling": {"rope_type": "yarn"}}, "'yarn' is not supported; allowed: default, linear"),
        ({**GEMMA3_270M_NEW, "rope_parameters": FULL_ONLY}, "full_attention: type 'yarn'"),
        ({**GEMMA3_270M_NEW, "rope_parameters": {"rope_theta": 1e6}}, "rope_parameters is {'rope_theta'"),
        ({**GEMMA3_270M, "rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({**GEMMA3_270M, "rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({**TEXT4, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_theta is None"),
        ({**GEMMA3_270M, "layer_types": LAYER_TYPES}, "layer_types is .* allowed: a list of 18 entries"),
        ({**GEMMA3_270M, "layer_types": ["chunked_attention"] * 18}, "layer_types is .*chunked_attention"),
        ({**GEMMA3_270M, "sliding_window": None}, "sliding_window is None, .* allowed: a positive integer"),
        ({**GEMMA3_270M, "hidden_size": "640"}, "hidden_size is '640'"),
        ({**GEMMA3_270M, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**GEMMA3_270M, "num_attention_heads": True}, "num_attention_heads is True"),
        ({**GEMMA3_270M, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, .* allowed: a positive number"),
        ({**TEXT4, "per_layer_config": {"60": {}}}, "per_layer_config is .* allowed: layers 0 to 59"),
        ({**TEXT4, "per_layer_config": {"5": {"sliding_window": 1}}}, "allowed: objects with head_dim"),
        ({**TEXT4, "per_layer_config": [1]}, "per_layer_config is .* allowed: an object"),
    ],
)
def test_configuration_refused(values, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        config_of(tmp_path, values)
    assert str(tmp_path / "config.json") in str(caught.value)


# Files and names


def test_opens_as_a_target(case):
    checkpoint = open_checkpoint(case.folder, case.family)
    assert checkpoint.config == case.checkpoint.config
    assert checkpoint.identity["format"] == "safetensors" and checkpoint.identity["family"] == case.family
    assert checkpoint.identity["file"] == case.folder.name and "ignored" not in checkpoint.identity
    other = {"gemma3": "gemma4", "gemma4": "gemma3"}[case.family]
    with pytest.raises(ValueError, match=f"holds a {case.family} model, this target is {other}"):
        open_checkpoint(case.folder, other)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_multimodal_names(case, folder, prefix):
    others = [
        "vision_tower.encoder.weight",
        "model.embed_vision.proj.weight",
        "model.vision_tower.a",
        "model.audio_tower.b",
    ]
    others += ["model.vision_tower.c", "multi_modal_projector.weight", "model.embed_audio.d"]
    stored = load_file(folder / "model.safetensors")
    stored = {name.replace("model.", prefix, 1): value for name, value in stored.items()}
    save_file({**stored, **{name: torch.zeros(2) for name in others}}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", model_type=case.family, text_config=text, eos_token_id=[1, 106])
    checkpoint = open_folder(folder)
    assert checkpoint.config == case.checkpoint.config
    assert checkpoint.identity["ignored"] == {
        "vision_tower.": 1,
        "model.embed_vision.": 1,
        "model.vision_tower.": 2,
        "model.audio_tower.": 1,
        "multi_modal_projector.": 1,
        "model.embed_audio.": 1,
    }
    logits, _ = our_run(decoder(checkpoint), case.tokens[:, :WINDOW], [WINDOW])
    torch.testing.assert_close(logits, case.logits[:WINDOW], atol=1e-4, rtol=0)


def test_tensors_without_a_place(case, folder):
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "draft.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor 'draft.weight' has no place"):
        open_folder(folder)
    save_file({**stored, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 tensors without a place in the model: layers.0.self_attn.q_proj.bias"):
        decoder(open_folder(folder))
    twice = {**stored, "model.language_model.norm.weight": torch.zeros(96)}
    save_file(twice, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"both stand for 'norm.weight'"):
        open_folder(folder)


def test_missing_and_misshapen_tensors(case, folder):
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    save_file({key: value for key, value in stored.items() if key != name}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"no tensor 'layers.3.mlp.up_proj.weight' \(of shape \[256, 96\]\)"):
        decoder(open_folder(folder))
    save_file({**stored, name: torch.zeros(255, 96)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'layers.3.mlp.up_proj.weight' has shape \[255, 96\], expected \[256, 96\]"):
        decoder(open_folder(folder))
    save_file(stored, folder / "model.safetensors")
    edit(folder / "config.json", vocab_size=129)
    with pytest.raises(ValueError, match=r"'embed_tokens.weight' has shape \[128, 96\], expected \[129, 96\]"):
        decoder(open_folder(folder))


def test_rows_are_read_as_asked_in_the_files_dtype(case, folder):
    stored = load_file(folder / "model.safetensors")
    half = {name: value.bfloat16() for name, value in stored.items()}
    save_file(half, folder / "model.safetensors")
    source = open_folder(folder).tensors["layers.0.mlp.up_proj.weight"]
    expected = half["model.layers.0.mlp.up_proj.weight"]
    assert source.shape == (256, 96)
    for part in (slice(0, None), slice(3, 7), slice(250, 256), slice(255, None)):
        rows = source.read(part.start, part.stop)
        assert rows.dtype == torch.bfloat16 and torch.equal(rows, expected[part])
    assert torch.equal(source.read(), expected)


def test_dtypes_that_are_not_weights(case, folder):
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"] = torch.zeros(96, dtype=torch.int8)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model.norm.weight' is torch.int8; allowed: torch.float16"):
        open_folder(folder)


def test_shards(case, tmp_path):
    case.model.save_pretrained(tmp_path, max_shard_size="200KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    checkpoint = open_folder(tmp_path)
    logits, _ = our_run(decoder(checkpoint), case.tokens[:, :WINDOW], [WINDOW])
    torch.testing.assert_close(logits, case.logits[:WINDOW], atol=1e-4, rtol=0)

    shard = tmp_path / index["model.norm.weight"]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"{shard.name} cannot be read as weights .* is it complete"):
        open_folder(tmp_path)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=rf"no weight file .*{shard.name}, which the index beside it names"):
        open_folder(tmp_path)
    shard.write_bytes(whole)
    edit(tmp_path / "model.safetensors.index.json", weight_map={**index, "model.other.weight": shard.name})
    with pytest.raises(ValueError, match=r"in parts that do not have them: model.other.weight"):
        open_folder(tmp_path)
    edit(tmp_path / "model.safetensors.index.json", weight_map=...)
    with pytest.raises(ValueError, match="no 'weight_map'; expected"):
        open_folder(tmp_path)


def test_the_index_says_which_copy_counts(case, folder):
    stored = load_file(folder / "model.safetensors")
    stale = {**stored, "model.norm.weight": torch.zeros(96)}
    own = {"model.norm.weight": stored["model.norm.weight"]}
    save_file(own, folder / "a.safetensors")
    save_file(stale, folder / "b.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: "a.safetensors" if name in own else "b.safetensors" for name in stored}
    edit(folder / "model.safetensors.index.json", weight_map=weight_map)
    assert torch.equal(open_folder(folder).tensors["norm.weight"].read(), own["model.norm.weight"])


def test_identity_follows_the_weights_and_the_configuration(case, folder):
    stored = load_file(folder / "model.safetensors")
    digests = [case.checkpoint.identity["sha256"], open_folder(folder).identity["sha256"]]
    assert digests[0] == digests[1]
    stored["model.norm.weight"][0] += 1
    save_file(stored, folder / "model.safetensors")
    digests.append(open_folder(folder).identity["sha256"])
    edit(folder / "config.json", rms_norm_eps=1e-5)
    digests.append(open_folder(folder).identity["sha256"])
    assert len(set(digests)) == 3


def test_missing_and_broken_files(case, folder):
    with pytest.raises(FileNotFoundError, match=r"no config.json in .*nowhere; a Hugging Face folder has"):
        open_folder(folder / "nowhere")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for cut in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"model.safetensors cannot be read as weights"):
            open_folder(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no weights, found .*; expected model.safetensors, or parts"):
        open_folder(folder)
    for text, message in (("{", "is not JSON"), ("[]", "holds a list, expected"), ("", "is not JSON")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config.json {message}"):
            open_folder(folder)


# Heads


def test_own_head(case, tmp_path):
    untied = make_case(case.family, tmp_path, length=WINDOW, tie_word_embeddings=False)
    assert not untied.checkpoint.config.tied_head
    model = decoder(untied.checkpoint)
    assert not torch.equal(model.lm_head.weight, model.embed_tokens.weight)
    logits, _ = our_run(model, untied.tokens, [WINDOW])
    torch.testing.assert_close(logits, untied.logits, atol=1e-4, rtol=0)


def test_a_head_that_should_be_tied(case, folder):
    """As transformers has it: an equal copy is the table itself, a different one is a head of its own."""
    stored = load_file(folder / "model.safetensors")
    table = stored["model.embed_tokens.weight"]
    save_file({**stored, "lm_head.weight": table.clone()}, folder / "model.safetensors")
    checkpoint = open_folder(folder)
    assert checkpoint.config.tied_head and "lm_head.weight" not in checkpoint.tensors
    own = table.clone()
    own[100, 5] += 1
    save_file({**stored, "lm_head.weight": own}, folder / "model.safetensors")
    checkpoint = open_folder(folder)
    assert not checkpoint.config.tied_head
    assert torch.equal(decoder(checkpoint).lm_head.weight, own)


def test_an_equal_head_that_is_not_tied_stays(case, folder):
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    edit(folder / "config.json", tie_word_embeddings=False)
    assert not open_folder(folder).config.tied_head


def test_head_missing(case, folder):
    edit(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"tie_word_embeddings is false, but there is no tensor 'lm_head.weight'"):
        open_folder(folder)


# Text


def write_tokenizer(folder: Path, **settings) -> None:
    data = {
        "added_tokens": [{"id": 1, "content": "<eos>"}, {"id": 105, "content": "<end_of_turn>"}],
        "model": {"vocab": {"<pad>": 0, "plain": 7}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_stop_ids_from_every_file(case, folder):
    (folder / "generation_config.json").unlink()
    assert open_folder(folder).stop_ids == (1,)
    edit(folder / "generation_config.json", eos_token_id=[1, 106, 50])
    edit(folder / "config.json", eos_token_id=[1, 100])
    write_tokenizer(folder, eos_token="plain", eot_token={"content": "<end_of_turn>"})
    assert open_folder(folder).stop_ids == (1, 106, 50, 100, 7, 105)
    edit(folder / "tokenizer_config.json", eos_token="late", added_tokens_decoder={"9": {"content": "late"}})
    assert open_folder(folder).stop_ids == (1, 106, 50, 100, 9, 105)


def test_stop_ids_of_the_multimodal_and_of_the_text_configuration(case, folder):
    (folder / "generation_config.json").unlink()
    text = json.loads((folder / "config.json").read_text())
    edit(folder / "config.json", model_type=case.family, text_config={**text, "eos_token_id": 3}, eos_token_id=[106])
    assert open_folder(folder).stop_ids == (106, 3)


def test_ids_outside_the_vocabulary(case, folder):
    edit(folder / "generation_config.json", eos_token_id=[1, 128])
    with pytest.raises(ValueError, match=r"eos_token_id 128 is outside the vocabulary; allowed: 0 to 127"):
        open_folder(folder)
    edit(folder / "generation_config.json", eos_token_id=1)
    edit(folder / "config.json", bos_token_id=-1)
    with pytest.raises(ValueError, match="bos_token_id -1 is outside the vocabulary"):
        open_folder(folder)
    edit(folder / "config.json", bos_token_id=2)
    write_tokenizer(folder, eos_token="<gone>")
    with pytest.raises(ValueError, match=r"tokenizer_config.json: token '<gone>' is not in the tokenizer's vocabulary"):
        open_folder(folder)


def test_bos(case, folder):
    assert (case.checkpoint.bos_id, case.checkpoint.add_bos) == (2, True)
    edit(folder / "config.json", bos_token_id=5)
    write_tokenizer(folder, add_bos_token=False)
    checkpoint = open_folder(folder)
    assert (checkpoint.bos_id, checkpoint.add_bos) == (5, False)
    edit(folder / "config.json", bos_token_id=None)
    assert open_folder(folder).bos_id is None
    edit(folder / "config.json", bos_token_id=...)
    assert open_folder(folder).bos_id == 2  # the classes' default, as is the next
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=...)
    assert open_folder(folder).stop_ids == (1,)


def test_tokenizer(case, folder):
    assert case.checkpoint.tokenizer == TokenizerSource("none")
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"has tokenizer.model but no tokenizer.json; write one with"):
        open_folder(folder)
    write_tokenizer(folder)
    assert open_folder(folder).tokenizer == TokenizerSource("json", folder / "tokenizer.json")


def test_chat_template(case, folder):
    assert case.checkpoint.chat_template is None
    write_tokenizer(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert open_folder(folder).chat_template == "from json"
    edit(folder / "tokenizer_config.json", chat_template="from settings")
    assert open_folder(folder).chat_template == "from settings"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert open_folder(folder).chat_template == "named"
    (folder / "chat_template.jinja").write_text("from file é", encoding="utf-8")
    assert open_folder(folder).chat_template == "from file é"


def test_formats_differ_in_two_fields_only(case):
    """What is left of the format in the configuration; the GGUF reader's tests hold the other side to the same."""
    config = case.checkpoint.config
    assert config.norm_offset == {"gemma3": 1.0, "gemma4": 0.0}[case.family]
    assert config.embed_scale_rounded
    assert {field.name for field in dataclasses.fields(config)} >= {"norm_offset", "embed_scale_rounded"}

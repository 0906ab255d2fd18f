"""GGUF files against the same models as Hugging Face folders: configuration, weights of every type, heads, errors."""

import dataclasses
import itertools
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from jinja2 import Template
from tiny_gemma import FAMILIES, WINDOW, decoder, hf_model, hf_run, make_case, our_run, write_gguf

from eyas.models.gemma_targets import open_checkpoint, open_gguf
from eyas.models.gguf_reader import GGUFTensor, open_reader, read_gguf
from eyas.models.layers import RopeSpec

PATTERN = {"gemma3": ["sliding_attention"] * 5 + ["full_attention"], "gemma4": None}  # Gemma 3 files need not store it
BLOCKS = {Type.Q4_K: 256, Type.Q6_K: 256}  # the others have 32 columns a block


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    family = request.param
    options = {"layer_types": PATTERN[family]} if PATTERN[family] else {}
    return make_case(family, tmp_path_factory.mktemp(family), **options)


def k_blocks(kind: Type, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random blocks of a type that the gguf package reads and cannot write, of about unit gain."""
    rng = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    scale = np.array([0.2 / 100 / columns**0.5], np.float16).view(np.uint8)
    if kind == Type.Q4_K:  # d and dmin lead
        blocks[..., :2] = blocks[..., 2:4] = scale
    else:  # Q6_K: int8 scales, then d last
        blocks[..., -2:] = scale
    return blocks.reshape(rows, -1)


# Whole models


def test_same_logits_as_the_folder(case, tmp_path):
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", case.model))
    logits, streams = our_run(decoder(checkpoint), case.tokens, itertools.repeat(WINDOW))
    torch.testing.assert_close(logits, case.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(streams[-1], case.streams[-1], atol=1e-4, rtol=0)


def test_norm_offset_twice_or_never_shows(case, tmp_path):
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", case.model))
    for opened, offset in ((checkpoint, 1.0), (case.checkpoint, 1.0 - case.checkpoint.config.norm_offset)):
        wrong = dataclasses.replace(opened, config=dataclasses.replace(opened.config, norm_offset=offset))
        logits, _ = our_run(decoder(wrong), case.tokens[:, :WINDOW], [WINDOW])
        assert (logits - case.logits[:WINDOW]).abs().max() > 0.1


def test_same_configuration_as_the_folder(case, tmp_path):
    """Field by field, for every layer; only what the formats do to weights differs."""
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", case.model))
    expected = dataclasses.replace(case.checkpoint.config, norm_offset=0.0, embed_scale_rounded=False)
    assert checkpoint.config == expected
    assert checkpoint.config.layers[0] != checkpoint.config.layers[-1]
    assert checkpoint.config.rms_eps == 1e-6  # and not the float32 next to it


def test_mixed_quantised_types(case, tmp_path):
    """The mixture of a Q4_K_M file, and then some: each matrix in the type its own entry names."""
    kinds = {
        "token_embd.weight": Type.Q8_0,
        "attn_q.weight": Type.Q5_0,
        "attn_k.weight": Type.Q4_0,
        "attn_v.weight": Type.Q8_0,
        "attn_output.weight": Type.Q5_1,
        "ffn_gate.weight": Type.F16,
        "ffn_up.weight": Type.BF16,
        "0.ffn_down.weight": Type.Q4_K,
        "1.ffn_down.weight": Type.Q6_K,
        "ffn_down.weight": Type.Q4_1,
    }
    stored = {f"blk.{i}.ffn_down.weight": k_blocks(kind, 96, 256, i) for i, kind in enumerate((Type.Q4_K, Type.Q6_K))}

    def type_of(name: str) -> Type:
        return next(kind for suffix, kind in kinds.items() if name.endswith(suffix))

    options = {"layer_types": PATTERN[case.family]} if PATTERN[case.family] else {}
    model = hf_model(case.family, **options)
    path = write_gguf(tmp_path / "model.gguf", model, type_of, stored)
    # The same numbers for transformers, taken from the file by the gguf package's own reader.
    found = {
        t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in gguf.GGUFReader(path).tensors
    }
    assert {t.tensor_type for t in gguf.GGUFReader(path).tensors} == {*kinds.values(), Type.F32}
    places = {"token_embd.weight": model.model.embed_tokens.weight}
    for i, layer in enumerate(model.model.layers):
        for part, names in ((layer.self_attn, "q k v"), (layer.mlp, "gate up down")):
            stem = "attn" if part is layer.self_attn else "ffn"
            for name in names.split():
                if getattr(part, f"{name}_proj") is not None:
                    places[f"blk.{i}.{stem}_{name}.weight"] = getattr(part, f"{name}_proj").weight
        places[f"blk.{i}.attn_output.weight"] = layer.self_attn.o_proj.weight
    with torch.no_grad():
        for name, weight in places.items():
            weight.copy_(found[name])
    expected, _ = hf_run(model, case.tokens)
    assert (expected - case.logits).abs().max() > 0.01, "quantisation must matter to this test"
    logits, _ = our_run(decoder(open_gguf(path)), case.tokens, itertools.repeat(WINDOW))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q5_0, Type.Q4_K, Type.Q6_K])
def test_embedding_of_any_type(kind, tmp_path):
    model = hf_model("gemma3", hidden_size=256, num_hidden_layers=1, layer_types=["sliding_attention"])
    table = model.model.embed_tokens.weight.detach()
    stored = {"token_embd.weight": k_blocks(kind, 128, 256, 0)} if kind in BLOCKS else None
    path = write_gguf(tmp_path / "model.gguf", model, lambda name: kind if "token_embd" in name else Type.F32, stored)
    source = open_gguf(path).tensors["embed_tokens.weight"]
    assert isinstance(source, GGUFTensor) and source.shape == (128, 256)
    data = stored["token_embd.weight"] if stored else gguf.quantize(table.numpy(), kind)
    expected = torch.from_numpy(gguf.dequantize(data, kind))
    assert torch.equal(source.read(), expected)
    assert torch.equal(source.read(5, 9), expected[5:9]) and torch.equal(source.read(127), expected[127:])
    assert source.read(0, 1).dtype == torch.float32
    if stored is None:
        assert (expected - table).abs().max() < 0.13 * table.abs().max()  # a step of Q4_0 is an eighth


def test_head_of_its_own(case, tmp_path):
    options = {"layer_types": PATTERN[case.family]} if PATTERN[case.family] else {}
    untied = make_case(case.family, tmp_path, length=WINDOW, tie_word_embeddings=False, **options)
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", untied.model))
    assert not checkpoint.config.tied_head
    logits, _ = our_run(decoder(checkpoint), untied.tokens, [WINDOW])
    torch.testing.assert_close(logits, untied.logits, atol=1e-4, rtol=0)
    assert open_gguf(write_gguf(tmp_path / "tied.gguf", case.model)).config.tied_head


# Metadata


def gemma3_file(tmp_path: Path, **options) -> Path:
    model = hf_model("gemma3", **{"num_hidden_layers": 6, "layer_types": PATTERN["gemma3"], **options.pop("model", {})})
    return write_gguf(tmp_path / "model.gguf", model, **options)


def test_linear_scaling_is_for_global_layers(tmp_path):
    def scale(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    layers = open_gguf(gemma3_file(tmp_path, change=scale)).config.layers
    assert [layer.rope for layer in layers] == [RopeSpec(10000.0)] * 5 + [RopeSpec(1e6, "linear", 8.0)]


def test_keys_that_newer_gemma3_files_have(tmp_path):
    def newer(writer):
        writer.add_sliding_window_pattern(2)
        writer.add_rope_freq_base_swa(5000.0)

    layers = open_gguf(gemma3_file(tmp_path, change=newer)).config.layers
    assert [layer.window for layer in layers] == [WINDOW, None] * 3
    assert layers[0].rope == RopeSpec(5000.0)


def test_gemma3_pattern_as_an_array(tmp_path):
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2
    layers = open_gguf(gemma3_file(tmp_path, model={"layer_types": kinds})).config.layers
    assert [layer.window for layer in layers] == [WINDOW if kind == "sliding_attention" else None for kind in kinds]


def test_query_scale_of_the_27b_model(tmp_path):
    """62 layers: the scale is by width per head, 96 / 4, and not by head width, 16."""
    kinds = (PATTERN["gemma3"] * 11)[:62]
    path = gemma3_file(tmp_path, model={"num_hidden_layers": 62, "layer_types": kinds})
    assert open_gguf(path).config.attn_scale == 24**-0.5


def test_partial_rotation_comes_from_the_file(tmp_path):
    rope = {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    case = make_case("gemma4", tmp_path, length=WINDOW, rope_parameters=rope)
    checkpoint = open_gguf(write_gguf(tmp_path / "model.gguf", case.model))
    assert checkpoint.config.layers == case.checkpoint.config.layers
    assert checkpoint.config.layers[2].rope == RopeSpec(1e6, "proportional", partial=0.5)


def test_special_ids_and_template(case, tmp_path):
    def extra(writer):
        writer.add_eot_token_id(100)
        writer.add_chat_template("mine")
        writer.add_add_bos_token(False)

    plain = open_gguf(write_gguf(tmp_path / "plain.gguf", case.model))
    assert (plain.bos_id, plain.stop_ids, plain.add_bos) == (2, (1, 106), True)
    mark = {"gemma3": "<start_of_turn>user\n", "gemma4": "<|turn>user\n"}[case.family]
    assert mark.removesuffix("user\n") in plain.chat_template
    full = open_gguf(write_gguf(tmp_path / "full.gguf", case.model, change=extra))
    assert (full.stop_ids, full.add_bos, full.chat_template) == ((1, 100, 106), False, "mine")


def test_default_template_renders_the_familys_turns(case, tmp_path):
    template = Template(open_gguf(write_gguf(tmp_path / "plain.gguf", case.model)).chat_template)
    messages = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yes."}]
    start, end = {"gemma3": ("<start_of_turn>", "<end_of_turn>"), "gemma4": ("<|turn>", "<turn|>")}[case.family]
    expected = f"<bos>{start}user\nHi{end}\n{start}model\nYes.{end}\n"
    assert template.render(bos_token="<bos>", messages=messages) == expected
    assert (
        template.render(bos_token="<bos>", messages=messages, add_generation_prompt=True) == f"{expected}{start}model\n"
    )


def test_long_arrays_are_stepped_over(case, tmp_path):
    """A vocabulary's arrays, of strings and of numbers, in front of a key and of the tensors."""

    def vocabulary(writer):
        writer.add_token_list([f"token {i}" * (i % 3) for i in range(5000)])
        writer.add_token_scores([float(i) for i in range(5000)])
        writer.add_token_types([1] * 5000)
        writer.add_chat_template("after")

    path = write_gguf(tmp_path / "model.gguf", case.model, change=vocabulary)
    ours, theirs = open_reader(path), gguf.GGUFReader(path)
    assert len(ours.fields["tokenizer.ggml.tokens"].parts) < 10 < len(theirs.fields["tokenizer.ggml.tokens"].parts)
    assert list(ours.fields) == list(theirs.fields)
    assert read_gguf(path)[2]["chat_template"] == "after"
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine.name == other.name and np.array_equal(mine.data, other.data)


# Errors


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no GGUF file at .*none.gguf"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*none.gguf; expected a .gguf file or"):
        open_checkpoint(tmp_path / "none.gguf", "gemma3")


def test_truncated_at_any_place(case, tmp_path):
    def vocabulary(writer):
        writer.add_token_list([f"token {i}" for i in range(5000)])

    path = write_gguf(tmp_path / "model.gguf", case.model, change=vocabulary)
    end = max(t.data_offset + t.n_bytes for t in gguf.GGUFReader(path).tensors)
    whole, short = path.read_bytes(), tmp_path / "short.gguf"
    for cut in [*range(0, 2000, 37), *range(2000, end, end // 40), end - 1]:
        short.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"short.gguf is not a readable GGUF file .*; is it complete\?"):
            read_gguf(short)
    short.write_bytes(whole[:end])
    read_gguf(short)


def test_not_a_gguf_file(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK" * 100)
    with pytest.raises(ValueError, match=r"not a readable GGUF file \(GGUF magic invalid\)"):
        read_gguf(tmp_path / "model.gguf")


def test_other_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"architecture 'llama' is not supported; allowed: gemma3, gemma4"):
        read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "key",
    ["block_count", "embedding_length", "feed_forward_length", "context_length", "rope.freq_base"]
    + [f"attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "sliding_window")]
    + ["attention.layer_norm_rms_epsilon"],
)
def test_missing_key(case, key, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", case.model, drop=(f"{case.family}.{key}",))
    with pytest.raises(ValueError, match=rf"model.gguf: metadata key '{case.family}.{key}' is missing"):
        read_gguf(path)


def test_missing_and_extra_tensors(case, tmp_path):
    def extra(name):
        return lambda writer: writer.add_tensor(name, np.zeros((4, 4), np.float32))

    with pytest.raises(ValueError, match=r"tensor 'token_embd.weight' is missing; is this a complete"):
        read_gguf(write_gguf(tmp_path / "a.gguf", case.model, drop=("token_embd.weight",)))
    for name in ("blk.0.attn_sinks.weight", "blk.0", "v.patch_embd.weight"):
        with pytest.raises(ValueError, match=rf"b.gguf: tensor '{name}' has no place in a Gemma text decoder"):
            read_gguf(write_gguf(tmp_path / "b.gguf", case.model, change=extra(name)))
    checkpoint = open_gguf(write_gguf(tmp_path / "c.gguf", case.model, drop=("blk.2.ffn_up.weight",)))
    with pytest.raises(ValueError, match=r"no tensor 'layers.2.mlp.up_proj.weight' \(of shape \[256, 96\]\)"):
        decoder(checkpoint)
    checkpoint = open_gguf(write_gguf(tmp_path / "d.gguf", case.model, change=extra("blk.6.ffn_up.weight")))
    with pytest.raises(ValueError, match=r"1 tensors without a place in the model: layers.6.mlp.up_proj.weight"):
        decoder(checkpoint)


def test_wrong_shape_names_tensor_expected_and_found(case, tmp_path):
    def misshapen(writer):
        writer.add_tensor("blk.1.attn_k.weight", np.zeros((31, 96), np.float32))

    path = write_gguf(tmp_path / "model.gguf", case.model, change=misshapen, drop=("blk.1.attn_k.weight",))
    with pytest.raises(
        ValueError, match=r"'layers.1.self_attn.k_proj.weight' has shape \[31, 96\], expected \[32, 96\]"
    ):
        decoder(open_gguf(path))


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    return make_case("gemma4", tmp_path_factory.mktemp("gemma4"), length=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention.shared_kv_layers", 2), ("embedding_length_per_layer_input", 256), ("expert_count", 8)],
)
def test_gemma4_variants_refused(gemma4, key, value, tmp_path):
    name = f"gemma4.{key}"
    path = write_gguf(
        tmp_path / "model.gguf", gemma4.model, drop=(name,), change=lambda writer: writer.add_uint32(name, value)
    )
    with pytest.raises(ValueError, match=rf"{name} is {value}; only the dense Gemma 4"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count_kv", [2, 2, 1], "head_count_kv has 3 entries for 6 layers"),
        ("attention.sliding_window_pattern", [True] * 7, "sliding_window_pattern has 7 entries for 6 layers"),
        ("feed_forward_length", [256] * 4 + [512] * 2, r"feed_forward_length has \[256, 512\]; only one width"),
    ],
)
def test_gemma4_arrays_refused(gemma4, key, value, message, tmp_path):
    name = f"gemma4.{key}"
    path = write_gguf(
        tmp_path / "model.gguf", gemma4.model, drop=(name,), change=lambda writer: writer.add_array(name, value)
    )
    with pytest.raises(ValueError, match=message):
        read_gguf(path)


def test_gemma4_arrays_may_be_scalars_and_the_other_way(gemma4, tmp_path):
    def change(writer):
        writer.add_array("gemma4.attention.head_count", [4] * 6)
        writer.add_array("gemma4.feed_forward_length", [256] * 6)

    path = write_gguf(
        tmp_path / "model.gguf",
        gemma4.model,
        drop=("gemma4.attention.head_count", "gemma4.feed_forward_length"),
        change=change,
    )
    expected = dataclasses.replace(gemma4.checkpoint.config, embed_scale_rounded=False)
    assert open_gguf(path).config == expected


def test_gemma4_rotation_divisors(gemma4, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", gemma4.model, drop=("rope_freqs.weight",))
    with pytest.raises(ValueError, match=r"tensor 'rope_freqs.weight' is missing"):
        read_gguf(path)

    def odd(writer):
        writer.add_tensor("rope_freqs.weight", np.array([1, 2] * 8, np.float32))

    with pytest.raises(ValueError, match=r"'rope_freqs.weight' must hold ones and then huge values, got \[1.0, 2.0"):
        read_gguf(write_gguf(tmp_path / "model.gguf", gemma4.model, drop=("rope_freqs.weight",), change=odd))


def test_unknown_rope_scaling(tmp_path):
    path = gemma3_file(tmp_path, change=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN))
    with pytest.raises(ValueError, match=r"rope scaling 'yarn' is not supported; allowed: none, linear"):
        read_gguf(path)

"""Tiny random Gemma models, as transformers builds them and as files, and the runs that tests compare.

Every weight is random, norm factors and layer scalars too, so that nothing passes by being one or zero.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Gemma4ForCausalLM, Gemma4TextConfig

from eyas.models.gemma import GemmaDecoder
from eyas.models.gguf_reader import LAYER_NAMES, TOP_NAMES
from eyas.models.hf_reader import open_folder
from eyas.models.recipe import RECIPES, materialize
from eyas.models.target import Checkpoint

WINDOW = 8
FAMILIES = ("gemma3", "gemma4")
F32 = gguf.GGMLQuantizationType.F32
COMMON = dict(
    vocab_size=128,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=WINDOW,
    max_position_embeddings=4096,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
)
OWN = {
    "gemma3": dict(query_pre_attn_scalar=16),
    "gemma4": dict(
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0,
    ),
}


def hf_model(family: str, seed: int = 0, **options) -> nn.Module:
    """A float32 model of transformers with random weights. ``options`` override the tiny configuration's fields."""
    kind, config = {
        "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig),
        "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig),
    }[family]
    model = kind(config(**{**COMMON, **OWN[family], **options}, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("layer_scalar"):
                value.copy_(0.8 + 0.2 * torch.rand(1, generator=generator))
            elif name.endswith("norm.weight"):
                # Gemma 4 scales q.k by 1: half-sized factors keep its attention from amplifying rounding.
                mean = 0.0 if family == "gemma3" else 0.5 if "self_attn" in name else 1.0
                value.copy_(mean + 0.3 * torch.randn(value.shape, generator=generator))
            elif value.ndim == 2:
                value.copy_(torch.randn(value.shape, generator=generator) * value.shape[1] ** -0.5)
    return model


@dataclass(frozen=True)
class Case:
    """A tiny model as transformers runs it and as our reader opens it, and what transformers computes."""

    family: str
    model: nn.Module
    folder: Path
    checkpoint: Checkpoint
    tokens: Tensor
    logits: Tensor
    streams: list[Tensor]


def make_case(family: str, folder: Path, length: int = 53, **options) -> Case:
    """Writes a random model to ``folder`` and runs it; 53 tokens go three times round a ring of two windows."""
    model = hf_model(family, **options)
    model.save_pretrained(folder)
    tokens = tokens_of(length)
    return Case(family, model, folder, open_folder(folder), tokens, *hf_run(model, tokens))


def decoder(
    checkpoint: Checkpoint, max_seq_len: int = 64, dtype: torch.dtype = torch.float32, **config
) -> GemmaDecoder:
    """Our module with the checkpoint's weights, dense. ``config`` overrides fields of the configuration."""
    module = GemmaDecoder(dataclasses.replace(checkpoint.config, **config), max_seq_len, dtype)
    materialize(module, "target.", checkpoint.tensors, RECIPES["none"], dtype, checkpoint.config.norm_offset)
    return module


def tokens_of(length: int, vocab_size: int = 128, seed: int = 1) -> Tensor:
    return torch.randint(3, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def hf_run(model: nn.Module, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits ``[T, V]`` and the residual stream ``[T, E]`` at each boundary, in one call without a cache."""
    before_norm = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    out = model(tokens, use_cache=False, output_hidden_states=True)
    hook.remove()
    streams = [*out.hidden_states[:-1], before_norm[0]]  # transformers' own last entry is the normed one
    return out.logits[0].float(), [stream[0] for stream in streams]


@torch.no_grad()
def our_run(model: GemmaDecoder, tokens: Tensor, calls: Iterable[int]) -> tuple[Tensor, list[Tensor]]:
    """As ``hf_run``, in calls of the given numbers of rows that go on until ``tokens`` end."""
    boundaries = tuple(range(model.n_layers + 1))
    logits, taps, start = [], [], 0
    for rows in calls:
        part = tokens[:, start : start + rows]
        if not part.numel():
            break
        hidden, streams = model(part, torch.arange(start, start + part.shape[1]), boundaries)
        logits.append(model.logits(hidden)[0])
        taps.append([stream[0] for stream in streams])
        start += rows
    assert start >= tokens.shape[1], "calls end before the tokens do"
    return torch.cat(logits), [torch.cat(parts) for parts in zip(*taps)]


def write_gguf(
    path: Path,
    model: nn.Module,
    type_of: Callable[[str], gguf.GGMLQuantizationType] = lambda name: F32,
    stored: Mapping[str, np.ndarray] | None = None,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Writes a transformers model as llama.cpp's converter does.

    ``type_of`` gives the type of a matrix by its GGUF name; ``stored`` has blocks for the types that the gguf package
    cannot write. ``change`` sees the writer before the tensors are written; ``drop`` leaves out keys and tensors.
    """
    c, family = model.config, "gemma4" if "gemma4" in model.config.model_type else "gemma3"
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_sliding_window(c.sliding_window)
    writer.add_rope_freq_base(c.rope_parameters["full_attention"]["rope_theta"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    if c.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(c.final_logit_softcapping)
    is_sliding = [kind == "sliding_attention" for kind in c.layer_types]
    if family == "gemma3":
        writer.add_head_count_kv(c.num_key_value_heads)
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
        if is_sliding != [(i + 1) % 6 != 0 for i in range(len(is_sliding))]:
            writer.add_sliding_window_pattern(is_sliding)
    else:
        layers = [c.per_layer_config[i] for i in range(c.num_hidden_layers)]
        full, sliding = layers[is_sliding.index(False)], layers[is_sliding.index(True)]
        writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
        writer.add_key_length(full.head_dim)
        writer.add_value_length(full.head_dim)
        writer.add_key_length_swa(sliding.head_dim)
        writer.add_value_length_swa(sliding.head_dim)
        writer.add_sliding_window_pattern(is_sliding)
        writer.add_shared_kv_layers(0)
        writer.add_embedding_length_per_layer_input(0)
        writer.add_rope_freq_base_swa(c.rope_parameters["sliding_attention"]["rope_theta"])
        rotated = int(c.rope_parameters["full_attention"]["partial_rotary_factor"] * full.head_dim // 2)
        if "rope_freqs.weight" not in drop:
            divisors = [1.0] * rotated + [1e30] * (full.head_dim // 2 - rotated)
            writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    own_names = {**{name: key for key, name in TOP_NAMES.items()}, "layer": {v: k for k, v in LAYER_NAMES.items()}}
    for name, value in model.state_dict().items():
        name = name.removeprefix("model.")
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            name = f"blk.{index}.{own_names['layer'][rest]}"
        else:
            name = own_names[name]
        if name in drop:
            continue
        data = value.numpy()
        if name.endswith("norm.weight"):
            data = data + np.float32(family == "gemma3")  # the format's factors include the one
        kind = type_of(name) if data.ndim == 2 else F32
        if stored and name in stored:
            writer.add_tensor(name, stored[name], raw_dtype=kind)
        elif kind == F32:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    for key in drop:
        writer.kv_data[0].pop(key, None)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

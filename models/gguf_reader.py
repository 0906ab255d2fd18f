"""Reads Gemma 3 and Gemma 4 targets from GGUF files: configuration, weights and special ids.

Facts of the format (llama.cpp): linear weights are stored ``[out, in]``, query and key rows are not permuted, Gemma 3's
norm factors include the one, Gemma 4's are the factors themselves, the embedding is unscaled, and a file without
``output.weight`` has a tied head. Gemma 3 files need not store the layer pattern (every sixth layer is global) nor
the base of the sliding layers' rotary positions (10000).
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from eyas.models.gemma import GemmaConfig, GemmaLayer
from eyas.models.layers import RopeSpec

JOINED_ROWS = 16  # the library takes few rows at a time, whatever their length
LARGE_ARRAY = 4096  # elements; longer metadata arrays (the vocabulary) are kept as one block
SLIDING_ROPE_THETA = 10000.0
LAYERS_PER_GLOBAL = 6

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "layer_output_scale.weight": "layer_scalar",
}
TOP_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FREQS = "rope_freqs.weight"  # of Gemma 4's global layers: 1 for pairs that rotate, 1e30 for those that do not
TEXT_FACTS = {
    "bos": "ggml.bos_token_id",
    "eos": "ggml.eos_token_id",
    "eot": "ggml.eot_token_id",
    "add_bos": "ggml.add_bos_token",
    "chat_template": "chat_template",
}


class Reader(gguf.GGUFReader):
    """``gguf.GGUFReader`` that steps over long metadata arrays instead of making an object an element (15 s for 262144
    tokens)."""

    def _get_field_parts(self, orig_offs: int, raw_type: int):
        if gguf.GGUFValueType(raw_type) == gguf.GGUFValueType.ARRAY:
            item, count = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
            if count > LARGE_ARRAY:
                start = orig_offs + 12
                block = self._get(start, np.uint8, self._array_bytes(start, gguf.GGUFValueType(item), count))
                types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(item)]
                return 12 + block.nbytes, [self._get(orig_offs, np.uint8, 12), block], [], types
        return super()._get_field_parts(orig_offs, raw_type)

    def _array_bytes(self, start: int, item: gguf.GGUFValueType, count: int) -> int:
        if item != gguf.GGUFValueType.STRING:
            return count * np.dtype(self.gguf_scalar_to_np[item]).itemsize
        data, length, at = memoryview(self.data), struct.Struct("<Q"), start
        for _ in range(count):
            at += 8 + length.unpack_from(data, at)[0]
        return at - start


@dataclass(frozen=True)
class GGUFTensor:
    """A ``RowSource`` over one tensor of a file; rows are dequantised as they are read."""

    name: str
    tensor: gguf.ReaderTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(d) for d in reversed(self.tensor.shape))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        data = self.tensor.data[start:stop].view(np.ndarray)  # slices of a mapped array are slow to make
        joined = math.gcd(len(data), JOINED_ROWS) if data.ndim == 2 else 1
        flat = data.reshape(len(data) // joined, -1) if joined > 1 else data  # blocks do not know of rows
        values = gguf.quants.dequantize(flat, self.tensor.tensor_type).astype(np.float32, copy=False)
        return torch.from_numpy(values.reshape(*data.shape[:-1], -1).copy())


class Metadata:
    """Typed look-ups in a GGUF file's metadata, with errors that name the file and the key."""

    def __init__(self, path: Path, reader: gguf.GGUFReader):
        self.path, self.fields = path, reader.fields

    def get(self, key: str, default=...):
        if key in self.fields:
            value, kind = self.fields[key].contents(), self.fields[key].types[0]
            # A float32 as the number that was meant: 1e-06, not 9.999999974752427e-07.
            return float(str(np.float32(value))) if kind == gguf.GGUFValueType.FLOAT32 else value
        if default is ...:
            raise ValueError(f"{self.path}: metadata key {key!r} is missing; is this a complete Gemma GGUF file?")
        return default

    def per_layer(self, key: str, layers: int, default=...) -> list:
        """A value a layer: the array as stored, or the scalar repeated."""
        value = self.get(key, default)
        values = list(value) if isinstance(value, (list, tuple)) else [value] * layers
        if len(values) != layers:
            raise ValueError(f"{self.path}: {key} has {len(values)} entries for {layers} layers")
        return values


def open_reader(path: Path) -> Reader:
    try:
        return Reader(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"no GGUF file at {path}") from None
    except (ValueError, IndexError, struct.error) as error:
        raise ValueError(f"{path} is not a readable GGUF file ({error}); is it complete?") from error


def gemma3_config(meta: Metadata, stored: Mapping[str, GGUFTensor], vocab_size: int) -> GemmaConfig:
    L, D = meta.get("gemma3.block_count"), meta.get("gemma3.attention.key_length")
    H = meta.get("gemma3.attention.head_count")
    scaling = meta.get("gemma3.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{meta.path}: rope scaling {scaling!r} is not supported; allowed: none, linear")
    factor = meta.get("gemma3.rope.scaling.factor", 1.0) if scaling == "linear" else 1.0
    theta, sliding_theta = meta.get("gemma3.rope.freq_base"), meta.get("gemma3.rope.freq_base_swa", SLIDING_ROPE_THETA)
    every = meta.get("gemma3.attention.sliding_window_pattern", LAYERS_PER_GLOBAL)
    is_sliding = every if isinstance(every, list) else [(i + 1) % every != 0 for i in range(L)]
    kind = dict(n_heads=H, n_kv_heads=meta.get("gemma3.attention.head_count_kv"), head_dim=D)
    sliding = GemmaLayer(**kind, rope=RopeSpec(sliding_theta), window=meta.get("gemma3.attention.sliding_window"))
    full = GemmaLayer(**kind, rope=RopeSpec(theta, "linear", factor) if factor != 1.0 else RopeSpec(theta))
    E = meta.get("gemma3.embedding_length")
    return GemmaConfig(
        family="gemma3",
        vocab_size=vocab_size,
        hidden_size=E,
        intermediate_size=meta.get("gemma3.feed_forward_length"),
        layers=tuple(sliding if is_sliding[i] else full for i in range(L)),
        attn_scale=(E // H if L == 62 else D) ** -0.5,  # the 27B model scales by its width per head
        rms_eps=meta.get("gemma3.attention.layer_norm_rms_epsilon"),
        norm_offset=0.0,  # the file's factors include the one
        tied_head="output.weight" not in stored,
        embed_scale_rounded=False,
        max_positions=meta.get("gemma3.context_length"),
        final_softcap=meta.get("gemma3.final_logit_softcapping", None),
    )


def gemma4_config(meta: Metadata, stored: Mapping[str, GGUFTensor], vocab_size: int) -> GemmaConfig:
    L = meta.get("gemma4.block_count")
    for key in ("embedding_length_per_layer_input", "attention.shared_kv_layers", "expert_count"):
        if value := meta.get(f"gemma4.{key}", 0):
            raise ValueError(f"{meta.path}: gemma4.{key} is {value}; only the dense Gemma 4 without it is supported")
    heads = meta.per_layer("gemma4.attention.head_count", L)
    kv_heads = meta.per_layer("gemma4.attention.head_count_kv", L)
    is_sliding = meta.per_layer("gemma4.attention.sliding_window_pattern", L)
    D, D_sliding = meta.get("gemma4.attention.key_length"), meta.get("gemma4.attention.key_length_swa")
    full_rope = RopeSpec(meta.get("gemma4.rope.freq_base"), "proportional", partial=rotated_share(meta.path, stored))
    sliding_rope = RopeSpec(meta.get("gemma4.rope.freq_base_swa", SLIDING_ROPE_THETA))
    window = meta.get("gemma4.attention.sliding_window")
    widths = set(meta.per_layer("gemma4.feed_forward_length", L))
    if len(widths) != 1:
        raise ValueError(f"{meta.path}: gemma4.feed_forward_length has {sorted(widths)}; only one width is supported")

    def layer(i: int) -> GemmaLayer:
        if is_sliding[i]:
            return GemmaLayer(heads[i], kv_heads[i], D_sliding, sliding_rope, window)
        return GemmaLayer(heads[i], kv_heads[i], D, full_rope, None, k_eq_v=f"blk.{i}.attn_v.weight" not in stored)

    return GemmaConfig(
        family="gemma4",
        vocab_size=vocab_size,
        hidden_size=meta.get("gemma4.embedding_length"),
        intermediate_size=widths.pop(),
        layers=tuple(layer(i) for i in range(L)),
        attn_scale=1.0,
        rms_eps=meta.get("gemma4.attention.layer_norm_rms_epsilon"),
        norm_offset=0.0,
        v_norm=True,
        layer_scalar=True,
        final_softcap=meta.get("gemma4.final_logit_softcapping", None),
        tied_head="output.weight" not in stored,
        embed_scale_rounded=False,
        max_positions=meta.get("gemma4.context_length"),
    )


def rotated_share(path: Path, stored: Mapping[str, GGUFTensor]) -> float:
    """The share of frequency pairs that rotate in Gemma 4's global layers."""
    if ROPE_FREQS not in stored:
        raise ValueError(f"{path}: tensor {ROPE_FREQS!r} is missing; is this a complete Gemma 4 GGUF file?")
    divisors = stored[ROPE_FREQS].read()
    rotated = int((divisors == 1).sum())
    if not (divisors[:rotated] == 1).all() or not (divisors[rotated:] > 1e20).all():
        raise ValueError(f"{path}: {ROPE_FREQS!r} must hold ones and then huge values, got {divisors.tolist()[:8]}...")
    return rotated / len(divisors)


CONFIGS = {"gemma3": gemma3_config, "gemma4": gemma4_config}


def read_gguf(path: Path) -> tuple[GemmaConfig, dict[str, GGUFTensor], dict[str, object]]:
    """Opens a GGUF target.

    Returns its configuration, its tensors by this project's names (read lazily), and of its facts about text those
    present: ids ``bos``, ``eos``, ``eot``, ``add_bos``, ``chat_template``, and its ``license``. Raises ``ValueError``
    for another architecture, a missing key or a tensor without a place.
    """
    reader = open_reader(Path(path))
    meta = Metadata(Path(path), reader)
    architecture = meta.get("general.architecture")
    if architecture not in CONFIGS:
        raise ValueError(f"{path}: architecture {architecture!r} is not supported; allowed: {', '.join(CONFIGS)}")
    by_name = {t.name: GGUFTensor(t.name, t) for t in reader.tensors}
    if "token_embd.weight" not in by_name:
        raise ValueError(f"{path}: tensor 'token_embd.weight' is missing; is this a complete Gemma GGUF file?")
    config = CONFIGS[architecture](meta, by_name, by_name["token_embd.weight"].shape[0])
    tensors = {place(path, name): tensor for name, tensor in by_name.items() if name != ROPE_FREQS}
    facts = {short: meta.get(f"tokenizer.{key}", None) for short, key in TEXT_FACTS.items()}
    facts["license"] = meta.get("general.license", None)
    return config, tensors, {short: value for short, value in facts.items() if value is not None}


def place(path: Path, name: str) -> str:
    """This project's name of a GGUF tensor."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    if name.startswith("blk."):
        index, _, rest = name.removeprefix("blk.").partition(".")
        if rest in LAYER_NAMES:
            return f"layers.{index}.{LAYER_NAMES[rest]}"
    raise ValueError(f"{path}: tensor {name!r} has no place in a Gemma text decoder")

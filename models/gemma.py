"""The Gemma text decoder, driven by its configuration: Gemma 3 and the dense Gemma 4 are two settings of it.

Shape suffixes: M rows of this forward, H query heads, G key/value heads, D head width, E model width, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.layers import CacheGeometry, KVCache, RMSNorm, Rope, RopeSpec, attend, rotate
from eyas.models.weights import Dense


@dataclass(frozen=True)
class GemmaLayer:
    """One decoder layer. ``window`` None: a global layer. ``k_eq_v``: no value projection, values are the raw keys."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int | None = None
    k_eq_v: bool = False


@dataclass(frozen=True)
class GemmaConfig:
    """Everything that decides the function of a Gemma text decoder.

    ``embed_scale_rounded``: the embedding scale sqrt(hidden_size) is rounded to the activations' dtype, as the Hugging
    Face format needs (25.25 in bfloat16 for a width of 640); GGUF keeps it in float32. ``attn_scale`` multiplies q.k.
    ``norm_offset`` is what the checkpoint's format leaves out of a norm's factor: the readers add it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[GemmaLayer, ...]
    attn_scale: float
    rms_eps: float = 1e-6
    norm_offset: float = 1.0
    v_norm: bool = False
    layer_scalar: bool = False
    attn_softcap: float | None = None
    final_softcap: float | None = None
    tied_head: bool = True
    embed_scale_rounded: bool = True
    max_positions: int = 32768

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The largest window of the sliding layers, None if there are none."""
        return max((layer.window for layer in self.layers if layer.window), default=None)


class Attention(nn.Module):
    def __init__(self, config: GemmaConfig, layer: GemmaLayer, geometry: CacheGeometry, dtype: torch.dtype):
        super().__init__()
        self.layer, self.scale, self.softcap = layer, config.attn_scale, config.attn_softcap
        H, G, D, E = layer.n_heads, layer.n_kv_heads, layer.head_dim, config.hidden_size
        self.q_proj, self.k_proj = Dense(H * D, E), Dense(G * D, E)
        self.v_proj = None if layer.k_eq_v else Dense(G * D, E)
        self.o_proj = Dense(E, H * D)
        self.q_norm, self.k_norm = RMSNorm(D, config.rms_eps), RMSNorm(D, config.rms_eps)
        self.v_norm = RMSNorm(D, config.rms_eps, weighted=False) if config.v_norm else None
        self.cache = KVCache(geometry.rows, G, D, dtype)

    def forward(self, x_ME: Tensor, table: tuple[Tensor, Tensor], slots_M: Tensor, mask_ML: Tensor) -> Tensor:
        D = self.layer.head_dim
        q_HMD = self.q_proj(x_ME).unflatten(-1, (-1, D)).transpose(1, 2)
        k_GMD = self.k_proj(x_ME).unflatten(-1, (-1, D)).transpose(1, 2)
        v_GMD = k_GMD if self.v_proj is None else self.v_proj(x_ME).unflatten(-1, (-1, D)).transpose(1, 2)
        q_HMD = rotate(self.q_norm(q_HMD), table)
        k_GMD = rotate(self.k_norm(k_GMD), table)
        if self.v_norm is not None:
            v_GMD = self.v_norm(v_GMD)
        k_GLD, v_GLD = self.cache.write(slots_M, k_GMD, v_GMD)
        y_HMD = attend(q_HMD, k_GLD, v_GLD, mask_ML, self.scale, self.softcap)
        return self.o_proj(y_HMD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GemmaConfig):
        super().__init__()
        E, I = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = Dense(I, E), Dense(I, E), Dense(E, I)

    def forward(self, x_ME: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x_ME), approximate="tanh") * self.up_proj(x_ME))


class DecoderLayer(nn.Module):
    def __init__(self, config: GemmaConfig, layer: GemmaLayer, geometry: CacheGeometry, dtype: torch.dtype):
        super().__init__()
        E, eps = config.hidden_size, config.rms_eps
        self.self_attn = Attention(config, layer, geometry, dtype)
        self.mlp = MLP(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(E, eps), RMSNorm(E, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(E, eps), RMSNorm(E, eps)
        self.register_buffer("layer_scalar", torch.ones(1) if config.layer_scalar else None)

    def forward(self, x_ME: Tensor, table: tuple[Tensor, Tensor], slots_M: Tensor, mask_ML: Tensor) -> Tensor:
        x_ME = x_ME + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x_ME), table, slots_M, mask_ML))
        x_ME = x_ME + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_ME)))
        return x_ME if self.layer_scalar is None else x_ME * self.layer_scalar.to(x_ME.dtype)


class GemmaDecoder(nn.Module):
    """A target in the sense of ``eyas.models.target.TapTarget``.

    ``max_seq_len``: positions that the caches can hold. ``dtype``: of the activations and caches.
    """

    def __init__(self, config: GemmaConfig, max_seq_len: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.max_seq_len, self.dtype = config, max_seq_len, dtype
        self.embed_tokens = Dense(config.vocab_size, config.hidden_size)
        self.geometry = [CacheGeometry.of(max_seq_len, layer.window) for layer in config.layers]
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, geometry, dtype) for layer, geometry in zip(config.layers, self.geometry)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.lm_head = None if config.tied_head else Dense(config.vocab_size, config.hidden_size)
        kinds = dict.fromkeys((layer.rope, layer.head_dim) for layer in config.layers)
        self.rope_kinds = list(kinds)
        self.ropes = nn.ModuleList(Rope(spec, width) for spec, width in kinds)
        scale = torch.tensor(config.hidden_size**0.5)
        self.embed_scale = float(scale.to(dtype) if config.embed_scale_rounded else scale)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def n_layers(self) -> int:
        return self.config.n_layers

    @property
    def max_call_rows(self) -> int:
        """The most rows that one forward may have: a ring of two windows takes one window."""
        return min(geometry.max_call_rows() for geometry in self.geometry)

    def embed_rows(self, tokens: Tensor) -> Tensor:
        """int64 ``[1, M]`` -> raw, unscaled embedding rows ``[1, M, E]``: what a draft head shares."""
        return self.embed_tokens.rows(tokens, self.dtype)

    def forward(
        self, tokens: Tensor, input_pos_M: Tensor, boundaries: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x_ME = self.embed_rows(tokens) * self.embed_scale
        tables = {kind: rope(input_pos_M) for kind, rope in zip(self.rope_kinds, self.ropes)}
        views = {g: (g.slots(input_pos_M), g.mask(input_pos_M)) for g in dict.fromkeys(self.geometry)}
        taps = {0: x_ME}
        for i, (layer, geometry) in enumerate(zip(self.layers, self.geometry)):
            kind = self.config.layers[i]
            x_ME = layer(x_ME, tables[kind.rope, kind.head_dim], *views[geometry])
            taps[i + 1] = x_ME
        return self.norm(x_ME), tuple(taps[b] for b in boundaries)

    def logits(self, hidden_ME: Tensor) -> Tensor:
        """Final-normed ``[1, M, E]`` -> float32 ``[1, M, V]``."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        y_MV = head(hidden_ME).float()
        cap = self.config.final_softcap
        return y_MV if cap is None else torch.tanh(y_MV / cap) * cap

"""The EAGLE-3 draft head: one decoder layer (or a few) on the target's features, with its own cache and vocabulary.

Per position it joins two inputs, the raw embedding row of a token and a feature of the position before it:

    feature = fc(concat of the target's residual streams at the boundaries)   for rows that the target has seen
    feature = the head's own output g                                         for rows that it proposed itself

Boundary b is the residual stream after b decoder layers. Every published variant is a field of ``Eagle3Config``.
Shape suffixes: M rows, H query heads, G key/value heads, D head width, E draft width, V draft vocabulary.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.layers import CacheGeometry, KVCache, RMSNorm, Rope, RopeSpec, attend, rotate
from eyas.models.weights import Dense

FC_NORMS = ("none", "concat", "per_tap")


@dataclass(frozen=True)
class Eagle3Config:
    """Everything that decides the function of a head, independent of the spelling it was saved in.

    ``boundaries``: which residual streams it taps, ascending; any number. ``vocab_size``: the target's.
    ``norm_before_residual``: the residual of the first layer is the normed feature, not the feature.
    ``fc_norm``: ``none``; ``concat`` (one norm over all taps, "norm_before_fc"); ``per_tap`` ("fc_norm").
    ``norm_output``: the feedback g is the normed output rather than the raw one; logits are normed in either case.
    ``own_embed``, ``own_head``: the head brings its own tables; otherwise it uses the target's (raw, unscaled).
    ``window``: sliding attention over this many positions, itself included. ``qk_norm``: per-head norms (Qwen 3).
    ``max_positions``: positions that the head was made for, None if it does not say.
    """

    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    boundaries: tuple[int, ...]
    n_layers: int = 1
    rms_eps: float = 1e-6
    rope: RopeSpec = field(default_factory=lambda: RopeSpec(10000.0))
    window: int | None = None
    norm_before_residual: bool = False
    fc_norm: str = "none"
    norm_output: bool = False
    own_embed: bool = False
    own_head: bool = True
    qk_norm: bool = False
    attention_bias: bool = False
    max_positions: int | None = None

    def __post_init__(self):
        if self.fc_norm not in FC_NORMS:
            raise ValueError(f"unknown fc_norm {self.fc_norm!r}; allowed: {', '.join(FC_NORMS)}")
        if not self.boundaries or list(self.boundaries) != sorted(set(self.boundaries)) or self.boundaries[0] < 0:
            raise ValueError(f"taps must be ascending and distinct boundaries from 0 on, got {list(self.boundaries)}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft vocabulary of {self.draft_vocab_size} does not fit the target's {self.vocab_size}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} key/value heads evenly")
        if not self.own_embed and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"a head of width {self.hidden_size} cannot share the embedding of a target of width "
                f"{self.target_hidden_size}; it must bring its own embed_tokens"
            )
        if not self.own_head and (
            self.draft_vocab_size != self.vocab_size or self.hidden_size != self.target_hidden_size
        ):
            raise ValueError(
                f"a head without lm_head must have the target's vocabulary and width, got {self.draft_vocab_size} of "
                f"{self.vocab_size} and {self.hidden_size} of {self.target_hidden_size}"
            )

    def taps(self) -> str:
        """The taps in words: ``after layers 1, 8, 14`` (counted from 0); boundary 0 is the scaled embedding."""
        layers = [str(b - 1) for b in self.boundaries if b > 0]
        parts = ["the scaled embedding"] if self.boundaries[0] == 0 else []
        if layers:
            parts.append(f"after layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}")
        return " and ".join(parts)


def default_boundaries(n_layers: int) -> tuple[int, ...]:
    """Low, middle and high taps of a target that names none: ``(2, L // 2, L - 3)``.

    Raises ``ValueError`` where they are not three distinct boundaries (fewer than 7 layers): those targets must be
    told.
    """
    low, mid, high = 2, n_layers // 2, n_layers - 3
    if not 2 <= low < mid < high:
        raise ValueError(
            f"the default taps of a target of {n_layers} layers would be [{low}, {mid}, {high}]; "
            f"they must be distinct and ascending, so the head has to name its own"
        )
    return low, mid, high


class Attention(nn.Module):
    def __init__(self, config: Eagle3Config, in_features: int, geometry: CacheGeometry, dtype: torch.dtype):
        super().__init__()
        H, G, D = config.n_heads, config.n_kv_heads, config.head_dim
        bias = config.attention_bias
        self.head_dim, self.scale = D, D**-0.5
        self.q_proj, self.k_proj = Dense(H * D, in_features, bias), Dense(G * D, in_features, bias)
        self.v_proj = Dense(G * D, in_features, bias)
        self.o_proj = Dense(config.hidden_size, H * D, bias)
        self.q_norm = RMSNorm(D, config.rms_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.rms_eps) if config.qk_norm else None
        self.cache = KVCache(geometry.rows, G, D, dtype)

    def project(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[1, H, M, D]``, keys and values ``[1, G, M, D]`` of rows ``[1, M, E]`` at the table's positions."""
        q_HMD, k_GMD, v_GMD = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None:
            q_HMD, k_GMD = self.q_norm(q_HMD), self.k_norm(k_GMD)
        return rotate(q_HMD, table), rotate(k_GMD, table), v_GMD

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], slots_M: Tensor | None, mask: Tensor) -> Tensor:
        q_HMD, k_GMD, v_GMD = self.project(x, table)
        if slots_M is not None:
            k_GMD, v_GMD = self.cache.write(slots_M, k_GMD, v_GMD)
        y_HMD = attend(q_HMD, k_GMD, v_GMD, mask, self.scale, None)
        return self.o_proj(y_HMD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        E, I = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = Dense(I, E), Dense(I, E), Dense(E, I)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """The first layer reads embedding and feature side by side (width 2E); any others are plain Llama layers."""

    def __init__(self, config: Eagle3Config, first: bool, geometry: CacheGeometry, dtype: torch.dtype):
        super().__init__()
        E, eps = config.hidden_size, config.rms_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(E, eps)
        self.hidden_norm = RMSNorm(E, eps) if first else None
        self.self_attn = Attention(config, 2 * E if first else E, geometry, dtype)
        self.post_attention_layernorm = RMSNorm(E, eps)
        self.mlp = MLP(config)

    def join(self, embed_ME: Tensor, h_ME: Tensor) -> tuple[Tensor, Tensor]:
        """What attention is added to, and what it reads."""
        if self.hidden_norm is None:
            return h_ME, self.input_layernorm(h_ME)
        normed_ME = self.hidden_norm(h_ME)
        residual_ME = normed_ME if self.norm_before_residual else h_ME
        return residual_ME, torch.cat([self.input_layernorm(embed_ME), normed_ME], dim=-1)

    def forward(self, embed_ME: Tensor, h_ME: Tensor, table, slots_M: Tensor | None, mask: Tensor) -> Tensor:
        residual_ME, x = self.join(embed_ME, h_ME)
        h_ME = residual_ME + self.self_attn(x, table, slots_M, mask)
        return h_ME + self.mlp(self.post_attention_layernorm(h_ME))


class Eagle3Head(nn.Module):
    """The head's modules. ``max_seq_len``: rows of its flat cache. ``dtype``: of activations and cache.

    ``d2t`` int64 ``[draft_vocab_size]``: target id of draft id i is ``i + d2t[i]``.
    """

    def __init__(self, config: Eagle3Config, max_seq_len: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.max_seq_len, self.dtype = config, max_seq_len, dtype
        E, A, Et = config.hidden_size, len(config.boundaries), config.target_hidden_size
        self.geometry = CacheGeometry.of(max_seq_len, None)
        self.embed_tokens = Dense(config.vocab_size, E) if config.own_embed else None
        self.input_norm = RMSNorm(A * Et, config.rms_eps) if config.fc_norm == "concat" else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(Et, config.rms_eps) for _ in range(A)) if config.fc_norm == "per_tap" else None
        )
        self.fc = Dense(E, A * Et)
        self.layers = nn.ModuleList(DraftLayer(config, i == 0, self.geometry, dtype) for i in range(config.n_layers))
        self.norm = RMSNorm(E, config.rms_eps)
        self.lm_head = Dense(config.draft_vocab_size, E) if config.own_head else None
        self.rope = Rope(config.rope, config.head_dim)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def combine(self, taps: tuple[Tensor, ...]) -> Tensor:
        """The target's residual streams, ``[1, M, Et]`` each, in ascending order -> features ``[1, M, E]``."""
        if self.fc_norm is not None:
            taps = tuple(norm(tap) for norm, tap in zip(self.fc_norm, taps))
        x = torch.cat(taps, dim=-1)
        return self.fc(x if self.input_norm is None else self.input_norm(x))

    def forward(self, embed_ME: Tensor, feature_ME: Tensor, input_pos_M: Tensor) -> tuple[Tensor, Tensor]:
        """Rows into the cache and through the head.

        ``embed_ME``: raw embedding rows of the tokens *after* ``input_pos_M``; ``feature_ME``: features *at* it.
        Returns (normed output for the logits, g for feedback), both ``[1, M, E]``.
        """
        mask_ML = self.geometry.mask(input_pos_M)
        if self.config.window is not None:
            slot_L = torch.arange(self.max_seq_len, device=input_pos_M.device)
            mask_ML = mask_ML & (slot_L.unsqueeze(0) > input_pos_M.unsqueeze(1) - self.config.window)
        return self.run(embed_ME, feature_ME, self.rope(input_pos_M), self.geometry.slots(input_pos_M), mask_ML)

    def recompute(self, embed_ME: Tensor, feature_ME: Tensor) -> tuple[Tensor, Tensor]:
        """The same for positions ``0..M-1``, from nothing and leaving nothing behind: the oracle of the cached form."""
        pos_M = torch.arange(embed_ME.shape[1], device=embed_ME.device)
        mask = pos_M.unsqueeze(1) >= pos_M.unsqueeze(0)
        if self.config.window is not None:
            mask = mask & (pos_M.unsqueeze(0) > pos_M.unsqueeze(1) - self.config.window)
        return self.run(embed_ME, feature_ME, self.rope(pos_M), None, mask)

    def run(self, embed_ME, feature_ME, table, slots_M: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
        h_ME = feature_ME
        for layer in self.layers:
            h_ME = layer(embed_ME, h_ME, table, slots_M, mask)
        normed_ME = self.norm(h_ME)
        return normed_ME, normed_ME if self.config.norm_output else h_ME

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids int64 ``[...]`` -> ids in the target's vocabulary."""
        return draft_ids + self.d2t[draft_ids]

"""Training-time test: the draft head run as it will be served, a chain of proposals from every position at once.

Step 0 is the head over the target's features. Step k > 0 is the k-th further proposal of each position's own chain: row
i takes the output of row i at step k - 1 as its feature, the token k places further on, and the rotary position i + k;
it attends to what its chain would have in the cache, which is the keys of step 0 up to row i and one key of row i from
each of the steps 1 to k.

Shape suffixes: B sequences, T positions, E draft width, H query heads, G key/value heads, D head width, V draft
vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.models.eagle3 import Attention, Eagle3Head


@dataclass
class Chain:
    """What the steps of one layer leave behind: keys and values ``[B, G, T, D]``, those of step 0 first."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def attend(self, q_BHTD: Tensor, window: int | None, scale: float) -> Tensor:
        """Attention of the latest step over all of them, ``[B, H, T, D]``."""
        k, groups = len(self.keys) - 1, self.keys[0].shape[1]
        q = q_BHTD.unflatten(1, (groups, -1))  # [B, G, H / G, T, D]
        rows = torch.arange(q.shape[-2], device=q.device)
        age = rows[:, None] + k - rows[None, :]
        seen = (age >= k) if window is None else (age >= k) & (age < window)
        past = (q @ self.keys[0].unsqueeze(2).transpose(-1, -2)).float() * scale
        parts = [past.masked_fill(~seen, float("-inf"))]
        for step in range(1, k + 1):  # a chain is never longer than a window
            parts.append((q * self.keys[step].unsqueeze(2)).sum(-1, keepdim=True).float() * scale)
        weights = torch.cat(parts, dim=-1).softmax(-1).to(q.dtype)
        out = weights[..., : len(rows)] @ self.values[0].unsqueeze(2)
        for step in range(1, k + 1):
            out = out + weights[..., len(rows) + step - 1, None] * self.values[step].unsqueeze(2)
        return out.flatten(1, 2)


def attention(module: Attention, x_BTE: Tensor, table: tuple[Tensor, Tensor], chain: Chain, window: int | None):
    """The head's attention for the next step of ``chain``, which it extends; result ``[B, T, E]``."""
    q, k, v = module.project(x_BTE, table)
    chain.keys.append(k)
    chain.values.append(v)
    return module.o_proj(chain.attend(q, window, module.scale).transpose(1, 2).flatten(2))


def unroll(head: Eagle3Head, embeds_BTE: Tensor, features_BTE: Tensor, steps: int) -> Iterator[Tensor]:
    """The normed outputs ``[B, T, E]`` of each step, whose logits propose the token after the next ``k + 1``.

    ``embeds_BTE``: raw embedding rows of the tokens *after* each position; ``features_BTE``: the head's combined
    features *at* it. At step k the last k rows have no token of their own and are to be left out.
    """
    chains = [Chain() for _ in head.layers]
    rows = torch.arange(embeds_BTE.shape[1], device=embeds_BTE.device)
    h = features_BTE
    for k in range(steps):
        embeds, table = embeds_BTE.roll(-k, dims=1), head.rope(rows + k)
        for layer, chain in zip(head.layers, chains):
            residual, x = layer.join(embeds, h)
            h = residual + attention(layer.self_attn, x, table, chain, head.config.window)
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        out = head.norm(h)
        yield out
        h = out if head.config.norm_output else h

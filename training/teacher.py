"""The target that a head is trained on, frozen, many sequences at a time.

A target's methods take one sequence; its layers take as many as its caches have room for, as long as all are at the
same positions. A teacher makes that room.
"""

import torch
from torch import Tensor, nn

from eyas.models.layers import KVCache
from eyas.models.recipe import load_recipe, materialize
from eyas.models.target import Checkpoint, TapTarget, TargetSpec


class Teacher:
    """A target with dense weights in ``dtype`` on ``device``, for sequences of up to ``max_seq_len`` tokens."""

    def __init__(
        self, spec: TargetSpec, checkpoint: Checkpoint, max_seq_len: int, dtype: torch.dtype, device: torch.device
    ):
        module = spec.build(checkpoint.config, max_seq_len, dtype)
        offset = getattr(checkpoint.config, "norm_offset", 0.0)
        materialize(module, "target.", checkpoint.tensors, load_recipe("none"), dtype, offset)
        self.module: TapTarget | nn.Module = module.to(device).eval()
        self.dtype, self.device, self.max_seq_len = dtype, device, max_seq_len
        self.rooms = 0  # how often the caches were made anew

    @property
    def vocab_size(self) -> int:
        return self.module.vocab_size

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 ``[B, T]`` -> raw embedding rows ``[B, T, E]``, which a head shares."""
        return self.module.embed_rows(tokens)

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, start: int | Tensor, boundaries: tuple[int, ...] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Tokens int64 ``[B, T]`` at ``start`` and after -> (final hidden ``[B, T, E]``, one such tap a boundary). What
        lies before ``start`` is what the calls before left in the caches.
        """
        self._make_room(tokens.shape[0])
        step, parts = self.module.max_call_rows, []
        for at in range(0, tokens.shape[1], step):
            part = tokens[:, at : at + step]
            positions = torch.arange(at, at + part.shape[1], device=tokens.device) + start
            parts.append(self.module(part, positions, boundaries))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([hidden for hidden, _ in parts], 1), tuple(
            torch.cat([taps[i] for _, taps in parts], 1) for i in range(len(boundaries))
        )

    @torch.no_grad()
    def judge(self, hidden: Tensor, ids: Tensor, rows: int = 2048) -> tuple[Tensor, Tensor]:
        """What the target says after each of ``hidden`` ``[N, E]``: (its best tokens int64 ``[N]``, its logits of the
        tokens ``ids`` int64 ``[Vd]`` only, ``[N, Vd]`` in its dtype). ``rows`` at a time have all their logits.
        """
        best, logits = [], []
        for part in hidden.split(rows):
            every = self.module.logits(part[None])[0]
            best.append(every.argmax(-1))
            logits.append(every[:, ids].to(self.dtype))
        return torch.cat(best), torch.cat(logits)

    def _make_room(self, sequences: int) -> None:
        caches = [module for module in self.module.modules() if isinstance(module, KVCache)]
        if all(cache.k.shape[0] == sequences for cache in caches):
            return
        self.rooms += 1
        for cache in caches:
            for name in ("k", "v"):
                old = getattr(cache, name)
                setattr(cache, name, old.new_zeros(sequences, *old.shape[1:]))

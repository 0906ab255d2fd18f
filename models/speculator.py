"""A target and its draft head as one module with the methods that are traced, and the loops that define what is right.

Pairing: the draft row of position t joins the target's feature at t with the token at t + 1. So features that
verification has already computed reseed the draft, and a corrected token never needs a forward of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from eyas.models.eagle3 import Eagle3Head
from eyas.models.target import TapTarget


class Eagle3Speculator(nn.Module):
    """``target`` and ``draft`` under one roof, so that equal buffer names mean equal storage in every traced method."""

    def __init__(self, target: TapTarget, draft: Eagle3Head):
        super().__init__()
        c = draft.config
        if c.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft head is for a vocabulary of {c.vocab_size}, the target has {target.vocab_size}"
            )
        if c.target_hidden_size != target.hidden_size:
            raise ValueError(
                f"the draft head taps a target of width {c.target_hidden_size}, this one has {target.hidden_size}"
            )
        if c.boundaries[-1] > target.n_layers:
            raise ValueError(
                f"the draft head taps boundary {c.boundaries[-1]}, the target has {target.n_layers} layers"
            )
        self.target, self.draft = target, draft

    def prefill(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 ``[1, T]`` at positions int64 ``[T]`` -> (next token ``[1, 1]``, features ``[1, T, H]``)."""
        hidden, taps = self.target(tokens, input_pos, self.draft.config.boundaries)
        return self.target.logits(hidden[:, -1:]).argmax(-1), self.draft.combine(taps)

    def target_verify(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        """As ``prefill``, with the greedy token after every row: (ids int64 ``[1, M]``, features ``[1, M, H]``)."""
        hidden, taps = self.target(tokens, input_pos, self.draft.config.boundaries)
        return self.target.logits(hidden).argmax(-1), self.draft.combine(taps)

    def target_logits(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        """As ``target_verify``, but the logits float32 ``[1, M, V]`` themselves: for perplexity and for bit
        comparisons.
        """
        hidden, _ = self.target(tokens, input_pos, ())
        return self.target.logits(hidden)

    def draft_decode(self, tokens: Tensor, feature: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Draft rows: tokens int64 ``[1, T]`` that follow positions int64 ``[T]``, features ``[1, T, H]`` at them
        -> (proposals int64 ``[1, T]`` in the target's vocabulary, g ``[1, T, H]``)."""
        normed, g = self.draft(self.draft_embed(tokens), feature, input_pos)
        return self.draft_ids(normed), g

    def decode(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        """Plain greedy step for one row: the token after it, int64 ``[1, 1]``. The same as verify's one-row window."""
        return self.target_verify(tokens, input_pos)[0]

    def draft_embed(self, tokens: Tensor) -> Tensor:
        own = self.draft.embed_tokens
        return self.target.embed_rows(tokens) if own is None else own.rows(tokens, self.draft.dtype)

    def draft_ids(self, normed: Tensor) -> Tensor:
        head = self.draft.lm_head
        logits = self.target.logits(normed) if head is None else head(normed)
        return self.draft.to_target(logits.float().argmax(-1))

    def reset(self) -> None:
        """Forgets all cached positions."""
        for name, buffer in self.named_buffers():
            if name.endswith(("cache.k", "cache.v")):
                buffer.zero_()


@dataclass
class Acceptance:
    """Counts of a run. ``tau``: tokens emitted a round, the free token of the prefill not counted."""

    chain: int
    accepted: list[int] = field(default_factory=list)  # accepted proposals of each round
    emitted: int = 0  # tokens that rounds emitted, after stops and budget

    @property
    def rounds(self) -> int:
        return len(self.accepted)

    @property
    def tau(self) -> float:
        return self.emitted / self.rounds if self.rounds else 0.0

    def by_position(self) -> list[float]:
        """Share of rounds that accepted proposal i, for i = 1..chain: unconditional, so it never rises."""
        return [sum(a >= i for a in self.accepted) / max(1, self.rounds) for i in range(1, self.chain + 1)]


@torch.no_grad()
def greedy_reference(
    speculator: Eagle3Speculator, ids: list[int], max_new_tokens: int, stop_ids: Iterable[int] = ()
) -> list[int]:
    """Plain greedy decoding by recomputing everything for every token. No cache survives between tokens."""
    stop, text = set(stop_ids), list(ids)
    while len(text) - len(ids) < max_new_tokens:
        token = int(_full(speculator, text)[0][-1])
        text.append(token)
        if token in stop:
            break
    return text[len(ids) :]


@torch.no_grad()
def speculative_reference(
    speculator: Eagle3Speculator, ids: list[int], chain: int, max_new_tokens: int, stop_ids: Iterable[int] = ()
) -> tuple[list[int], Acceptance]:
    """Speculative decoding by recomputing everything each round: the oracle of the cached loops.

    Returns (new tokens, counts). Same tokens as ``greedy_reference`` whatever the head proposes.
    """
    stop, new, counts = set(stop_ids), [], Acceptance(chain)

    def emit(token: int) -> bool:
        new.append(token)
        return token in stop or len(new) >= max_new_tokens

    greedy, _ = _full(speculator, ids)
    done = max_new_tokens <= 0 or emit(int(greedy[-1]))
    while not done:
        text = [*ids, *new]  # the last of them is the anchor: confirmed, with no feature yet
        _, features = _full(speculator, text[:-1])
        proposals = list(_chain(speculator, text, features, chain))
        greedy, _ = _full(speculator, [*text, *proposals])
        window = [int(token) for token in greedy[len(text) - 1 :]]
        accepted = 0
        while accepted < chain and proposals[accepted] == window[accepted]:
            accepted += 1
        counts.accepted.append(accepted)
        for token in window[: accepted + 1]:
            counts.emitted += 1
            done = emit(token)
            if done:
                break
    return new, counts


def _full(speculator: Eagle3Speculator, text: list[int]) -> tuple[Tensor, Tensor]:
    """Greedy token after every position of ``text``, and its features, from empty caches, in calls that the caches
    allow.
    """
    speculator.reset()
    ids, features = [], []
    step = speculator.target.max_call_rows
    for start in range(0, len(text), step):
        part = torch.tensor([text[start : start + step]])
        i, f = speculator.target_verify(part, torch.arange(start, start + part.shape[1]))
        ids.append(i[0])
        features.append(f)
    return torch.cat(ids), torch.cat(features, dim=1)


def _chain(speculator: Eagle3Speculator, text: list[int], features: Tensor, chain: int) -> Iterator[int]:
    """``chain`` proposals after ``text``, from features of its positions ``0..len(text)-2``, without a cache."""
    tokens = text[1:]
    for _ in range(chain):
        embeds = speculator.draft_embed(torch.tensor([tokens]))
        normed, g = speculator.draft.recompute(embeds, features)
        token = int(speculator.draft_ids(normed[:, -1:])[0, -1])
        tokens = [*tokens, token]
        features = torch.cat([features, g[:, -1:]], dim=1)
        yield token

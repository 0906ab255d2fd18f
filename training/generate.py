"""Continues prompts with the target itself, in batches: what a head is trained on is what its target writes."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.training.teacher import Teacher

NGRAM = 4  # of the share of repeated ones


@dataclass(frozen=True)
class Prompt:
    """``ids`` of a prompt of some ``kind``."""

    kind: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A prompt and what the target made of it: ``ids``, the first ``prompt`` of them given. ``temperature`` 0 is
    greedy.
    """

    kind: str
    ids: tuple[int, ...]
    prompt: int
    temperature: float

    @property
    def repeated(self) -> float:
        return repeated_share(self.ids[self.prompt :])


def repeated_share(ids: Sequence[int], n: int = NGRAM) -> float:
    """The share of a text's n-grams that occurred in it before: 0 where none did."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


class Generator:
    """Writes on from prompts of one length, all at once, a token a step; on CUDA a step is one graph."""

    def __init__(self, teacher: Teacher, stop_ids: Iterable[int], seed: int):
        self.teacher, self.stop_ids = teacher, torch.tensor(sorted(stop_ids), device=teacher.device)
        self.seed = seed
        self._graphs: dict[tuple[int, float], tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        self._room = -1  # the caches that the graphs use

    @torch.no_grad()
    def texts(
        self, prompts: Sequence[Prompt], new_tokens: int, temperature: float, batch: int, size: int = 0
    ) -> list[Text]:
        """Continues prompts of equal length; ``batch`` numbers the call, and its random numbers follow from that.
        ``size``: rows of a step where there are fewer prompts, so that calls share a graph.
        """
        (length,) = {len(p.ids) for p in prompts}
        torch.manual_seed(self.seed * 1_000_003 + batch)
        rows = [p.ids for p in prompts] + [prompts[0].ids] * (size - len(prompts))
        tokens = torch.tensor(rows, device=self.teacher.device)
        hidden, _ = self.teacher.forward(tokens, 0)
        made = [self.pick(hidden[:, -1:], temperature)]
        ended = torch.isin(made[0], self.stop_ids)
        for i in range(1, new_tokens):
            made.append(self.step(made[-1], length + i - 1, temperature))
            ended |= torch.isin(made[-1], self.stop_ids)
            if i % 16 == 0 and bool(ended.all()):
                break
        new = torch.cat(made, 1)
        stops = torch.isin(new, self.stop_ids).int()
        lengths = torch.where(stops.any(1), stops.argmax(1) + 1, new.shape[1]).tolist()
        return [
            Text(p.kind, (*p.ids, *row[:n]), length, temperature) for p, row, n in zip(prompts, new.tolist(), lengths)
        ]

    def pick(self, hidden: Tensor, temperature: float) -> Tensor:
        """The next token after ``hidden`` ``[B, 1, E]``, int64 ``[B, 1]``: the best, or drawn at a temperature."""
        logits = self.teacher.module.logits(hidden)
        if temperature > 0:  # the best of logits with Gumbel noise is a draw from their softmax
            logits = logits / temperature - torch.empty_like(logits).exponential_().log()
        return logits.argmax(-1)

    def step(self, tokens: Tensor, position: int, temperature: float) -> Tensor:
        if self.teacher.device.type != "cuda":
            hidden, _ = self.teacher.forward(tokens, position)
            return self.pick(hidden, temperature)
        if self._room != self.teacher.rooms:
            self._graphs.clear()
            self._room = self.teacher.rooms
        key = (tokens.shape[0], temperature)
        if key not in self._graphs:
            self._graphs[key] = self._capture(tokens, temperature)
        graph, given, at, out = self._graphs[key]
        given.copy_(tokens)
        at.fill_(position)
        graph.replay()
        return out.clone()

    def _capture(self, tokens: Tensor, temperature: float) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]:
        given, at = tokens.clone(), torch.zeros((), dtype=torch.int64, device=tokens.device)
        caches = [b for name, b in self.teacher.module.named_buffers() if ".cache." in name]
        kept = [cache.clone() for cache in caches]  # a trial run writes at position 0
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.pick(self.teacher.forward(given, at)[0], temperature)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.pick(self.teacher.forward(given, at)[0], temperature)
        for cache, old in zip(caches, kept):
            cache.copy_(old)
        return graph, given, at, out


@dataclass
class Filtered:
    """What was left out of some texts, and why."""

    kept: int = 0
    repetitive: int = 0
    doubles: int = 0
    short: int = 0

    def __str__(self) -> str:
        total = self.kept + self.repetitive + self.doubles + self.short
        return (
            f"{self.kept} of {total} texts kept; left out: {self.repetitive} that repeat themselves, "
            f"{self.doubles} doubles, {self.short} too short"
        )


def keep_good(texts: Iterable[Text], max_repeated: float, min_new: int) -> tuple[list[Text], Filtered]:
    """Texts whose new tokens are at least ``min_new``, repeat at most that share of their 4-grams, and are no one
    else's.
    """
    kept, counts, known = [], Filtered(), set()
    for text in texts:
        new = text.ids[text.prompt :]
        digest = hashlib.sha256(repr(new).encode()).digest()
        if len(new) < min_new:
            counts.short += 1
        elif digest in known:
            counts.doubles += 1
        elif text.repeated > max_repeated:
            counts.repetitive += 1
        else:
            known.add(digest)
            kept.append(text)
    counts.kept = len(kept)
    return kept, counts


def draft_vocabulary(texts: Iterable[Text], size: int, vocab_size: int, always: Iterable[int]) -> Tensor:
    """The ``size`` ids that occur most often among new tokens, ascending int64 ``[size]``; ``always`` are among them,
    and the lowest unused ids make up for too few.

    Raises ``ValueError`` for a size that the vocabulary does not have, or that cannot hold ``always``.
    """
    always = sorted(set(always))
    if not len(always) <= size <= vocab_size:
        raise ValueError(
            f"a draft vocabulary of {size} ids; allowed: {max(1, len(always))} to the target's {vocab_size}"
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(torch.tensor(text.ids[text.prompt :], dtype=torch.int64), minlength=vocab_size)
    counts[always] = counts.sum() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values

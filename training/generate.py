"""Continues prompts with the target itself, in batches: what a head is trained on is what its target writes."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    """Writes on from many prompts at once, a token a step; on CUDA a step is one graph."""

    def __init__(self, teacher: Teacher, stop_ids: Iterable[int], seed: int):
        self._stops = set(stop_ids)
        self.teacher, self.stop_ids = teacher, torch.tensor(sorted(self._stops), device=teacher.device)
        self.seed = seed
        self._graphs: dict[tuple[int, float], tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        self._room = -1  # the caches that the graphs use

    @torch.no_grad()
    def texts(
        self, prompts: Sequence[Prompt], new_tokens: int, temperature: float, batch: int, size: int = 0
    ) -> list[Text]:
        """Continues prompts; ``batch`` numbers the call, and its random numbers follow from that. ``size``: rows of a
        step where there are fewer prompts, so that calls share a graph. Steps begin where the shortest prompt ends:
        longer ones are read on meanwhile, so prompts of about one length waste least.
        """
        lengths = [len(p.ids) for p in prompts]
        shortest, longest = min(lengths), max(lengths)
        torch.manual_seed(self.seed * 1_000_003 + batch)
        rows = [p.ids for p in prompts] + [prompts[0].ids] * (size - len(prompts))
        device = self.teacher.device
        given = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in rows], device=device)
        length = torch.tensor([len(ids) for ids in rows], device=device)[:, None]
        tokens = [given[:, :shortest]]
        hidden, _ = self.teacher.forward(tokens[0], 0)
        picked = self.pick(hidden[:, -1:], temperature)
        ended = torch.zeros_like(length, dtype=torch.bool)
        for at in range(shortest, longest + new_tokens):
            if at > shortest:
                picked = self.step(tokens[-1], at - 1, temperature)
            tokens.append(torch.where(at < length, given[:, at : at + 1], picked) if at < longest else picked)
            ended |= torch.isin(tokens[-1], self.stop_ids) & (at >= length)
            if at % 16 == 0 and bool(ended.all()):
                break
        whole = torch.cat(tokens, 1).tolist()
        return [Text(p.kind, self._until_stop(row, len(p.ids), new_tokens), len(p.ids), temperature)
                for p, row in zip(prompts, whole)]  # fmt: skip

    def _until_stop(self, row: list[int], prompt: int, new_tokens: int) -> tuple[int, ...]:
        new = row[prompt : prompt + new_tokens]
        end = next((i + 1 for i, token in enumerate(new) if token in self._stops), len(new))
        return tuple(row[: prompt + end])

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
    """What was left out of some texts, and why. ``cut``: texts, and ``cut_tokens`` their tokens, from where they began
    to repeat themselves.
    """

    kept: int = 0
    kept_tokens: int = 0
    cut: int = 0
    cut_tokens: int = 0
    doubles: int = 0
    short: int = 0

    def __str__(self) -> str:
        total = self.kept + self.doubles + self.short
        return (
            f"{self.kept} of {total} texts kept, {self.kept_tokens} new tokens; {self.cut} were cut where they began "
            f"to repeat themselves, by {self.cut_tokens} tokens; left out: {self.doubles} doubles, "
            f"{self.short} too short"
        )


def before_loops(new: Sequence[int], max_repeated: float, n: int = NGRAM) -> int:
    """The length of the longest beginning of ``new`` of whose n-grams at most that share occurred in it before."""
    seen: set[tuple[int, ...]] = set()
    length = min(len(new), n - 1)
    for i in range(len(new) - n + 1):
        seen.add(tuple(new[i : i + n]))
        if (i + 1 - len(seen)) <= max_repeated * (i + 1):
            length = i + n
    return length


def keep_good(texts: Iterable[Text], max_repeated: float, min_new: int) -> tuple[list[Text], Filtered]:
    """Texts up to where more than that share of their 4-grams are repeated ones, if ``min_new`` new tokens are left and
    no other text has the same.
    """
    kept, counts, known = [], Filtered(), set()
    for text in texts:
        new = text.ids[text.prompt :]
        length = before_loops(new, max_repeated)
        counts.cut += length < len(new)
        counts.cut_tokens += len(new) - length
        digest = hashlib.sha256(repr(new[:length]).encode()).digest()
        if length < min_new:
            counts.short += 1
        elif digest in known:
            counts.doubles += 1
        else:
            known.add(digest)
            counts.kept_tokens += length
            kept.append(replace(text, ids=text.ids[: text.prompt + length]))
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

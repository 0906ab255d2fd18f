"""What a head is trained for: at every step of its chains, the target's distribution over the draft vocabulary.

Shape suffixes: B texts, T positions, E width, V draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.models.eagle3 import Eagle3Head
from eyas.training.generate import Text
from eyas.training.teacher import Teacher
from eyas.training.ttt import unroll


@dataclass(frozen=True)
class Batch:
    """Texts side by side: ``tokens`` int64 ``[B, T]``, padded at the end; ``new`` bool ``[B, T]``: what the target
    wrote.
    """

    tokens: Tensor
    new: Tensor

    @classmethod
    def of(cls, texts: Sequence[Text], device: torch.device) -> "Batch":
        length = max(len(text.ids) for text in texts)
        tokens = torch.zeros(len(texts), length, dtype=torch.int64)
        new = torch.zeros(len(texts), length, dtype=torch.bool)
        for i, text in enumerate(texts):
            tokens[i, : len(text.ids)] = torch.tensor(text.ids)
            new[i, text.prompt : len(text.ids)] = True
        return cls(tokens.to(device), new.to(device))


@dataclass(frozen=True)
class Step:
    """A step of all chains. ``loss``: mean over the positions that count. ``right`` bool ``[B, T]``: whether row i
    proposes what the target says after position i + 1 + k; ``counts`` bool ``[B, T]``: whether the target wrote that
    token, so that there is something to be right about.
    """

    loss: Tensor
    right: Tensor
    counts: Tensor

    @property
    def accuracy(self) -> float:
        return (self.right & self.counts).sum().item() / max(1, self.counts.sum().item())


def run_steps(teacher: Teacher, head: Eagle3Head, batch: Batch, steps: int) -> list[Step]:
    """The steps of a head over texts. The loss is the divergence from the target's distribution over the draft
    vocabulary, where the target's best token is in it.
    """
    vocabulary = head.to_target(torch.arange(head.config.draft_vocab_size, device=batch.tokens.device))
    hidden, taps = teacher.forward(batch.tokens, 0, head.config.boundaries)
    written = F.pad(batch.new[:, 1:], (0, 1))  # by position: whether the target wrote what comes after it
    said, logits = teacher.judge(hidden[written], vocabulary)
    best, row_of = (torch.full_like(batch.tokens, -1) for _ in range(2))
    best[written], row_of[written] = said, torch.arange(len(said), device=said.device)
    known = torch.isin(best, vocabulary)
    targets = logits.float().softmax(-1)
    certainty = torch.special.xlogy(targets, targets).sum(-1)
    made = []
    embeds = teacher.embed(batch.tokens.roll(-1, dims=1))
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=teacher.dtype == torch.bfloat16):
        for k, out in enumerate(unroll(head, embeds, head.combine(taps), steps)):
            after = slice(1 + k, None)  # row i stands for position i + 1 + k
            counts, learn = written[:, after], (written & known)[:, after]
            rows = out[:, : counts.shape[1]]
            proposed = head.lm_head(rows[learn]).float()
            at = row_of[:, after][learn]
            loss = divergence(proposed, targets[at], certainty[at]) if len(at) else proposed.sum()
            right = torch.zeros_like(counts)
            right[learn] = vocabulary[proposed.detach().argmax(-1)] == best[:, after][learn]
            made.append(Step(loss, right, counts))
    return made


def divergence(logits: Tensor, wanted: Tensor, certainty: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of the softmax of ``logits`` from ``wanted``, both ``[N, V]``, in nats: the mean.
    ``certainty`` ``[N]``: the sum of p log p over each row of ``wanted``. Its gradient is that of the cross entropy; it
    is 0 where there is nothing left to learn.
    """
    return F.cross_entropy(logits, wanted) + certainty.mean()


def accepted(steps: Sequence[Step]) -> Tensor:
    """int64 ``[B, T - len(steps)]``: how many proposals of row i's chain hold, for texts that the target wrote
    greedily.
    """
    width = steps[-1].right.shape[1]
    right = torch.stack([step.right[:, :width] for step in steps])
    return right.long().cumprod(0).sum(0)


def tau(texts: Sequence[Text], held: Tensor, chain: int) -> tuple[int, int]:
    """(tokens, rounds) of decoding greedy texts with chains of ``chain``, from ``accepted``'s ``held``: rounds are
    walked as decoding does, until a chain would pass a text's end.
    """
    tokens = rounds = 0
    for text, row in zip(texts, held.tolist(), strict=True):
        anchor = text.prompt  # the first new token is the prefill's
        while anchor + chain < len(text.ids) and anchor - 1 < len(row):
            taken = min(row[anchor - 1], chain) + 1
            tokens, rounds, anchor = tokens + taken, rounds + 1, anchor + taken
    return tokens, rounds

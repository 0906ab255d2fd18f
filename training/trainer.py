"""Trains a head: seeded, resumable to the bit on one machine, with a stop when held-out accuracy no longer rises.

A checkpoint is written at every check and at the end.
"""

import math
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from eyas.models.eagle3 import Eagle3Head
from eyas.models.weights import Dense
from eyas.training.generate import Text
from eyas.training.objective import Batch, run_steps
from eyas.training.teacher import Teacher


@dataclass(frozen=True)
class Plan:
    """How to train. ``batch``: texts a step. ``steps``: optimiser steps in all. ``ttt``: steps of a chain; step k's
    loss counts ``decay ** k``. ``patience``: checks without progress before an early stop, 0 for none.
    """

    steps: int
    batch: int
    ttt: int = 5
    decay: float = 0.8
    lr: float = 1e-3
    last_lr: float = 1e-5
    warmup: float = 0.03
    clip: float = 1.0
    weight_decay: float = 0.01
    seed: int = 0
    check_every: int = 200
    patience: int = 5

    def lr_at(self, step: int) -> float:
        """Warms up in a line, then falls as a cosine."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.lr * (step + 1) / warm
        share = (step - warm) / max(1, self.steps - warm)
        return self.last_lr + (self.lr - self.last_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


@dataclass(frozen=True)
class Progress:
    """After a step: its number, loss, and accuracy by chain step; held-out accuracy where it was looked at."""

    step: int
    loss: float
    accuracy: tuple[float, ...]
    lr: float
    tokens: int
    held_out: tuple[float, ...] | None = None


def trainable(head: Eagle3Head) -> Eagle3Head:
    """The head with its matrices and norms as float32 parameters."""
    for module in head.modules():
        if isinstance(module, Dense):
            for name in ("weight", "bias"):
                value = getattr(module, name)
                if value is not None:
                    delattr(module, name)
                    setattr(module, name, nn.Parameter(value.float()))
    return head.requires_grad_(True)


class Trainer:
    """A run. ``folder``: where its checkpoint lies; one that is there already is continued, if it is of this plan."""

    def __init__(
        self, teacher: Teacher, head: Eagle3Head, plan: Plan, train: Sequence[Text], held_out: Sequence[Text],
        folder: Path,
    ):  # fmt: skip
        if len(train) < plan.batch:
            raise ValueError(f"{len(train)} texts to train on are fewer than a batch of {plan.batch}")
        self.teacher, self.head, self.plan = teacher, trainable(head), plan
        self.train, self.held_out, self.path = train, held_out, folder / "training.pt"
        matrices = [p for p in head.parameters() if p.ndim > 1]
        others = [p for p in head.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.95))
        self.step, self.best, self.worse = 0, 0.0, 0
        self.best_weights: dict[str, Tensor] = {}
        if self.path.exists():
            self._resume()

    def _resume(self) -> None:
        try:
            state = torch.load(self.path, map_location=self.teacher.device, weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.path} is damaged; remove it to train from the start ({error})") from error
        if state["plan"] != asdict(self.plan):
            other = sorted(k for k, v in asdict(self.plan).items() if state["plan"].get(k) != v)
            raise ValueError(
                f"{self.path} is of a run with other settings ({', '.join(other)}); continue with those, or remove it"
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.best, self.worse = state["step"], state["best"], state["worse"]
        self.best_weights = state["best_weights"]

    def save(self) -> None:
        """Writes the checkpoint, in one step. Raises ``OSError`` where it cannot be written."""
        state = {
            "plan": asdict(self.plan), "head": self.head.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "best": self.best, "worse": self.worse, "best_weights": self.best_weights,
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}")
        try:
            torch.save(state, part)
            os.replace(part, self.path)
        except RuntimeError as error:  # what torch makes of a full disk
            raise OSError(f"{self.path} could not be written; is the disk full? ({error})") from error
        finally:
            part.unlink(missing_ok=True)

    def texts_of(self, step: int) -> list[Text]:
        """The texts of a step: each epoch in an order of its own."""
        per_epoch = len(self.train) // self.plan.batch
        epoch, at = divmod(step, per_epoch)
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(self.plan.seed + epoch))
        return [self.train[i] for i in order[at * self.plan.batch : (at + 1) * self.plan.batch].tolist()]

    def run(self, until: int | None = None, told: Callable[[Progress], None] = lambda progress: None) -> None:
        """Trains to the end, to step ``until``, or to an early stop; leaves the best weights in the head."""
        for progress in self._steps(until):
            told(progress)
        self.save()
        if self.best_weights and (self.step >= self.plan.steps or self.stopped):
            self.head.load_state_dict(self.best_weights, strict=False)

    @property
    def stopped(self) -> bool:
        return 0 < self.plan.patience <= self.worse

    def _steps(self, until: int | None) -> Iterator[Progress]:
        plan, device = self.plan, self.teacher.device
        while self.step < min(plan.steps, until or plan.steps) and not self.stopped:
            batch = Batch.of(self.texts_of(self.step), device)
            made = run_steps(self.teacher, self.head, batch, plan.ttt)
            loss = sum(step.loss * plan.decay**k for k, step in enumerate(made))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.head.parameters(), plan.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = plan.lr_at(self.step)
            self.optimizer.step()
            self.step += 1
            held_out = None
            if self.held_out and (self.step % plan.check_every == 0 or self.step == plan.steps):
                held_out = self.check()
                self.save()
            accuracy = tuple(step.accuracy for step in made)
            yield Progress(self.step, loss.item(), accuracy, plan.lr_at(self.step - 1), int(batch.new.sum()), held_out)

    def check(self) -> tuple[float, ...]:
        """Held-out accuracy by step; remembers the best weights and counts checks without progress."""
        right, counts = [0] * self.plan.ttt, [0] * self.plan.ttt
        with torch.no_grad():
            for at in range(0, len(self.held_out), self.plan.batch):
                batch = Batch.of(self.held_out[at : at + self.plan.batch], self.teacher.device)
                for k, step in enumerate(run_steps(self.teacher, self.head, batch, self.plan.ttt)):
                    right[k] += int((step.right & step.counts).sum())
                    counts[k] += int(step.counts.sum())
        accuracy = tuple(r / max(1, c) for r, c in zip(right, counts))
        score, chain = 0.0, 1.0
        for share in accuracy:  # tokens a round beyond the first, if steps were right independently
            chain *= share
            score += chain
        if score > self.best:
            self.best, self.worse = score, 0
            self.best_weights = {name: p.detach().clone() for name, p in self.head.named_parameters()}
        else:
            self.worse += 1
        return accuracy

"""Training a head: what counts as accepted is what decoding accepts, losses fall, and a run goes on where it ended."""

from dataclasses import replace

import pytest
import torch

from eyas.models.eagle3 import Eagle3Head
from eyas.models.eagle3_checkpoint import untrained_head
from eyas.models.recipe import load_recipe, materialize
from eyas.models.speculator import Eagle3Speculator, speculative_reference
from eyas.models.target import find_target
from eyas.training.generate import Generator, Prompt, Text
from eyas.training.objective import Batch, accepted, run_steps, tau
from eyas.training.teacher import Teacher
from eyas.training.trainer import Plan, Trainer

PLAN = Plan(steps=60, batch=32, ttt=3, lr=3e-3, check_every=20, patience=0)
N = 560  # texts to train on; 40 are held out


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    spec = find_target("tiny_gemma3")
    return Teacher(spec, spec.open_checkpoint(None), 64, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def texts(teacher) -> list[Text]:
    """Greedy ones of 24 new tokens."""
    options = {"generator": torch.Generator().manual_seed(0)}
    prompts = [Prompt("random", tuple(row)) for row in torch.randint(2, 128, (N + 40, 6), **options).tolist()]
    return Generator(teacher, (1,), seed=0).texts(prompts, 24, 0.0, batch=0)


def new_head(seed=0) -> Eagle3Head:
    checkpoint = find_target("tiny_gemma3").open_checkpoint(None)
    made = untrained_head(
        target_vocab_size=128, target_hidden_size=48, target_layers=4, seed=seed,
        target_embed=checkpoint.tensors["embed_tokens.weight"], ids=torch.arange(0, 120),
    )  # fmt: skip
    head = Eagle3Head(made.config, 64)
    materialize(head, "draft.", made.tensors, load_recipe("none"), torch.float32)
    head.d2t.copy_(made.d2t)
    return head


@pytest.fixture(scope="module")
def trained(teacher, texts, tmp_path_factory):
    """A run of 60 steps, and what it told."""
    told = []
    trainer = Trainer(teacher, new_head(), PLAN, texts[:N], texts[N:], tmp_path_factory.mktemp("run"))
    trainer.run(told=told.append)
    return trainer, told


def by_walking(teacher, head, texts, chain) -> tuple[int, int]:
    with torch.no_grad():
        return tau(texts, accepted(run_steps(teacher, head, Batch.of(texts, teacher.device), chain)), chain)


@pytest.mark.parametrize("chain", [1, 2, 4])
def test_what_is_accepted_is_what_decoding_accepts(chain, teacher, texts, trained):
    """The loop of proposals and verification, one text at a time, round by round."""
    head = trained[0].head
    chosen = texts[N : N + 4]
    with torch.no_grad():
        held = accepted(run_steps(teacher, head, Batch.of(chosen, teacher.device), chain))
    rounds = 0
    for text, row in zip(chosen, held.tolist(), strict=True):
        teacher._make_room(1)
        new, counts = speculative_reference(
            Eagle3Speculator(teacher.module, head), list(text.ids[:6]), chain, len(text.ids) - 6, (1,)
        )
        assert (*text.ids[:6], *new) == text.ids
        anchor = 6
        for taken in counts.accepted:
            if anchor + chain >= len(text.ids):
                break
            assert row[anchor - 1] == taken, "a round of the loop"
            anchor, rounds = anchor + taken + 1, rounds + 1
    assert by_walking(teacher, head, chosen, chain)[1] == rounds > 10


def test_losses_fall_and_chains_get_longer(teacher, texts, trained):
    trainer, told = trained
    assert [p.step for p in told] == list(range(1, 61))
    assert sum(p.loss for p in told[-5:]) < 0.5 * sum(p.loss for p in told[:5])
    checks = [p.held_out for p in told if p.held_out]
    assert len(checks) == 3 and checks[-1][0] > 0.15
    before, after = (by_walking(teacher, head, texts[N:], 3) for head in (new_head(), trainer.head))
    assert after[0] / after[1] > before[0] / before[1] + 0.1


def test_a_run_goes_on_where_it_ended(teacher, texts, trained, tmp_path):
    """To the bit, also in the middle of an epoch."""
    trainer, told = trained
    for until in (7, 20, 60):
        again = []
        part = Trainer(teacher, new_head(seed=9 if until > 7 else 0), PLAN, texts[:N], texts[N:], tmp_path)
        part.run(until=until, told=again.append)
        assert again == told[again[0].step - 1 : until]
    for (name, a), (_, b) in zip(trainer.head.named_parameters(), part.head.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(ValueError, match=r"training\.pt is of a run with other settings \(lr, seed\); continue with"):
        Trainer(teacher, new_head(), replace(PLAN, lr=1.0, seed=4), texts[:N], texts[N:], tmp_path)


def test_an_interrupted_run_goes_on_from_its_last_check(teacher, texts, trained, tmp_path):
    def interrupt(progress):
        if progress.step == 33:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(teacher, new_head(), PLAN, texts[:N], texts[N:], tmp_path).run(told=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["training.pt"]
    again = []
    Trainer(teacher, new_head(), PLAN, texts[:N], texts[N:], tmp_path).run(until=36, told=again.append)
    assert again == trained[1][20:36]


def test_a_damaged_checkpoint(teacher, texts, tmp_path):
    (tmp_path / "training.pt").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"training\.pt is damaged; remove it to train from the start"):
        Trainer(teacher, new_head(), PLAN, texts[:N], texts[N:], tmp_path)


def test_a_checkpoint_that_cannot_be_written(teacher, texts, tmp_path, monkeypatch):
    def full(state, path):
        path.write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 187008 vs 186900")

    trainer = Trainer(teacher, new_head(), PLAN, texts[:N], texts[N:], tmp_path)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"training\.pt could not be written; is the disk full\?"):
        trainer.run(until=1)
    assert not list(tmp_path.iterdir())


def test_it_stops_when_nothing_is_gained(teacher, texts, tmp_path):
    plan = replace(PLAN, lr=0.0, last_lr=0.0, check_every=2, patience=2)
    told = []
    trainer = Trainer(teacher, new_head(), plan, texts[:N], texts[N:], tmp_path)
    trainer.run(told=told.append)
    assert trainer.stopped and len(told) == 6, "one check that is the best so far, two that are not"


def test_too_few_texts(teacher, texts, tmp_path):
    with pytest.raises(ValueError, match="5 texts to train on are fewer than a batch of 32"):
        Trainer(teacher, new_head(), PLAN, texts[:5], [], tmp_path)


def test_the_rate():
    plan = Plan(steps=1000, batch=1, lr=1.0, last_lr=0.1, warmup=0.1)
    rates = [plan.lr_at(step) for step in range(1001)]
    assert rates[0] == 0.01 and rates[99] == rates[100] == 1.0 and rates[1000] == pytest.approx(0.1)
    assert rates[:100] == sorted(rates[:100]) and rates[100:] == sorted(rates[100:], reverse=True)


def test_only_what_the_target_wrote_counts(teacher):
    """Neither prompts nor what lies past a text's end, at any step; nor what the draft vocabulary has not."""
    texts = [Text("some", tuple(range(2, 14)), 4, 0.0), Text("some", tuple(range(30, 38)), 6, 0.0)]
    batch = Batch.of(texts, teacher.device)
    steps = run_steps(teacher, new_head(), batch, 3)
    for k, step in enumerate(steps):
        # row i at step k proposes the token at i + 2 + k
        rows = [[4 <= i + 2 + k < 12 for i in range(11 - k)], [6 <= i + 2 + k < 8 for i in range(11 - k)]]
        counted = step.counts.tolist()
        assert [row[: 11 - k] for row in counted] == rows and not any(row[-1] for row in counted)
        assert not (step.right & ~step.counts).any()

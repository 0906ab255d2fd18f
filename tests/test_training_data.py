"""Texts that a target writes: the same as one at a time, and which of them are kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ttt import head_of

from eyas.models.speculator import Eagle3Speculator, greedy_reference
from eyas.models.target import find_target
from eyas.training.generate import (
    Generator,
    Prompt,
    Text,
    before_loops,
    draft_vocabulary,
    keep_good,
    repeated_share,
)
from eyas.training.teacher import Teacher


@pytest.fixture(scope="module", params=["tiny_gemma3", "tiny_gemma4"])
def teacher(request) -> Teacher:
    spec = find_target(request.param)
    return Teacher(spec, spec.open_checkpoint(None), 64, torch.float32, torch.device("cpu"))


PROMPTS = [Prompt("some", tuple((7 * i + 3 * j) % 126 + 2 for j in range(9))) for i in range(5)]
OF_MANY_LENGTHS = [Prompt("other", prompt.ids[: 1 + 2 * i]) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("prompts", [PROMPTS, OF_MANY_LENGTHS], ids=["one length", "many lengths"])
def test_greedy_texts_are_those_of_one_at_a_time(teacher, prompts):
    texts = Generator(teacher, (1,), seed=0).texts(prompts, 20, 0.0, batch=0, size=7)
    alone = Eagle3Speculator(teacher.module, head_of())
    for prompt, text in zip(prompts, texts, strict=True):
        teacher._make_room(1)
        assert text.ids == (*prompt.ids, *greedy_reference(alone, list(prompt.ids), 20, (1,)))
        assert (text.kind, text.prompt, text.temperature) == (prompt.kind, len(prompt.ids), 0.0)


def test_taps_are_those_of_one_at_a_time(teacher):
    tokens = torch.tensor([p.ids for p in PROMPTS])
    hidden, taps = teacher.forward(tokens, 0, (0, 2, 4))
    ids = torch.tensor([3, 50, 101])
    best, logits = (t.unflatten(0, tokens.shape) for t in teacher.judge(hidden.flatten(0, 1), ids, rows=7))
    for i, row in enumerate(tokens):
        one, own = teacher.forward(row[None], 0, (0, 2, 4))
        torch.testing.assert_close(hidden[i : i + 1], one)
        torch.testing.assert_close([tap[i : i + 1] for tap in taps], list(own))
        every = teacher.module.logits(one)[0]
        assert torch.equal(best[i], every.argmax(-1))
        torch.testing.assert_close(logits[i], every[:, ids])


def test_texts_at_a_temperature(teacher):
    """Follow from the seed and the batch's number; their first tokens are distributed as the target says."""
    generator = Generator(teacher, (), seed=5)
    texts = generator.texts(PROMPTS, 8, 1.0, batch=3)
    assert texts == generator.texts(PROMPTS, 8, 1.0, batch=3) != generator.texts(PROMPTS, 8, 1.0, batch=4)
    many = generator.texts(PROMPTS[:1] * 4000, 1, 1.5, batch=0)
    hidden, _ = teacher.forward(torch.tensor([PROMPTS[0].ids]), 0)
    wanted = (teacher.module.logits(hidden[:, -1:])[0, 0] / 1.5).softmax(-1)
    found = torch.bincount(torch.tensor([text.ids[-1] for text in many]), minlength=128) / 4000
    assert (found - wanted).abs().max() < 4 * (wanted.max() / 4000) ** 0.5


def test_a_text_ends_with_its_stop(teacher):
    free = Generator(teacher, (), seed=0).texts(PROMPTS, 12, 0.0, batch=0)
    stop = free[0].ids[-3]
    for text, whole in zip(Generator(teacher, (stop,), seed=0).texts(PROMPTS, 12, 0.0, batch=0), free, strict=True):
        new = whole.ids[9:]
        assert text.ids[9:] == (new[: new.index(stop) + 1] if stop in new else new)


def test_a_stop_in_a_prompt_ends_nothing(teacher):
    """Also where the others have ended, so that nothing else keeps the batch going."""
    short, long = Prompt("some", (5, 8, 7)), (5, 8, 7, 9, 11, 13, 15)
    stop = Generator(teacher, (), seed=0).texts([short], 1, 0.0, batch=0)[0].ids[-1]
    generator = Generator(teacher, (stop,), seed=0)
    prompts = [Prompt("some", (*long[:4], stop, *long[i:])) for i in range(2, 7)]
    alone = [generator.texts([prompt], 40, 0.0, batch=0)[0] for prompt in prompts]
    assert max(len(text.ids) - text.prompt for text in alone) == 40
    for prompt, expected in zip(prompts, alone, strict=True):
        ended, text = generator.texts([short, prompt], 40, 0.0, batch=0)
        assert ended.ids == (*short.ids, stop) and text == expected


def test_repeated_share():
    assert repeated_share([1, 2, 3]) == 0 and repeated_share(range(20)) == 0
    assert repeated_share([7] * 13) == pytest.approx(0.9)  # ten 4-grams, all the same
    assert repeated_share([1, 2, 3, 4, 5, 1, 2, 3, 4]) == pytest.approx(1 / 6)


def test_what_is_kept():
    def text(*new: int) -> Text:
        return Text("some", (9, 9, *new), 2, 0.0)

    texts = [text(*range(12)), text(1, 2), text(*range(12)), text(*[5] * 12), text(*range(1, 13))]
    kept, counts = keep_good(texts, max_repeated=0.3, min_new=4)
    assert kept == [texts[0], text(5, 5, 5, 5), texts[4]]
    assert str(counts) == (
        "3 of 5 texts kept, 28 new tokens; 1 were cut where they began to repeat themselves, by 8 tokens; "
        "left out: 1 doubles, 1 too short"
    )


@given(st.lists(st.integers(0, 3), max_size=40), st.sampled_from([0.0, 0.2, 0.5]))
def test_the_longest_beginning_without_loops(new, share):
    """Told from every beginning there is."""
    good = [n for n in range(len(new) + 1) if repeated_share(new[:n]) <= share]
    assert before_loops(new, share) == max(good)


def test_the_draft_vocabulary():
    texts = [Text("some", (3, 3, 8, 8, 8, 2, 2, 40), 2, 0.0), Text("some", (5, 8, 40), 1, 0.0)]
    assert draft_vocabulary(texts, 4, 64, always=(1,)).tolist() == [1, 2, 8, 40]
    assert draft_vocabulary(texts, 6, 64, always=(1, 63)).tolist() == [0, 1, 2, 8, 40, 63]
    for size in (1, 65):
        with pytest.raises(ValueError, match=rf"a draft vocabulary of {size} ids; allowed: 2 to the target's 64"):
            draft_vocabulary(texts, size, 64, always=(1, 63))

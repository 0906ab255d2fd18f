"""Rounds of decoding on a card, over a program of Python functions on the host: tokens, positions and acceptance.

Its target continues any text by a rule; its head knows the rule and is wrong at places of its own. Features carry a
token, so a head that is given another row's, or stale ones, proposes something else, which the number of accepted
proposals shows.
"""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eyas.runtime.cuda_decoding import SEED, CudaGreedyDecoder, CudaSpeculativeDecoder, Rounds
from eyas.runtime.cuda_native import CudaTensor
from eyas.runtime.decoding import GreedyDecoder, SpeculativeDecoder

LENGTH, VOCABULARY, MOST, STOP = 48, 97, 5, 3
CHUNK = 2 * (MOST + 1) + 3  # of the prompt: two calls of the draft, and one of fewer rows
WRONG = {
    "never": lambda at: False,
    "always": lambda at: True,
    "at times": lambda at: at * 2654435761 % 7 < 2,
}


def rule(text: list[int]) -> int:
    return (sum((i + 1) * token for i, token in enumerate(text[-9:])) * 31 + len(text)) % VOCABULARY


class Target:
    """``prefill`` and ``target_verify``: the token after each row, and the row's own token as its feature."""

    def __init__(self, cache: list, of_prefill: bool):
        self.cache, self.of_prefill = cache, of_prefill
        self.max_rows = CHUNK if of_prefill else MOST + 1

    def run(self, tokens, positions):
        ids = []
        for token, at in zip(tokens[0].tolist(), positions.tolist(), strict=True):
            self.cache[at] = token
            ids.append(rule(self.cache[: at + 1]))
        feature = tokens[0][None, :, None].to(torch.bfloat16)
        return torch.tensor([ids[-1:] if self.of_prefill else ids]), feature

    def __call__(self, *inputs):
        return [CudaTensor(value) for value in self.run(*map(host, inputs))]


class Draft(Target):
    """``draft_decode``: the token two positions on, from its cache of pairs, and the row's token as its own output."""

    spec = SimpleNamespace(inputs=(None, SimpleNamespace(sizes=(1, 1, 1))))

    def __init__(self, cache: list, wrong, max_rows: int):
        self.cache, self.wrong, self.max_rows = cache, wrong, max_rows

    def run(self, tokens, feature, positions):
        assert len(tokens[0]) <= self.max_rows and feature.dtype == torch.bfloat16
        ids = []
        for token, own, at in zip(tokens[0].tolist(), feature[0, :, 0].tolist(), positions.tolist(), strict=True):
            self.cache[at : at + 2] = int(own), token
            ids.append((rule(self.cache[: at + 2]) + self.wrong(at + 2)) % VOCABULARY)
        return torch.tensor([ids]), tokens[0][None, :, None].to(torch.bfloat16)


def host(value) -> torch.Tensor:
    return value.value if isinstance(value, CudaTensor) else torch.from_numpy(np.asarray(value))


class Toy:
    """A program of the two."""

    device = "cuda"

    def __init__(self, wrong="never", draft_positions=0):
        self.constants = {
            "get_max_seq_len": LENGTH, "get_vocab_size": VOCABULARY, "get_stop_ids": [STOP], "get_chain_len": 2,
            "get_max_chain_len": MOST, "get_draft_max_positions": draft_positions,
        }  # fmt: skip
        self.caches = [[0] * (LENGTH + 2) for _ in range(2)]
        self.methods = {
            "prefill": Target(self.caches[0], True),
            "target_verify": Target(self.caches[0], False),
            "draft_decode": Draft(self.caches[1], WRONG[wrong], MOST + 1),
        }
        self.buffers = SimpleNamespace(reset=lambda: None)
        self.epoch = 0

    def method(self, name):
        return self.methods[name]

    def reset(self):
        for cache in self.caches:
            cache[:] = [96] * len(cache)
        self.epoch += 1
        return self.epoch


def text(decoder, ids, new=LENGTH, stop=(), **options):
    return [t for block in decoder.generate(ids, new, stop, **options) for t in block]


def prompt(length):
    return [(7 * i + 5) % VOCABULARY for i in range(length)]


@pytest.mark.parametrize("length", [1, 2, MOST + 1, MOST + 2, CHUNK, CHUNK + 1, LENGTH - 2, LENGTH - 1])
@pytest.mark.parametrize("wrong", WRONG)
def test_rounds_are_those_of_the_host(wrong, length):
    """The same tokens, rounds and acceptance, for every chain and to the last position."""
    program = Toy(wrong)
    want = text(GreedyDecoder(program), prompt(length))
    assert text(CudaGreedyDecoder(program, False, "cpu"), prompt(length)) == want and len(want) == LENGTH - length
    for chain in range(1, MOST + 1):
        pair = SpeculativeDecoder(program), CudaSpeculativeDecoder(program, False, "cpu")
        for decoder in pair:
            assert text(decoder, prompt(length), chain=chain) == want, (decoder, chain)
        plain, on_card = (decoder.statistics for decoder in pair)
        assert (plain.rounds, plain.accepted, plain.proposed) == (on_card.rounds, on_card.accepted, on_card.proposed)
        if wrong == "never" and length < LENGTH - 2:
            assert on_card.accepted[chain] >= on_card.rounds - 2, "all but the last ones, which the end cuts short"
        if wrong == "always":
            assert set(on_card.accepted) <= {0}


@pytest.mark.parametrize("rows", [1, 2, MOST])
def test_a_prompt_is_dealt_out_to_a_draft_of_fewer_rows(rows):
    ids = prompt(2 * MOST + 3)
    want, got = (SpeculativeDecoder(Toy("at times")) for _ in range(2))
    got.draft = Draft(got.draft.cache, got.draft.wrong, rows)
    assert text(got, ids, chain=2) == text(want, ids, chain=2)
    assert got.statistics.accepted == want.statistics.accepted


def test_chunks_of_fewer_rows_than_a_call_of_the_draft(monkeypatch):
    """What a graph of the draft's most rows would read is there all the same."""
    want = CudaSpeculativeDecoder(Toy("at times"), False, "cpu")
    text(want, prompt(11), chain=3)
    monkeypatch.setattr(f"{__name__}.CHUNK", 4)
    got = CudaSpeculativeDecoder(Toy("at times"), False, "cpu")
    got.rounds._calls(SEED)
    text(got, prompt(11), chain=3)
    assert got.statistics.accepted == want.statistics.accepted


def test_beyond_the_positions_of_a_head():
    """Plain steps from there on; a prompt that is longer has nothing else."""
    for positions, length in ((20, 4), (20, 19), (20, 30)):
        program = Toy("never", draft_positions=positions)
        want = text(GreedyDecoder(program), prompt(length))
        decoder = CudaSpeculativeDecoder(program, False, "cpu")
        assert text(decoder, prompt(length), chain=3) == want
        assert (max(decoder.statistics.proposed, default=-1) >= 0) == (length < positions - 1)


def test_a_text_ends_at_a_stop_id_and_the_next_one_starts_afresh():
    program = Toy("at times")
    greedy, decoder = CudaGreedyDecoder(program, False, "cpu"), CudaSpeculativeDecoder(program, False, "cpu")
    for seed in range(4):
        ids = prompt(5 + seed)
        whole = text(greedy, ids)
        stop = whole[6]
        want = whole[: whole.index(stop) + 1]
        assert text(decoder, ids, stop=[stop], chain=4) == want and decoder.statistics.finished == "stop"
        assert text(greedy, ids, stop=[stop]) == want
        assert text(decoder, ids, new=3, chain=4) == whole[:3]


def test_rounds_are_started_before_those_before_them_are_read(monkeypatch):
    """Where another one follows whatever the first gives; a round that nobody reads follows a stop id alone."""
    program, events = Toy("at times"), []

    def noted(name):
        real = getattr(Rounds, name)

        def call(*args):
            events.append(name)
            return real(*args)

        monkeypatch.setattr(Rounds, name, call)

    noted("start")
    noted("read")
    for decoder, options in (
        (CudaGreedyDecoder(program, False, "cpu"), {}),
        (CudaSpeculativeDecoder(program, False, "cpu"), {"chain": 3}),
    ):
        events.clear()
        whole = text(decoder, prompt(5), new=25, **options)
        assert events[:5] == ["start", "start", "read", "start", "read"]
        assert events.count("start") == events.count("read") == decoder.statistics.rounds
        events.clear()
        assert text(decoder, prompt(5), new=25, stop=[whole[9]], **options) == whole[: whole.index(whole[9]) + 1]
        assert events.count("start") - events.count("read") <= 1
        assert text(decoder, prompt(5), new=25, **options) == whole, "what was left is nobody's"


@pytest.mark.parametrize("consumer", [0.0, 0.003])
def test_time_is_the_cards_however_long_the_caller_takes(consumer, monkeypatch):
    program = Toy("at times")
    monkeypatch.setattr(Rounds, "seconds", lambda self: 0.5)
    decoder = CudaSpeculativeDecoder(program, False, "cpu")
    for _ in decoder.generate(prompt(5), 30, (), 3):
        time.sleep(consumer)
    found = decoder.statistics
    ahead = round(found.verify_seconds / 0.5)
    assert found.rounds - 4 <= ahead < found.rounds, "all but the first, and the last, which the end cuts short"
    assert 0 <= found.decode_seconds - found.verify_seconds < 0.05


def test_two_decoders_take_turns():
    program = Toy()
    first, second = (CudaSpeculativeDecoder(program, False, "cpu").generate(prompt(4), 20, (), 2) for _ in range(2))
    next(first), next(second)
    with pytest.raises(RuntimeError, match="another generation has started on this program"):
        list(first)
    assert list(second)

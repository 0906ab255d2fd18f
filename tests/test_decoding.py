"""Decoding through artifacts: speculative text is greedy text, whatever the head proposes and wherever a text ends."""

import gc
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from chain_target import CYCLE, NEXT, STOP

from eyas.models.speculator import greedy_reference, speculative_reference
from eyas.models.tiny_targets import WINDOW
from eyas.runtime.artifact import Artifact
from eyas.runtime.container_files import DataFile
from eyas.runtime.decoding import GreedyDecoder, SpeculativeDecoder, positions, tokens
from eyas.runtime.payload import storage_key

LENGTH = 64  # positions of every program here
NAMES = ("tiny", "gemma4", "accept", "reject", "mid")
RING = 2 * WINDOW
PROMPT_LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, RING - 1, RING, RING + 1, 3 * WINDOW + 3, 5 * RING // 2, 63)
NEAR_TIE = 1e-3  # logits closer than this may change places between two orders of summation


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(2, 128, length).tolist()


def text(decoder: GreedyDecoder, ids: list[int], new: int, stop_ids=(), **options) -> list[int]:
    return [t for block in decoder.generate(ids, new, stop_ids, **options) for t in block]


class Spy:
    """A method that is called as before, and a log of the calls: (name, inputs, outputs), as they were at the time."""

    def __init__(self, method, log: list):
        self.method, self.log = method, log

    def __getattr__(self, name: str):
        return getattr(self.method, name)

    def __call__(self, *inputs):
        outputs = self.method(*inputs)
        seen = [np.array(getattr(value, "array", value)) for value in inputs]
        self.log.append((self.method.name, seen, [np.array(value.array) for value in outputs]))
        return outputs


def spied(decoder: GreedyDecoder) -> list:
    """The log of all calls that a decoder will make."""
    log = []
    for name in ("prefill", "verify", "draft"):
        if hasattr(decoder, name):
            setattr(decoder, name, Spy(getattr(decoder, name), log))
    return log


# Identity


@pytest.fixture(scope="module")
def greedy_texts(programs) -> dict[tuple[str, int], list[int]]:
    """Greedy text up to the end of the caches, by program and length of the prompt."""
    texts = {}
    for name in NAMES:
        decoder = GreedyDecoder(programs[name])
        for length in PROMPT_LENGTHS:
            texts[name, length] = text(decoder, prompt(length), LENGTH)
            assert decoder.statistics.finished == "length" and len(texts[name, length]) == LENGTH - length
    return texts


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_speculative_text_is_greedy_text_to_the_last_position(name, length, programs, greedy_texts):
    decoder = SpeculativeDecoder(programs[name])
    for chain in range(1, decoder.max_chain + 1):
        assert text(decoder, prompt(length), LENGTH, chain=chain) == greedy_texts[name, length], f"chain {chain}"
        assert decoder.statistics.finished == "length"
        assert decoder.statistics.new_tokens == LENGTH - length


def test_texts_vary(greedy_texts):
    """Identity of a text that repeats one token would say little."""
    for name in NAMES:
        assert len({t for length in PROMPT_LENGTHS for t in greedy_texts[name, length]}) > 20


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_that_of_the_eager_module(name, lowered, greedy_texts):
    speculator, ties = lowered[name].speculator(), 0
    for length in (1, WINDOW + 1, 5 * RING // 2):
        ids, got = prompt(length), greedy_texts[name, length][:24]
        want = greedy_reference(speculator, ids, len(got))
        if got != want:
            at = next(i for i, (a, b) in enumerate(zip(got, want)) if a != b)
            speculator.reset()
            every, step = [*ids, *want[:at]], speculator.target.max_call_rows
            for start in range(0, len(every), step):
                part = torch.tensor([every[start : start + step]])
                logits = speculator.target_logits(part, torch.arange(start, start + part.shape[1]))
            gap = float(logits[0, -1, want[at]] - logits[0, -1, got[at]])
            assert 0 <= gap < NEAR_TIE, f"new token {at} of a prompt of {length}"
            ties += 1
    assert ties <= 1


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_acceptance_is_that_of_the_oracle(name, k, lowered, programs):
    new, ids = 18, [2, 40, CYCLE[3]]
    want, counts = speculative_reference(lowered[name].speculator(), ids, k, new)
    decoder = SpeculativeDecoder(programs[name])
    assert text(decoder, ids, new, chain=k) == want
    stats = decoder.statistics
    assert (stats.rounds, stats.emitted, stats.tau) == (counts.rounds, counts.emitted, counts.tau)
    left, accepted = new - 1, []
    for a in counts.accepted:  # the decoder does not propose what the budget could not take
        accepted.append(min(a, left - 1))
        left -= a + 1
    assert stats.accepted == Counter(accepted)


def test_acceptance_of_the_three_heads(programs):
    ids = [2, CYCLE[0]]
    for chain in range(1, 8):
        decoder = SpeculativeDecoder(programs["accept"])
        text(decoder, ids, 1 + 5 * (chain + 1), chain=chain)
        assert decoder.statistics.accepted == {chain: 5} and decoder.statistics.acceptance() == [1.0] * chain
        assert decoder.statistics.tau == chain + 1
        decoder = SpeculativeDecoder(programs["reject"])
        text(decoder, ids, 30, chain=chain)
        assert decoder.statistics.accepted == {0: 29} and decoder.statistics.tau == 1
        decoder = SpeculativeDecoder(programs["mid"])
        text(decoder, ids, 60, chain=chain)
        assert len(decoder.statistics.accepted) > 1 and sum(decoder.statistics.hits.values()) > 0
        assert 1 < decoder.statistics.tau < chain + 1


def test_fifty_rounds_without_one_accepted_token(programs):
    ids, decoder = [2, CYCLE[0]], SpeculativeDecoder(programs["reject"])
    assert text(decoder, ids, 51, chain=7) == text(GreedyDecoder(programs["reject"]), ids, 51)
    assert decoder.statistics.rounds == 50 and decoder.statistics.accepted == {0: 50}


# Stops and budgets


@pytest.mark.parametrize("at", [0, 1, 3, 5, 6, 10])
def test_a_stop_id_ends_the_text_wherever_it_stands_in_a_block(at, programs):
    """With 4 proposals that are all accepted, new tokens 1..5 are the first round's, of which the fifth is verify's."""
    ids, program = [2, CYCLE[0]], programs["accept"]
    whole = text(GreedyDecoder(program), ids, 30)
    assert len(set(whole)) == len(whole)
    decoder = SpeculativeDecoder(program)
    blocks = list(decoder.generate(ids, 30, [whole[at]], chain=4))
    assert [t for block in blocks for t in block] == whole[: at + 1] and all(blocks)
    assert text(GreedyDecoder(program), ids, 30, [whole[at]]) == whole[: at + 1]
    stats = decoder.statistics
    assert (stats.finished, stats.new_tokens, stats.emitted) == ("stop", at + 1, at)
    assert stats.rounds == -(-at // 5)
    assert [len(block) for block in blocks] == [1, *(min(5, at - start) for start in range(0, at, 5))]


def test_proposing_a_stop_id_is_no_decision(chain):
    program = chain("stop").load()
    greedy, decoder = GreedyDecoder(program), SpeculativeDecoder(program)
    log = spied(decoder)
    ids = [2, CYCLE[0]]
    assert greedy.stop_ids == {STOP}
    assert text(decoder, ids, 40, None, chain=4) == text(greedy, ids, 40, None)
    proposed = {t for name, inputs, _ in log if name == "target_verify" for t in inputs[0][0, 1:].tolist()}
    assert proposed == {STOP} and decoder.statistics.finished == "budget" and decoder.statistics.new_tokens == 40


def test_the_artifacts_own_stop_ids_are_the_default(programs):
    program = programs["accept"]
    decoder = SpeculativeDecoder(program)
    following = next(t for t in range(3, 128) if NEXT[t] in CYCLE and t not in CYCLE)
    decoder.stop_ids = frozenset([NEXT[following]])
    assert list(decoder.generate([following], 9)) == [[NEXT[following]]]
    assert decoder.statistics.finished == "stop" and decoder.statistics.rounds == 0


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("name", ["accept", "reject", "mid"])
def test_budgets_are_kept_to_the_token(name, k, programs):
    ids, program = [2, CYCLE[0]], programs[name]
    whole = text(GreedyDecoder(program), ids, 40)
    decoder = SpeculativeDecoder(program)
    for budget in (1, 2, k, k + 1, k + 2, 2 * k + 3):
        assert text(decoder, ids, budget, chain=k) == whole[:budget]
        stats = decoder.statistics
        assert (stats.finished, stats.new_tokens, stats.emitted) == ("budget", budget, budget - 1)
        rounds = {"accept": -(-(budget - 1) // (k + 1)), "reject": budget - 1}.get(name, stats.rounds)
        assert stats.rounds == rounds
        assert stats.tau == pytest.approx((budget - 1) / rounds if rounds else 0)


def test_a_prompt_longer_than_one_call_works_and_one_beyond_the_caches_does_not(programs):
    decoder = SpeculativeDecoder(programs["tiny"])
    assert decoder.prefill.max_rows == 8
    assert len(text(decoder, prompt(63), 9)) == 1 and decoder.statistics.finished == "length"
    with pytest.raises(ValueError, match=r"the prompt has 64 tokens; the program holds 64, .* may have 63"):
        text(decoder, prompt(64), 1)


@pytest.mark.parametrize(
    ("ids", "new", "options", "message"),
    [
        ([], 1, {}, "prompt is empty"),
        ([2, 128], 1, {}, "token id 128 is outside the vocabulary of 128"),
        ([2, -1], 1, {}, "token id -1 is outside"),
        ([2], 0, {}, "max_new_tokens must be at least 1, got 0"),
        ([2], 1, {"chain": 0}, r"chain must lie in 1..7 for this artifact, got 0"),
        ([2], 1, {"chain": 8}, r"chain must lie in 1..7 for this artifact, got 8"),
    ],
)
def test_bad_requests(ids, new, options, message, programs):
    with pytest.raises(ValueError, match=message):
        text(SpeculativeDecoder(programs["tiny"]), ids, new, **options)


def rows(count: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return tokens([5] * count), positions(start, count)


FEATURE = np.zeros((1, 2, 48), np.float32)
WRONG_CALLS = {
    "no rows": ("prefill", rows(0), "method 'prefill' takes 1 to 8 rows, the same in every input; got 0"),
    "a row too many": ("target_verify", rows(9), "takes 1 to 8 rows, the same in every input; got 9"),
    "a row too many for a chunk": ("prefill", rows(9), "method 'prefill' takes 1 to 8 rows"),
    "rows that differ": ("prefill", (tokens([5, 6]), positions(0, 3)), "the same in every input; got 2, 3"),
    "a missing input": ("draft_decode", rows(2), "method 'draft_decode' takes 3 inputs, got 2"),
    "int32": ("prefill", (tokens([5]).astype(np.int32), positions(0, 1)), "input 0 .* is int64, got int32"),
    "float64": (
        "draft_decode",
        (tokens([5, 6]), FEATURE.astype(np.float64), positions(0, 2)),
        "input 1 .* is float32, got float64",
    ),
    "another rank": ("prefill", (positions(5, 1), positions(0, 1)), r"has shape \[1\], expected \[1, rows\]"),
    "a batch": ("prefill", (np.full((2, 3), 5), positions(0, 3)), r"has shape \[2, 3\], expected \[1, rows\]"),
    "another width": (
        "draft_decode",
        (tokens([5, 6]), FEATURE[..., :47], positions(0, 2)),
        r"input 1 .* has shape \[1, 2, 47\], expected \[1, rows, 48\]",
    ),
    "past the caches": ("target_verify", rows(2, 63), r"positions .* must lie in 0..63, got 63 to 64"),
    "before them": ("target_verify", rows(2, -1), r"positions .* must lie in 0..63, got -1 to 0"),
    "no token": ("target_verify", (tokens([128]), positions(0, 1)), r"tokens .* must lie in 0..127, got 128 to 128"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_calls_that_do_not_fit_are_refused_before_they_run(case, programs):
    """With the allowed values (M4, M7), and without a trace in the state."""
    name, inputs, message = WRONG_CALLS[case]
    program = programs["tiny"]
    program.reset()
    with pytest.raises((TypeError, ValueError), match=message):
        program.method(name)(*inputs)
    caches = [array for b, array in program.buffers.arrays().items() if ".cache." in b]
    assert len(caches) == 10 and not any(array.any() for array in caches)


def test_an_unknown_method_is_answered_with_those_there_are(programs):
    with pytest.raises(KeyError, match="no method 'forward'; it has draft_decode, prefill, target_logits, target_veri"):
        programs["tiny"].method("forward")


def test_every_number_of_rows_that_is_allowed_runs(programs):
    for method in programs["tiny"].methods.values():
        for count in range(method.min_rows, method.max_rows + 1):
            extra = (np.zeros((1, count, 48), np.float32),) if method.name == "draft_decode" else ()
            ids, where = rows(count)
            assert all(np.isfinite(value.array).all() for value in method(ids, *extra, where))


# State


def poison(program, patch: pytest.MonkeyPatch) -> None:
    """From now on, forgetting fills all that methods write with NaN."""
    forget = program.reset
    written = {b["name"] for b in program.artifact.manifest["sharing"] if b["writers"]}
    arrays = {name: array for name, array in program.buffers.arrays().items() if name in written}
    assert any("target" in name for name in arrays) and any("draft" in name for name in arrays)

    def reset() -> int:
        epoch = forget()
        for array in arrays.values():
            array[...] = np.nan
        return epoch

    patch.setattr(program, "reset", reset)


@pytest.mark.parametrize("name", NAMES)
def test_what_lies_in_unused_cache_slots_is_never_read(name, programs, monkeypatch):
    program = programs[name]
    runs = []
    for poisoned in (False, True):
        if poisoned:
            poison(program, monkeypatch)
        decoder = SpeculativeDecoder(program)
        log = spied(decoder)
        got = [text(decoder, prompt(length), 12, chain=3) for length in (1, RING + 1, 50)]
        values = [value for _, _, outputs in log for value in outputs]
        assert all(np.isfinite(value).all() for value in values)
        runs.append((got, [value.tobytes() for value in values]))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", NAMES)
def test_target_and_draft_write_their_own_caches_and_nothing_else(name, programs, lowered):
    """Equal shapes and alike names do not make them one (I2), and each is held once for all methods (I3, I4)."""
    program = programs[name]
    program.reset()
    arrays, ids = program.buffers.arrays(), (tokens(prompt(4)), positions(0, 4))

    def changed(call) -> tuple[set[str], list]:
        before = {name: array.tobytes() for name, array in arrays.items()}
        outputs = call()
        return {name for name, array in arrays.items() if array.tobytes() != before[name]}, outputs

    of_target, (_, feature) = changed(lambda: program.method("prefill")(*ids))
    of_draft, _ = changed(lambda: program.method("draft_decode")(ids[0], feature, ids[1]))
    caches = {b: b.partition(".")[0] for b in arrays if ".cache." in b}
    assert of_target == {b for b, owner in caches.items() if owner == "target"} and len(of_target) >= 4
    assert of_draft == {b for b, owner in caches.items() if owner == "draft"} and len(of_draft) == 2
    assert changed(lambda: program.method("target_verify")(*ids))[0] <= of_target
    eager = [buffer for b, buffer in lowered[name].speculator().named_buffers() if ".cache." in b]
    assert program.buffers.mutable_nbytes == sum(buffer.nbytes for buffer in eager)
    listed = {b["name"]: b["nbytes"] for b in program.artifact.manifest["sharing"]}
    assert program.buffers.nbytes == sum(listed[b] for b in arrays)
    assert all(listed[b] <= 32 for b in listed.keys() - arrays.keys())  # tables so small that the code holds them


def test_state_starts_and_starts_again_with_the_files_values(lowered, tmp_path):
    """Not with zeros, where the file says something else (I7)."""
    folder = lowered["tiny"].copy(tmp_path / "ones")
    name = "target.layers.0.self_attn.cache.k"
    offset, size = DataFile(folder / "model.ptd").entries[storage_key("cpu", name)]
    data = bytearray((folder / "model.ptd").read_bytes())
    data[offset : offset + size] = np.ones(size // 4, np.float32).tobytes()
    (folder / "model.ptd").write_bytes(data)
    program = Artifact.open(folder, check_data=False).load()
    cache = program.buffers.arrays()[name]
    assert (cache == 1).all()
    ids = tokens(prompt(5)), positions(0, 5)
    first = program.method("prefill")(*ids)[1].array.tobytes()
    assert not (cache == 1).all()
    program.reset()
    assert (cache == 1).all() and (program.buffers.arrays()[name] == 1).all()
    assert program.method("prefill")(*ids)[1].array.tobytes() == first


def test_a_method_outlives_its_program(lowered, programs):
    """What it needs is kept alive by it alone (M3)."""
    made = lowered["mid"]

    def methods():
        program = made.load()
        return program.method("target_verify"), program.method("draft_decode")

    verify, draft = methods()
    gc.collect()
    [bytearray(1 << 20) for _ in range(64)]  # would take the place of what was given back
    outputs = []
    programs["mid"].reset()
    for one, two in (
        (verify, draft),
        (programs["mid"].method("target_verify"), programs["mid"].method("draft_decode")),
    ):
        ids = tokens(prompt(6)), positions(0, 6)
        token, feature = one(*ids)
        outputs.append([value.array.tobytes() for value in (token, feature, *two(ids[0], feature, ids[1]))])
    assert outputs[0] == outputs[1]
    held = verify(*ids)[1].array
    del verify, draft, one, two, token, feature
    gc.collect()
    assert np.isfinite(held).all() and held.tobytes() == outputs[0][1]


IN_A_FRESH_PROCESS = """
import json, sys
from eyas.runtime.artifact import Artifact
from eyas.runtime.decoding import SpeculativeDecoder
decoder = SpeculativeDecoder(Artifact.open(sys.argv[1]).load())
print(json.dumps([t for block in decoder.generate(json.loads(sys.argv[2]), 20, (), 4) for t in block]))
"""


def test_a_generation_leaves_nothing_behind(lowered):
    program, a, b = lowered["tiny"].load(), prompt(21), prompt(9)
    decoder = SpeculativeDecoder(program)
    texts = [text(decoder, ids, 20, chain=4) for ids in (a, b, a)]
    texts.append(text(GreedyDecoder(program), a, 20))
    texts.append(text(SpeculativeDecoder(program), b, 20, chain=2))
    fresh = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", IN_A_FRESH_PROCESS, str(lowered["tiny"].path), json.dumps(ids)],
                check=True, capture_output=True, text=True,
            ).stdout
        )
        for ids in (a, b)
    ]  # fmt: skip
    assert texts == [fresh[0], fresh[1], fresh[0], fresh[0], fresh[1]] and fresh[0] != fresh[1]


def test_an_abandoned_generation_does_no_harm_and_cannot_go_on(programs):
    program, ids = programs["mid"], [2, CYCLE[0]]
    decoder = SpeculativeDecoder(program)
    whole = text(decoder, ids, 30, chain=5)
    left = decoder.generate(ids, 30, (), chain=5)
    next(left), next(left)
    assert text(decoder, ids, 30, chain=5) == whole
    with pytest.raises(RuntimeError, match="another generation has started on this program"):
        next(left)
    left = decoder.generate(ids, 30, (), chain=5)
    next(left)
    left.close()
    assert text(decoder, ids, 30, chain=2) == whole


def test_chain_length_may_change_from_call_to_call(programs, greedy_texts):
    decoder = SpeculativeDecoder(programs["mid"])
    for chain in (7, 1, 4, 2, 7, 3):
        assert text(decoder, prompt(9), LENGTH, chain=chain) == greedy_texts["mid", 9]
        assert decoder.statistics.chain == chain
    assert text(decoder, prompt(9), LENGTH) == greedy_texts["mid", 9] and decoder.statistics.chain == 4


def test_outputs_of_a_round_outlive_the_next(programs):
    program = programs["tiny"]
    program.reset()
    verify, draft = program.method("target_verify"), program.method("draft_decode")
    ids, feature = verify(tokens([5, 6, 7]), positions(0, 3))
    first, g = draft(tokens([6, 7, 8]), feature, positions(0, 3))
    kept = [value.array.tobytes() for value in (ids, feature, first, g)]
    other = verify(tokens([9, 10, 11]), positions(3, 3))
    draft(tokens([10, 11, 12]), other[1], positions(3, 3))
    assert [value.array.tobytes() for value in (ids, feature, first, g)] == kept
    assert other[1].array.tobytes() != kept[1]


# Rows


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_a_prompt_do_not_change_a_bit(name, programs, monkeypatch):
    program, ids, seen = programs[name], prompt(27), []
    for step in range(1, 9):
        decoder = SpeculativeDecoder(program)
        monkeypatch.setattr(decoder.prefill, "max_rows", step)
        log = spied(decoder)
        got = text(decoder, ids, 10, chain=3)
        by_method = {
            method: np.concatenate(
                [outputs[1] for called, _, outputs in log[: 2 * -(-27 // step)] if called == method], axis=1
            )
            for method in ("prefill", "draft_decode")
        }
        assert all(value.shape[1] == 27 for value in by_method.values())
        verified = [inputs[0].tolist() for called, inputs, _ in log if called == "target_verify"]
        seen.append((got, verified, {method: value.tobytes() for method, value in by_method.items()}))
        monkeypatch.undo()
    assert all(one == seen[0] for one in seen[1:])


@pytest.mark.parametrize("name", NAMES)
def test_every_draft_row_joins_a_token_with_the_feature_before_it(name, programs):
    """Rows that the target has seen carry its own feature of that position; proposed rows carry the head's output."""
    decoder = SpeculativeDecoder(programs[name])
    log, ids = spied(decoder), [*prompt(18), CYCLE[0]]
    whole = ids + text(decoder, ids, 40, chain=3)
    features: dict[int, np.ndarray] = {}
    seeded, proposed, last = 0, 0, None  # the last row of the draft call before, if no call of the target came between
    for method, inputs, outputs in log:
        rows = inputs[-1].tolist()
        if method != "draft_decode":
            features |= {p: outputs[1][0, i] for i, p in enumerate(rows)}
            last = None
            continue
        for i, p in enumerate(rows):
            token, feature = inputs[0][0, i], inputs[1][0, i].tobytes()
            if last is None:
                assert token == whole[p + 1] and feature == features[p].tobytes()
                seeded += 1
            else:
                assert (p, token, feature) == (last[0] + 1, last[1], last[2])
                proposed += 1
        last = rows[-1], outputs[0][0, -1], outputs[1][0, -1].tobytes()
    assert len({value.tobytes() for value in features.values()}) == len(features)  # each row has a mark of its own
    assert seeded >= len(whole) - 5 and proposed > 10


def test_methods_compute_what_the_module_does(lowered, programs):
    for name in ("tiny", "gemma4", "mid"):
        program, speculator = programs[name], lowered[name].speculator()
        program.reset(), speculator.reset()
        ids, near = torch.tensor([prompt(23)]), dict(rtol=1e-4, atol=2e-4)
        for start in range(0, 23, 4):
            part, where = ids[:, start : start + 4], torch.arange(start, min(start + 4, 23))
            with torch.no_grad():
                want, feature = speculator.target_verify(part, where)
                proposals, g = speculator.draft_decode(part, feature, where)
            got = program.method("target_verify" if start % 8 else "prefill")(part.numpy(), where.numpy())
            np.testing.assert_array_equal(got[0].array[0, -1], want[0, -1])
            np.testing.assert_allclose(got[1].array, feature, **near)
            got = program.method("draft_decode")(part.numpy(), got[1], where.numpy())
            np.testing.assert_array_equal(got[0].array, proposals)
            np.testing.assert_allclose(got[1].array, g, **near)


# A head made for fewer positions than the target


def test_plain_steps_take_over_where_the_head_ends(chain):
    made = chain("accept", 32)
    program = made.load()
    assert program.constants["get_draft_max_positions"] == 32
    for length in (2, 20, 29, 31, 32, 33, 50):
        ids = [*prompt(length - 1), CYCLE[0]]
        want = text(GreedyDecoder(program), ids, LENGTH)
        for k in (1, 4, 7):
            decoder = SpeculativeDecoder(program)
            log = spied(decoder)
            assert text(decoder, ids, LENGTH, chain=k) == want
            drafted = [p for name, inputs, _ in log if name == "draft_decode" for p in inputs[2].tolist()]
            assert max(drafted, default=0) < 32
            assert (decoder.statistics.accepted[0] > 0) and (length > 27 or decoder.statistics.accepted[k] > 0)
            if length < 28:  # the chain shortens until the last position is used
                assert max(drafted) == 31

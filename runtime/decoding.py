"""Greedy and speculative decoding over a loaded program. Both give the same tokens; they differ in calls and in time.

The draft row of position t joins the target's feature at t with the token at t + 1, so the features that
``target_verify`` has just computed reseed the draft, and the token that corrects a proposal never needs a forward of
its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter

import numpy as np

from eyas.runtime.artifact import Program
from eyas.runtime.native import Tensor
from eyas.runtime.statistics import Statistics


class GreedyDecoder:
    """Plain decoding: ``target_verify`` with one row a token. The reference for identity and for speed."""

    def __init__(self, program: Program):
        self.program = program
        self.prefill, self.verify = program.method("prefill"), program.method("target_verify")
        self.max_seq_len = int(program.constants["get_max_seq_len"])
        self.vocab_size = int(program.constants["get_vocab_size"])
        stop = program.constants["get_stop_ids"]
        self.stop_ids = frozenset(stop if isinstance(stop, list) else [stop])
        self.statistics = Statistics()
        self._proposed = 0  # proposals of the last round

    def generate(
        self, ids: Sequence[int], max_new_tokens: int = 128, stop_ids: Iterable[int] | None = None
    ) -> Iterator[list[int]]:
        """Yields new tokens as they are confirmed, in lists.

        ``ids``: the prompt, at least one token. Generation ends with a token of ``stop_ids`` (the artifact's by
        default; it is given out), after ``max_new_tokens``, or when prompt and text fill ``max_seq_len``. Raises
        ``ValueError`` for a prompt that does not fit, or ids outside the vocabulary. Cached state of earlier calls is
        forgotten first.
        """
        yield from self._generate(ids, 0, max_new_tokens, stop_ids)

    def _generate(self, ids, chain: int, max_new_tokens: int, stop_ids: Iterable[int] | None) -> Iterator[list[int]]:
        self._check(ids, max_new_tokens)
        stop = self.stop_ids if stop_ids is None else frozenset(stop_ids)
        stats = self.statistics = Statistics(prompt_tokens=len(ids), chain=chain)
        budget = min(max_new_tokens, self.max_seq_len - len(ids))
        epoch = self.program.reset()
        start = perf_counter()
        anchor = self._prefill(ids, chain)
        stats.prefill_seconds = perf_counter() - start
        block, text_length = [anchor], len(ids)
        while True:
            block = self._clip(block, stop, budget - stats.new_tokens)
            stats.new_tokens += len(block)
            text_length += len(block)
            done = block[-1] in stop or stats.new_tokens >= budget
            if done:
                full = text_length >= self.max_seq_len and budget < max_new_tokens
                stats.finished = "stop" if block[-1] in stop else "length" if full else "budget"
            yield block
            if done:
                return
            if self.program.epoch != epoch:
                raise RuntimeError(
                    "another generation has started on this program since, and has taken its caches; finish one before "
                    "the next, or load the artifact once for each"
                )
            start = perf_counter()
            # the anchor is the last token of the text: not in the target's cache yet
            room = budget - stats.new_tokens
            proposals = self._chain_for(chain, text_length, room)
            most = proposals + 1  # tokens of this round
            alike = room > most and self._chain_for(chain, text_length + most, room - most) == proposals
            block = self._round(block[-1], text_length - 1, proposals, alike)
            emitted = len(self._clip(block, stop, room))
            stats.record(self._proposed, len(block) - 1, emitted)
            stats.decode_seconds += perf_counter() - start

    @staticmethod
    def _clip(block: list[int], stop: frozenset[int], room: int) -> list[int]:
        """The part of a round's tokens that may be given out: to the first stop id, within the budget."""
        for i, token in enumerate(block[:room]):
            if token in stop:
                return block[: i + 1]
        return block[:room]

    def _check(self, ids: Sequence[int], max_new_tokens: int) -> None:
        if len(ids) < 1:
            raise ValueError("the prompt is empty; it must have at least one token (the start token, if nothing else)")
        if len(ids) >= self.max_seq_len:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; the program holds {self.max_seq_len}, one of them new, so a prompt "
                f"may have {self.max_seq_len - 1}; shorten it or lower again with a larger --max-seq-len"
            )
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        outside = [i for i in ids if not 0 <= i < self.vocab_size]
        if outside:
            raise ValueError(f"token id {outside[0]} is outside the vocabulary of {self.vocab_size}")

    def _prefill(self, ids: Sequence[int], chain: int) -> int:
        """Runs the prompt in chunks; returns the token after it."""
        step = self.prefill.max_rows
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            token, feature = self.prefill(tokens(part), positions(start, len(part)))
            following = int(token.array[0, 0]) if start + len(part) == len(ids) else ids[start + len(part)]
            self._seed(part, following, feature, start, chain)
        return following

    def _seed(self, part: Sequence[int], following: int, feature: Tensor, start: int, chain: int) -> None:
        """What to do with a prefill chunk's features: nothing, without a draft."""

    def _chain_for(self, chain: int, text_length: int, room: int) -> int:
        """Proposals of the next round."""
        return 0

    def _round(self, anchor: int, position: int, chain: int, alike: bool) -> list[int]:
        """One round: the tokens that follow the anchor. ``alike``: unless a stop id ends the text, another round of as
        many proposals follows, whatever this one gives.
        """
        self._proposed = 0
        start = perf_counter()
        ids, _ = self.verify(tokens([anchor]), positions(position, 1))
        self.statistics.verify_seconds += perf_counter() - start
        return [int(ids.array[0, 0])]


class SpeculativeDecoder(GreedyDecoder):
    """Chains of proposals from the draft head, verified by the target in one call a round."""

    def __init__(self, program: Program):
        super().__init__(program)
        self.draft = program.method("draft_decode")
        self.max_chain = int(program.constants["get_max_chain_len"])
        self.default_chain = int(program.constants["get_chain_len"])
        self.draft_positions = int(program.constants["get_draft_max_positions"])
        self._seeded: tuple[int, Tensor] | None = None  # first proposal, and the head's output that it came from

    def generate(
        self,
        ids: Sequence[int],
        max_new_tokens: int = 128,
        stop_ids: Iterable[int] | None = None,
        chain: int | None = None,
    ) -> Iterator[list[int]]:
        """As ``GreedyDecoder.generate``, with ``chain`` proposals a round: 1 to the artifact's largest, its default if
        None.
        """
        chain = self.default_chain if chain is None else chain
        if not 1 <= chain <= self.max_chain:
            raise ValueError(f"chain must lie in 1..{self.max_chain} for this artifact, got {chain}")
        yield from self._generate(ids, chain, max_new_tokens, stop_ids)

    def _chain_for(self, chain: int, text_length: int, room: int) -> int:
        """As many proposals as the caches, the head's positions and the budget leave room for.

        The window's rows lie at text_length - 1 and after; a round of k proposals gives out at most k + 1 tokens.
        """
        positions_left = min(self.max_seq_len, self.draft_positions or self.max_seq_len) - text_length
        return max(0, min(chain, positions_left, room - 1))  # 0 beyond what the head was made for: plain steps

    def _seed(self, part: Sequence[int], following: int, feature: Tensor, start: int, chain: int) -> None:
        if self.draft_positions and start + len(part) > self.draft_positions:
            self._seeded = None
            return
        self._reseed([*part[1:], following], feature, start)

    def _reseed(self, following: list[int], feature: Tensor, start: int) -> None:
        """Draft rows for positions ``start..`` that the target has seen: ``following[i]`` is the token after position
        start + i.
        """
        for at in range(0, len(following), self.draft.max_rows):
            part = following[at : at + self.draft.max_rows]
            rows = feature if len(part) == len(following) else feature.part(np.s_[:, at : at + len(part)])
            ids, g = self.draft(tokens(part), rows, positions(start + at, len(part)))
        self._seeded = int(ids.array[0, -1]), g.part(np.s_[:, -1:])

    def _round(self, anchor: int, position: int, chain: int, alike: bool) -> list[int]:
        if chain == 0 or self._seeded is None:
            block = super()._round(anchor, position, 0, alike)
            self._seeded = None  # the draft's cache has a gap from here on
            return block
        self._proposed = chain
        start = perf_counter()
        proposals = self._propose(position, chain)
        drafted = perf_counter()
        ids, feature = self.verify(tokens([anchor, *proposals]), positions(position, chain + 1))
        window = ids.array[0].tolist()
        verified = perf_counter()
        accepted = 0
        while accepted < chain and proposals[accepted] == window[accepted]:
            accepted += 1
        block = window[: accepted + 1]
        self._reseed(block, feature.part(np.s_[:, : accepted + 1]), position)
        self.statistics.verify_seconds += verified - drafted
        self.statistics.draft_seconds += (drafted - start) + (perf_counter() - verified)
        return block

    def _propose(self, position: int, chain: int) -> list[int]:
        """``chain`` proposals for the tokens after the anchor at ``position``. Draft rows from ``position`` on are
        overwritten.
        """
        token, g = self._seeded
        proposals = [token]
        for j in range(1, chain):
            ids, g = self.draft(tokens([token]), g, positions(position + j - 1, 1))
            token = int(ids.array[0, 0])
            proposals.append(token)
        return proposals


def tokens(ids: Sequence[int]) -> np.ndarray:
    """int64 ``[1, M]``."""
    return np.array([ids], dtype=np.int64)


def positions(start: int, rows: int) -> np.ndarray:
    """int64 ``[M]``: consecutive positions."""
    return np.arange(start, start + rows, dtype=np.int64)

"""Decoding on a CUDA card: a round, from the first proposal to the next one, is one CUDA graph.

Tokens, positions and proposals stay on the card, so that a round can be started before the host has read the one
before: the card does not wait for the host. All K + 1 rows of a window reseed the draft, so that shapes do not depend
on how many proposals were right; rows after the last right one are overwritten by the next round before anything reads
them.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch

from eyas.runtime.cuda_native import CudaTensor
from eyas.runtime.cuda_program import CudaProgram
from eyas.runtime.decoding import GreedyDecoder, SpeculativeDecoder


class Rounds:
    """What rounds hand on, and the graphs that they are: one for each number of proposals, captured when it is first
    needed.

    ``anchor``, ``first``: int64 ``[1, 1]``, the last token of the text and the first proposal. ``position``: int64
    ``[1]``, the anchor's. ``g``: ``[1, 1, H]``, what the draft made of the row before the first proposal.
    """

    def __init__(self, program: CudaProgram, graphs: bool, device: str = "cuda"):
        """``device``: where the program's tensors are; anything but "cuda" is for tests, and has no graphs."""
        self.verify, self.draft = program.method("target_verify"), program.method("draft_decode")
        self.graphs = graphs
        most = int(program.constants["get_max_chain_len"])
        self.anchor, self.first, self.position = (
            torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((1, 1), (1, 1), (1,))
        )
        self.g = torch.zeros(1, 1, self.draft.spec.inputs[1].sizes[2], dtype=torch.bfloat16, device=device)
        self.window = torch.arange(most + 1, device=device)
        # how many proposals were right, and the tokens after each row; what the host reads of two rounds, and the time
        # of the one before them
        self._result = torch.zeros(most + 2, dtype=torch.int64, device=device)
        self._copies = [torch.zeros(most + 2, dtype=torch.int64, pin_memory=device == "cuda") for _ in range(2)]
        self._copied = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if device == "cuda" else None
        self._started = self._read = 0  # rounds
        self._captured: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._stream = torch.cuda.Stream() if device == "cuda" else None

    def _on_stream(self) -> AbstractContextManager[object]:
        """Has calls run on the rounds' stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Returns when the card has done all that was started."""
        if self._stream is not None:
            self._stream.synchronize()

    @property
    def pending(self) -> int:
        """Rounds that were started and not read: at most two."""
        return self._started - self._read

    def start(self, chain: int) -> None:
        """Starts a round of ``chain`` proposals."""
        with self._on_stream():
            if self.graphs:
                self._graph(chain).replay()
            else:
                self._round(chain)
            self._copies[self._started % 2].copy_(self._result, non_blocking=True)
            if self._copied is not None:
                self._copied[self._started % 3].record()
        self._started += 1

    def read(self) -> list[int]:
        """The tokens of the first round that was not read, which follow its anchor; the last one is the next anchor."""
        if self._copied is not None:
            self._copied[self._read % 3].synchronize()
        found = self._copies[self._read % 2].tolist()
        self._read += 1
        return found[1 : found[0] + 2]

    def seconds(self) -> float | None:
        """Seconds from the end of a round to that of the next one, which was the last to be read; for rounds of which
        the second was started before the first was read. None where there is no card.
        """
        if self._copied is None:
            return None
        before, last = (self._copied[(self._read - back) % 3] for back in (2, 1))
        return 1e-3 * before.elapsed_time(last)

    def prepare(self, chain: int) -> bool:
        """Captures the round of ``chain`` proposals, if it is not yet. Returns whether that has written to the caches:
        the first time, what it calls must have run once, which loads its kernels.
        """
        if not self.graphs or chain in self._captured:
            return False
        first = not self._captured
        with self._on_stream():
            if first:
                self._round(chain)
            self._graph(chain)
        self.wait()
        return first

    def _graph(self, chain: int) -> torch.cuda.CUDAGraph:
        if chain not in self._captured:
            graph = torch.cuda.CUDAGraph()
            self._stream.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._round(chain)
            self._captured[chain] = graph
        return self._captured[chain]

    def replay_us(self, chain: int, times: int) -> float:
        """Microseconds that the card takes for a round of ``chain`` proposals: the mean of ``times`` graphs that follow
        one another, which nobody reads.
        """
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph = self._graph(chain)
        with self._on_stream():
            graph.replay()  # keeps the card busy while the next ones are started
            before.record()
            for _ in range(times):
                graph.replay()
            after.record()
        self.wait()
        return 1e3 * before.elapsed_time(after) / times

    def _round(self, chain: int) -> None:
        where = self.position + self.window[: chain + 1]
        proposals, token, g = [self.first][:chain], self.first, self.g
        for j in range(1, chain):
            at = self.position + (j - 1)  # not a part of ``where``: native code counts on alignment
            token, g = self.draft.run(token, g, at)
            proposals.append(token)
        tokens = torch.cat([self.anchor, *proposals], 1)
        ids, feature = self.verify.run(tokens, where)
        right = (ids[:, :chain] == tokens[:, 1:]).long().cumprod(1).sum(1)  # [1]
        if chain:
            following, made = self.draft.run(ids, feature, where)
            self.first.copy_(following.gather(1, right[:, None]))
            self.g.copy_(made.index_select(1, right))
        self.anchor.copy_(ids.gather(1, right[:, None]))
        self.position.add_(right + 1)
        self._result[:1].copy_(right)
        self._result[1 : chain + 2].copy_(ids[0])

    def begin(self, anchor: int, position: int, seeded: tuple[int, CudaTensor] | None) -> None:
        """Where a generation's rounds begin. ``seeded``: the first proposal, and what it came from."""
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()
        self.wait()
        self._read = self._started
        with self._on_stream():
            self.anchor.fill_(anchor)
            self.position.fill_(position)
            if seeded is not None:
                first, g = seeded
                self.first.fill_(first)
                self.g.copy_(g.value)
        self.wait()


class OnCard:
    """What decoding on the card does otherwise; stands before the decoder whose steps it replaces.

    ``graphs``: each round is a CUDA graph, with the bits that the same calls have one by one.
    """

    _seeded: tuple | None = None

    def __init__(self, program: CudaProgram, graphs: bool = True, device: str = "cuda"):
        super().__init__(program)
        self.rounds = Rounds(program, graphs, device)

    def _generate(self, *args: object) -> Iterator[list[int]]:
        try:
            yield from super()._generate(*args)
        finally:
            self.rounds.wait()  # a stop id may have left a round that nobody will read

    def _prefill(self, ids: Sequence[int], chain: int) -> int:
        if self.rounds.prepare(chain):
            self.program.buffers.reset()
        following = super()._prefill(ids, chain)
        self.rounds.begin(following, len(ids), self._seeded)
        return following

    def _round(self, anchor: int, position: int, chain: int, alike: bool) -> list[int]:
        """One round. Its time counts as that of verify: the card does not say where a graph spends it. That of a round
        which was started ahead is the card's: some of it has passed while the caller had the tokens before.
        """
        self._proposed = chain
        start, ahead = perf_counter(), self.rounds.pending > 0
        for _ in range(self.rounds.pending, 1 + alike):
            self.rounds.start(chain)
        block = self.rounds.read()
        spent = perf_counter() - start
        if ahead and (seconds := self.rounds.seconds()) is not None:
            self.statistics.decode_seconds += seconds - spent
            spent = seconds
        self.statistics.verify_seconds += spent
        return block


class CudaGreedyDecoder(OnCard, GreedyDecoder):
    """Plain decoding on the card."""


class CudaSpeculativeDecoder(OnCard, SpeculativeDecoder):
    """Speculative decoding on the card."""

"""Decoding on a CUDA card: a round, from the first proposal to the next one, is one CUDA graph.

Tokens, positions and proposals stay on the card, so that a round can be started before the host has read the one
before: the card does not wait for the host. All K + 1 rows of a window reseed the draft, so that shapes do not depend
on how many proposals were right; rows after the last right one are overwritten by the next round before anything reads
them. A prompt's rows of the draft, a window's number at a time, are one graph as well.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch

from eyas.runtime.cuda_native import CudaTensor
from eyas.runtime.cuda_program import CudaProgram
from eyas.runtime.decoding import GreedyDecoder, SpeculativeDecoder

SEED = "seed"  # beside the numbers of proposals, what has a graph


class Rounds:
    """What rounds hand on, and the graphs that they are: one for each number of proposals, and one for the draft's rows
    of a prompt, captured when they are first needed.

    ``anchor``, ``first``: int64 ``[1, 1]``, the last token of the text and the first proposal. ``position``: int64
    ``[1]``, the anchor's. ``g``: ``[1, 1, H]``, what the draft made of the row before the first proposal.
    """

    def __init__(self, program: CudaProgram, graphs: bool, device: str = "cuda"):
        """``device``: where the program's tensors are; anything but "cuda" is for tests, and has no graphs."""
        self.prefill, self.verify, self.draft = map(program.method, ("prefill", "target_verify", "draft_decode"))
        self.graphs = graphs
        most = int(program.constants["get_max_chain_len"])
        self.anchor, self.first, self.position = (
            torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((1, 1), (1, 1), (1,))
        )
        width, chunk = self.draft.spec.inputs[1].sizes[2], max(self.prefill.max_rows, self.draft.max_rows)
        self.g = torch.zeros(1, 1, width, dtype=torch.bfloat16, device=device)
        self.window = torch.arange(most + 1, device=device)
        # a chunk of the prompt for the draft: the token after each row, the target's features, the position of the
        # first row, and the next row to do
        self._following = torch.zeros(1, chunk, dtype=torch.int64, device=device)
        self._features = torch.zeros(1, chunk, width, dtype=torch.bfloat16, device=device)
        self._chunk_start, self._next = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        # how many proposals were right, and the tokens after each row; what the host reads of two rounds, and the time
        # of the one before them
        self._result = torch.zeros(most + 2, dtype=torch.int64, device=device)
        self._copies = [torch.zeros(most + 2, dtype=torch.int64, pin_memory=device == "cuda") for _ in range(2)]
        self._copied = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if device == "cuda" else None
        self._started = self._read = 0  # rounds
        self._captured: dict[int | str, torch.cuda.CUDAGraph] = {}
        self._stream = program.stream if device == "cuda" else None
        self._workspace = program.workspace if graphs else None

    def workspace(self) -> AbstractContextManager[object]:
        """Has calls run on the rounds' stream, with their tensors in the memory of the graphs, if there are any: what
        they give is lost with the next graph.
        """
        return self._on_stream() if self._workspace is None else self._workspace.entered()

    def _on_stream(self) -> AbstractContextManager[object]:
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
        graph = self._graph(chain) if self.graphs else None
        with self._on_stream() if graph else self.workspace():
            self._do(chain, graph)
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
        """Captures what a generation with ``chain`` proposals a round needs, where it is not yet. Returns whether that
        has written to the caches: the first time, all that it calls must have run once, which loads its kernels, and
        before it the largest call, so that graphs find their memory in what that takes.
        """
        needed = (SEED, chain) if chain else (chain,)
        if not self.graphs or all(what in self._captured for what in needed):
            return False
        first = not self._captured
        if first:
            with self.workspace():
                self._largest_call()
                for what in needed:
                    self._calls(what)
        for what in needed:
            self._graph(what)
        self.wait()
        return first

    def _largest_call(self) -> None:
        where = torch.arange(self.prefill.max_rows, device=self.window.device)
        self.prefill.run(torch.zeros_like(where)[None], where)

    def _calls(self, what: int | str) -> None:
        """The calls of a round of so many proposals, or for a window's rows of the prompt."""
        if what == SEED:
            self._seed(self.draft.max_rows)
        else:
            self._round(what)

    def _do(self, what: int | str, graph: torch.cuda.CUDAGraph | None) -> None:
        if graph:
            graph.replay()
        else:
            self._calls(what)

    def _graph(self, what: int | str) -> torch.cuda.CUDAGraph:
        if what not in self._captured:
            self._captured[what] = self._workspace.capture(lambda: self._calls(what))
        return self._captured[what]

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

    def seed(self, following: Sequence[int], feature: torch.Tensor, start: int) -> None:
        """Draft rows for a chunk of the prompt, at positions ``start..``; ``following[i]`` is the token after position
        start + i, ``feature`` ``[1, N, H]`` the target's. The last one gives the first proposal and ``g``.
        """
        n = len(following)
        self._following[0, :n].copy_(torch.tensor(following))
        self._features[:, :n].copy_(feature)  # from memory that the graph may overwrite
        self._chunk_start.fill_(start)
        self._next.zero_()
        whole, rest = divmod(n, self.draft.max_rows)
        graph = self._graph(SEED) if self.graphs else None
        for _ in range(whole):
            self._do(SEED, graph)
        if rest:
            self._seed(rest)

    def _seed(self, rows: int) -> None:
        at = self._next + self.window[:rows]
        following, feature = self._following.index_select(1, at), self._features.index_select(1, at)
        ids, made = self.draft.run(following, feature, self._chunk_start + at)
        self.first.copy_(ids[:, -1:])
        self.g.copy_(made[:, -1:])
        self._next.add_(rows)

    def begin(self, anchor: int, position: int) -> None:
        """Where a generation's rounds begin; the first proposal is ``seed``'s."""
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()
        self.wait()
        self._read = self._started
        with self._on_stream():
            self.anchor.fill_(anchor)
            self.position.fill_(position)
        self.wait()


class OnCard:
    """What decoding on the card does otherwise; stands before the decoder whose steps it replaces.

    ``graphs``: each round is a CUDA graph, with the bits that the same calls have one by one.
    """

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
        with self.rounds.workspace():
            following = super()._prefill(ids, chain)
        self.rounds.begin(following, len(ids))
        return following

    def _reseed(self, following: list[int], feature: CudaTensor, start: int) -> None:
        self.rounds.seed(following, feature.value, start)

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

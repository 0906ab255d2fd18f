"""Decoders that propose what is known to come, and something else now and then, so that every accept length occurs."""

import numpy as np
import torch
from torch import Tensor

from eyas.runtime.artifact import Program
from eyas.runtime.cuda_decoding import CudaSpeculativeDecoder
from eyas.runtime.cuda_native import CudaTensor
from eyas.runtime.cuda_program import CudaMethod, CudaProgram
from eyas.runtime.decoding import SpeculativeDecoder


def is_told(position: int) -> bool:
    """Whether an oracle proposes what it knows of a position: four times of five, by no pattern of the text."""
    return (position * 2654435761 >> 16) % 5 > 0


class OracleDecoder(SpeculativeDecoder):
    """``text``: prompt and greedy text, as far as they are known."""

    text: list[int]

    def _propose(self, position: int, chain: int) -> list[int]:
        proposals = super()._propose(position, chain)  # the head runs as ever; its proposals are replaced
        for j in range(len(proposals)):
            at = position + 1 + j
            if at < len(self.text) and is_told(at):
                proposals[j] = self.text[at]
        return proposals


class OracleHead:
    """``draft_decode`` of a program on a card, with ``known`` int64 ``[L + 2]`` in the place of its own proposals where
    that is not negative: the row of position t proposes for t + 2.
    """

    def __init__(self, draft: CudaMethod, length: int, device: str):
        self._draft, self.spec, self.max_rows = draft, draft.spec, draft.max_rows
        self.known = torch.full((length + 2,), -1, dtype=torch.int64, device=device)

    def run(self, tokens: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        ids, g = self._draft.run(tokens, feature, positions)
        known = self.known[positions + 2][None]
        return torch.where(known < 0, ids, known), g

    def __call__(self, tokens: np.ndarray, feature: CudaTensor, positions: np.ndarray) -> list[CudaTensor]:
        ids, g = self._draft(tokens, feature, positions)
        known = self.known[torch.from_numpy(positions + 2).to(self.known.device)][None]
        return [CudaTensor(torch.where(known < 0, ids.value, known)), g]


class CudaOracleDecoder(CudaSpeculativeDecoder):
    """``OracleDecoder`` with the rounds of a card, as they run for any head."""

    def __init__(self, program: CudaProgram, graphs: bool = True, device: str = "cuda"):
        super().__init__(program, graphs, device)
        self.draft = self.rounds.draft = OracleHead(self.draft, self.max_seq_len, device)

    @property
    def text(self) -> list[int]:
        return self._text

    @text.setter
    def text(self, ids: list[int]) -> None:
        self._text, known = ids, self.draft.known
        told = [token if is_told(at) else -1 for at, token in enumerate(ids)]
        known.copy_(torch.tensor(told + [-1] * (len(known) - len(told))))


def open_oracle(program: Program) -> OracleDecoder | CudaOracleDecoder:
    """The oracle for a program's device."""
    return CudaOracleDecoder(program) if program.device == "cuda" else OracleDecoder(program)

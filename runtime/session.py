"""What a user of an artifact opens: its tokenizer, and a decoder for the device that it was lowered for."""

from eyas.runtime.artifact import TOKENIZER, Artifact, Program
from eyas.runtime.decoding import GreedyDecoder, SpeculativeDecoder
from eyas.runtime.text import Tokenizer


def open_tokenizer(artifact: Artifact) -> Tokenizer:
    """The tokenizer of an artifact. Raises ``ValueError`` for a damaged one."""
    facts = artifact.manifest["tokenizer"]
    return Tokenizer.load(
        artifact.path / TOKENIZER,
        bos_id=facts["bos_id"],
        add_bos=facts["add_bos"],
        stop_ids=facts["stop_ids"],
        chat_template=facts["chat_template"],
    )


def open_decoder(program: Program, kind: str, graphs: bool = True) -> GreedyDecoder:
    """The decoder of ``kind``, "greedy" or "speculative", for a program's device. ``graphs``: on cuda, a round is one
    CUDA graph.
    """
    if program.device == "cuda":
        from eyas.runtime.cuda_decoding import CudaGreedyDecoder, CudaSpeculativeDecoder  # here: it imports torch

        return {"greedy": CudaGreedyDecoder, "speculative": CudaSpeculativeDecoder}[kind](program, graphs)
    return {"greedy": GreedyDecoder, "speculative": SpeculativeDecoder}[kind](program)

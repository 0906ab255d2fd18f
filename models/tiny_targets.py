"""Small random targets with every feature of the large ones, for tests and for trying passes in seconds."""

from pathlib import Path

import torch
from torch import nn

from eyas.models.gemma import GemmaConfig, GemmaDecoder, GemmaLayer
from eyas.models.layers import RopeSpec
from eyas.models.target import Checkpoint, TokenizerSource
from eyas.models.weights import TensorSource

WINDOW = 8
EMBEDDING_GAIN = (
    0.2  # a tied embedding as large as the layers' output would make the text repeat its last token for ever
)


def tiny_config(
    family: str, n_layers: int = 4, vocab_size: int = 128, hidden_size: int = 48, head_dim: int = 16
) -> GemmaConfig:
    """Four layers, every third one global, window 8, and a width (48) that no group of 32 divides."""
    if family == "gemma3":
        sliding = GemmaLayer(4, 2, head_dim, RopeSpec(10000.0), window=WINDOW)
        full = GemmaLayer(4, 2, head_dim, RopeSpec(1e6, "linear", 8.0))
        extra = dict(attn_scale=head_dim**-0.5)
    elif family == "gemma4":
        sliding = GemmaLayer(4, 2, head_dim, RopeSpec(10000.0), window=WINDOW)
        full = GemmaLayer(4, 1, 2 * head_dim, RopeSpec(1e6, "proportional", partial=0.25), k_eq_v=True)
        extra = dict(attn_scale=1.0, norm_offset=0.0, v_norm=True, layer_scalar=True, final_softcap=30.0)
    else:
        raise ValueError(f"unknown family {family!r}; allowed: gemma3, gemma4")
    return GemmaConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=96,
        layers=tuple(full if i % 3 == 2 else sliding for i in range(n_layers)),
        max_positions=4096,
        **extra,
    )


def random_tensors(module: nn.Module, seed: int) -> dict[str, TensorSource]:
    """A source for each matrix and vector that ``module`` reads, by name: matrices of about unit gain (the embedding
    less), norms near 1.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, value in named:
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "layer_scalar":
            tensors[name] = 0.8 + 0.2 * torch.rand(1, generator=generator)
        elif leaf == "weight" and value.ndim == 1:
            tensors[name] = 1 + 0.2 * torch.randn(value.shape, generator=generator)
        elif leaf == "weight":
            gain = EMBEDDING_GAIN if name == "embed_tokens.weight" else 1.0
            tensors[name] = torch.randn(value.shape, generator=generator) * value.shape[1] ** -0.5 * gain
        elif leaf == "bias":
            tensors[name] = 0.1 * torch.randn(value.shape, generator=generator)
    return {name: TensorSource(tensor) for name, tensor in tensors.items()}


def open_checkpoint(path: Path | None, family: str, seed: int = 4, n_layers: int = 4, head_dim: int = 16) -> Checkpoint:
    if path is not None:
        raise ValueError(f"tiny targets are random and take no checkpoint, got {path}")
    config = tiny_config(family, n_layers, head_dim=head_dim)
    tensors = random_tensors(GemmaDecoder(config, 1), seed)
    for name, source in tensors.items():
        if name.endswith("norm.weight"):
            source.tensor -= config.norm_offset  # as a checkpoint of this family stores it
    return Checkpoint(
        config=config,
        tensors=tensors,
        identity={"format": "random", "family": family, "seed": seed, "n_layers": n_layers, "head_dim": head_dim},
        tokenizer=TokenizerSource("none"),
        bos_id=2,
        stop_ids=(1,),
        chat_template=None,
    )


def build(config: GemmaConfig, max_seq_len: int, dtype: torch.dtype) -> GemmaDecoder:
    return GemmaDecoder(config, max_seq_len, dtype)

"""A tiny target whose next token follows from the last one, and draft heads that are right always, never or sometimes.

The layers add next to nothing (their last norms are near 0), so the logits of a row are its own embedding against
``lm_head``, whose row ``NEXT[t]`` is the embedding of t. A head can do the same sum: its attention sees only its own
row, hands the normed embedding on, and nothing else in it adds to that.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eyas.models.eagle3 import Eagle3Config
from eyas.models.eagle3_checkpoint import expected_shapes, write_head
from eyas.models.gemma import GemmaConfig, GemmaDecoder, GemmaLayer
from eyas.models.layers import RopeSpec
from eyas.models.target import Checkpoint, TargetSpec, TokenizerSource
from eyas.models.tiny_targets import WINDOW, build, random_tensors
from eyas.models.weights import TensorSource

__all__ = ["build", "open_checkpoint"]  # what a target's module holds

VOCAB, WIDTH, DRAFT_VOCAB, STOP = 128, 48, 64, 1
SPEC = TargetSpec("chain", "next token from the last one, for tests", "chain_target")


def shuffled(ids: Sequence[int], seed: int) -> list[int]:
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    return [ids[i] for i in order]


# The text runs round CYCLE whatever its prompt ends with: each other token leads into it.
CYCLE = shuffled(list(range(4, 120, 2)), 1)
NEXT = {t: CYCLE[t % len(CYCLE)] for t in range(VOCAB)} | dict(zip(CYCLE, [*CYCLE[1:], CYCLE[0]]))


def config() -> GemmaConfig:
    sliding = GemmaLayer(2, 1, 16, RopeSpec(10000.0), window=WINDOW)
    full = GemmaLayer(2, 1, 16, RopeSpec(1e6))
    return GemmaConfig(
        family="chain", vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, layers=(sliding, full),
        attn_scale=0.25, norm_offset=0.0, tied_head=False, max_positions=4096,
    )  # fmt: skip


def tensors() -> dict[str, Tensor]:
    made = {name: source.tensor for name, source in random_tensors(GemmaDecoder(config(), 1), 11).items()}
    for name, value in made.items():
        if "post_" in name:
            value *= 0.02
    embed = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(12))
    head = torch.zeros(VOCAB, WIDTH)
    for token, following in NEXT.items():
        weight = 1.0 if token in CYCLE else 0.5
        head[following] += weight * embed[token] / embed[token].norm()
    return made | {"embed_tokens.weight": embed, "lm_head.weight": head}


def open_checkpoint(path: Path | None) -> Checkpoint:
    return Checkpoint(
        config=config(),
        tensors={name: TensorSource(value) for name, value in tensors().items()},
        identity={"format": "random"},
        tokenizer=TokenizerSource("none"),
        bos_id=2,
        stop_ids=(STOP,),
    )


def head_config(max_positions: int | None = None) -> Eagle3Config:
    return Eagle3Config(
        vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, target_hidden_size=WIDTH, hidden_size=WIDTH,
        intermediate_size=16, n_heads=3, n_kv_heads=3, head_dim=16, boundaries=(1, 2), window=1,
        norm_before_residual=True, max_positions=max_positions,
    )  # fmt: skip


def filled(ids: Sequence[int]) -> list[int]:
    """``ids`` with others, up to the draft vocabulary's size, ascending."""
    others = [t for t in range(3, VOCAB) if t not in CYCLE and t not in ids]
    return sorted([*ids, *others[: DRAFT_VOCAB - len(ids)]])


def write_chain_head(folder: Path, kind: str, max_positions: int | None = None) -> Path:
    """A head: ``accept`` (always right), ``reject`` (never), ``mid`` (cannot say two of seven tokens), ``stop``
    (proposes the stop id and nothing else).
    """
    target = tensors()
    made = {name: torch.zeros(shape) for name, shape in expected_shapes(head_config()).items()}
    made["fc.weight"][:, :WIDTH] = torch.eye(WIDTH)  # a feature is the first tap; the zero norm after it hides it
    made["layers.0.input_layernorm.weight"] += 1
    made["layers.0.self_attn.v_proj.weight"][:, :WIDTH] = torch.eye(WIDTH)
    made["layers.0.self_attn.o_proj.weight"] += torch.eye(WIDTH)
    made["norm.weight"] += target["norm.weight"]
    ids = {"mid": filled([t for i, t in enumerate(CYCLE) if i % 7 not in (3, 5)]), "stop": filled([STOP, *CYCLE])}
    ids = torch.tensor(ids.get(kind, filled(CYCLE)))
    rows = target["lm_head.weight"][ids]
    made["lm_head.weight"] += {"reject": rows.roll(1, 0), "stop": 0 * rows}.get(kind, rows)
    d2t = ids - torch.arange(len(ids))
    write_head(folder, head_config(max_positions), made, d2t, torch.float32)
    return folder

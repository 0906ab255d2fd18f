"""An EAGLE-3 head as read or made, before any module exists; a writer, and a random head to try things with.

Shape suffixes: V target vocabulary, Vd draft vocabulary, H draft width, Ht target width, A taps.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eyas.kernels.masked_sdpa import HEAD_WIDTH_MULTIPLE
from eyas.models.eagle3 import Eagle3Config, Eagle3Head, default_boundaries
from eyas.models.layers import RopeSpec
from eyas.models.tensor_files import FLOATS
from eyas.models.tiny_targets import random_tensors
from eyas.models.weights import RowSource

SPECULATORS_VERSION = "0.9.0"  # the release whose format ``write_head`` follows
DEFAULT_ROPE_THETA = 10000.0
TAP_IDS = "eagle_aux_hidden_state_layer_ids"

# Parameters of each rope type: name in the file -> name in RopeSpec.
ROPE_PARAMETERS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max",
    },
}


@dataclass(frozen=True, eq=False)
class DraftCheckpoint:
    """A head as read, before any module exists.

    ``tensors``: by ``Eagle3Head``'s own names, without ``d2t``. ``d2t`` int64 ``[Vd]``: the target id of draft id i is
    ``i + d2t[i]``. ``identity``: what the artifact records of it, plain JSON values. ``notes``: what was settled, a
    line each, for the log; those that need a look start with ``warning:``.
    """

    config: Eagle3Config
    tensors: Mapping[str, RowSource]
    d2t: Tensor
    identity: Mapping[str, object]
    notes: tuple[str, ...]


class PickedRows:
    """Rows ``ids`` int64 ``[N]``, ascending, of another source."""

    def __init__(self, source: RowSource, ids: Tensor):
        self.source, self.ids, self.shape = source, ids, (len(ids), source.shape[1])

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        ids = self.ids[start:stop]
        ends = (torch.nonzero(ids[1:] != ids[:-1] + 1).flatten() + 1).tolist()
        runs = ids.tensor_split(ends)  # of consecutive ids, each read at once
        return torch.cat([self.source.read(int(run[0]), int(run[-1]) + 1) for run in runs])


def expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a head of this configuration."""
    head = Eagle3Head(config, 1)
    named = [*head.named_parameters(), *head.named_buffers()]
    return {name: tuple(value.shape) for name, value in named if name.endswith((".weight", ".bias"))}


def target_ids(where: object, d2t: Tensor, draft_vocab: int, target_vocab: int) -> Tensor:
    """Target ids int64 ``[Vd]`` of the offsets ``d2t``. Raises ``ValueError`` if out of range or not ascending."""
    if tuple(d2t.shape) != (draft_vocab,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise ValueError(f"{where}: d2t is {d2t.dtype} {list(d2t.shape)}, expected integers [{draft_vocab}]")
    ids = torch.arange(draft_vocab) + d2t.to("cpu", torch.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target_vocab:
        raise ValueError(
            f"{where}: d2t maps to target ids from {low} to {high}; allowed: 0 to {target_vocab - 1}. "
            f"It holds offsets: target id = draft id + d2t[draft id]"
        )
    falls = (ids.diff() <= 0).nonzero().flatten()
    if len(falls):
        pair = ids[falls[0] : falls[0] + 2].tolist()
        raise ValueError(
            f"{where}: d2t maps draft id {int(falls[0])} and the next to target ids {pair}; they must ascend"
        )
    return ids


def taps_note(config: Eagle3Config, n_layers: int, spelled: str) -> str:
    numbers = ", ".join(map(str, config.boundaries))
    return f"taps: {config.taps()} (boundaries {numbers} of 0 to {n_layers}; {spelled})"


def write_head(
    folder: Path | str,
    config: Eagle3Config,
    tensors: Mapping[str, Tensor],
    d2t: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    target_name: str = "",
    speculative_tokens: int = 3,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Writes a head as a new folder in the speculators format, config.json and model.safetensors, in one step.

    ``tensors``: by ``Eagle3Head``'s names. ``d2t``: integer offsets ``[Vd]``; the mask ``t2d`` follows from them.
    ``dtype``: of the weights in the file. ``target_name`` and ``speculative_tokens`` are for servers that read the
    folder. More than ``max_file_bytes`` of tensors go to several files with an index, none larger unless a single
    tensor is. Raises ``ValueError`` for tensors that do not fit ``config``, and for a folder that has something in it;
    ``OSError`` where it cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; name another, or remove it first")
    if dtype not in FLOATS:
        raise ValueError(f"weights cannot be written as {dtype}; allowed: {', '.join(map(str, FLOATS))}")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted({name for name, _ in shapes.items() ^ expected_shapes(config).items()})
    if wrong:
        raise ValueError(
            f"{folder}: tensors missing, left over or misshapen for this configuration: {', '.join(wrong)}"
        )
    ids = target_ids(folder, d2t, config.draft_vocab_size, config.vocab_size)
    data = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    if config.draft_vocab_size != config.vocab_size:
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[ids] = True
        data |= {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}
    text = json.dumps(speculators_config(config, dtype, target_name, speculative_tokens), indent=2)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as work:
        made = Path(work) / folder.name
        made.mkdir()
        try:
            save_parts(data, made, max_file_bytes)
        except SafetensorError as error:
            raise OSError(f"{folder} could not be written: {error}") from error
        (made / "config.json").write_text(text + "\n")
        os.replace(made, folder)


def save_parts(data: Mapping[str, Tensor], folder: Path, max_file_bytes: int) -> None:
    """``model.safetensors``, or parts of it in the order of ``data`` with ``model.safetensors.index.json``."""
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in data.items():
        if parts[-1] and sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > max_file_bytes:
            parts.append({})
        parts[-1][name] = tensor
    if len(parts) == 1:
        save_file(parts[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    for part, file in zip(parts, files):
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in data.values())},
        "weight_map": {name: file for part, file in zip(parts, files) for name in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def speculators_config(config: Eagle3Config, dtype: torch.dtype, target_name: str, speculative_tokens: int) -> dict:
    """``config`` as the speculators format spells it."""
    rope = config.rope
    if rope.kind not in ROPE_PARAMETERS:
        raise ValueError(f"rope kind {rope.kind!r} cannot be written; allowed: {', '.join(ROPE_PARAMETERS)}")
    scaling = {"rope_type": rope.kind} | {k: getattr(rope, field) for k, field in ROPE_PARAMETERS[rope.kind].items()}
    layer = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "attention_bias": config.attention_bias,
        # Both spellings, as transformers before 5 reads only the second.
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "layer_types": ["full_attention" if config.window is None else "sliding_attention"] * config.n_layers,
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
    }
    if config.max_positions is not None:
        layer["max_position_embeddings"] = config.max_positions
    proposal = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.fc_norm == "concat",
        "fc_norm": config.fc_norm == "per_tap",
        "norm_output": config.norm_output,
        "embed_requires_grad": config.own_embed,
        TAP_IDS: list(config.boundaries),
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }


def untrained_head(
    *,
    target_vocab_size: int,
    target_hidden_size: int,
    target_layers: int,
    target_embed: RowSource,
    seed: int = 0,
    boundaries: Iterable[int] | None = None,
    ids: Tensor | None = None,
) -> DraftCheckpoint:
    """A random head for a target of these sizes: to try the machinery with, or to start training from.

    Shaped as suits the target's width, with a norm a tap and normed feedback, as Gemma's residual streams grow a lot.
    ``target_embed``: the target's raw embedding ``[V, Ht]``, whose rows become the ``lm_head``. ``boundaries``: the
    taps; the usual ones, or evenly spread where the target is too shallow for those. ``ids`` int64 ``[Vd]``: the target
    ids of the draft vocabulary, ascending; otherwise every other block of up to 64, so that a mistaken mapping shows.
    """
    if tuple(target_embed.shape) != (target_vocab_size, target_hidden_size):
        expected = [target_vocab_size, target_hidden_size]
        raise ValueError(f"target_embed has shape {list(target_embed.shape)}, expected {expected}")
    if boundaries is None:
        boundaries, spelled = usual_or_spread(target_layers)
    else:
        spelled = "as the caller says"
    if ids is None:
        block = min(64, max(1, target_vocab_size // 16))
        rank = torch.arange(min(16384, target_vocab_size // 2) // block * block)
        ids = (rank // block * 2 + 1) * block + rank % block
    d2t = ids - torch.arange(len(ids))
    target_ids("draft vocabulary", d2t, len(ids), target_vocab_size)
    head_dim = 256 if target_hidden_size >= 512 else HEAD_WIDTH_MULTIPLE
    heads = 1 << max(0, math.ceil(math.log2(target_hidden_size / head_dim)))
    config = Eagle3Config(
        vocab_size=target_vocab_size,
        draft_vocab_size=len(ids),
        target_hidden_size=target_hidden_size,
        hidden_size=target_hidden_size,
        intermediate_size=64 * max(1, target_hidden_size // 20),
        n_heads=heads,
        n_kv_heads=max(1, heads // 4),
        head_dim=head_dim,
        boundaries=tuple(boundaries),
        rope=RopeSpec(DEFAULT_ROPE_THETA),
        norm_before_residual=True,
        fc_norm="per_tap",
        norm_output=True,
    )
    tensors = {**random_tensors(Eagle3Head(config, 1), seed), "lm_head.weight": PickedRows(target_embed, ids)}
    notes = (
        f"format: none, this head is UNTRAINED (random, seed {seed}): its proposals will almost never be accepted",
        taps_note(config, target_layers, spelled),
        f"vocabulary: {len(ids)} of the target's {target_vocab_size} ids, through d2t (offsets)",
        "embedding: the target's; lm_head: the target's rows of those ids",
    )
    identity = {"format": "untrained", "seed": seed, "boundaries": list(config.boundaries), "taps": config.taps()}
    return DraftCheckpoint(config, tensors, d2t, identity, notes)


def usual_or_spread(n_layers: int) -> tuple[tuple[int, ...], str]:
    try:
        return default_boundaries(n_layers), "the usual ones"
    except ValueError:
        count = min(3, n_layers)
        return tuple((i + 1) * n_layers // count for i in range(count)), "evenly spread"

"""Reads EAGLE-3 heads, in every published spelling.

Spellings differ in where taps are listed and what the numbers mean, in tensor names, and in what an absent key stands
for. A head that is read wrongly still runs and the text stays right; only its acceptance drops. So the reader settles
every question once, says in words how (``DraftCheckpoint.notes``), and refuses what it cannot settle.

Shape suffixes: V target vocabulary, Vd draft vocabulary, H draft width, Ht target width, A taps.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.models.eagle3 import Eagle3Config, default_boundaries
from eyas.models.eagle3_checkpoint import (
    DEFAULT_ROPE_THETA,
    ROPE_PARAMETERS,
    TAP_IDS,
    DraftCheckpoint,
    expected_shapes,
    taps_note,
    target_ids,
)
from eyas.models.layers import RopeSpec
from eyas.models.tensor_files import FLOATS, WEIGHT_FILES, file_sha256, open_weights, read_json
from eyas.models.weights import RowSource, TensorSource

SECTIONS = ("eagle_config", "transformer_layer_config")  # objects inside config.json that hold settings of the head
DEFAULT_EPS = 1e-6
UNRELATED = 0.1  # an embedding with a smaller mean cosine to the target's has nothing to do with it

# Who writes which architecture, where the name tells. Only "NeMo" changes how a configuration is read.
WRITERS = {
    "LlamaForCausalLMEagle3": "SGLang",
    "Eagle3LlamaForCausalLM": "vLLM",
    "LlamaEagle3DraftModel": "NeMo",
}
OTHER_DRAFTS = ("peagle", "dflash", "dspark", "medusa", "mtp")

# Settings with one supported value: with any other, the head would compute something else.
ONLY = {
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "mlp_bias": False,
    "parallel_drafting": False,
    "parallel_draft_step": 1,
    "partial_rotary_factor": 1.0,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "has_lm_head": True,
}

# Settings that do not change what a trained head computes here.
NO_EFFECT = set(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path attention_dropout attn_implementation auto_map
    bos_token_id dtype embed_requires_grad eos_token_id has_no_defaults_at_init initializer_range max_window_layers
    pad_token_id parallel_draft_heads_num_layers pretraining_tp speculators_version torch_dtype transformers_version
    unk_token_id use_cache
    """.split()  # noqa: SIM905
)


def rows_of(source: RowSource | None) -> int | None:
    return None if source is None else math.prod(source.shape[:1])


def canonical_names(path: Path, tensors: Mapping[str, RowSource]) -> dict[str, RowSource]:
    """The tensors by ``Eagle3Head``'s names, whatever the file calls them."""
    placed, was = {}, {}
    for name, source in tensors.items():
        own = re.sub(r"^(?:draft_model\.|model\.)+", "", name)
        own = re.sub(r"^midlayer\.", "layers.0.", own)
        own = re.sub(r"^additional_layers\.(\d+)\.", lambda m: f"layers.{int(m[1]) + 1}.", own)
        for i, tap in enumerate(("low", "mid", "high")):
            own = own.replace(f"aux_norm_{tap}.", f"fc_norm.{i}.")
        if own in placed:
            raise ValueError(f"{path}: tensors {was[own]!r} and {name!r} are two spellings of {own!r}; remove one")
        placed[own], was[own] = source, name
    for name in list(placed):  # what SGLang calls the norm of later layers, which have only the hidden state to norm
        match = re.fullmatch(r"(layers\.[1-9]\d*)\.hidden_norm\.weight", name)
        if match and (usual := f"{match[1]}.input_layernorm.weight") not in placed:
            placed[usual] = placed.pop(name)
    return placed


# --- Configuration ---


class Settings:
    """A head's ``config.json``: its sections searched together, with a record of the keys that were asked for.

    ``notes`` collects what was settled. Look-ups raise ``ValueError`` with the folder's name in front.
    """

    def __init__(self, path: Path, data: dict):
        self.path, self.top = path, data
        nested = {name: data[name] for name in SECTIONS if isinstance(data.get(name), dict)}
        self.sections = {"": data} | {f"{name}.": section for name, section in nested.items()}
        self.used = set(nested)
        self.notes: list[str] = []

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.path}: {text}")

    def get(self, key: str) -> object:
        """The value of ``key`` in whichever section has it, None if none does or it is null."""
        self.used.add(key)
        found = {name + key: section[key] for name, section in self.sections.items() if section.get(key) is not None}
        values = list(found.values())
        if any(value != values[0] for value in values):
            raise self.error(
                f"{' and '.join(f'{k} = {v!r}' for k, v in found.items())} contradict each other; keep one"
            )
        return values[0] if values else None

    def number(self, key: str, kind: type) -> int | float | None:
        """A positive ``kind``, int or float; None if absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != kind(value) or value <= 0:
            raise self.error(f"{key} = {value!r}; expected a positive {kind.__name__}")
        return kind(value)

    def size(self, key: str) -> int:
        """A positive int that has to be there."""
        value = self.number(key, int)
        if value is None:
            raise self.error(f"the configuration has no {key!r}; add it to config.json")
        return value

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key} = {value!r}; expected true or false")
        return value


def detect_format(settings: Settings) -> str:
    """``speculators``, or who writes such a flat configuration. Raises ``ValueError`` for other kinds of drafts."""
    top, key = settings.top, "speculators_model_type"
    settings.used |= {key, "architectures", "speculators_config"}
    speculators = top.get("speculators_config") or {}
    names = [str(name) for name in top.get("architectures") or []]
    others = [name for name in names if any(word in name.lower() for word in OTHER_DRAFTS)]
    kinds = {top.get(key, "eagle3"), speculators.get("algorithm", "eagle3"), *others}
    if kinds != {"eagle3"}:
        raise settings.error(
            f"this is a draft of kind {', '.join(sorted(map(str, kinds - {'eagle3'})))}; allowed: eagle3"
        )
    if key in top:
        if "transformer_layer_config." not in settings.sections:
            raise settings.error("a speculators configuration needs the object 'transformer_layer_config'")
        return "speculators"
    known = [WRITERS[name] for name in names if name in WRITERS]
    return known[0] if known else "SGLang" if "eagle_config." in settings.sections else "SafeAILab"


def refuse_unsupported(settings: Settings) -> None:
    for key, allowed in ONLY.items():
        value = settings.get(key)
        if value is not None and value != allowed:
            raise settings.error(f"{key} = {value!r} is not supported; allowed: {allowed!r}")


def note_leftovers(settings: Settings) -> None:
    """Lists the keys that nothing asked for. An unknown flag that is on, or unknown tap ids, cannot be passed over."""
    idle, unknown = [], []
    for prefix, section in settings.sections.items():
        for key, value in section.items():
            if key in settings.used:
                continue
            if key in NO_EFFECT:
                idle.append(prefix + key)
            elif value is True or key.endswith("layer_ids"):
                raise settings.error(
                    f"{prefix}{key} = {value!r} is unknown and could change what the head computes; "
                    f"remove it from config.json if it does not"
                )
            else:
                unknown.append(prefix + key)
    if idle:
        settings.notes.append(f"configuration keys without effect here: {', '.join(sorted(idle))}")
    if unknown:
        settings.notes.append(f"warning: unknown configuration keys, not used: {', '.join(sorted(unknown))}")


def tap_list(settings: Settings, section: str) -> list[int]:
    """The tap ids of one section. Empty if it has none; some trainers write an empty list for the usual taps."""
    settings.used.add(TAP_IDS)
    ids = settings.sections.get(section, {}).get(TAP_IDS) or []
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise settings.error(f"{section}{TAP_IDS} = {ids!r}; expected a list of layer numbers")
    return ids


def read_taps(settings: Settings, n_layers: int) -> tuple[tuple[int, ...], str]:
    """The boundaries that the head taps, and how the configuration spells them.

    A list at the top level holds boundaries; one in ``eagle_config`` holds layers whose output is tapped, one less.
    """
    top, nested = tap_list(settings, ""), tap_list(settings, "eagle_config.")
    if nested and max(nested) == n_layers:
        shifted, how = (
            nested,
            f"eagle_config lists {nested}: {n_layers} can only be a boundary, so all are taken as such",
        )
    else:
        shifted, how = [i + 1 for i in nested], f"eagle_config lists layer outputs {nested}, one added"
    if top and nested and top != shifted:
        raise settings.error(f"the top level lists the boundaries {top}, {how} makes {shifted}; keep the right list")
    usual = [2, n_layers // 2, n_layers - 3]
    if top:
        how = "listed as boundaries"
        if [b + 1 for b in top] == usual:
            settings.notes.append(
                f"warning: the boundaries {top} are the usual {usual} less one; if they come from an SGLang "
                f"configuration they are layer outputs, and belong in eagle_config"
            )
    elif nested == usual:
        settings.notes.append(
            f"warning: eagle_config lists {nested}, the usual boundaries; if that is what they are, and not layer "
            f"outputs, move the list to the top level"
        )
    boundaries = top or shifted
    if not boundaries:
        how = "assumed: the configuration names none, these are the usual ones"
        try:
            boundaries = default_boundaries(n_layers)
        except ValueError as error:
            raise settings.error(f"the configuration names no taps; {error}: add {TAP_IDS} to config.json") from error
    if list(boundaries) != sorted(set(boundaries)) or boundaries[0] < 0 or boundaries[-1] > n_layers:
        raise settings.error(
            f"boundaries {list(boundaries)} ({how}) do not fit a target of {n_layers} layers; "
            f"allowed: ascending and distinct, from 0 to {n_layers}"
        )
    return tuple(boundaries), how


def read_norms(settings: Settings, form: str, norm_output: bool | None) -> dict[str, object]:
    """``norm_before_residual``, ``fc_norm`` and ``norm_output``, with the defaults of the format."""
    residual, said = settings.flag("norm_before_residual"), ""
    if residual is None:
        residual, said = form == "speculators", " (assumed: the configuration does not say)"
        if residual:
            settings.notes.append(
                "warning: norm_before_residual is absent and taken as true, as vLLM takes it; the schema's own default "
                "is false. If almost nothing is accepted, add norm_before_residual = false to config.json"
            )
    concat, per_tap, legacy = (settings.flag(key) for key in ("norm_before_fc", "fc_norm", "use_aux_norm"))
    if legacy is not None and per_tap not in (None, legacy):
        raise settings.error(f"fc_norm = {per_tap} and its older name use_aux_norm = {legacy} contradict each other")
    if concat and (per_tap or legacy):
        raise settings.error("norm_before_fc and fc_norm are both true; a head has one of them at most")
    fc_norm = "concat" if concat else "per_tap" if per_tap or legacy else "none"

    output, by = settings.flag("norm_output"), "as configured"
    if norm_output is not None:
        output, by = norm_output, "as the caller says"
    elif output is None:
        output, by = False, "assumed: the configuration does not say"
    elif form not in ("speculators", "NeMo"):
        raise settings.error(
            f"norm_output = {output} is ambiguous in a flat configuration: for SGLang and vLLM true means normed "
            f"feedback, SpecForge up to 0.2.0 writes true for raw feedback (and false for a head without a final norm, "
            f"which cannot be read). Say norm_output=True for normed, False for raw feedback, or remove the key (raw)"
        )
    settings.notes.append(
        f"norms: norm_before_residual {residual}{said}; before fc: {fc_norm}; "
        f"feedback: {'normed' if output else 'raw'} (norm_output, {by})"
    )
    return dict(norm_before_residual=residual, fc_norm=fc_norm, norm_output=output)


def read_rope(settings: Settings) -> RopeSpec:
    """The head's own rotary positions; the target's are never a default."""
    theta = settings.number("rope_theta", float)
    found = {key: settings.get(key) for key in ("rope_parameters", "rope_scaling")}
    specs = {key: rope_spec(settings, key, value, theta) for key, value in found.items() if value is not None}
    if len(set(specs.values())) > 1:
        raise settings.error(f"rope_parameters and rope_scaling contradict each other ({specs}); keep one")
    spec = next(iter(specs.values()), RopeSpec(theta or DEFAULT_ROPE_THETA))
    named = theta is not None or any("rope_theta" in found[key] for key in specs)
    said = "" if named else " (assumed: the configuration names none)"
    settings.notes.append(f"rope: {spec.kind}, theta {spec.theta:g}{said}")
    return spec


def rope_spec(settings: Settings, key: str, value: object, theta: float | None) -> RopeSpec:
    """One set of rotary parameters, under ``key``; ``theta`` is the separate ``rope_theta``, if there is one."""
    if not isinstance(value, dict) or any(isinstance(part, (dict, list)) for part in value.values()):
        raise settings.error(
            f"{key} = {value!r} is not one set of rotary parameters; give the head's own, "
            f'as in {{"rope_type": "default", "rope_theta": 10000.0}}'
        )
    value = {name: part for name, part in value.items() if part is not None}
    kinds = {value.pop(name) for name in ("rope_type", "type") if name in value} or {"default"}
    inner = value.pop("rope_theta", theta)
    if len(kinds) > 1 or (theta is not None and inner != theta):
        raise settings.error(f"{key} contradicts itself or rope_theta: types {kinds}, theta {inner} and {theta}")
    kind = kinds.pop()
    if kind not in ROPE_PARAMETERS:
        allowed = ", ".join(ROPE_PARAMETERS)
        raise settings.error(f"{key}: rope type {kind!r} is not supported in a draft head; allowed: {allowed}")
    if value.get("partial_rotary_factor") == 1.0:
        del value["partial_rotary_factor"]
    names = ROPE_PARAMETERS[kind]
    if value.keys() != names.keys() or not all(isinstance(v, (int, float)) and v > 0 for v in value.values()):
        needed = ", ".join(names) or "none"
        raise settings.error(f"{key} of type {kind!r} has {value}; it takes exactly, as positive numbers: {needed}")
    return RopeSpec(float(inner or DEFAULT_ROPE_THETA), kind, **{names[name]: part for name, part in value.items()})


def read_window(settings: Settings, form: str, n_layers: int) -> int | None:
    """The positions that the head's attention looks back over, itself included; None: all."""
    kinds, width = settings.get("layer_types"), settings.number("sliding_window", int)
    enabled = settings.flag("use_sliding_window")
    if form == "NeMo" and (kinds or width):
        settings.notes.append("attention: full causal (NeMo copies the target's windows, and does not use them)")
        return None
    if kinds is None and enabled:
        raise settings.error(
            "use_sliding_window is true and layer_types is absent; add layer_types, with 'sliding_attention' or "
            "'full_attention' for each layer, as the head was trained"
        )
    if kinds is not None and kinds not in (["full_attention"] * n_layers, ["sliding_attention"] * n_layers):
        raise settings.error(
            f"layer_types = {kinds!r} for {n_layers} draft layers; allowed: one entry a layer, and all of them "
            f"'full_attention' or all 'sliding_attention'"
        )
    if kinds is None or kinds[0] == "full_attention":
        settings.notes.append("attention: full causal")
        return None
    if width is None or enabled is False:
        raise settings.error(
            f"layer_types says sliding_attention, but sliding_window is {width} and use_sliding_window {enabled}; "
            f"set a window and true, or full_attention"
        )
    settings.notes.append(f"attention: sliding window of {width} positions")
    return width


def read_layers(settings: Settings, form: str, tensors: Mapping[str, RowSource]) -> int:
    """The number of draft layers, by the file; the configuration has to agree."""
    count = 1 + max((int(m[1]) for name in tensors if (m := re.match(r"layers\.(\d+)\.", name))), default=0)
    declared = settings.number("num_hidden_layers", int) or count
    if declared != count and form != "NeMo":
        raise settings.error(f"num_hidden_layers is {declared}, the file has {count} draft layers; correct one of them")
    if declared != count:
        settings.notes.append(f"layers: {count}, by the file (NeMo copies the target's num_hidden_layers, {declared})")
    return count


def read_attention(settings: Settings, form: str, tensors: dict[str, RowSource]) -> dict[str, bool]:
    """``qk_norm`` and ``attention_bias``. Not every trainer gives ``o_proj`` a bias; a file without gets zeros."""
    first = "layers.0.self_attn"
    settings.used.add("model_type")
    kind = settings.sections.get("transformer_layer_config.", settings.top).get("model_type")
    if form == "NeMo":
        kind = "llama"  # whatever the target's, which it copies
    if kind not in (None, "llama", "qwen3"):
        raise settings.error(f"model_type {kind!r} is not a known kind of draft layer; allowed: llama, qwen3")
    qk_norm = f"{first}.q_norm.weight" in tensors if kind is None else kind == "qwen3"
    has_bias = f"{first}.q_proj.bias" in tensors
    biases = settings.flag("attention_bias")
    if settings.flag("bias") and biases is None:  # vLLM takes it for attention_bias, SGLang for a bias of fc
        biases = has_bias
        settings.notes.append(f"bias: true{'' if has_bias else ', without effect as the file has no biases'}")
    if biases and not any(name.endswith("o_proj.bias") for name in tensors):
        for name in [name for name in tensors if name.endswith("o_proj.weight")]:
            zeros = torch.zeros(tensors[name].shape[0])
            tensors[name.removesuffix("weight") + "bias"] = TensorSource(zeros)
        settings.notes.append("biases: on q, k and v; the file has none for o_proj, taken as zero")
    return dict(qk_norm=qk_norm, attention_bias=bool(biases))


# --- Tables ---


def refuse_absolute(where: object, d2t: Tensor, t2d: Tensor | None, target_vocab: int) -> None:
    """Raises ``ValueError`` if ``d2t`` holds target ids rather than offsets, or belongs to another head than ``t2d``.

    ``t2d`` bool ``[V]`` marks the target ids that the head knows, so it can tell the two apart.
    """
    d2t = d2t.to(torch.int64)
    ids = torch.arange(len(d2t)) + d2t
    absolute = (
        f"{where}: d2t reads as absolute target ids (it starts {d2t[:4].tolist()}); allowed: offsets, target id = "
        f"draft id + d2t[draft id]. Subtract arange({len(d2t)}) from it"
    )
    if t2d is None:
        # Offsets that always rise leave out a neighbour of every id: possible, but no counted vocabulary is like that.
        if len(d2t) > 1 and bool((d2t.diff() > 0).all()):
            raise ValueError(f"{absolute}; if they are offsets all the same, add the mask t2d that proves it")
        return
    known = t2d.nonzero().flatten()
    if tuple(t2d.shape) != (target_vocab,) or bool((t2d != t2d.bool()).any()):
        raise ValueError(f"{where}: t2d is {t2d.dtype} {list(t2d.shape)}, expected a mask of {target_vocab} target ids")
    if torch.equal(known, d2t) and not torch.equal(known, ids):
        raise ValueError(absolute)
    if not torch.equal(known, ids):
        raise ValueError(
            f"{where}: d2t maps to {len(ids)} target ids that start {ids[:4].tolist()}, t2d marks {len(known)} that "
            f"start {known[:4].tolist()}; they must be the same ids, ascending. Is one of the tables another head's?"
        )


def read_vocabulary(settings: Settings, tensors: dict[str, RowSource], target_vocab: int) -> tuple[bool, Tensor]:
    """Whether the head has its own ``lm_head``, and the offsets ``[Vd]``. Takes both tables out of ``tensors``."""
    d2t, t2d, head = tensors.pop("d2t", None), tensors.pop("t2d", None), tensors.get("lm_head.weight")
    made_for = {
        "vocab_size": settings.number("vocab_size", int),
        "t2d": rows_of(t2d),
        "embed_tokens.weight": rows_of(tensors.get("embed_tokens.weight")),
    }
    for name, size in made_for.items():
        if size not in (None, target_vocab):
            raise settings.error(
                f"the head is for a target vocabulary of {size} ({name}), this target has {target_vocab}; "
                f"use the head that was made for this target"
            )
    sizes = {key: settings.number(key, int) for key in ("draft_vocab_size", "truncated_vocab_size")}
    said = "" if any(sizes.values()) else " (draft_vocab_size is null or absent)"
    sizes |= {"lm_head.weight": rows_of(head), "d2t": rows_of(d2t)}
    sizes = {name: size for name, size in sizes.items() if size is not None} or {"target": target_vocab}
    if len(set(sizes.values())) > 1:
        raise settings.error(f"the size of the draft vocabulary is contradictory: {sizes}; is the checkpoint complete?")
    size = next(iter(sizes.values()))
    for name, tensor in {"lm_head.weight": head, "d2t": d2t}.items():
        if tensor is None and size != target_vocab:
            raise settings.error(
                f"tensor {name!r} is missing, and nothing can stand in for it in a head that knows {size} of the "
                f"target's {target_vocab} ids; complete the checkpoint"
            )
    settings.used.add("tie_word_embeddings")  # of no effect where there is an lm_head
    if head is None and any(section.get("tie_word_embeddings") for section in settings.sections.values()):
        raise settings.error("tie_word_embeddings is true and there is no lm_head.weight; save the head's lm_head too")
    own = f"lm_head: the file's own, {size} rows" if head is not None else "lm_head: the target's (the file has none)"
    settings.notes.append(own + said)
    if d2t is None:
        settings.notes.append(f"vocabulary: all {size} ids of the target, no table (identity)")
        return head is not None, torch.zeros(size, dtype=torch.int64)
    offsets = d2t.read()
    refuse_absolute(settings.path, offsets, None if t2d is None else t2d.read(), target_vocab)
    offsets = target_ids(settings.path, offsets, size, target_vocab) - torch.arange(size)
    proof = "with no t2d to check them by" if t2d is None else "and t2d agrees"
    settings.notes.append(f"vocabulary: {size} of the target's {target_vocab} ids, d2t holds offsets, {proof}")
    if size != target_vocab and not bool(offsets.any()):
        settings.notes.append(
            f"warning: d2t is all zeros: the head knows just the first {size} ids; was it ever filled?"
        )
    return head is not None, offsets


def read_embedding(settings: Settings, tensors: dict[str, RowSource], target: RowSource | None) -> bool:
    """Whether the head has its own table. One that equals the target's is taken out of ``tensors``, to be shared."""
    name = "embed_tokens.weight"
    if name not in tensors:
        settings.notes.append("embedding: the target's (the file has none)")
        return False
    if target is None or tuple(target.shape) != tuple(tensors[name].shape):
        why = "no table of the target to compare it with" if target is None else "of another width than the target's"
        settings.notes.append(f"embedding: the file's own ({why})")
        return True
    cosine = similarity(tensors[name], target)
    if cosine is None:
        del tensors[name]
        settings.notes.append("embedding: the target's (the file's equals it, so there is one table)")
        return False
    near = "; a copy of the table before it was quantised?" if cosine > 0.999 else ""
    settings.notes.append(f"embedding: the file's own (mean cosine with the target's {cosine:.4f}{near})")
    if abs(cosine) < UNRELATED:
        settings.notes.append(
            f"warning: the file's embedding has nothing in common with the target's (mean cosine {cosine:.4f}): "
            f"probably random. Remove {name} from the file to use the target's"
        )
    return True


def similarity(own: RowSource, target: RowSource) -> float | None:
    """None if the tables are equal in ``own``'s precision, otherwise the mean cosine of matching rows (of a sample)."""
    rows, width = own.shape
    step = max(1, (1 << 22) // width)
    blocks = ((start, min(start + step, rows)) for start in range(0, rows, step))
    if all(torch.equal(mine := own.read(*block), target.read(*block).to(mine.dtype)) for block in blocks):
        return None
    sample = [(start, min(start + 16, rows)) for start in range(0, rows, max(16, rows // 64))]
    cosines = [F.cosine_similarity(own.read(*block).float(), target.read(*block).float(), dim=-1) for block in sample]
    return torch.cat(cosines).mean().item()


# --- Reading ---


def check_weights(settings: Settings, config: Eagle3Config, tensors: Mapping[str, RowSource]) -> None:
    """Raises ``ValueError`` naming tensors that are missing, left over, misshapen or not floating point."""
    expected = expected_shapes(config)
    missing, left = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or left:
        raise settings.error(
            f"the weights do not fit the configuration. Missing: {', '.join(missing) or 'none'}; without a place: "
            f"{', '.join(left) or 'none'}. Read as {config.n_layers} draft layers, norm before fc {config.fc_norm!r}, "
            f"q/k norms {config.qk_norm}, biases {config.attention_bias}; if the file is complete, correct config.json"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            got = list(tensors[name].shape)
            raise settings.error(f"tensor {name!r} has shape {got}, by the configuration it has {list(shape)}")
        dtype = tensors[name].read(0, 0).dtype
        if dtype not in FLOATS:
            raise settings.error(
                f"tensor {name!r} is {dtype}; allowed: {', '.join(map(str, FLOATS))}. Start from the unquantised head"
            )


def read_head(
    path: Path | str,
    *,
    target_vocab_size: int,
    target_hidden_size: int,
    target_layers: int,
    target_embed: RowSource | None = None,
    norm_output: bool | None = None,
) -> DraftCheckpoint:
    """Reads an EAGLE-3 head, in any published spelling, for a target of these sizes.

    ``path``: a folder of config.json and weights (safetensors or ``pytorch_model.bin``, whole or in parts), as written
    by speculators, SafeAILab, SGLang and SpecForge, or their vLLM, NeMo and nebius variants. Weights stay in the file
    until they are asked for. ``target_embed``: the target's raw embedding ``[V, Ht]``; a table in the file that equals
    it is shared. ``norm_output``: overrides the configuration, and settles it where a flat one is ambiguous.

    Fallbacks, each with a note: no ``embed_tokens``: the target's, if the widths agree; no ``lm_head``: the target's,
    if vocabulary and width agree; no ``d2t``: identity, if the vocabularies agree; no ``t2d``: one check less; biases,
    but none for ``o_proj``: zero. Raises ``FileNotFoundError`` or ``ValueError`` for anything else that is missing,
    left over, contradictory or not supported.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}; expected one with config.json and {' or '.join(WEIGHT_FILES)}")
    settings = Settings(path, read_json(path / "config.json", "expected the folder of an EAGLE-3 head"))
    form = detect_format(settings)
    files, raw = open_weights(path)
    tensors = canonical_names(path, raw)
    settings.notes.append(f"format: {form}, weights in {', '.join(file.name for file in files)}")
    refuse_unsupported(settings)

    width, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    tapped_width = settings.number("target_hidden_size", int) or width
    if tapped_width != target_hidden_size:
        raise settings.error(
            f"the head taps a target of width {tapped_width}, this one has {target_hidden_size}; use the head that was "
            f"made for this target (target_hidden_size in config.json; absent, it is hidden_size)"
        )
    boundaries, spelled = read_taps(settings, target_layers)
    taps = settings.number("num_aux_hidden_states", int) or len(boundaries)
    columns = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else None
    if columns is None:
        raise settings.error("tensor 'fc.weight' is missing; is this an EAGLE-3 head, and not EAGLE-1 or a target?")
    if taps != len(boundaries) or columns != taps * target_hidden_size:
        raise settings.error(
            f"fc.weight reads {columns} features and num_aux_hidden_states is {taps}, but the {len(boundaries)} taps "
            f"{list(boundaries)} ({spelled}) of width {target_hidden_size} are {len(boundaries) * target_hidden_size}; "
            f"list the taps that the head was trained with"
        )
    layers = read_layers(settings, form, tensors)
    norms = read_norms(settings, form, norm_output)
    attention = read_attention(settings, form, tensors)
    own_head, d2t = read_vocabulary(settings, tensors, target_vocab_size)
    own_embed = read_embedding(settings, tensors, target_embed)
    for name, own in {"embed_tokens.weight": own_embed, "lm_head.weight": own_head}.items():
        if not own and width != target_hidden_size:
            raise settings.error(
                f"tensor {name!r} is missing, and the target's cannot stand in for it: it is {target_hidden_size} "
                f"wide, the head {width}; complete the checkpoint"
            )
    head_dim = settings.number("head_dim", int)
    if head_dim is None and width % heads:
        raise settings.error(f"there is no head_dim, and {heads} heads do not divide a width of {width}; add head_dim")
    eps = settings.number("rms_norm_eps", float)
    if eps is None:
        settings.notes.append(f"rms_norm_eps: {DEFAULT_EPS:g} (assumed: the configuration names none)")
    fields = dict(
        vocab_size=target_vocab_size,
        draft_vocab_size=len(d2t),
        target_hidden_size=target_hidden_size,
        hidden_size=width,
        intermediate_size=settings.size("intermediate_size"),
        n_heads=heads,
        n_kv_heads=settings.number("num_key_value_heads", int) or heads,
        head_dim=head_dim or width // heads,
        boundaries=boundaries,
        n_layers=layers,
        rms_eps=eps or DEFAULT_EPS,
        rope=read_rope(settings),
        window=read_window(settings, form, layers),
        own_embed=own_embed,
        own_head=own_head,
        max_positions=settings.number("max_position_embeddings", int),
        **norms,
        **attention,
    )
    try:
        config = Eagle3Config(**fields)
    except ValueError as error:
        raise settings.error(str(error)) from error
    q = tensors.get("layers.0.self_attn.q_proj.weight")
    if q is not None and q.shape[-1] != 2 * width:
        raise settings.error(
            f"layers.0.self_attn.q_proj.weight reads {q.shape[-1]} features; embedding and feature side by side are "
            f"{2 * width}, twice hidden_size {width}"
        )
    check_weights(settings, config, tensors)
    note_leftovers(settings)
    settings.notes.insert(1, taps_note(config, target_layers, spelled))
    verifier = (settings.top.get("speculators_config") or {}).get("verifier") or {}
    identity = {
        "file": path.name,
        "format": form,
        "sha256": {file.name: file_sha256(file) for file in [path / "config.json", *files]},
        "made_for": verifier.get("name_or_path"),
        "boundaries": list(boundaries),
        "taps": config.taps(),
    }
    return DraftCheckpoint(config, tensors, d2t, identity, tuple(settings.notes))

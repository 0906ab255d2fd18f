"""Writes the ``tokenizer.json`` of an artifact, from a checkpoint's own, from a GGUF file, or a trivial one for tests.

What is written differs from the source in form, not in meaning, so that it loads fast and leaves nothing to chance:

- No post-processor. The runtime's ``Tokenizer.encode`` is the one place that adds BOS; whether it should is recorded in
  ``TokenizerFacts.add_bos``. A runner of others that reads the file gets no BOS unless it asks for one.
- No truncation and no padding, which would cut or fill prompts in silence.
- Each merge as one string ``"a b"`` instead of a pair, where no token holds a space, and no indentation. For Gemma's
  262144 tokens the file shrinks from 33 to 12 MB and the library needs 163 instead of 355 MB while it loads.
"""

import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers

from eyas.models.gguf_reader import open_reader
from eyas.models.target import TokenizerSource

FORM = 1  # raise it when what ``settle`` or ``TokenizerFacts`` hold changes: older cache entries are then not found
TRIVIAL_SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>")
PROBE_ID = 2**32 - 1  # an id that no vocabulary has


@dataclass(frozen=True)
class TokenizerFacts:
    """What the artifact records of its tokenizer.

    ``sha256``: of the written file. ``vocab_size``: highest id plus one. ``bos``: the BOS token as the vocabulary
    writes it. ``add_bos``: whether a plain prompt starts with BOS. ``special_ids``: id to literal, thousands for Gemma.
    """

    sha256: str
    vocab_size: int
    bos_id: int | None
    bos: str | None
    add_bos: bool
    special_ids: Mapping[int, str]

    def to_json(self) -> str:
        return json.dumps(vars(self) | {"special_ids": list(self.special_ids.items())}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "TokenizerFacts":
        fields = json.loads(text)
        return cls(**fields | {"special_ids": dict(fields["special_ids"])})


def make_tokenizer_json(
    source: TokenizerSource,
    out_path: Path,
    cache_dir: Path,
    *,
    vocab_size: int | None = None,
    bos_id: int | None = None,
) -> TokenizerFacts:
    """Writes the tokenizer of ``source`` to ``out_path`` and returns what it is. Raises as ``read_tokenizer``."""
    content, facts = read_tokenizer(source, cache_dir, vocab_size=vocab_size, bos_id=bos_id)
    with TemporaryDirectory(dir=Path(out_path).parent) as folder:
        part = Path(folder, "tokenizer.json")
        part.write_bytes(content)
        os.replace(part, out_path)
    return facts


def read_tokenizer(
    source: TokenizerSource, cache_dir: Path, *, vocab_size: int | None = None, bos_id: int | None = None
) -> tuple[bytes, TokenizerFacts]:
    """The ``tokenizer.json`` that an artifact takes for the tokenizer of ``source``, and what it is.

    ``vocab_size``: rows of the model's embedding; required for kind "none", checked for the others. ``bos_id``: the
    checkpoint's; None takes the one that the tokenizer itself adds. A GGUF file is converted once (25 s and 1 GB, in a
    child process) and kept in ``cache_dir``. Warns of a BOS that is an ordinary token.

    Raises ``FileNotFoundError``; ``ValueError`` for a source that is not a tokenizer, that adds more than a BOS, that
    disagrees with ``bos_id`` or that has ids the model lacks; ``RuntimeError`` when the conversion fails.
    """
    if source.kind == "none":
        content, facts = trivial(vocab_size, bos_id)
    elif source.kind in ("json", "gguf"):
        if source.path is None or not source.path.is_file():
            raise FileNotFoundError(f"no tokenizer source at {source.path}; expected a {source.kind} file")
        content, facts = (
            settle(source.path.read_bytes(), str(source.path), bos_id, None)
            if source.kind == "json"
            else from_gguf(source.path, Path(cache_dir), bos_id)
        )
    else:
        raise ValueError(f"unknown kind of tokenizer source {source.kind!r}; allowed: json, gguf, none")
    if vocab_size is not None and facts.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {facts.vocab_size - 1}, the model only up to {vocab_size - 1}; "
            "do the two belong to the same checkpoint?"
        )
    if facts.bos_id is not None and facts.bos_id not in facts.special_ids:
        warnings.warn(
            f"BOS id {facts.bos_id} is the ordinary token {facts.bos!r}, not a special one; is it another model's id?",
            stacklevel=2,
        )
    return content, facts


def settle(raw: bytes, name: str, bos_id: int | None, add_bos: bool | None) -> tuple[bytes, TokenizerFacts]:
    """A ``tokenizer.json`` in the form described above, tried by loading it, and its facts.

    ``name``: of the source, for errors. ``add_bos``: None goes by the post-processor.
    """
    try:
        fields = json.loads(raw)
        before, after = added_around(fields.get("post_processor"))
        fields |= {"post_processor": None, "truncation": None, "padding": None}
        fields["model"] = fields["model"] | joined_merges(fields["model"])
        content = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
        loaded = tokenizers.Tokenizer.from_buffer(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} is not a readable tokenizer.json: {error!r}") from error
    if after or len(before) > 1 or (before and bos_id not in (None, *before)):
        expected = "at most one BOS" if bos_id is None else f"at most the checkpoint's BOS, {bos_id}"
        raise ValueError(f"{name} adds ids {before} before a text and {after} after it; allowed: {expected}, before it")
    bos_id = bos_id if bos_id is not None else next(iter(before), None)
    bos = None if bos_id is None else loaded.id_to_token(bos_id)
    if bos_id is not None and bos is None:
        raise ValueError(f"{name} has no token for the BOS id {bos_id} of the checkpoint; do the two belong together?")
    facts = TokenizerFacts(
        sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=max(loaded.get_vocab(with_added_tokens=True).values()) + 1,
        bos_id=bos_id,
        bos=bos,
        add_bos=bos_id is not None and (bool(before) if add_bos is None else add_bos),
        special_ids={i: t.content for i, t in sorted(loaded.get_added_tokens_decoder().items()) if t.special},
    )
    return content, facts


def added_around(post_processor: Mapping | None) -> tuple[list[int], list[int]]:
    """The ids that a post-processor puts before and after a text, found by applying it to a vocabulary of one token."""
    probe = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": PROBE_ID}, "unk_token": "a"},
        "post_processor": post_processor,
    }
    ids = tokenizers.Tokenizer.from_buffer(json.dumps(probe).encode()).encode("a").ids
    middle = ids.index(PROBE_ID)
    return ids[:middle], ids[middle + 1 :]


def joined_merges(model: Mapping) -> dict[str, list[str]]:
    """BPE merges as strings, or nothing where the library would read those otherwise (space in a token, comment)."""
    merges = model.get("merges", [])
    strings = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    plain = all(merge.count(" ") == 1 and not merge.startswith("#version") for merge in strings)
    return {"merges": strings} if merges and plain else {}


def trivial(vocab_size: int | None, bos_id: int | None) -> tuple[bytes, TokenizerFacts]:
    """A tokenizer for random models: ids 0 to 3 are the specials, id i is the word ``t<i>``, with spaces between."""
    if vocab_size is None or vocab_size <= len(TRIVIAL_SPECIALS):
        raise ValueError(
            f"a trivial tokenizer needs the model's vocabulary size, above {len(TRIVIAL_SPECIALS)}; got {vocab_size}"
        )
    words = [*TRIVIAL_SPECIALS, *(f"t{i}" for i in range(len(TRIVIAL_SPECIALS), vocab_size))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens(list(TRIVIAL_SPECIALS))
    return settle(built.to_str().encode(), "the trivial tokenizer", bos_id, bos_id is not None)


def from_gguf(path: Path, cache_dir: Path, bos_id: int | None) -> tuple[bytes, TokenizerFacts]:
    """The tokenizer inside a GGUF file, from the cache if an intact entry is there, else built and kept.

    An entry's name is its key (all that the result depends on) and the SHA-256 of its bytes: the facts on one line,
    then the ``tokenizer.json``. It appears by renaming, so it is whole or absent; one damaged later is removed.
    """
    key, add_bos = gguf_key(path, bos_id)
    for entry in sorted(cache_dir.glob(f"{key}.*")):
        data = entry.read_bytes()
        if hashlib.sha256(data).hexdigest() == entry.name.rpartition(".")[2]:
            return unpack(data)
        entry.unlink(missing_ok=True)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache_dir) as folder:
        part = Path(folder, "entry")
        build_in_child(path, part, bos_id, add_bos)
        data = part.read_bytes()
        os.replace(part, cache_dir / f"{key}.{hashlib.sha256(data).hexdigest()}")
    return unpack(data)


def unpack(entry: bytes) -> tuple[bytes, TokenizerFacts]:
    facts, content = entry.split(b"\n", 1)
    return content, TokenizerFacts.from_json(facts.decode())


def gguf_key(path: Path, bos_id: int | None) -> tuple[str, bool | None]:
    """A name for all that the tokenizer of a GGUF file depends on, and whether the file says that BOS is added."""
    fields = open_reader(path).fields
    if "tokenizer.ggml.tokens" not in fields:
        raise ValueError(f"{path} holds no tokenizer (no tokenizer.ggml.tokens); give a tokenizer.json instead")
    digest = hashlib.sha256(json.dumps([FORM, version("transformers"), version("tokenizers"), bos_id]).encode())
    for name in sorted(fields):
        if name.startswith("tokenizer.") or name == "general.architecture":
            for part in fields[name].parts:
                digest.update(part.tobytes())
    add_bos = fields.get("tokenizer.ggml.add_bos_token")
    return digest.hexdigest()[:32], None if add_bos is None else bool(add_bos.contents())


def build_in_child(path: Path, entry: Path, bos_id: int | None, add_bos: bool | None) -> None:
    """Runs ``build_entry`` in a process of its own, so that its gigabyte goes when it is done."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "eyas.lowering.tokenizer",
        json.dumps([str(path), str(entry), bos_id, add_bos]),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"converting the tokenizer of {path} failed (exit status {done.returncode}); "
            f"the process ended with:\n{done.stderr.strip()[-2000:]}"
        )


def build_entry(path: Path, entry: Path, bos_id: int | None, add_bos: bool | None) -> None:
    """Converts the tokenizer of a GGUF file through transformers and writes the cache entry."""
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:  # alone in a folder, so that no file beside it has a say
        Path(folder, "model.gguf").symlink_to(path.resolve())
        converted = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    fields = json.loads(converted.backend_tokenizer.to_str())
    vocab = fields["model"][
        "vocab"
    ]  # the file's tokens; the tokenizer's class may have added some that the model lacks
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] in vocab]
    content, facts = settle(json.dumps(fields).encode(), str(path), bos_id, add_bos)
    entry.write_bytes(facts.to_json().encode() + b"\n" + content)


if __name__ == "__main__":
    gguf_path, entry_path, *rest = json.loads(sys.argv[1])
    build_entry(Path(gguf_path), Path(entry_path), *rest)

"""Text in and text out: prompts and chats to token ids, and token ids to text while they are still arriving.

A ``TextStream`` does not call the library's ``decode``. It maps each token to the bytes it stands for and puts those
through an incremental UTF-8 decoder, so a character that is split over tokens (``<0xE2>``, ``<0x82>``, ``<0xAC>``)
comes out whole, a token costs the same however long the text is, and any split of the ids into rounds gives the same
text. ``Tokenizer.decode`` is one such stream pushed once. Where the bytes are valid UTF-8 its text is that of the
library; where they are not, each ill-formed part becomes one U+FFFD, as in Python and browsers (the library gives up on
the whole run of byte tokens around it, valid characters included, which no stream could know in time).
"""

import codecs
import ctypes
import json
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

DECODERS = "none, ByteLevel, Metaspace, or a sequence of Replace (of a string), ByteFallback, Fuse and Strip (left)"
SENTENCEPIECE_ORDER = ("Replace", "ByteFallback", "Fuse", "Strip")


def byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte: itself if it prints, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = byte_level_alphabet()


@dataclass(frozen=True)
class PieceRule:
    """What the decoder of a ``tokenizer.json`` does to one token, and where tokens meet.

    ``replaces``: (old, new) strings. ``first_drops``: a string that the first token of a text loses. ``separator``: put
    between tokens. ``strips``: (character, count), the most of it that a text loses at its start.
    """

    replaces: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    byte_level: bool = False
    first_drops: str = ""
    separator: bytes = b""
    strips: tuple[str, int] = ("", 0)

    @classmethod
    def read(cls, decoder: Mapping | None) -> "PieceRule":
        """The rule of a decoder as ``tokenizer.json`` writes it. Raises ``ValueError`` for one we cannot stream."""
        if decoder is None:
            return cls(separator=b" ")
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        if kinds == ["Metaspace"]:
            mark, dropped = steps[0]["replacement"], steps[0]["prepend_scheme"] != "never"
            return cls(replaces=((mark, " "),), first_drops=mark if dropped else "")
        by_kind = {kind: [step for step in steps if step["type"] == kind] for kind in SENTENCEPIECE_ORDER}
        known = [kind for kind in SENTENCEPIECE_ORDER for _ in by_kind[kind]] == kinds
        whole = not by_kind["Strip"] or (kinds.count("Fuse") and len(by_kind["Strip"]) == 1)
        left = all(step["stop"] == 0 for step in by_kind["Strip"])
        if not (known and whole and left and all("String" in step["pattern"] for step in by_kind["Replace"])):
            raise ValueError(f"the tokenizer's decoder {json.dumps(decoder)} is not supported; allowed: {DECODERS}")
        return cls(
            replaces=tuple((step["pattern"]["String"], step["content"]) for step in by_kind["Replace"]),
            byte_fallback=bool(by_kind["ByteFallback"]),
            strips=next(((step["content"], step["start"]) for step in by_kind["Strip"]), ("", 0)),
        )

    def to_bytes(self, piece: str, first: bool = False) -> bytes:
        """The bytes that a token of this literal stands for; ``first``: as the first one of a text."""
        if self.byte_level:
            if all(character in BYTE_OF_CHARACTER for character in piece):
                return bytes(BYTE_OF_CHARACTER[character] for character in piece)
            return piece.encode()  # an added token, stored as it reads
        if first and self.first_drops:
            piece = piece.replace(self.first_drops, "")
        for old, new in self.replaces:
            piece = piece.replace(old, new)
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            digits = piece[3:5]
            if all(digit in "0123456789abcdefABCDEF" for digit in digits):
                return bytes([int(digits, 16)])
        return piece.encode()


class Tokenizer:
    """A tokenizer with the facts that its file does not hold: BOS, stop ids and the chat template.

    BOS is added here and only here: the library is always called without special tokens, whatever the file's own
    post-processor says. A tokenizer may be shared between threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        add_bos: bool,
        stop_ids: Iterable[int],
        chat_template: str | None,
    ):
        """Raises ``ValueError`` for ids without a token, for ``add_bos`` without a BOS, and for an unknown decoder."""
        self.bos_id, self.add_bos = bos_id, add_bos
        self.stop_ids = tuple(dict.fromkeys(stop_ids))
        self.chat_template = chat_template
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        if add_bos and bos_id is None:
            raise ValueError("add_bos is set but there is no bos_id; give one, or set add_bos to False")
        for what, ids in (("BOS", [] if bos_id is None else [bos_id]), ("stop", self.stop_ids)):
            if missing := [i for i in ids if i < 0 or backend.id_to_token(i) is None]:
                raise ValueError(
                    f"{what} ids {missing} have no token; allowed: ids of this vocabulary of {self.vocab_size} tokens"
                )
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = backend.decoder
        self.rule = PieceRule.read(None if decoder is None else json.loads(decoder.__getstate__()))
        self._pieces: dict[int, bytes | None] = {}

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        bos_id: int | None,
        add_bos: bool,
        stop_ids: Iterable[int],
        chat_template: str | None = None,
    ) -> "Tokenizer":
        """Reads a ``tokenizer.json``. May be called on any thread.

        The library holds the interpreter's lock while it reads (about a second for 262144 tokens), so a background
        thread overlaps with work that has released the lock (file reads, ``dlopen``, device copies), not with Python.

        Raises ``FileNotFoundError``, or ``ValueError`` when the file is not a tokenizer or the other facts do not fit.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {path}; expected a tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not a readable tokenizer.json: {error}") from error
        return_free_memory()
        return cls(backend, bos_id=bos_id, add_bos=add_bos, stop_ids=stop_ids, chat_template=chat_template)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def literal(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it (``▁the``, ``<0xE2>``, ``<eos>``); None for an id without one."""
        return self._backend.id_to_token(token_id)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt. With ``add_bos`` they start with one BOS, also when the text spells it out."""
        ids = self.encode_raw(text)
        return [self.bos_id, *ids] if self.add_bos and ids[:1] != [self.bos_id] else ids

    def encode_raw(self, text: str) -> list[int]:
        """Ids of exactly this text: nothing is added, and special tokens that it spells out become their ids.

        Raises ``ValueError`` for text that is not Unicode (half of a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text cannot be encoded: {error}; is the input valid UTF-8, and complete at both ends?"
            ) from error
        return self._backend.encode(text, add_special_tokens=False).ids

    def render(self, messages: Sequence[Mapping], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """The text of a conversation by the chat template.

        ``messages``: mappings with ``role`` and ``content``; entries that are None are left out. ``variables``: what
        else the template reads (``tools``, ``enable_thinking``). The template gets ``bos_token``, and as ``eos_token``
        the first stop token. Raises ``ValueError`` without a template, for messages of another form, and when the
        template refuses them.
        """
        if self.chat_template is None:
            raise ValueError(
                "there is no chat template: the checkpoint brought none, as base models do; use a plain prompt instead"
            )
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise ValueError(f"messages must be one or more mappings with 'role' and 'content', got {messages!r}")
        literals = {"bos_token": self.bos_id, "eos_token": next(iter(self.stop_ids), None)}
        context = {"tools": None, "documents": None}
        context |= {name: self.literal(i) for name, i in literals.items() if i is not None}
        context |= variables
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=add_generation_prompt, **context)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused these messages: {error}") from error

    def chat(
        self, messages: Sequence[Mapping], *, add_generation_prompt: bool = True, **variables: object
    ) -> list[int]:
        """Ids of a conversation, see ``render``. The template alone decides about BOS, whatever ``add_bos`` says."""
        return self.encode_raw(self.render(messages, add_generation_prompt=add_generation_prompt, **variables))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids. ``skip_special`` leaves out special and stop tokens; ids without a token give nothing."""
        stream = TextStream(self, skip_special=skip_special)
        return stream.push(ids) + stream.finish()

    def describe_stops(self) -> list[tuple[int, str]]:
        """(id, literal) of each stop id. Warns of ordinary tokens among them: such ids often are another model's."""
        stops = [(i, self.literal(i)) for i in self.stop_ids]
        for i, literal in stops:
            if i not in self.special_ids:
                warnings.warn(
                    f"stop id {i} is the ordinary token {literal!r}, not a special one; is it another model's id?",
                    stacklevel=2,
                )
        return stops

    def piece(self, token_id: int, first: bool = False) -> bytes | None:
        """The bytes that a token stands for (``first``: as the first one of a text); None for an id without a token."""
        if first:
            literal = self.literal(token_id)
            return None if literal is None else self.rule.to_bytes(literal, first=True)
        if token_id not in self._pieces:
            literal = self.literal(token_id)
            self._pieces[token_id] = None if literal is None else self.rule.to_bytes(literal)
        return self._pieces[token_id]

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.chat_template)


class TextStream:
    """Ids in, as many at a time as a round brings; text out as soon as it is final.

    ``stopped``: the stop string that ended the text, or None. Of stop strings, the one that is complete first counts
    (of several, the longest), the text ends before it, and what follows is dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        stop_strings: Iterable[str] = (),
        continues: bool = False,
    ):
        """Raises ``ValueError`` for an empty stop string.

        ``skip_special``: leave out special and stop tokens. ``continues``: the ids follow other text, so a
        leading space stays where the tokenizer would drop it.
        """
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids.union(tokenizer.stop_ids) if skip_special else frozenset()
        self._stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        if "" in self._stops:
            raise ValueError(f"stop strings must not be empty, got {list(self._stops)}")
        self._longest = max(map(len, self._stops), default=0)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # holds an incomplete character, at most 3 bytes
        self._held = ""  # text that may be the start of a stop string
        self._at_start = not continues
        self._to_strip = 0 if continues else tokenizer.rule.strips[1]
        self._finished = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids make final; empty once ``stopped``. Raises ``ValueError`` after ``finish``."""
        if self._finished:
            raise ValueError("this stream is finished; start another one")
        return self._release(self._utf8.decode(b"".join(self._bytes(ids))))

    def finish(self) -> str:
        """What was held back: a possible stop string, and U+FFFD for a character that stayed incomplete. Once."""
        if self._finished:
            return ""
        self._finished = True
        return self._release(self._utf8.decode(b"", final=True), last=True)

    def _bytes(self, ids: Iterable[int]) -> Iterable[bytes]:
        for token_id in ids:
            if token_id in self._hidden:
                continue
            piece = self._tokenizer.piece(token_id, first=self._at_start)
            if piece is None:
                continue
            if not self._at_start:
                yield self._tokenizer.rule.separator
            self._at_start = False
            yield piece

    def _release(self, text: str, last: bool = False) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + self._strip(text)
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        cut = len(text) if last else len(text) - self._open_stop(text)
        self._held = text[cut:]
        return text[:cut]

    def _open_stop(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the start of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0

    def _strip(self, text: str) -> str:
        character, _ = self._tokenizer.rule.strips
        while self._to_strip and text:
            if not text.startswith(character):
                self._to_strip = 0
                break
            text, self._to_strip = text[len(character) :], self._to_strip - 1
        return text


def raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)


def to_json(value: object, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """The ``tojson`` filter of chat templates: unlike jinja's own, it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def return_free_memory() -> None:
    """Gives freed heap pages back to the system, where the C library can (glibc): 36 MB after 262144 tokens."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)

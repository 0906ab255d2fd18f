"""Text in and out: prompts, chats, and streams that never break a character."""

import itertools
import threading
import warnings
from datetime import datetime

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from eyas.runtime.text import TextStream, Tokenizer

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
EOS, BOS, END_OF_TURN = 1, 2, 5
BYTE = 8  # id of <0x00> in the Gemma-like vocabulary
MERGES = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("世", "界"), ("e", "r")]
TEXTS = (
    "the other day",
    "뷁 쀍쀍 the 똠방각하",  # rare Hangul, bytes only
    "👨‍👩‍👧‍👦 and 🏳️‍🌈, 👍🏽!",  # joiners, selectors, modifiers
    "e\u0301 Z\u0337\u0322a\u0338lgo",  # combining marks
    "zażółć gęślą jaźń",
    "世界 the 世 a界\n\nthe\n",
    "  two  spaces  ",
    "\U0010ffff\u0000\x7f߿ࠀ",  # borders of the lengths of UTF-8
)


def gemma_like(newlines: bool = True) -> tokenizers.Tokenizer:
    """A BPE with byte fallback, spaces as ▁, and added tokens, with the decoder of Gemma's tokenizer."""
    letters = sorted({*"▁abcdefghijklmnopqrstuvwxyzZ.,!?<>|/#:世界é"})
    words = [*SPECIALS, "\n", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *map("".join, MERGES)]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(list(SPECIALS))
    if newlines:
        backend.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in ("\n", "\n\n")])
    return backend


def llama_like() -> tokenizers.Tokenizer:
    """As above, but a space is put before a text and taken off again."""
    backend = gemma_like(newlines=False)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def byte_level() -> tokenizers.Tokenizer:
    """A BPE over bytes as GPT-2 and Qwen have it; some tokens hold half a character, or one and a half."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ð", "Ł"), ("ë", "·"), ("ë·", "ģ"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    vocab = {word: i for i, word in enumerate([*SPECIALS, *alphabet, *map("".join, merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    return backend


BACKENDS = {build.__name__: build() for build in (gemma_like, llama_like, byte_level)}


def wrap(backend: tokenizers.Tokenizer, **facts) -> Tokenizer:
    defaults = dict(bos_id=BOS, add_bos=True, stop_ids=(EOS, END_OF_TURN), chat_template=None)
    return Tokenizer(backend, **defaults | facts)


GEMMA = wrap(BACKENDS["gemma_like"])


def stream(tokenizer: Tokenizer, rounds, **options) -> list[str]:
    """The text of each round, and of the end."""
    text = TextStream(tokenizer, **options)
    return [*(text.push(ids) for ids in rounds), text.finish()]


def rounds_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """``ids`` in rounds of these sizes, over and over."""
    rounds, cycle = [], itertools.cycle(sizes)
    while ids:
        size = next(cycle)
        rounds.append(ids[:size])
        ids = ids[size:]
    return rounds


# without what starts a special token, and without the mark that decodes to a space
CHARACTERS = st.sampled_from("the a世é뷁👨‍👩\u0301\n.") | st.characters(
    exclude_categories=["Cs"], exclude_characters="<▁"
)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


# Streams


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("text", TEXTS)
def test_any_cut_of_a_text_keeps_its_characters_whole(name, text):
    tokenizer = wrap(BACKENDS[name])
    ids = tokenizer.encode(text)
    assert BACKENDS[name].decode(ids) == text  # the library agrees that these ids are this text
    assert tokenizer.decode(ids) == text
    single = stream(tokenizer, [[i] for i in ids])
    assert "".join(single) == text and "\ufffd" not in "".join(single)
    assert single[-1] == ""
    for cut in range(len(ids) + 1):
        assert "".join(stream(tokenizer, [ids[:cut], ids[cut:]])) == text


@pytest.mark.parametrize("name", BACKENDS)
@given(text=st.text(CHARACTERS), sizes=SIZES)
def test_any_rounds_of_any_text(name, text, sizes):
    tokenizer = wrap(BACKENDS[name])
    assert "".join(stream(tokenizer, rounds_of(tokenizer.encode(text), sizes))) == text


@given(ids=st.lists(st.integers(0, GEMMA.vocab_size - 1) | st.integers(BYTE + 0x80, BYTE + 0xFF)), sizes=SIZES)
def test_any_rounds_of_any_ids_are_the_bytes_they_stand_for(ids, sizes):
    raw = b""
    for i in ids:
        if BYTE <= i < BYTE + 256:
            raw += bytes([i - BYTE])
        elif i >= len(SPECIALS):
            raw += GEMMA.literal(i).replace("▁", " ").encode()
    assert "".join(stream(GEMMA, rounds_of(ids, sizes))) == GEMMA.decode(ids) == raw.decode("utf-8", "replace")


def test_a_character_comes_with_its_last_byte():
    euro = [BYTE + byte for byte in "€".encode()]
    assert stream(GEMMA, [[i] for i in euro]) == ["", "", "€", ""]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_character_cut_by_the_end_is_flushed_once(keep):
    text = TextStream(GEMMA)
    assert text.push(GEMMA.encode("a") + [BYTE + byte for byte in "😀".encode()[:keep]]) == "a"
    assert text.finish() == "\ufffd"
    assert text.finish() == ""
    with pytest.raises(ValueError, match="finished"):
        text.push([BYTE])


def test_invalid_bytes_come_out_within_four_tokens():
    for raw in itertools.product((0x41, 0x80, 0x9F, 0xBF, 0xC0, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xFF), repeat=4):
        text = TextStream(GEMMA)
        assert any([text.push([BYTE + byte]) for byte in raw]), raw


def test_a_leading_space_ends_half_a_character():
    ids = [BYTE + 0xE2, BYTE + 0x82, GEMMA.encode_raw(" the")[0]]
    assert GEMMA.literal(ids[-1]) == "▁the"
    assert stream(GEMMA, [[i] for i in ids]) == ["", "", "\ufffd the", ""]


def test_special_and_stop_tokens_are_shown_on_request_only():
    newline = GEMMA.encode_raw("\n")[0]
    tokenizer = wrap(BACKENDS["gemma_like"], stop_ids=(EOS, newline))
    ids = tokenizer.encode("the<end_of_turn>\n")
    assert ids[0] == BOS and ids[-1] == newline
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special=False) == "<bos>the<end_of_turn>\n"


def test_a_special_token_inside_a_character_does_not_break_it():
    first, *rest = (BYTE + byte for byte in "é".encode())
    assert GEMMA.decode([first, END_OF_TURN, *rest]) == "é"


def test_ids_without_a_token_give_nothing():
    the, beyond = GEMMA.encode_raw("the"), GEMMA.vocab_size + 7  # a model's vocabulary is often padded
    assert GEMMA.decode([beyond, *the, beyond]) == "the"


def test_a_text_loses_the_space_before_it_unless_it_continues_another():
    tokenizer = wrap(BACKENDS["llama_like"])
    ids = tokenizer.encode("the  a")
    assert "".join(stream(tokenizer, [[i] for i in ids])) == "the  a"
    assert "".join(stream(tokenizer, [[i] for i in ids], continues=True)) == " the  a"
    assert tokenizer.decode([BYTE + 0x20, BYTE + 0x20]) == " "  # spaces as bytes count too, one of them
    assert stream(tokenizer, [GEMMA.encode_raw("a"), GEMMA.encode_raw(" ")]) == ["a", " ", ""]


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_metaspace_tokens(scheme):
    backend = gemma_like()
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    ids = [backend.token_to_id(word) for word in ("<bos>", "▁the", "▁a", "er")]
    assert wrap(backend).decode(ids) == backend.decode(ids)
    assert "".join(stream(wrap(backend), [[i] for i in ids], continues=True)) == " the aer"


def test_added_tokens_of_a_byte_level_tokenizer_read_as_stored():
    backend = byte_level()
    backend.add_tokens(["<two words>", "é"])
    ids = backend.encode("<two words>é").ids
    assert len(ids) == 2
    assert wrap(backend).decode(ids) == backend.decode(ids) == "<two words>\ufffd"  # é happens to be a byte's name


def test_word_tokens_are_joined_by_spaces():
    backend = tokenizers.Tokenizer(models.WordLevel({"<bos>": 0, "t1": 1, "t2": 2}, unk_token="t1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>"])
    tokenizer = wrap(backend, bos_id=0, stop_ids=())
    assert tokenizer.encode("t1 t2 t2") == [0, 1, 2, 2]
    assert stream(tokenizer, [[0], [1], [0], [2, 2]]) == ["", "t1", "", " t2 t2", ""]
    assert stream(tokenizer, [[1], [2]], continues=True) == [" t1", " t2", ""]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Strip(" ", 1, 0),  # of each token, as nothing fuses them
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")]),
        decoders.Replace(tokenizers.Regex("▁+"), " "),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder):
    backend = gemma_like()
    backend.decoder = decoder
    with pytest.raises(ValueError, match="is not supported; allowed: none, ByteLevel"):
        wrap(backend)


# Stop strings


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, of several the longest, and that string."""
    for end in range(1, len(text) + 1):
        if hits := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("abt ", max_size=20), stops=st.lists(st.text("abt ", min_size=1, max_size=5), max_size=3), sizes=SIZES
)
@example(text="abtb", stops=["abtb", "bt"], sizes=[5])
def test_stop_strings_cut_at_the_same_place_for_any_rounds(text, stops, sizes):
    cut, stop = first_stop(text, stops)
    reader, shown = TextStream(GEMMA, stop_strings=stops), ""
    for ids in rounds_of(GEMMA.encode(text), sizes):
        shown += reader.push(ids)
        assert cut.startswith(shown)  # nothing is shown that is taken back later
    assert (shown + reader.finish(), reader.stopped) == (cut, stop)


def test_only_what_may_become_a_stop_string_is_held_back():
    reader = TextStream(GEMMA, stop_strings=["<end>", "\n\n#"])
    pushed = [reader.push(GEMMA.encode_raw(text)) for text in ("the<", "en", "ter <e", "nd", "a", "<end")]
    assert pushed == ["the", "", "<enter ", "", "<enda", ""]
    assert reader.stopped is None
    assert reader.finish() == "<end"
    assert reader.finish() == ""


def test_a_stop_string_ends_the_text():
    reader = TextStream(GEMMA, stop_strings="</a>")
    assert reader.push(GEMMA.encode_raw("the a</a>the")) == "the a"
    assert reader.stopped == "</a>"
    assert reader.push(GEMMA.encode_raw("the")) == reader.finish() == ""
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream(GEMMA, stop_strings=["a", ""])


# Prompts


@pytest.mark.parametrize("own_bos", [False, True])
def test_bos_is_there_once_or_not_at_all(own_bos):
    backend = gemma_like()
    if own_bos:
        backend.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A $B", [("<bos>", BOS)])
    the = GEMMA.encode_raw("the")
    for add_bos, text, count in [(True, "the", 1), (True, "<bos>the", 1), (False, "the", 0), (False, "<bos>the", 1)]:
        assert wrap(backend, add_bos=add_bos).encode(text) == [BOS] * count + the
    assert wrap(backend).encode("") == [BOS]
    assert wrap(backend).encode_raw("the<eos><bos>") == [*the, EOS, BOS]


def test_a_bos_to_add_must_exist():
    with pytest.raises(ValueError, match="no bos_id"):
        wrap(BACKENDS["gemma_like"], bos_id=None)
    with pytest.raises(ValueError, match=r"BOS ids \[99999\] have no token"):
        wrap(BACKENDS["gemma_like"], bos_id=99999)
    assert wrap(BACKENDS["gemma_like"], bos_id=None, add_bos=False).encode("the") == GEMMA.encode_raw("the")


def test_no_prompt_is_cut_or_filled():
    backend = gemma_like()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert wrap(backend).encode("the other day") == GEMMA.encode("the other day")


def test_half_a_surrogate_pair_is_an_error():
    with pytest.raises(ValueError, match="cannot be encoded"):
        GEMMA.encode("a\ud83d")


# Chats

CHAT = [
    {"role": "user", "content": " the <b>day</b> ", "name": None},
    {"role": "assistant", "content": "a\n"},
    {"role": "user", "content": "뷁?"},
]
TURNS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
BUSY_TEMPLATE = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system turns, got ' ~ messages[0].content) }}{% endif -%}
{{ bos_token }}
    {% for message in messages %}
        {% if loop.index > 2 %}{% break %}{% endif %}
<start_of_turn>{{ message | tojson }}{{ message.name is defined }}{{ eos_token }}
    {% endfor %}
{{ tools is none }} {% if add_generation_prompt %}{{ mood }}<start_of_turn>{% endif %}
"""


@pytest.mark.parametrize("template", [TURNS_TEMPLATE, BUSY_TEMPLATE, "{{ messages[0].content }}"])
def test_chat_ids_equal_the_reference(template):
    from transformers import PreTrainedTokenizerFast

    for add_bos, prompt in itertools.product([False, True], repeat=2):
        backend = gemma_like()
        if add_bos:
            backend.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A $B", [("<bos>", BOS)])
        reference = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
        reference.chat_template = template
        ours = wrap(backend, add_bos=add_bos, chat_template=template)
        options = dict(add_generation_prompt=prompt, mood="a")
        assert ours.render(CHAT, **options) == reference.apply_chat_template(CHAT, tokenize=False, **options)
        ids = ours.chat(CHAT, **options)
        assert ids == reference.apply_chat_template(CHAT, return_dict=False, **options)
        assert ids.count(BOS) == template.count("bos_token")


def test_templates_know_the_date():
    assert wrap(BACKENDS["gemma_like"], chat_template="{{ strftime_now('%Y') }}").render(CHAT) in (
        str(datetime.now().year),
        str(datetime.now().year - 1),
    )


def test_chats_that_cannot_be_rendered():
    with pytest.raises(ValueError, match="no chat template"):
        GEMMA.chat(CHAT)
    busy = wrap(BACKENDS["gemma_like"], chat_template=BUSY_TEMPLATE)
    with pytest.raises(ValueError, match="refused these messages: no system turns, got x"):
        busy.chat([{"role": "system", "content": "x"}])
    for messages in ([], ["the"], [{"content": "the"}]):
        with pytest.raises(ValueError, match="one or more mappings"):
            busy.chat(messages)
    with pytest.raises(ValueError, match=r"refused these messages: .*[Ee]xpected"):
        wrap(BACKENDS["gemma_like"], chat_template="{% if %}").chat(CHAT)


@pytest.mark.parametrize("template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"])
def test_templates_run_in_a_sandbox(template):
    with pytest.raises(ValueError, match="unsafe"):
        wrap(BACKENDS["gemma_like"], chat_template=template).render(CHAT)


# Stop ids and loading


def test_stop_ids_are_described_and_ordinary_ones_reported():
    tokenizer = wrap(BACKENDS["gemma_like"], stop_ids=[END_OF_TURN, EOS, END_OF_TURN])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokenizer.describe_stops() == [(END_OF_TURN, "<end_of_turn>"), (EOS, "<eos>")]
    the = GEMMA.encode_raw(" the")[0]
    with pytest.warns(UserWarning, match=f"stop id {the} is the ordinary token '▁the'"):
        assert wrap(BACKENDS["gemma_like"], stop_ids=[EOS, the]).describe_stops() == [(EOS, "<eos>"), (the, "▁the")]
    with pytest.raises(ValueError, match=r"stop ids \[-1, 99999\] have no token"):
        wrap(BACKENDS["gemma_like"], stop_ids=[EOS, -1, 99999])


def test_loading_in_another_thread(tmp_path):
    path, loaded = tmp_path / "tokenizer.json", []
    BACKENDS["gemma_like"].save(str(path))
    facts = dict(bos_id=BOS, add_bos=True, stop_ids=[EOS], chat_template=TURNS_TEMPLATE)
    thread = threading.Thread(target=lambda: loaded.append(Tokenizer.load(path, **facts)))
    thread.start()
    thread.join()
    assert loaded[0].encode(TEXTS[1]) == GEMMA.encode(TEXTS[1])
    assert loaded[0].chat(CHAT)[0] == BOS


def test_files_that_are_no_tokenizer(tmp_path):
    facts = dict(bos_id=None, add_bos=False, stop_ids=())
    path = tmp_path / "tokenizer.json"
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*tokenizer\.json"):
        Tokenizer.load(path, **facts)
    path.write_text(BACKENDS["gemma_like"].to_str()[:-20])
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer\.json: "):
        Tokenizer.load(path, **facts)

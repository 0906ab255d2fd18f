"""The tool that trains heads, on a tiny target: a head that decoding accepts more of, and what it says of itself."""

import json
import shutil

import pytest
import torch

from eyas.lowering.lower import open_draft
from eyas.models.eagle3 import Eagle3Head
from eyas.models.recipe import load_recipe, materialize
from eyas.models.speculator import Eagle3Speculator, speculative_reference
from eyas.models.target import find_target
from eyas.tools import train_draft
from eyas.training import corpus
from eyas.training.generate import Generator

OPTIONS = (
    "--target", "tiny_gemma3", "--prompts", "700", "--new-tokens", "24", "--temperatures", "0", "--batch", "32",
    "--epochs", "4", "--draft-vocab", "120", "--ttt", "3", "--lr", "3e-3", "--check-every", "25",
    "--max-repeated", "0.9",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads") / "tiny"
    assert train_draft.main([*OPTIONS, "-o", str(folder)]) == 0
    return folder


def test_the_card(made):
    card = json.loads((made / "card.json").read_text())
    figures, untrained = card["tau"]["random"], card["tau untrained"]["random"]
    assert 1.0 <= untrained["K=4"] < 1.05 < 1.1 < figures["K=1"] < figures["K=4"] <= figures["K=7"]
    assert figures["K=1"] <= 2 and 0 <= figures["repeated"] < 0.3
    assert card["texts"]["kept"] > 500 and card["texts"]["short"] + card["texts"]["cut"] > 0
    assert card["steps"] == card["plan"]["steps"] == 4 * (card["texts"]["kept"] // 32)
    assert card["made with"]["device"] == "cpu" and card["made with"]["arguments"]["lr"] == 3e-3
    assert card["sources of prompts"] == "random ids" and card["held-out tokens in the draft vocabulary"] > 0.9


def test_decoding_accepts_as_much_as_the_card_says(made):
    """Through the reader of heads and the loop of decoding, on prompts that were held out."""
    spec = find_target("tiny_gemma3")
    checkpoint = spec.open_checkpoint(None)
    target = spec.build(checkpoint.config, 64, torch.float32)
    materialize(
        target, "target.", checkpoint.tensors, load_recipe("none"), torch.float32, checkpoint.config.norm_offset
    )
    draft = open_draft(str(made), checkpoint)
    head = Eagle3Head(draft.config, 64)
    materialize(head, "draft.", draft.tensors, load_recipe("none"), torch.float32)
    head.d2t.copy_(draft.d2t)
    prompts = json.loads((made / "held_out.json").read_text())["prompts"]
    tokens = rounds = 0
    for prompt in prompts[:9]:
        _, counts = speculative_reference(Eagle3Speculator(target, head), prompt["ids"], 4, 24, checkpoint.stop_ids)
        tokens, rounds = tokens + sum(a + 1 for a in counts.accepted), rounds + counts.rounds
    said = json.loads((made / "card.json").read_text())["tau"]["random"]["K=4"]
    assert tokens / rounds == pytest.approx(said, abs=0.2) and rounds > 120


def test_a_second_run_reads_what_the_first_wrote(made, tmp_path, monkeypatch, capsys):
    def no_more(*args, **options):
        raise AssertionError("texts are there already")

    monkeypatch.setattr(Generator, "texts", no_more)
    work = str(made) + ".work"
    assert train_draft.main([*OPTIONS, "-o", str(tmp_path / "again"), "--work", work]) == 0
    assert "goes on after step" in capsys.readouterr().err
    for name in ("config.json", "model.safetensors", "card.json", "held_out.json"):
        assert (tmp_path / "again" / name).read_bytes() == (made / name).read_bytes()
    changed = [*OPTIONS, "-o", str(tmp_path / "other"), "--work", work, "--new-tokens", "30"]
    assert train_draft.main(changed) == 2
    assert "holds texts of other settings" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_damaged_texts_are_named(made, tmp_path, capsys):
    work = tmp_path / "work"
    shutil.copytree(str(made) + ".work", work)
    (work / "texts" / "00000.json").write_text('[["random", [1')
    options = [*OPTIONS, "-o", str(tmp_path / "again"), "--work", str(work)]
    assert train_draft.main(options) == 2
    assert "00000.json is damaged (" in capsys.readouterr().err
    (work / "texts" / "00000.json").unlink()
    assert train_draft.main(options) == 0, "they are written again"
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--temperatures", "0,x"), "--temperatures takes comma-separated numbers of at least 0, got '0,x'"),
        (("--prompts", "3"), "--prompts must be at least 8, got 3"),
        (("--draft-vocab", "999"), "a draft vocabulary of 999 ids; allowed: 1 to the target's 128"),
        (("--target", "nothing"), "unknown target 'nothing'; allowed: gemma3_270m"),
        (("--taps", "1,9"), "taps are boundaries from 0 to the target's 4 layers, got '1,9'"),
        (("--taps", "1,x"), "--taps takes comma-separated numbers, got '1,x'"),
        (("--epochs", "0"), "--epochs must be above 0, got 0.0"),
    ],
)
def test_wrong_settings(changes, message, tmp_path, capsys):
    assert train_draft.main([*OPTIONS, "-o", str(tmp_path / "head"), *changes]) in (1, 2)
    assert message in capsys.readouterr().err and not (tmp_path / "head").exists()


def test_a_folder_that_is_there_already(made, capsys):
    assert train_draft.main([*OPTIONS, "-o", str(made)]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err


def test_prompts_are_of_four_kinds_and_no_two_alike():
    made = corpus.prompts()
    assert made == corpus.prompts() and len(made) == len(set(made)) > 15000
    by_kind = {kind: [text for k, text in made if k == kind] for kind in corpus.KINDS}
    assert all(len(texts) > 2000 for texts in by_kind.values())
    assert all(40 < sum(map(corpus.is_held_out, texts)) < 0.05 * len(texts) for texts in by_kind.values())
    assert corpus.prompts(10, seed=1) != corpus.prompts(10) == made[:10]


def test_kinds_take_turns():
    prompts = [train_draft_prompt(kind, i) for i, kind in enumerate("aaaaabbc")]
    assert [p.kind for p in train_draft.balanced(prompts, 6)] == ["a", "b", "c", "a", "b", "a"]
    assert len(train_draft.balanced(prompts, 99)) == 8


def train_draft_prompt(kind: str, i: int):
    from eyas.training.generate import Prompt

    return Prompt(kind, (i,))

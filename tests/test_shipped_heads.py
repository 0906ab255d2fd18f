"""The heads that come with the project: small enough to ship, found by the checkpoint that they are for."""

import json

import pytest

from eyas.lowering.lower import open_draft
from eyas.models.eagle3_reader import read_head
from eyas.models.shipped_heads import FOLDER, shipped_head
from eyas.models.target import find_target
from eyas.training.corpus import KINDS

HEADS = sorted(path.parent for path in FOLDER.glob("*/card.json"))


@pytest.mark.parametrize("folder", HEADS, ids=[folder.name for folder in HEADS])
def test_a_head_is_small_and_has_a_card(folder):
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert max(sizes) <= 15 << 20 and sum(sizes) <= 25 << 20
    card = json.loads((folder / "card.json").read_text())
    assert set(card["tau"]) == set(KINDS) and min(figures["K=4"] for figures in card["tau"].values()) >= 1.7
    assert sum(figures["K=4"] for figures in card["tau"].values()) / len(KINDS) >= 2.3
    prompts = json.loads((folder / "held_out.json").read_text())["prompts"]
    assert {prompt["kind"] for prompt in prompts} == set(KINDS)
    assert shipped_head(card["target"]) == folder


def test_the_head_of_gemma3_270m_fits_its_target():
    checkpoint = find_target("gemma3_270m").open_checkpoint(None)
    draft = open_draft("auto", checkpoint)
    config = checkpoint.config
    same = read_head(
        FOLDER / "gemma3_270m", target_vocab_size=config.vocab_size, target_hidden_size=config.hidden_size,
        target_layers=config.n_layers, target_embed=checkpoint.tensors["embed_tokens.weight"],
    )  # fmt: skip
    assert draft.config == same.config and draft.identity == same.identity
    assert draft.identity["made_for"] == "gemma3_270m"


def test_other_checkpoints_have_none():
    assert shipped_head({"sha256": "0"}) is None and shipped_head({}) is None
    draft = open_draft("auto", find_target("tiny_gemma3").open_checkpoint(None))
    assert draft.identity["format"] == "untrained"

"""What the README shows as code is run as it stands there."""

import re
import sys
from pathlib import Path

import pytest
import torch

from eyas.lowering.trace import METHODS, Limits, trace_methods
from eyas.models.eagle3 import Eagle3Head
from eyas.models.eagle3_checkpoint import untrained_head
from eyas.models.recipe import RECIPES, Recipe, materialize
from eyas.models.speculator import Eagle3Speculator, greedy_reference, speculative_reference
from eyas.models.target import TargetSpec

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    """The README's target as the module that it says to write, and the entry that it says to add."""
    folder = tmp_path_factory.mktemp("target")
    code = [block for block in blocks("python") if "class OneLayer" in block or "class Config" in block]
    assert len(code) == 2
    (folder / "one_layer.py").write_text("\n".join(code))
    sys.path.insert(0, str(folder))
    entry = re.search(r"`(TargetSpec\(.*?\))`", README)[1].replace("eyas.models.one_layer", "one_layer")
    yield eval(entry, {"TargetSpec": TargetSpec})
    sys.path.remove(str(folder))
    sys.modules.pop("one_layer", None)


def test_the_target_of_the_readme_traces_and_decodes(one_layer):
    checkpoint = one_layer.open_checkpoint(None)
    target = one_layer.build(checkpoint.config, 32, torch.float32)
    materialize(target, "target.", checkpoint.tensors, RECIPES["int8"], torch.float32)
    draft = untrained_head(
        target_vocab_size=64, target_hidden_size=32, target_layers=1,
        target_embed=checkpoint.tensors["embed_tokens.weight"],
    )  # fmt: skip
    head = Eagle3Head(draft.config, 32)
    materialize(head, "draft.", draft.tensors, RECIPES["none"], torch.float32)
    head.d2t.copy_(draft.d2t)
    speculator = Eagle3Speculator(target, head)
    methods = trace_methods(speculator, Limits(max_seq_len=32, max_prefill=8, max_chain=3, chain=2))
    assert tuple(methods) == METHODS
    greedy = greedy_reference(speculator, [3, 4, 5], 12)
    assert speculative_reference(speculator, [3, 4, 5], 2, 12)[0] == greedy
    speculator.reset()
    tokens, positions = torch.tensor([[3, 4, 5]]), torch.arange(3)
    expected = speculator.prefill(tokens, positions)[0]
    speculator.reset()
    assert torch.equal(methods["prefill"].module()(tokens, positions)[0], expected) and int(expected) == greedy[0]


def test_the_recipe_of_the_readme_is_one():
    import json

    recipe = Recipe.from_json(json.loads(blocks("json")[0]))
    assert str(recipe.format_of("target.layers.0.mlp.up_proj")) == "int4{group=64,zeros=true}"
    assert recipe.format_of("target.embed_tokens").kind == "int8" and recipe.format_of("draft.fc").kind == "dense"


def test_every_option_that_the_readme_names_exists():
    from eyas.tools import bench, explain, inspect, lower, opt, run, train_draft

    texts = (module.parser().format_help() for module in (bench, explain, inspect, lower, opt, run, train_draft))
    known = {option for text in texts for option in re.findall(r"--[a-z-]+", text)}
    assert set(re.findall(r"(?<![-\w])--[a-z][a-z-]+", README)) <= known


def test_the_section_that_the_run_tool_points_to_is_there():
    source = (Path(__file__).parents[1] / "tools" / "run.py").read_text()
    (name,) = re.findall(r"see '([^']+)' in the README", source)
    (section,) = re.findall(rf"^## {name}\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    assert "bit for bit" in section and "near ties" in section and "Not covered" in section

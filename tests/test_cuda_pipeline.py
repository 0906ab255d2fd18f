"""The whole pipeline for cuda over tiny Gemmas with a head, traced in bfloat16 and run on cpu by the kernels'
references: what it leaves to stock operators, and what the program computes before and after it.
"""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from ir import check_types

from eyas.lowering.pipelines import pipeline_for
from eyas.lowering.trace import METHODS, Limits, trace_methods
from eyas.models.eagle3 import Eagle3Head
from eyas.models.eagle3_checkpoint import untrained_head
from eyas.models.gemma import GemmaDecoder
from eyas.models.recipe import load_recipe, materialize
from eyas.models.speculator import Eagle3Speculator
from eyas.models.tiny_targets import random_tensors, tiny_config
from eyas.passes.numerics import copy_program, differences
from eyas.passes.pipeline import run_pipeline
from eyas.passes.program import Program
from eyas.passes.registry import parse_pipeline

WINDOW, LENGTH = 32, 128
FEW, MANY = Limits(LENGTH, max_prefill=8), Limits(LENGTH, max_prefill=24)
CASES = {
    "gemma3-int8": ("gemma3", "int8", FEW),
    "gemma4-int4": ("gemma4", "int4", FEW),
    "gemma3-int4-many": ("gemma3", "int4", MANY),
    "gemma3-none-many": ("gemma3", "none", MANY),
}
STOCK = (
    "linear", "scaled_dot_product_attention", "int8_linear", "int4_linear", "int4_smallm", "int4_anym", "sdpa_midm",
    "embedding", "int8_embedding", "softmax", "matmul", "mm", "bmm",
)  # fmt: skip
STOCK_PROJECTIONS = ("aten.linear.default", "eyas.int8_linear.default", "eyas.int4_linear.default")
FULL = "a call has up to 24 rows; the kernel takes 16"
LEFT_OF_MANY = {
    ("prefill", "scaled_dot_product_attention"): (4, FULL),
    ("draft_decode", "scaled_dot_product_attention"): (1, FULL),  # which also takes the prompt's chunks
}
LEFT = {"gemma3-int4-many": LEFT_OF_MANY, "gemma3-none-many": LEFT_OF_MANY}


def speculator(family, quant, dtype):
    """A tiny target whose heads are as wide as the kernels take them, and a head of its own, with random weights."""
    config = tiny_config(family)
    layers = [replace(one, head_dim=4 * one.head_dim, window=one.window and WINDOW) for one in config.layers]
    config = replace(config, layers=tuple(layers), attn_scale=0.125)
    tensors = random_tensors(GemmaDecoder(config, 1), 4)
    facts = dict(target_vocab_size=config.vocab_size, target_hidden_size=config.hidden_size)
    draft = untrained_head(**facts, target_layers=4, target_embed=tensors["embed_tokens.weight"])
    head_config = replace(draft.config, head_dim=64)
    target, head = GemmaDecoder(config, LENGTH, dtype), Eagle3Head(head_config, LENGTH, dtype)
    materialize(target, "target.", tensors, load_recipe(quant), dtype)
    materialize(head, "draft.", random_tensors(Eagle3Head(head_config, 1), 5), load_recipe(quant), dtype)
    head.d2t.copy_(draft.d2t)
    return Eagle3Speculator(target, head)


@pytest.fixture(scope="module", params=CASES)
def programs(request):
    """(case, the program as traced, the same after all passes but ``outline_blocks``, records)"""
    family, quant, limits = CASES[request.param]
    before = Program(trace_methods(speculator(family, quant, torch.bfloat16), limits, (*METHODS, "target_logits")))
    after = Program({method: copy.deepcopy(ep) for method, ep in before.methods.items()}, device="cuda")
    passes = [one for one in pipeline_for("cuda", None) if one.name != "outline_blocks"]
    return request.param, before, after, run_pipeline(after, passes)


def names(graph):
    return Counter(
        node.target.overloadpacket.__name__ for node in graph.nodes if hasattr(node.target, "overloadpacket")
    )


def test_nothing_is_left_to_stock_operators_but_what_is_listed(programs):
    case, before, after, records = programs
    found = {(method, name): count for method, ep in after.methods.items()
             for name, count in names(ep.graph).items() if name in STOCK}  # fmt: skip
    listed = LEFT.get(case, {})
    assert found == {key: count for key, (count, _) in listed.items()}
    refusals = Counter((r.method, r.reason) for record in records for r in record.refusals)
    assert refusals == {(method, reason): count for (method, _), (count, reason) in listed.items()}
    for method, ep in after.methods.items():
        check_types(ep)
        old, new = names(before.methods[method].graph), names(ep.graph)
        products = [name for name in new if name.startswith("fragment_") and not name.endswith("_embedding")]
        stock = [n for n in before.methods[method].graph.nodes if str(n.target) in STOCK_PROJECTIONS]
        assert len(stock) > 7
        assert sum(new[name] for name in products) == len({(n.args[0], n.target) for n in stock}), "one an input"
        assert new["splitk_sdpa"] + new["scaled_dot_product_attention"] == old["scaled_dot_product_attention"]
        masks = new["ge"] + new["le"] + new["gt"]
        assert bool(masks) == ((method, "scaled_dot_product_attention") in listed), "masks that nobody reads are gone"


RUNS = [(0, 8), (8, 8), (16, 1), (17, 5), (22, 8), (30, 8), (38, 8), (46, 3), (49, 8), (57, 8), (65, 8), (73, 2)]


@torch.no_grad()
def outputs(run, method, draft_width, dtype):
    """Numbers, not ids, of calls that go round the rings of 64 rows: [rows, width] of each."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for start, rows in RUNS:
        args = [torch.randint(0, 128, (1, rows), generator=generator), torch.arange(start, start + rows)]
        if method == "draft_decode":
            args.insert(1, torch.randn(1, rows, draft_width, generator=generator).bfloat16().to(dtype))
        found = run(*args)
        made.append((found if isinstance(found, torch.Tensor) else found[-1])[0].double())
    return torch.cat(made)


def far(got, truth):
    """Root mean square of the difference, of that of the values."""
    return ((got - truth).square().mean() / truth.square().mean()).sqrt().item()


def test_the_program_computes_what_it_did(programs):
    """Rounding to bfloat16 a hundred times takes the traced program from the one in float32 by about 1% of the values.
    The passes put as many roundings elsewhere, and save those of attention's weights: what they leave is as far from
    float32, and at most as far from what it was.
    """
    case, before, after, _ = programs
    family, quant, _ = CASES[case]
    exact = speculator(family, quant, torch.float32)
    width = exact.draft.config.hidden_size
    for method in (*METHODS, "target_logits"):
        exact.reset()
        truth = outputs(getattr(exact, method), method, width, torch.float32)
        was, now = (outputs(p.methods[method].module(), method, width, torch.bfloat16) for p in (before, after))
        assert truth.std() > 0.1 and 0 < far(was, truth) < 0.02
        assert far(now, truth) < 1.2 * far(was, truth) and far(now, was) < 1.2 * far(was, truth), method


def test_layers_become_blocks(programs):
    """The last pass; the operators of Triton kernels stand in blocks as others do."""
    case, _, after, _ = programs
    program = copy_program(after)
    (record,) = run_pipeline(program, parse_pipeline("outline_blocks"))
    assert record.rewrites and program.blocks
    inside = sum((names(block.program.graph) for block in program.blocks.values()), Counter())
    assert inside["splitk_sdpa"] and inside["fragment_bf16_linear" if "none" in case else "fragment_int8_linear"]
    for found in differences(after, program, rows={method: [1, 8] for method in METHODS}):
        assert found.error == 0, found

"""Bytes and work of operators, counted by hand."""

import pytest
import torch
from ir import ROWS, program_of, randn

from eyas.passes.costs import Cost, costs
from eyas.passes.pipeline import run_pipeline
from eyas.passes.registry import parse_pipeline

X = randn(1, ROWS, 8)


def cost(function, *args, rows=3, live=10, passes="", **tensors):
    program = program_of(function, *args, **tensors)
    run_pipeline(program, parse_pipeline(passes))
    return costs(program.methods["forward"], rows, live)


def test_a_product_reads_its_weight_once_and_works_for_every_row():
    found = cost(lambda m, x: torch.nn.functional.linear(x, m.w), X, w=randn(16, 8))
    assert found == {"aten.linear.default": Cost(1, 4 * (3 * 8 + 16 * 8 + 3 * 16), 2 * 3 * 8 * 16)}


def test_views_move_nothing_and_elementwise_work_is_an_operation_an_element():
    found = cost(lambda m, x: (x + 1).transpose(1, 2), X)
    assert found["aten.add.Tensor"] == Cost(1, 4 * 2 * 3 * 8, 3 * 8)
    assert found["aten.transpose.int"] == Cost(1)


def test_a_lookup_reads_the_rows_that_it_looks_up():
    ids = torch.zeros(1, ROWS, dtype=torch.int64)
    found = cost(lambda m, i: torch.nn.functional.embedding(i, m.w), ids, w=randn(1000, 8))
    assert found["aten.embedding.default"].moved == 4 * 3 * 8 * 2 + 8 * 3


def attend(module, q, pos):
    module.cache.index_copy_(2, pos, q[:, :1])
    mask = pos[:, None] >= torch.arange(64)
    return torch.nn.functional.scaled_dot_product_attention(
        q, module.cache, module.cache, mask, enable_gqa=True, scale=1.0
    )


@pytest.mark.parametrize(
    ("passes", "operator"), [("", "aten.scaled_dot_product_attention"), ("midm_sdpa", "eyas.sdpa_midm")]
)
def test_attention_counts_the_live_keys(passes, operator):
    q, pos = randn(1, 4, ROWS, 16), torch.arange(ROWS)
    found = cost(attend, q, pos, passes=passes, cache=torch.zeros(1, 1, 64, 16))
    one = found[f"{operator}.default"]
    assert one.work == 4 * (4 * 3 * 16) * 10
    extra = 3 * 64 if not passes else 8 * 3  # the mask, or the positions
    assert one.moved == 4 * (2 * 4 * 3 * 16) + 4 * 10 * 16 + extra
    assert found["aten.index_copy_.default"].moved == 2 * 4 * 3 * 16


def test_operators_of_triton_kernels_count_as_those_that_they_replace():
    """A table of 64 rows of 64 bytes or numbers, of which a lookup reads its rows; attention in bfloat16 over 10 live
    keys.
    """

    def forward(module, ids, q, pos):
        x = torch.ops.eyas.int8_embedding(ids, module.w, module.scales, torch.bfloat16)
        dense = torch.nn.functional.linear(torch.nn.functional.embedding(ids, module.dense), module.dense)
        return torch.ops.eyas.int8_linear(x, module.w, module.scales), dense, attend(module, q, pos)

    ids, q, pos = torch.zeros(1, ROWS, dtype=torch.int64), randn(1, 4, ROWS, 64).bfloat16(), torch.arange(ROWS)
    tensors = {"w": torch.ones(64, 64, dtype=torch.int8), "scales": torch.ones(64)}
    tensors["dense"] = torch.ones(64, 64, dtype=torch.bfloat16)
    cache = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
    found = cost(forward, ids, q, pos, passes="fragment_linear,splitk_sdpa", cache=cache, **tensors)
    one = found["eyas.splitk_sdpa.default"]
    assert one == Cost(1, 2 * (2 * 4 * 3 * 64) + 2 * 10 * 64 + 8 * 3, 4 * (4 * 3 * 64) * 10)
    product = found["eyas.fragment_int8_linear.default"]
    assert product == Cost(1, 64 * 64 + 4 * 64 + 2 * (3 * 64 + 3 * 64), 2 * 3 * 64 * 64)
    assert found["eyas.fragment_int8_embedding.default"].moved == 2 * (2 * 3 * 64) + 4 * 64 + 8 * 3
    dense = found["eyas.fragment_bf16_linear.default"]
    assert dense == Cost(1, 2 * (64 * 64 + 3 * 64 + 3 * 64), 2 * 3 * 64 * 64)
    assert found["eyas.fragment_bf16_embedding.default"].moved == 2 * (2 * 3 * 64) + 8 * 3


def test_the_bound_is_the_slower_of_memory_and_arithmetic():
    assert Cost(1, 100, 10).seconds(bandwidth=10, peak=10) == 10 and Cost(1, 10, 100).seconds(10, 10) == 10


def test_the_dearest_comes_first():
    found = cost(lambda m, x: torch.nn.functional.linear(x, m.w) + 1, X, w=randn(160, 8))
    assert list(found) == ["aten.linear.default", "aten.add.Tensor"]


def test_a_block_costs_what_its_nodes_do():
    """At each of its calls."""

    def layers(module, x):
        for weight in (module.a, module.b, module.c):
            x = x + torch.nn.functional.gelu(x @ weight) @ weight.T
        return x * 2

    def made(passes):
        program = program_of(layers, X, a=randn(8, 8), b=randn(8, 8), c=randn(8, 8))
        run_pipeline(program, parse_pipeline(passes))
        return program

    plain, outlined = made(""), made("outline_blocks")
    assert any(node.target is torch.ops.eyas.block.default for node in outlined.methods["forward"].graph.nodes)
    assert costs(outlined.methods["forward"], 4, 4) == costs(plain.methods["forward"], 4, 4)

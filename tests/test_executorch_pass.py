"""Passes in ExecuTorch's own pipeline, over graphs in its edge form."""

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from ir import ROWS, Function, export, randn

from eyas.lowering.executorch_pass import ExecutorchPass
from eyas.models.weights import Int4, TensorSource
from eyas.passes.int4_smallm import Int4Smallm
from eyas.passes.pipeline import PassError
from eyas.passes.remove_noop import RemoveNoop
from eyas.passes.split_copy_to_slice import SplitCopyToSlice

X = randn(1, ROWS, 8)


def lower(ep, *passes):
    config = EdgeCompileConfig(_check_ir_validity=False)
    return to_edge_transform_and_lower(ep, transform_passes=list(passes), compile_config=config)


def targets(manager) -> list[str]:
    nodes = [n for n in manager.exported_program().graph.nodes if n.op == "call_function"]
    assert all(isinstance(n.target, EdgeOpOverload) or not hasattr(n.target, "_schema") for n in nodes)
    return [str(n.target._op) if isinstance(n.target, EdgeOpOverload) else n.name for n in nodes]


def halves(module, x):
    low, high = x.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1)


def test_splits_of_the_edge_form_become_slices():
    ep = export(Function(halves), X)
    assert any("split" in name for name in targets(lower(ep)))
    one = ExecutorchPass(SplitCopyToSlice())
    manager = lower(ep, one)
    assert one.outcome.rewrites == 1
    names = targets(manager)
    assert names.count("aten.slice_copy.Tensor") == 2 and not any("split" in name for name in names)
    for rows in (1, 7):
        x = randn(1, rows, 8, seed=rows)
        assert torch.equal(manager.exported_program().module()(x), halves(None, x))


def test_our_own_operators_are_rewritten_there_too():
    layer = Int4(TensorSource(randn(24, 64)), 32, zeros=True)
    ep = export(Function(lambda m, x: m.w(x), w=layer), randn(1, ROWS, 64))
    one = ExecutorchPass(Int4Smallm())
    assert "eyas.int4_smallm.default" in targets(lower(ep, one)) and one.outcome.rewrites == 1


def test_a_pass_that_must_fire_says_why_it_did_not():
    one = SplitCopyToSlice(must_fire=True)
    with pytest.raises(Exception, match="ExecutorchPass") as raised:  # the manager's own, which keeps the cause
        lower(export(Function(lambda m, x: x + 1), X), ExecutorchPass(one))
    assert isinstance(raised.value.__cause__, PassError) and f"{one} must fire and did not" in str(
        raised.value.__cause__
    )


def test_a_bare_exported_program_will_do():
    ep = export(Function(lambda m, x: x.float() * 2), X)
    result = ExecutorchPass(RemoveNoop())(ep)
    assert result.modified and not ExecutorchPass(RemoveNoop())(ep).modified
    assert not any(isinstance(node.target, EdgeOpOverload) for node in ep.graph.nodes)

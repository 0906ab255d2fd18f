"""Equal submodules are traced once, and the whole is what tracing all of it gives."""

import pytest
import torch
from ir import randn
from torch import nn
from torch.export import Dim

from eyas.lowering import trace as tracing
from eyas.lowering import trace_once
from eyas.lowering.lower import open_draft
from eyas.lowering.trace import Limits, TraceError, trace
from eyas.lowering.trace_once import equal_members, export_once
from eyas.models.eagle3 import Eagle3Head
from eyas.models.recipe import load_recipe, materialize
from eyas.models.speculator import Eagle3Speculator
from eyas.models.target import Checkpoint, TokenizerSource
from eyas.models.tiny_targets import build, random_tensors, tiny_config
from eyas.passes.blocks import whole
from eyas.passes.pipeline import run_pipeline
from eyas.passes.program import Program
from eyas.passes.registry import parse_pipeline

WIDTH, SLOTS = 8, 16
ROWS = Dim("rows", min=1, max=8)
SHAPES = ({0: ROWS}, {0: ROWS})


class Layer(nn.Module):
    """A residual layer with a cache; ``scale`` is a plain attribute that the trace depends on."""

    def __init__(self, scale: float = 0.5, seed: int = 0):
        super().__init__()
        self.scale = scale
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.register_buffer("cache", torch.zeros(SLOTS, WIDTH))
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3

    def forward(self, x, pair, mask=None):
        table, positions = pair
        self.cache.index_copy_(0, positions, self.norm(x) * table)
        seen = self.cache[positions]
        return x + self.down(self.mix(self.up(seen))) * self.scale


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.register_buffer("angles", randn(SLOTS, WIDTH))

    def forward(self, x, positions):
        table, taps = self.angles[positions].sin(), []
        for layer in self.layers:
            x = layer(x, (table, positions))
            taps.append(x)
        return x, torch.cat([taps[0], taps[-2]], -1)


def stack(n: int = 6, **odd) -> Stack:
    """Equal layers, but for those of ``odd`` (``layer3=...``)."""
    return Stack(*(odd.get(f"layer{i}") or Layer(seed=i) for i in range(n)))


def inputs(rows: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(rows, WIDTH, seed=rows), torch.arange(start, start + rows)


def traced_forwards(module: nn.Module, monkeypatch) -> int:
    """How often a layer's own ``forward`` runs while ``module`` is traced."""
    count = 0
    stock = Layer.forward

    def counted(self, *args, **kwargs):
        nonlocal count
        count += 1
        return stock(self, *args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(Layer, "forward", counted)
        if export_once(module, inputs(5), SHAPES, ROWS) is None:
            return 0
    return count


def assert_same(module: nn.Module) -> None:
    """That the trace computes what the module does, in results and caches, for several numbers of rows."""
    with torch.no_grad():
        ep = export_once(module, inputs(5), SHAPES, ROWS)
        plain = torch.export.export(module, inputs(5), dynamic_shapes=SHAPES, strict=False)
    assert [spec.target for spec in ep.graph_signature.input_specs] == [
        spec.target for spec in plain.graph_signature.input_specs
    ]
    assert len(ep.graph.nodes) == len(plain.graph.nodes)
    ep.validate()
    ep.graph.lint()
    texts = []
    for one in (ep, plain):
        program = Program({"forward": one})
        run_pipeline(program, parse_pipeline("remove_noop,dead_code"))
        texts.append(whole(one).text)
    assert texts[0] == texts[1]
    for rows in (1, 3, 8):
        states = []
        for run in (ep.module(), plain.module()):
            for layer in run.layers.children():
                layer.cache.zero_()
            states.append([*run(*inputs(rows, 2)), *(layer.cache.clone() for layer in run.layers.children())])
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_the_whole_is_what_a_trace_of_all_of_it_gives():
    assert_same(stack())


def test_a_layer_of_each_kind_is_traced(monkeypatch):
    """Twice to see its arguments' types and once for its trace, however many there are."""
    assert [len(group) for group in equal_members(stack(9))] == [9]
    assert traced_forwards(stack(9), monkeypatch) == traced_forwards(stack(4), monkeypatch) == 3
    kinds = stack(9, layer3=Layer(0.25), layer5=Layer(0.25), layer7=Layer(0.25))
    assert sorted(len(group) for group in equal_members(kinds)) == [3, 6]
    assert traced_forwards(kinds, monkeypatch) == 6
    assert_same(kinds)


def test_no_layer_keeps_anything_of_it():
    module = stack()
    before = {key: dict(vars(layer)) for key, layer in module.named_modules()}
    with torch.no_grad():
        export_once(module, inputs(5), SHAPES, ROWS)
    assert {key: dict(vars(layer)) for key, layer in module.named_modules()} == before
    assert not any(key.startswith("traced_") for key in trace_once.GRAPHS)
    assert not any(layer.cache.any() for layer in module.layers)


class Shared(Layer):
    """A layer that reads another's cache."""

    def __init__(self, other: Layer):
        super().__init__()
        self.cache = other.cache


def hooked() -> Layer:
    layer = Layer()
    layer.register_forward_hook(lambda module, args, result: result * 2)
    return layer


def held() -> Layer:
    layer = Layer()
    layer.constant = [torch.ones(WIDTH)]
    return layer


def wider() -> Layer:
    layer = Layer()
    layer.register_buffer("cache", torch.zeros(2 * SLOTS, WIDTH))
    return layer


FIRST = Layer()
ODD = {
    "another attribute": lambda: Layer(0.25),
    "another shape": wider,
    "another class": lambda: type("Other", (Layer,), {})(),
    "a hook": hooked,
    "a tensor that is no buffer": held,
    "a bias less": lambda: setattr(layer := Layer(), "up", nn.Linear(WIDTH, WIDTH, bias=False)) or layer,
    "in training": lambda: Layer().train(False),
}


@pytest.mark.parametrize("what", ODD)
def test_what_differs_is_traced_by_itself(what):
    module = stack(layer2=ODD[what]())
    (group,) = equal_members(module)
    assert module.layers[2] not in group and len(group) == 5
    assert_same(module)


def test_a_fact_that_no_forward_reads_does_not_matter():
    module = stack()
    for i, layer in enumerate(module.layers):
        layer.error = 0.1 * i
    assert not equal_members(module)
    Layer.untraced = ("error",)
    try:
        (group,) = equal_members(module)
        assert len(group) == 6
    finally:
        del Layer.untraced


def test_layers_that_share_a_tensor():
    """Each is traced with its own, and writes go where they went."""
    first = Layer(seed=0)
    module = Stack(first, Layer(seed=1), Shared(first), Layer(seed=3), Layer(seed=4))
    with torch.no_grad():
        once = export_once(module, inputs(5), SHAPES, ROWS)
    for rows in (2, 7):
        results = []
        for run in (once.module(), module):
            for layer in module.layers:
                layer.cache.zero_()
            results.append(run(*inputs(rows)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_layer_that_is_called_twice_is_traced_as_it_is(monkeypatch):
    twice = Layer(seed=1)
    module = Stack(Layer(seed=0), twice, twice, Layer(seed=3), Layer(seed=4))
    assert_same(module)


class Growing(Stack):
    """Layers whose inputs differ: each takes one column more."""

    def forward(self, x, positions):
        for i, layer in enumerate(self.layers):
            x = layer(x, (self.angles[positions] if i < 3 else self.angles[positions][:, :1], positions))
        return x, x


def test_members_that_are_called_with_other_types(monkeypatch):
    module = Growing(*(Layer(seed=i) for i in range(6)))
    assert_same(module)
    assert traced_forwards(module, monkeypatch) > 6, "the last three are not what the first is"


def test_few_members_are_not_worth_it():
    assert not equal_members(stack(2)) and equal_members(stack(4))
    assert not equal_members(Stack(*(nn.Identity() for _ in range(8))))


class Fixed(Layer):
    def forward(self, x, pair, mask=None):
        return super().forward(x, pair) + torch.ones(5, WIDTH)


def test_a_layer_that_cannot_be_traced_by_itself():
    """Then the whole cannot be either; that is what is reported."""
    with pytest.raises(RuntimeError, match="broadcast a dimension of length 5"), torch.no_grad():
        export_once(Stack(*(Fixed(seed=i) for i in range(6))), inputs(5), SHAPES, ROWS)


def speculator(n_layers: int, family: str) -> Eagle3Speculator:
    config = tiny_config(family, n_layers)
    target = build(config, 64, torch.float32)
    tensors = random_tensors(build(config, 1, torch.float32), 0)
    draft = open_draft(
        "untrained", Checkpoint(config, dict(tensors), {"format": "random"}, TokenizerSource("none"), 2, (1,))
    )
    recipe = load_recipe("int8")
    materialize(target, "target.", tensors, recipe, torch.float32, config.norm_offset)
    made = Eagle3Speculator(target, Eagle3Head(draft.config, 64, torch.float32))
    materialize(made.draft, "draft.", draft.tensors, recipe, torch.float32)
    return made


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
@pytest.mark.parametrize("method", ["prefill", "target_verify"])
def test_targets_are_traced_as_before(family, method, monkeypatch):
    made = speculator(8, family)
    kinds = []
    stock = trace_once.trace_kind
    monkeypatch.setattr(trace_once, "trace_kind", lambda *args: kinds.append(stock(*args)) or kinds[-1])
    once = trace(made, method, 8)
    assert len([kind for kind in kinds if kind is not None]) == 2, "sliding and global layers"
    monkeypatch.setattr(tracing, "export_once", lambda *args: None)
    plain = trace(made, method, 8)
    assert once.range_constraints.keys() and len(once.graph.nodes) == len(plain.graph.nodes)
    texts = []
    for ep in (once, plain):
        run_pipeline(Program({method: ep}), parse_pipeline("remove_noop,dead_code"))
        texts.append(whole(ep).text)
    assert texts[0] == texts[1]


def test_a_target_that_cannot_be_traced_is_explained_as_before(monkeypatch):
    made = speculator(6, "gemma3")
    stock = type(made.target.layers[0]).forward
    monkeypatch.setattr(
        type(made.target.layers[0]), "forward", lambda self, x, *rest: stock(self, x, *rest) + torch.ones(1, 5, 48)
    )
    with pytest.raises(TraceError, match="its code ties it to a constant"):
        trace(made, "target_verify", 8)
    assert Limits(64, 8).rows("prefill") == 8

"""Weight formats, recipes and their report, and the linear operators that serve them."""

import itertools
import json

import pytest
import torch
from torch import Tensor, nn
from torch.library import opcheck

from eyas.kernels import int4_linear, int8_linear, panel_linear
from eyas.models.gemma import GemmaDecoder
from eyas.models.recipe import RECIPES, Format, Placed, Recipe, load_recipe, materialize, report_lines
from eyas.models.tiny_targets import open_checkpoint, random_tensors, tiny_config
from eyas.models.weights import (
    SHRINKS,
    Dense,
    Int4,
    Int8,
    TensorSource,
    Weight,
    quantize_symmetric,
    quantize_with_zeros,
    row_slices,
)

GROUPS = (32, 64, 128, 256)
WIDTHS = (288, 1, 31, 33, 96, 256)


def matrix(rows: int = 7, columns: int = 288, seed: int = 0) -> Tensor:
    """Rows of very different size, so that a scale of the wrong row or group cannot pass."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 10.0 ** torch.linspace(-2, 2, rows)[:, None]


def grouped(w: Tensor, group: int) -> Tensor:
    """``[N, K]`` -> ``[N, groups, group]``, padded with zeros."""
    return nn.functional.pad(w, (0, -w.shape[1] % group)).unflatten(1, (-1, group))


class Counted(TensorSource):
    """A source that records the reads, and fails one of more than ``most`` rows."""

    def __init__(self, tensor: Tensor, most: int = 1 << 30):
        super().__init__(tensor)
        self.most, self.reads = most, []

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        assert stop is not None and stop - start <= self.most
        self.reads.append((start, stop))
        return super().read(start, stop)


# Formats: how far from the source


@pytest.mark.parametrize("columns", WIDTHS)
def test_int8_is_within_half_a_step(columns):
    w = matrix(columns=columns)
    q = Int8(TensorSource(w))
    step = w.abs().amax(1, keepdim=True) / 127
    assert ((q.dense() - w).abs() <= 0.5001 * step).all()
    assert q.error == pytest.approx(((q.dense() - w).norm() / w.norm()).item(), rel=1e-3)
    extremes = w.gather(1, w.abs().argmax(1, keepdim=True))
    torch.testing.assert_close(q.dense().gather(1, w.abs().argmax(1, keepdim=True)), extremes, rtol=1e-6, atol=0)


def stepped(quantize, groups: torch.Tensor, shrink: float = 1.0) -> torch.Tensor:
    """What the groups become in sixteen steps over ``shrink`` of their range."""
    q, scale, offset = quantize(groups, shrink)
    assert q.min() >= 0 and q.max() <= 15 and torch.equal(q, q.round())
    return q * scale[..., None] + offset[..., None]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_symmetric_steps_over_the_whole_range(columns, group):
    want = grouped(matrix(columns=columns), group)
    got = stepped(quantize_symmetric, want)
    extreme = want.gather(-1, want.abs().argmax(-1, keepdim=True))
    step = extreme.abs() / 8
    within = (got - want).abs() <= 0.5001 * step
    clipped = want / -extreme > 7.5 / 8  # the sign that the extreme has not: 7 steps at most
    assert (within | clipped).all() and ((got - want).abs() <= 1.0001 * step).all()
    hit = got.gather(-1, want.abs().argmax(-1, keepdim=True))
    torch.testing.assert_close(hit, extreme, rtol=1e-6, atol=0)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_steps_with_zeros_over_the_whole_range(columns, group):
    want = grouped(matrix(columns=columns), group)
    got = stepped(quantize_with_zeros, want)
    step = (want.amax(-1, keepdim=True).clamp_min(0) - want.amin(-1, keepdim=True).clamp_max(0)) / 15
    assert ((got - want).abs() <= 0.5001 * step + 1e-12).all()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("zeros", [False, True])
def test_int4_is_the_best_of_the_shrunken_ranges(columns, group, zeros):
    w = matrix(columns=columns)
    q = Int4(TensorSource(w), group, zeros)
    assert (q.offsets is None) == (not zeros) and q.dense().shape == w.shape
    want, got = grouped(w, group), grouped(q.dense(), group)
    quantize = quantize_with_zeros if zeros else quantize_symmetric
    errors = torch.stack([(stepped(quantize, want, shrink) - want).square().sum(-1) for shrink in SHRINKS])
    if columns % group == 0:  # padding counts as values that should become 0, which the dense form no longer shows
        torch.testing.assert_close((got - want).square().sum(-1), errors.amin(0), rtol=1e-3, atol=1e-9)
        assert (errors.argmin(0) > 0).any(), "clipping pays for some groups"
    assert q.error == pytest.approx(((q.dense() - w).norm() / w.norm()).item(), rel=1e-3)


def test_zeros_halve_the_error_of_one_sided_weights():
    one_sided = TensorSource(matrix(columns=256).abs())
    assert Int4(one_sided, 32, True).error <= 0.6 * Int4(one_sided, 32, False).error
    assert (Int4(one_sided, 32, True).offsets == 0).all(), "the range includes 0"


@pytest.mark.parametrize("zeros", [False, True])
def test_int4_values_on_the_grid_are_kept(zeros):
    """Values that the format can stand for come back as they were, at any column of any group."""
    levels = torch.arange(16.0) - (0 if zeros else 8)
    w = torch.cat([levels, levels.flip(0)]).repeat(3, 9) * torch.tensor([1.0, 0.25, 8.0])[:, None]
    assert torch.equal(Int4(TensorSource(w), 32, zeros).dense(), w)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("zeros", [False, True])
def test_padding_is_not_seen_outside(group, zeros):
    """Width 288 and groups that do not divide it: the same numbers as of a matrix that was padded by hand."""
    w, x = matrix(), torch.randn(3, 288, generator=torch.Generator().manual_seed(1))
    q = Int4(TensorSource(w), group, zeros)
    width = -(-288 // group) * group
    padded = Int4(TensorSource(nn.functional.pad(w, (0, width - 288))), group, zeros)
    assert torch.equal(q.dense(), padded.dense()[:, :288])
    assert (padded.dense()[:, 288:] == 0).all() or zeros
    torch.testing.assert_close(q(x), padded(nn.functional.pad(x, (0, width - 288))), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(q(x), x @ q.dense().T, rtol=1e-5, atol=1e-3)
    assert q(x).shape == (3, 7) and q.extra_repr() == "int4, [7, 288]"
    assert torch.equal(q.qweight, padded.qweight) and q.scales.shape == (7, width // group)


@pytest.mark.parametrize("zeros", [False, True])
def test_rows_and_groups_of_zeros(zeros):
    w = matrix()
    w[2] = 0
    w[4, 64:128] = 0
    for q in (Int8(TensorSource(w)), Int4(TensorSource(w), 64, zeros)):
        assert (q.dense()[2] == 0).all() and torch.isfinite(q.dense()).all()
        assert (q.dense()[4, 64:128] == 0).all() and torch.isfinite(torch.tensor(q.error))
    nothing = torch.zeros(3, 40)
    assert Int8(TensorSource(nothing)).error == Int4(TensorSource(nothing), 32, zeros).error == 0.0
    assert (Int4(TensorSource(nothing), 32, zeros)(torch.randn(2, 40)) == 0).all()


@pytest.mark.parametrize("zeros", [False, True])
def test_tiny_values_stay_finite(zeros):
    w = torch.full((2, 32), 1e-39)
    for q in (Int8(TensorSource(w)), Int4(TensorSource(w), 32, zeros)):
        assert torch.isfinite(q.dense()).all() and q.dense().abs().max() <= 1e-37


def test_reading_in_slices_equals_reading_at_once(monkeypatch):
    w = matrix(rows=50)
    whole = [Dense.of(TensorSource(w)), Int8(TensorSource(w)), Int4(TensorSource(w), 64, True)]
    whole.append(Int4(TensorSource(w), 128, False))
    source = Counted(w, most=7)
    monkeypatch.setattr("eyas.models.weights.row_slices", lambda s: row_slices(s, elements=7 * 288))
    parts = [Dense.of(source), Int8(source), Int4(source, 64, True), Int4(source, 128, False)]
    assert source.reads[:8] == [(start, min(start + 7, 50)) for start in range(0, 50, 7)]
    for one, other in zip(whole, parts, strict=True):
        assert one.error == pytest.approx(other.error)
        for (name, a), (_, b) in zip(one.named_buffers(), other.named_buffers(), strict=True):
            assert torch.equal(a, b), name


def test_slices_cover_every_row_once():
    for rows, elements in itertools.product((1, 5, 6), (1, 10, 25, 1000)):
        w = matrix(rows, 10).bfloat16()
        slices = list(row_slices(TensorSource(w), elements))
        assert all(part.dtype == torch.float32 for _, part in slices)
        assert torch.equal(torch.cat([part for _, part in slices]), w.float())
        assert [i for s, _ in slices for i in range(s.start, s.stop)] == list(range(rows))


def test_dense_takes_the_dtype_asked_for():
    w = matrix()
    weight = Dense.of(TensorSource(w), torch.ones(7), torch.bfloat16)
    assert weight.weight.dtype == weight.bias.dtype == torch.bfloat16
    assert torch.equal(weight.weight, w.bfloat16()) and weight.nbytes() == 2 * (7 * 288 + 7)
    assert weight.error == 0.0 and weight.dense().dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["dense", "int8", "int4", "int4{group=64,zeros=true}"])
def test_product_with_bias_keeps_the_dtype(fmt, dtype):
    w, bias = matrix(), torch.arange(7.0)
    weight = Format.parse(fmt).build(TensorSource(w), bias, dtype)
    assert isinstance(weight, Weight) and weight.format == Format.parse(fmt).kind
    x = torch.randn(1, 3, 288, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = weight(x)
    assert y.dtype == dtype and y.shape == (1, 3, 7)
    expected = x.float() @ weight.dense().T + bias
    error = (y.float() - expected).abs().amax((0, 1)) / expected.abs().amax((0, 1))
    assert error.max() < {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]


def test_rows_of_an_embedding():
    w, ids = matrix(), torch.tensor([[6, 0, 0, 3]])
    for weight in (Dense.of(TensorSource(w)), Int8(TensorSource(w))):
        assert torch.equal(weight.rows(ids, torch.float32), weight.dense()[ids])
        assert weight.rows(ids, torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="int4 weights cannot serve as an embedding; allowed: dense, int8"):
        Int4(TensorSource(w), 32, False).rows(ids, torch.float32)


def test_group_sizes_without_a_kernel():
    with pytest.raises(ValueError, match="group size 48 has no kernel; allowed: 32, 64, 128, 256"):
        Int4(TensorSource(matrix()), 48, False)
    assert [group for group in range(1, 1025) if int4_linear.supports(group) is None] == list(GROUPS)


# Recipes


@pytest.mark.parametrize(
    "fmt",
    [Format("dense"), Format("int8"), Format("int4")]
    + [Format("int4", group, zeros) for group in GROUPS for zeros in (False, True)],
    ids=str,
)
def test_formats_print_as_they_parse(fmt):
    assert Format.parse(str(fmt)) == fmt


def test_format_spellings():
    assert Format.parse(" int4 ") == Format.parse("int4{}") == Format("int4", 32, False)
    assert Format.parse("int4{zeros=true}") == Format("int4", 32, True)
    assert Format.parse("int4{zeros=false,group=128}") == Format("int4", 128, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int3", "unknown weight format 'int3'; allowed: dense, int8, int4"),
        ("", "'' is not of the form name or name{option=value,...}"),
        ("int4{group=64", "is not of the form"),
        ("int4{group=48}", "group size 48 has no kernel; allowed: 32, 64, 128, 256"),
        ("int4{group=-32}", "unknown option 'group=-32' .* allowed: group=<int>, zeros=true|false"),
        ("int4{zeros=1}", "unknown option 'zeros=1' .* allowed: group=<int>, zeros=true|false"),
        ("int4{bits=3}", "unknown option 'bits=3'"),
        ("int8{group=64}", "'int8' takes no options"),
        ("int8{group=32}", "'int8' takes no options"),
        ("dense{zeros=true}", "'dense' takes no options"),
    ],
)
def test_formats_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Format.parse(text)


def test_a_format_without_options_has_none():
    with pytest.raises(ValueError, match="'int8' takes no options"):
        Format("int8", group=64)


def test_recipes_round_trip():
    mine = Recipe("mine", (("*.embed_tokens", Format("int8")), ("*", Format("int4", 64, True))))
    for recipe in (*RECIPES.values(), mine):
        assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
        assert RECIPES.get(recipe.name, recipe) == recipe


def test_first_match_wins():
    recipe = Recipe("r", (("target.layers.1.*", Format("dense")), ("*_proj", Format("int4")), ("*", Format("int8"))))
    assert recipe.format_of("target.layers.1.mlp.up_proj") == Format("dense")
    assert recipe.format_of("target.layers.10.mlp.up_proj") == Format("int4")
    assert recipe.format_of("target.embed_tokens") == Format("int8")
    assert Recipe("r", recipe.rules[:1]).format_of("draft.fc") == Format("dense"), "no match: as it is"
    assert Recipe("r", recipe.rules[::-1]).format_of("target.layers.1.mlp.up_proj") == Format("int8")


def test_named_recipes():
    names = ("target.embed_tokens", "draft.embed_tokens", "target.lm_head", "draft.lm_head", "draft.fc")
    assert {RECIPES["none"].format_of(name).kind for name in names} == {"dense"}
    assert {RECIPES["int8"].format_of(name).kind for name in names} == {"int8"}
    assert [RECIPES["int4"].format_of(name).kind for name in names] == ["int8"] * 4 + ["int4"]


def test_recipe_files(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "rules": [["draft.*", "dense"], ["*", "int4{group=64,zeros=true}"]]}))
    assert load_recipe(str(path)) == Recipe("mine", (("draft.*", Format("dense")), ("*", Format("int4", 64, True))))
    assert load_recipe("int4") is RECIPES["int4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting"),
        ("[]", r"an object with 'name' and 'rules', got \[\]"),
        ('{"name": "x"}', r"an object with 'name' and 'rules', got \['name'\]"),
        ('{"name": "x", "rules": [["*"]]}', r"a rule is a pair of strings, \[pattern, format\], got \['\*'\]"),
        ('{"name": "x", "rules": [["*", 4]]}', r"a rule is a pair of strings, .* got \['\*', 4\]"),
        ('{"name": "x", "rules": ["ab"]}', "a rule is a pair of strings, .* got 'ab'"),
        ('{"name": "x", "rules": [["*", "int5"]]}', "unknown weight format 'int5'; allowed: dense, int8, int4"),
    ],
)
def test_recipe_files_refused(text, message, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(str(path))
    assert str(path) in str(caught.value)


def test_unknown_recipe():
    with pytest.raises(ValueError, match=r"unknown recipe 'int5'; allowed: none, int8, int4, or the path"):
        load_recipe("int5")


# Filling a module, and the report


def tiny(recipe: Recipe, **changes) -> tuple[GemmaDecoder, list[Placed]]:
    """A tiny Gemma 4 (width 48) filled under a recipe. ``changes``: tensors by name, None to leave out."""
    checkpoint = open_checkpoint(None, "gemma4", n_layers=6)
    tensors = {**checkpoint.tensors, **{name.replace("__", "."): value for name, value in changes.items()}}
    module = GemmaDecoder(checkpoint.config, 32)
    tensors = {name: value for name, value in tensors.items() if value is not None}
    return module, materialize(module, "target.", tensors, recipe, torch.float32, checkpoint.config.norm_offset)


def test_report_lists_every_matrix_and_what_was_padded():
    recipe = Recipe("r", (("*.lm_head", Format("int8")), ("*embed_tokens", Format("int8")), ("*", Format("int4", 64))))
    module, report = tiny(recipe)
    matrices = {f"target.{name}": child for name, child in module.named_modules() if isinstance(child, Weight)}
    assert [placed.name for placed in report] == list(matrices)
    assert len(report) == 1 + 6 * 7 - 2  # two global layers have no value projection
    for placed in report:
        weight = matrices[placed.name]
        assert placed.shape == (weight.out_features, weight.in_features)
        assert (placed.nbytes, placed.error) == (weight.nbytes(), weight.error)
        assert placed.format == ("int8" if "embed" in placed.name else "int4{group=64,zeros=false}")
        padded = -(-placed.shape[1] // 64) * 64
        is_padded = placed.format != "int8" and padded != placed.shape[1]
        assert placed.note == (f"width padded to {padded}" if is_padded else "")
    assert {p.note for p in report} == {"", "width padded to 64", "width padded to 128"}
    assert matrices["target.layers.0.mlp.up_proj"].nbytes() == 96 * (64 // 2 + 4)


def test_report_in_words():
    report = [
        Placed("target.embed_tokens", (9, 48), "int8", 1_500_000, 0.004),
        Placed("target.a", (9, 64), "int4{group=64,zeros=false}", 1_000_000, 0.08),
        Placed("target.b", (9, 48), "int4{group=64,zeros=false}", 500_000, 0.09, "width padded to 64"),
    ]
    assert report_lines(report) == [
        "int8: 1 matrices, 1.5 MB, largest relative error 0.0040 (target.embed_tokens)",
        "int4{group=64,zeros=false}: 2 matrices, 1.5 MB, largest relative error 0.0900 (target.b)",
        "  target.b: width padded to 64",
    ]
    assert report_lines([]) == []


@pytest.mark.parametrize("recipe", ["none", "int8", "int4"])
def test_materialized_weights_stand_for_the_source(recipe):
    source = random_tensors(GemmaDecoder(tiny_config("gemma4", 6), 1), 4)  # the seed of tiny targets
    module, report = tiny(RECIPES[recipe])
    bound = {"dense": 0.0, "int8": 0.01, "int4": 0.15}
    for placed in report:
        name = placed.name.removeprefix("target.")
        got, want = module.get_submodule(name).dense(), source[f"{name}.weight"].tensor
        assert (got - want).norm() / want.norm() <= bound[placed.format.partition("{")[0]]
    assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    assert torch.equal(module.layers[1].layer_scalar, source["layers.1.layer_scalar"].tensor)
    assert torch.equal(module.layers[1].self_attn.k_norm.weight, source["layers.1.self_attn.k_norm.weight"].tensor)


def test_norm_offset_is_added_to_norms_alone():
    config = tiny_config("gemma4", 6)
    source = random_tensors(GemmaDecoder(config, 1), 0)
    module = GemmaDecoder(config, 8)
    materialize(module, "target.", source, RECIPES["none"], torch.bfloat16, norm_offset=1.0)
    for name, parameter in module.named_parameters():
        assert name.endswith("norm.weight") and parameter.dtype == torch.float32
        assert torch.equal(parameter, source[name].tensor + 1), name
    assert torch.equal(module.layers[0].layer_scalar, source["layers.0.layer_scalar"].tensor)
    assert torch.equal(module.embed_tokens.weight, source["embed_tokens.weight"].tensor.bfloat16())


def test_materialize_reads_biases():
    module = nn.Sequential(Dense(5, 48, bias=True))
    tensors = {"0.weight": TensorSource(matrix(5, 48)), "0.bias": TensorSource(torch.arange(5.0))}
    for recipe in RECIPES.values():
        module = nn.Sequential(Dense(5, 48, bias=True))
        materialize(module, "m.", tensors, recipe, torch.float32)
        assert torch.equal(module[0].bias, torch.arange(5.0))
        assert torch.equal(module(torch.zeros(1, 48))[0], torch.arange(5.0))
    with pytest.raises(ValueError, match=r"no tensor '0.bias' \(of shape \[5\]\)"):
        materialize(
            nn.Sequential(Dense(5, 48, bias=True)), "m.", dict(list(tensors.items())[:1]), recipe, torch.float32
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers__2__mlp__up_proj__weight": None}, r"no tensor 'layers.2.mlp.up_proj.weight' \(of shape \[96, 48\]\)"),
        ({"layers__2__layer_scalar": None}, r"no tensor 'layers.2.layer_scalar' \(of shape \[1\]\)"),
        ({"norm__weight": None}, r"no tensor 'norm.weight' \(of shape \[48\]\)"),
        (
            {"layers__0__self_attn__q_proj__weight": TensorSource(torch.zeros(48, 64))},
            r"'layers.0.self_attn.q_proj.weight' has shape \[48, 64\], expected \[64, 48\]",
        ),
        ({"norm__weight": TensorSource(torch.zeros(47))}, r"'norm.weight' has shape \[47\], expected \[48\]"),
        (
            {"lm_head__weight": TensorSource(torch.zeros(2)), "a": TensorSource(torch.zeros(2))},
            "checkpoint has 2 tensors without a place in the model: a, lm_head.weight$",
        ),
        ({f"x{i}": TensorSource(torch.zeros(2)) for i in range(9)}, r"9 tensors .*: x0, x1, .* x7, \.\.\.$"),
    ],
)
def test_materialize_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(RECIPES["none"], **changes)


# Operators


def test_nibbles_round_trip():
    values = torch.arange(256, dtype=torch.uint8) % 16
    values = values[torch.randperm(256, generator=torch.Generator().manual_seed(0))].view(4, 64)
    packed = int4_linear.pack_nibbles(values)
    assert packed.shape == (4, 32) and packed.dtype == torch.uint8
    assert torch.equal(int4_linear.unpack_nibbles(packed), values)
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(int4_linear.pack_nibbles(int4_linear.unpack_nibbles(every)), every)
    assert int4_linear.pack_nibbles(torch.tensor([3, 12], dtype=torch.uint8)).item() == 3 + 12 * 16, "low nibble first"


def test_int4_by_hand():
    """Two groups of 32 columns, the second cut to 2: ``q * scale + offset`` column by column."""
    q = torch.arange(64, dtype=torch.uint8)[None] % 16
    scales, offsets = torch.tensor([[0.5, 2.0]]), torch.tensor([[-1.0, 3.0]])
    packed = int4_linear.pack_nibbles(q)
    got = int4_linear.dequantize(packed, scales, offsets, 32, 34)
    assert got[0].tolist() == [i % 16 * 0.5 - 1.0 for i in range(32)] + [0 * 2.0 + 3.0, 1 * 2.0 + 3.0]
    symmetric = int4_linear.dequantize(packed, scales, None, 32, 34)
    assert symmetric[0].tolist() == [(i % 16 - 8) * 0.5 for i in range(32)] + [-8 * 2.0, -7 * 2.0]


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8])
def test_panels_round_trip(rows, dtype):
    w = (torch.randn(rows, 9, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    panels = panel_linear.pack_panels(w)
    assert panels.shape == (-(-rows // 16), 9, 16) and panels.is_contiguous() and panels.dtype == dtype
    assert torch.equal(panel_linear.unpack_panels(panels, rows), w)
    assert panels[0, 4, 0] == w[0, 4] and panels[-1, 4, (rows - 1) % 16] == w[-1, 4]
    assert (panel_linear.unpack_panels(panels, panels.shape[0] * 16)[rows:] == 0).all(), "rows past the last are zero"
    ids = torch.randint(0, rows, (1, 5), generator=torch.Generator().manual_seed(0))
    assert torch.equal(panel_linear.panel_rows(ids, panels), w[ids])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("rows", [16, 21])
def test_int4_references_agree(group, zeros, rows):
    w = Int4(TensorSource(matrix(rows)), group, zeros)
    x = torch.randn(5, 288, generator=torch.Generator().manual_seed(1))
    panels = panel_linear.pack_panels(w.qweight)  # a byte keeps its two columns
    scale_offset = panel_linear.pack_scale_offset(w.scales, w.offsets)
    assert scale_offset.shape == (-(-rows // 16), -(-288 // group), 2, 16) and scale_offset.dtype == torch.float32
    got = torch.ops.eyas.panel_int4_linear(x, panels, scale_offset, group, rows)
    expected = torch.ops.eyas.int4_linear(x, w.qweight, w.scales, w.offsets, group)
    exact = x.double() @ w.dense().double().T
    scale = exact.abs().amax(0)
    assert ((got - exact).abs() / scale).max() < 1e-5
    assert ((expected - exact).abs() / scale).max() < 1e-5


@pytest.mark.parametrize("rows", [16, 21])
def test_int8_and_dense_references_agree(rows):
    source = TensorSource(matrix(rows))
    x = torch.randn(5, 288, generator=torch.Generator().manual_seed(1))
    w = Int8(source)
    scales = panel_linear.pack_scales(w.scales)
    assert scales.tolist() == [*w.scales.tolist(), *[0.0] * (-rows % 16)]
    got = torch.ops.eyas.panel_int8_linear(x, panel_linear.pack_panels(w.qweight), scales, rows)
    expected = torch.ops.eyas.int8_linear(x, w.qweight, w.scales)
    exact = x.double() @ w.dense().double().T
    assert ((got - exact).abs() / exact.abs().amax(0)).max() < 1e-5
    assert ((expected - exact).abs() / exact.abs().amax(0)).max() < 1e-5
    dense = torch.ops.eyas.panel_linear(x, panel_linear.pack_panels(source.tensor), rows)
    exact = x.double() @ source.tensor.double().T
    assert ((dense - exact).abs() / exact.abs().amax(0)).max() < 1e-5
    assert torch.equal(int8_linear.dequantize(w.qweight, w.scales), w.dense())


def test_masked_attention_reference():
    """Against torch's own, with dead slots full of NaN, and with a row that sees nothing."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, rows, 16, generator=generator) for heads, rows in ((4, 3), (2, 10), (2, 10)))
    mask = torch.arange(10) < torch.tensor([[4], [7], [0]])
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    k[:, :, 7:], v[:, :, 7:] = float("nan"), float("nan")
    got = torch.ops.eyas.masked_sdpa(q, k, v, mask, 0.3)
    torch.testing.assert_close(got[:, :, :2], expected[:, :, :2], rtol=1e-5, atol=1e-5)
    assert (got[:, :, 2] == 0).all() and got.transpose(1, 2).is_contiguous()


def sample(name: str) -> tuple:
    """Arguments for an operator, of sizes that are no multiple of anything."""
    w, x = matrix(21), torch.randn(5, 288)
    symmetric, zeros, int8 = Int4(TensorSource(w), 64, False), Int4(TensorSource(w), 128, True), Int8(TensorSource(w))
    scale_offset = panel_linear.pack_scale_offset(zeros.scales, zeros.offsets)
    mask = torch.ones(3, 10, dtype=torch.bool).tril(4)
    return {
        "int4_linear": (x[None], symmetric.qweight, symmetric.scales, None, 64),
        "int4_linear bfloat16": (x.bfloat16(), zeros.qweight, zeros.scales, zeros.offsets, 128),
        "int8_linear": (x[None].bfloat16(), int8.qweight, int8.scales),
        "int8_embedding": (torch.tensor([[1, 20, 1]]), int8.qweight, int8.scales, torch.bfloat16),
        "panel_linear": (x, panel_linear.pack_panels(w), 21),
        "panel_int8_linear": (x, panel_linear.pack_panels(int8.qweight), panel_linear.pack_scales(int8.scales), 21),
        "panel_int4_linear": (x, panel_linear.pack_panels(zeros.qweight), scale_offset, 128, 21),
        "masked_sdpa": (torch.randn(1, 4, 3, 16), torch.randn(1, 2, 10, 16), torch.randn(1, 2, 10, 16), mask, 0.25),
    }[name]


@pytest.mark.parametrize(
    "name",
    [f"{kind}_linear" for kind in ("int4", "int8", "panel", "panel_int8", "panel_int4")]
    + ["int4_linear bfloat16", "int8_embedding", "masked_sdpa"],
)
def test_operator_is_well_formed(name):
    """Schema, fake and tracing of each operator say what its body does."""
    opcheck(getattr(torch.ops.eyas, name.split()[0]).default, sample(name))


def test_supported_limits():
    assert panel_linear.supports(torch.float32) is None
    assert "torch.bfloat16; the cpu kernels take torch.float32" in panel_linear.supports(torch.bfloat16)

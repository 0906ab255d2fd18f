"""Which format each weight matrix gets, and what it cost.

A recipe is an ordered list of rules ``(pattern, format)``; the first pattern that matches a matrix's name decides
(``target.layers.3.mlp.up_proj``, ``draft.fc``; shell-style wildcards). A recipe file is JSON::

    {"name": "mine", "rules": [["*.embed_tokens", "int8"], ["draft.*", "dense"], ["*", "int4{group=64,zeros=true}"]]}
"""

import fnmatch
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from eyas.kernels import int4_linear
from eyas.models.weights import Dense, Int4, Int8, RowSource, Weight


@dataclass(frozen=True)
class Format:
    """How one matrix is stored: ``dense``, ``int8`` (a scale a row), or ``int4`` in groups of ``group`` columns."""

    kind: str
    group: int = 32
    zeros: bool = False

    KINDS = ("dense", "int8", "int4")

    def __post_init__(self):
        if self.kind not in self.KINDS:
            raise ValueError(f"unknown weight format {self.kind!r}; allowed: {', '.join(self.KINDS)}")
        if self.kind == "int4" and (reason := int4_linear.supports(self.group)):
            raise ValueError(reason)
        if self.kind != "int4" and (self.group, self.zeros) != (32, False):
            raise ValueError(f"weight format {self.kind!r} takes no options, got {self.group=}, {self.zeros=}")

    @classmethod
    def parse(cls, text: str) -> "Format":
        """``int4{group=32,zeros=true}`` and the like; ``parse(str(f)) == f``."""
        match = re.fullmatch(r"(\w+)(?:\{([^{}]*)\})?", text.strip())
        if not match:
            raise ValueError(f"weight format {text!r} is not of the form name or name{{option=value,...}}")
        options = {}
        for item in filter(None, (match[2] or "").split(",")):
            key, _, value = item.partition("=")
            if key == "group" and value.isdigit():
                options["group"] = int(value)
            elif key == "zeros" and value in ("true", "false"):
                options["zeros"] = value == "true"
            else:
                raise ValueError(
                    f"unknown option {item!r} in weight format {text!r}; allowed: group=<int>, zeros=true|false"
                )
        if options and match[1] != "int4":
            raise ValueError(f"weight format {match[1]!r} takes no options, got {text!r}")
        return cls(match[1], **options)

    def __str__(self) -> str:
        return f"int4{{group={self.group},zeros={str(self.zeros).lower()}}}" if self.kind == "int4" else self.kind

    def build(self, source: RowSource, bias: Tensor | None, dtype: torch.dtype) -> Weight:
        if self.kind == "int8":
            return Int8(source, bias)
        if self.kind == "int4":
            return Int4(source, self.group, self.zeros, bias)
        return Dense.of(source, bias, dtype)


@dataclass(frozen=True)
class Recipe:
    """An ordered choice of formats. ``format_of`` answers for a matrix's full name."""

    name: str
    rules: tuple[tuple[str, Format], ...]

    def format_of(self, name: str) -> Format:
        return next((fmt for pattern, fmt in self.rules if fnmatch.fnmatch(name, pattern)), Format("dense"))

    def to_json(self) -> dict:
        return {"name": self.name, "rules": [[pattern, str(fmt)] for pattern, fmt in self.rules]}

    @classmethod
    def from_json(cls, data: dict) -> "Recipe":
        if not isinstance(data, dict) or set(data) != {"name", "rules"}:
            got = sorted(data) if isinstance(data, dict) else repr(data)
            raise ValueError(f"a recipe is an object with 'name' and 'rules', got {got}")
        for rule in data["rules"]:
            if not isinstance(rule, (list, tuple)) or [type(part) for part in rule] != [str, str]:
                raise ValueError(f"a rule is a pair of strings, [pattern, format], got {rule!r}")
        return cls(data["name"], tuple((pattern, Format.parse(fmt)) for pattern, fmt in data["rules"]))


TABLES = (("*embed_tokens", Format("int8")), ("target.lm_head", Format("int8")), ("draft.lm_head", Format("int8")))
RECIPES = {
    "none": Recipe("none", (("*", Format("dense")),)),
    "int8": Recipe("int8", (("*", Format("int8")),)),
    "int4": Recipe("int4", (*TABLES, ("*", Format("int4", zeros=True)))),
}


def load_recipe(text: str) -> Recipe:
    """A recipe by name, or from a JSON file. Raises ``ValueError`` naming what is allowed."""
    if text in RECIPES:
        return RECIPES[text]
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"unknown recipe {text!r}; allowed: {', '.join(RECIPES)}, or the path of a recipe file")
    try:
        return Recipe.from_json(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"recipe file {path}: {error}") from error


@dataclass(frozen=True)
class Placed:
    """One matrix of the quantisation report. ``error``: relative root mean square against the source."""

    name: str
    shape: tuple[int, int]
    format: str
    nbytes: int
    error: float
    note: str = ""


def materialize(
    module: nn.Module,
    prefix: str,
    tensors: Mapping[str, RowSource],
    recipe: Recipe,
    dtype: torch.dtype,
    norm_offset: float = 0.0,
) -> list[Placed]:
    """Fills ``module`` from a checkpoint, each matrix in the format that the recipe names for ``prefix + name``.

    ``tensors`` go by the module's own names. ``dtype`` is that of dense matrices; other parameters stay float32.
    ``norm_offset`` is added to norm factors. Raises ``ValueError`` for tensors that are missing, left over or
    misshapen.
    """
    report, used = [], set()

    def take(name: str, shape: tuple[int, ...]) -> RowSource:
        if name not in tensors:
            raise ValueError(f"checkpoint has no tensor {name!r} (of shape {list(shape)})")
        if tuple(tensors[name].shape) != tuple(shape):
            raise ValueError(f"tensor {name!r} has shape {list(tensors[name].shape)}, expected {list(shape)}")
        used.add(name)
        return tensors[name]

    for name, child in list(module.named_modules()):
        if isinstance(child, Dense) and child.weight.is_meta:
            source = take(f"{name}.weight", child.weight.shape)
            bias = None if child.bias is None else take(f"{name}.bias", child.bias.shape).read().float()
            fmt = recipe.format_of(prefix + name)
            weight = fmt.build(source, bias, dtype)
            padded = (
                ""
                if fmt.kind != "int4" or source.shape[1] % fmt.group == 0
                else f"width padded to {-(-source.shape[1] // fmt.group) * fmt.group}"
            )
            module.set_submodule(name, weight)
            report.append(Placed(prefix + name, tuple(source.shape), str(fmt), weight.nbytes(), weight.error, padded))
    vectors = {name: tensor for name, tensor in module.named_parameters()}
    vectors |= {name: b for name, b in module.named_buffers() if name.endswith("layer_scalar")}
    for name, tensor in vectors.items():
        offset = norm_offset if name.endswith("norm.weight") else 0.0
        tensor.data = take(name, tensor.shape).read().float() + offset
    left = sorted(set(tensors) - used)
    if left:
        shown = ", ".join([*left[:8], *(["..."] if len(left) > 8 else [])])
        raise ValueError(f"checkpoint has {len(left)} tensors without a place in the model: {shown}")
    return report


def report_lines(report: list[Placed]) -> list[str]:
    """The quantisation report, a line a format and then the worst matrices of each."""
    lines = []
    for fmt in dict.fromkeys(p.format for p in report):
        group = [p for p in report if p.format == fmt]
        worst = max(group, key=lambda p: p.error)
        size = sum(p.nbytes for p in group)
        lines.append(
            f"{fmt}: {len(group)} matrices, {size / 1e6:.1f} MB, "
            f"largest relative error {worst.error:.4f} ({worst.name})"
        )
        lines.extend(f"  {p.name}: {p.note}" for p in group if p.note)
    return lines

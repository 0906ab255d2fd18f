"""The table of passes, and the text that names them: ``name`` or ``name{option=value,...}``, separated by commas."""

import dataclasses
import difflib
import re
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points

from eyas.passes.base import Pass

# name -> module:class; sorted; a module is imported when its pass is first asked for
PASSES: dict[str, str] = {
    "dead_code": "eyas.passes.dead_code:DeadCode",
    "fragment_linear": "eyas.passes.fragment_linear:FragmentLinear",
    "fuse_projections": "eyas.passes.fuse_projections:FuseProjections",
    "int4_smallm": "eyas.passes.int4_smallm:Int4Smallm",
    "masked_sdpa": "eyas.passes.masked_sdpa:MaskedSdpa",
    "materialize_tables": "eyas.passes.materialize_tables:MaterializeTables",
    "midm_sdpa": "eyas.passes.midm_sdpa:MidmSdpa",
    "outline_blocks": "eyas.passes.outline_blocks:OutlineBlocks",
    "panel_linear": "eyas.passes.panel_linear:PanelLinear",
    "remove_noop": "eyas.passes.remove_noop:RemoveNoop",
    "share_buffers": "eyas.passes.share_buffers:ShareBuffers",
    "split_argmax": "eyas.passes.split_argmax:SplitArgmax",
    "split_copy_to_slice": "eyas.passes.split_copy_to_slice:SplitCopyToSlice",
    "splitk_sdpa": "eyas.passes.splitk_sdpa:SplitkSdpa",
}
ENTRY_POINT_GROUP = "eyas.passes"


def pass_names() -> list[str]:
    """Every pass there is, those of other packages included, sorted."""
    return sorted({*PASSES, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def find_pass(name: str) -> type[Pass]:
    """The class of a pass. Raises ``ValueError`` with the closest names."""
    if name in PASSES:
        module, _, attribute = PASSES[name].partition(":")
        return getattr(import_module(module), attribute)
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return point.load()
    close = difflib.get_close_matches(name, pass_names(), n=3) or pass_names()
    raise ValueError(f"unknown pass {name!r}; did you mean: {', '.join(close)}? all of them: {', '.join(pass_names())}")


def parse_pass(text: str) -> Pass:
    """One pass from its text; ``parse_pass(str(p)) == p``. Raises ``ValueError`` naming the options there are."""
    match = re.fullmatch(r"\s*([\w.]+)\s*(?:\{([^{}]*)\})?\s*", text)
    if not match:
        raise ValueError(f"{text!r} is not a pass; write name or name{{option=value,...}}")
    cls = find_pass(match[1])
    fields = {f.name: f for f in dataclasses.fields(cls)}
    allowed = ", ".join(f"{f.name} ({_kind(f)})" for f in fields.values())
    options = {}
    for item in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in fields or not equals:
            raise ValueError(f"pass {match[1]!r} has no option {item!r}; allowed: {allowed or 'none'}")
        if key in options:
            raise ValueError(f"option {key!r} of pass {match[1]!r} is given twice")
        options[key] = _value(match[1], key, value, fields[key])
    needed = [f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [key for key in needed if key not in options]:
        raise ValueError(f"pass {match[1]!r} needs {', '.join(missing)}; its options: {allowed}")
    return cls(**options)


def _kind(field: dataclasses.Field) -> str:
    return field.type.__name__ if isinstance(field.type, type) else str(field.type)


def _value(name: str, key: str, text: str, field: dataclasses.Field) -> object:
    kind = _kind(field)
    if kind == "bool" and text in ("true", "false"):
        return text == "true"
    if kind == "int" and re.fullmatch(r"-?\d+", text):
        return int(text)
    if kind == "str":
        return text
    raise ValueError(f"option {key!r} of pass {name!r} takes {kind}, got {text!r}")


def split_specs(text: str) -> list[str]:
    """``a,b{x=1,y=2}`` -> ``['a', 'b{x=1,y=2}']``."""
    return [part for part in re.split(r",(?![^{]*\})", text) if part.strip()]


def parse_pipeline(text: str | Iterable[str]) -> list[Pass]:
    """A pipeline from its text, or from a list of such texts."""
    specs = split_specs(text) if isinstance(text, str) else [s for t in text for s in split_specs(t)]
    return [parse_pass(spec) for spec in specs]


def pipeline_text(passes: Iterable[Pass]) -> str:
    """The text that ``parse_pipeline`` reads back."""
    return ",".join(map(str, passes))

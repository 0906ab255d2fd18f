"""Prompts of four kinds to have a target continue: templates of our own over word lists, and the beginnings of texts
and of functions from Python's standard library (under the licence of the Python Software Foundation).

What a head learns from is only what the target writes after them.
"""

import ast
import functools
import hashlib
import importlib
import pkgutil
import random
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import product
from pathlib import Path

KINDS = ("prose", "code", "lists", "questions")
SOURCES = "templates of the project's own; texts and functions of Python's standard library (PSF licence)"

PLACES = """Lisbon, Kyoto, Cairo, Chicago, Vienna, Nairobi, Mumbai, Lima, Oslo, Istanbul, the Alps, the
Amazon, Iceland, Madagascar, the Sahara, Venice, Patagonia, Scotland, the Black Sea, the Silk Road, Mexico
City, Prague, Sydney, Seoul, the Mississippi, Athens, the Gobi desert, Cuba, New Zealand, Samarkand"""
ANIMALS = """falcons, octopuses, honey bees, elephants, sea turtles, wolves, penguins, bats, ants, horses,
whales, owls, salmon, spiders, crows, camels, beavers, tigers, cranes, frogs"""
FIELDS = """astronomy, chemistry, economics, medicine, geology, music theory, linguistics, architecture,
cooking, law, photography, mathematics, agriculture, philosophy, statistics, navigation, printing,
gardening, football, chess, weaving, electrical engineering, compiler design, cartography, beekeeping"""
THINGS = """bicycle, telescope, bridge, steam engine, violin, clock, vaccine, transistor, compass, sailing
ship, battery, camera, loom, elevator, refrigerator, radio, satellite, lens, plough, windmill, printing
press, microscope, train, computer, map, bakery, library, garden, kitchen knife, tent"""
PEOPLE = """a baker, a retired sailor, a young engineer, two sisters, an old teacher, a shepherd, a nurse, a
detective, a carpenter, a queen, a lighthouse keeper, a student, a violinist, a farmer, a translator, a
clockmaker, a gardener, a pilot, a fisherman, a librarian"""
WORDS = {
    name: " ".join(words.split()).split(", ")
    for name, words in dict(place=PLACES, animals=ANIMALS, field=FIELDS, thing=THINGS, someone=PEOPLE).items()
}

TEMPLATES = {
    "prose": (
        "The history of {place} begins", "The first {thing} was built",
        "In the study of {field}, it is often said that",
        "Most people think of {animals} as", "When {someone} arrived in {place}, the weather",
        "Once upon a time, in {place}, there lived {someone} who", "The invention of the {thing} changed",
        "Scientists who study {animals} have found", "It was late in the evening when {someone}",
        "A short introduction to {field}. The subject", "The {thing} is one of the most important",
        "During the nineteenth century, {place}", "Letters from {place}. My dear friend,",
        "Abstract. This paper examines {field} in", "The relationship between {animals} and people",
        "To understand {field}, one must first",
    ),
    "lists": (
        "Ten facts about {animals}:\n1.", "Things to see in {place}:\n-", "How to repair a {thing}:\n1.",
        "A short glossary of {field}:\n-", "Parts of a {thing}:\n*", "Reasons to visit {place}:\n1.",
        "A timeline of {field}:\n-", "Packing list for a journey to {place}:\n- [ ]",
        "What {someone} needs every day:\n1.", "Books about {field}:\n1.", "Rules for keeping {animals}:\n1.",
        "| {thing} | weight | price |\n|---|---|---|\n|", "Ten facts about {animals} in {place}:\n1.",
        "What {someone} bought in {place}:\n-", "Steps to build a {thing} in {place}:\n1. ",
        "Agenda for the meeting of {field} and {animals}:\n1.", "Shopping list of {someone} with a {thing}:\n*",
    ),
    "questions": (
        "Question: What is {field}?\nAnswer:", "Question: Where is {place}?\nAnswer:",
        "Question: What do {animals} eat?\nAnswer:", "Question: How does a {thing} work?\nAnswer:",
        "Q: Who invented the {thing}?\nA:", "Q: Why do people travel to {place}?\nA:",
        "Question: What should {someone} know about {field}?\nAnswer:", "Q: Are {animals} dangerous?\nA:",
        "User: Explain {field} in simple words.\nAssistant:", "User: Tell me about {place}.\nAssistant:",
        "Question: Did anybody ever see {animals} in {place}?\nAnswer:", "Q: Can a {thing} be found in {place}?\nA:",
        "FAQ\n\nHow long does it take to learn {field}?\n", "Interviewer: Why {animals}?\n{someone}:",
    ),
    "code": (
        "def sort_{thing}s(items):\n    ", "class {thing}:\n    def __init__(self",
        "# A program about {animals}\nimport", "-- tables for a shop that sells every kind of {thing}\nCREATE TABLE",
        "#include <stdio.h>\n\n/* prints facts about {animals} */\nint main", "function count{thing}s(list) {{\n",
        '{{\n  "name": "{place}",\n  "country":', "#!/bin/sh\n# makes a backup of the {thing} catalogue\n",
    ),
}  # fmt: skip


def prompts(limit: int | None = None, seed: int = 0) -> list[tuple[str, str]]:
    """(kind, text) of every prompt, no two alike, shuffled by ``seed``; with a ``limit``, the first ones. The same for
    the same version of Python.
    """
    made = list(every_prompt())
    random.Random(seed).shuffle(made)
    return made[:limit]


@functools.cache
def every_prompt() -> tuple[tuple[str, str], ...]:
    """(kind, text), sorted."""
    return tuple(sorted({(kind, text) for make in (from_templates, from_library) for kind, text in make()}))


def is_held_out(text: str, share: float = 0.02) -> bool:
    """Whether a prompt is kept for evaluation: a matter of its text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < share * 2**32


def from_templates() -> Iterator[tuple[str, str]]:
    for kind, templates in TEMPLATES.items():
        for template in templates:
            names = list(dict.fromkeys(re.findall(r"(?<!{){(\w+)}", template)))
            for words in product(*(WORDS[name] for name in names)):
                values = dict(zip(names, words))
                if kind == "code" and "thing" in values:
                    values["thing"] = values["thing"].replace(" ", "_")
                yield kind, template.format(**values)


def from_library() -> Iterator[tuple[str, str]]:
    """Beginnings of documentation and of functions of the standard library."""
    topics = importlib.import_module("pydoc_data.topics").topics
    for text in topics.values():
        yield from (("prose", part) for part in paragraphs(text))
    for path in sorted(library_files()):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                yield from (("prose", part) for part in paragraphs(ast.get_docstring(node) or ""))
            if isinstance(node, ast.FunctionDef) and len(node.body) > 2:
                start = node.lineno - 1
                body = textwrap.dedent("\n".join(lines[start : node.body[0].end_lineno]))
                if 30 <= len(body) <= 600:
                    yield "code", body + "\n"


def library_files() -> Iterator[Path]:
    """Modules of the standard library itself that are written in Python, without its tests."""
    root = Path(ast.__file__).parent
    for module in pkgutil.iter_modules([str(root)]):
        if module.name in sys.stdlib_module_names and not module.name.startswith("_"):
            path = root / module.name
            yield from path.glob("*.py") if module.ispkg else [path.with_suffix(".py")]


def paragraphs(text: str) -> Iterator[str]:
    """The beginnings of its paragraphs of plain sentences."""
    for part in re.split(r"\n\s*\n", textwrap.dedent(text)):
        words = part.split()
        if len(words) >= 16 and words[0][:1].isupper() and sum(w.isalpha() for w in words) > 0.7 * len(words):
            yield " ".join(words[: 12 + len(words) % 16])

"""What a pass changed, line by line, in the printer's text."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of a side-by-side diff: ``kind`` is equal, changed, removed, added or skipped (``before``: how many)."""

    kind: str
    before: str
    after: str


def unified(before: str, after: str, name: str, context: int = 2) -> str:
    """A unified diff of two programs' texts, '' where they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"before {name}", f"after {name}", n=context, lineterm=""
    )
    return "\n".join(lines)


def side_by_side(before: str, after: str, context: int = 3) -> Iterator[Row]:
    """The rows of a side-by-side diff; long equal stretches are skipped but for ``context`` lines at their ends."""
    a, b = before.splitlines(), after.splitlines()
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if a != b else []
    for tag, i, i_end, j, j_end in blocks:
        left, right = a[i:i_end], b[j:j_end]
        if tag == "equal":
            first, last = i == 0, i_end == len(a)
            head, tail = 0 if first else context, 0 if last else context
            if len(left) <= head + tail + 1:
                yield from (Row("equal", x, x) for x in left)
                continue
            yield from (Row("equal", x, x) for x in left[:head])
            yield Row("skipped", str(len(left) - head - tail), "")
            yield from (Row("equal", x, x) for x in left[len(left) - tail :])
            continue
        yield from paired(left, right)


def paired(left: list[str], right: list[str]) -> Iterator[Row]:
    """Rows of two stretches that differ: lines that define the same value stand side by side."""
    names = [[line.split(":")[0] for line in side] for side in (left, right)]
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, *names, autojunk=False).get_opcodes():
        if tag == "equal":
            for old, new in zip(left[i:i_end], right[j:j_end]):
                yield Row("equal" if old == new else "changed", old, new)
            continue
        yield from (Row("removed", old, "") for old in left[i:i_end])
        yield from (Row("added", "", new) for new in right[j:j_end])

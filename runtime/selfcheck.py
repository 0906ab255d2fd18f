"""Runs every method of an artifact once, and checks that a row's bits do not depend on the rows beside it.

``python -m eyas.runtime.selfcheck FOLDER`` prints a line a method; lowering runs it in a process of its own.
"""

import sys
from pathlib import Path

import numpy as np

from eyas.runtime.artifact import Artifact, Method, Program
from eyas.runtime.native import DTYPES, NAMES, Tensor


def inputs_of(method: Method, start: int, rows: int, vocab_size: int) -> list[np.ndarray]:
    """Arbitrary but fixed inputs: what position p gets does not depend on how calls cut the positions."""
    positions = np.arange(start, start + rows, dtype=np.int64)
    arrays = []
    for spec in method.spec.inputs:
        if len(spec.sizes) == 1:
            arrays.append(positions)
        elif NAMES[spec.dtype] == "int64":
            arrays.append((positions * 7919 + 13)[None] % vocab_size)
        else:
            columns = np.arange(spec.sizes[2])
            values = np.sin(0.37 * positions[:, None] + 0.11 * columns[None])[None].astype(np.float32) * 2
            bits = values.view(np.uint32) >> 16 if NAMES[spec.dtype] == "bfloat16" else values
            arrays.append(bits.astype(DTYPES[NAMES[spec.dtype]][1]))
    return arrays


def row_invariance(program: Program, method: Method, outputs: list[int], rows: int) -> list[int]:
    """The call sizes at which some row of the first ``rows`` positions has other bits than when it is called alone, in
    some of ``outputs``.
    """
    vocab_size = int(program.constants["get_vocab_size"])

    def run(step: int) -> list[np.ndarray]:
        program.reset()
        parts = [method(*inputs_of(method, at, min(step, rows - at), vocab_size)) for at in range(0, rows, step)]
        return [np.concatenate([part[i].array for part in parts], axis=1) for i in outputs]

    alone = run(1)
    return [
        step for step in range(2, rows + 1)
        if any(a.tobytes() != b.tobytes() for a, b in zip(alone, run(step)))
    ]  # fmt: skip


def is_finite(output: Tensor) -> bool:
    """Whether a tensor has no infinities and NaNs; those of bfloat16 have all bits of the exponent set."""
    array = output.array
    if output.dtype == "bfloat16":
        return bool((array & 0x7F80 != 0x7F80).all())
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def check(program: Program) -> list[str]:
    """A line a method. Raises ``RuntimeError`` for an output that is not finite, or rows that depend on each other."""
    lines, vocab_size = [], int(program.constants["get_vocab_size"])
    for name, method in program.methods.items():
        for rows in dict.fromkeys((1, min(3, method.max_rows))):
            program.reset()
            for output in method(*inputs_of(method, 0, rows, vocab_size)):
                if not is_finite(output):
                    raise RuntimeError(f"method {name!r} gives values that are not finite with {rows} rows")
        text = f"{name}: runs with {method.min_rows} to {method.max_rows} rows"
        if program.device == "cuda" and not name.startswith("target_"):
            lines.append(text)  # of the others, any row's bits serve: prefill is cut the same way for every decoder
            continue
        by_row = [i for i, spec in enumerate(method.spec.outputs) if len(spec.sizes) > 1 and spec.sizes[1] > 1]
        if by_row:
            rows = min(method.max_rows, 8)
            broken = row_invariance(program, method, by_row, rows)
            if broken:
                raise RuntimeError(
                    f"method {name!r}: a row of a call of {broken[0]} rows has other bits than the row alone, so "
                    f"speculative and greedy text may differ; a pass left a kernel whose rows depend on each other"
                )
            text += f"; rows are bit-equal in calls of 1 to {rows}"
        lines.append(text)
    program.reset()
    return lines


def main() -> int:
    try:
        program = Artifact.open(Path(sys.argv[1]), check_data=False).load()
        print("\n".join(check(program)))
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

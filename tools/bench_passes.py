"""Seconds of each pass and of the checks after it, on random decoders of growing depth."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from rich.console import Console
from rich.table import Table

GLOBAL_EVERY = 6  # layers of Gemma 3: five sliding ones, then a global one
REPEATS = 3


def deep_program(n_layers: int):
    """``target_verify`` of a tiny Gemma 3 with ``n_layers`` layers, in int4."""
    import torch

    from eyas.lowering.lower import DTYPES, open_draft
    from eyas.lowering.trace import Limits, trace_methods
    from eyas.models.eagle3 import Eagle3Head
    from eyas.models.recipe import load_recipe, materialize
    from eyas.models.speculator import Eagle3Speculator
    from eyas.models.target import Checkpoint, TokenizerSource
    from eyas.models.tiny_targets import build, random_tensors, tiny_config
    from eyas.passes.program import Program

    config = tiny_config("gemma3", n_layers)
    sliding, full = config.layers[0], config.layers[2]
    layers = tuple(full if i % GLOBAL_EVERY == GLOBAL_EVERY - 1 else sliding for i in range(n_layers))
    config = replace(config, layers=layers)
    target = build(config, 64, DTYPES["cpu"])
    checkpoint = Checkpoint(
        config,
        random_tensors(build(config, 1, torch.float32), 0),
        {"format": "random"},
        TokenizerSource("none"),
        2,
        (1,),
    )
    draft = open_draft("untrained", checkpoint)
    recipe = load_recipe("int4")
    materialize(target, "target.", checkpoint.tensors, recipe, DTYPES["cpu"], config.norm_offset)
    speculator = Eagle3Speculator(target, Eagle3Head(draft.config, 64, DTYPES["cpu"]))
    materialize(speculator.draft, "draft.", draft.tensors, recipe, DTYPES["cpu"])
    return Program(trace_methods(speculator, Limits(64, 8), ["target_verify"]))


def bench_passes(depths: Sequence[int]) -> dict[str, object]:
    """The pipeline of lowering over ``target_verify`` of each depth, medians of ``REPEATS`` runs; growth is per node of
    the traced graph.
    """
    from eyas.lowering.pipelines import pipeline_for
    from eyas.passes.numerics import copy_program
    from eyas.passes.pipeline import run_pipeline
    from eyas.passes.registry import pipeline_text

    passes = pipeline_for("cpu", None)
    programs = {depth: deep_program(depth) for depth in depths}
    runs = {depth: [] for depth in depths}
    for _ in range(REPEATS):
        for depth, program in programs.items():
            runs[depth].append(run_pipeline(copy_program(program), passes))
    table = Table(title=f"seconds of passes and of the checks after them: {pipeline_text(passes)}")
    table.add_column("pass")
    for depth in depths:
        table.add_column(f"{depth} layers", justify="right")
    total = dict.fromkeys(depths, 0.0)
    for i, one in enumerate(passes):
        cells = []
        for depth in depths:
            rewriting = median(records[i].seconds for records in runs[depth])
            checking = median(records[i].verify_seconds for records in runs[depth])
            total[depth] += rewriting + checking
            cells.append(f"{rewriting:.3f} + {checking:.3f}")
        table.add_row(str(one), *cells)
    nodes = {depth: records[0].nodes_before for depth, (records, *_) in runs.items()}
    table.add_row("all", *(f"{total[depth]:.2f}" for depth in depths))
    table.add_row("nodes as traced", *(str(nodes[depth]) for depth in depths))
    table.add_row("microseconds a node", *(f"{1e6 * total[depth] / nodes[depth]:.0f}" for depth in depths))
    Console().print(table)
    return {"seconds": total, "nodes": nodes}

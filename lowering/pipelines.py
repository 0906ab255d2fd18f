"""Named pipelines, as data. ``--passes`` replaces a device's ``OPTIMISE``; its ``FINISH`` always runs as well."""

from eyas.passes.base import Pass
from eyas.passes.pipeline import arrange
from eyas.passes.registry import parse_pipeline

OPTIMISE: dict[str, str] = {
    "cpu": "remove_noop,split_copy_to_slice,midm_sdpa,int4_smallm,dead_code,materialize_tables",
    # Without midm_sdpa, whose operator has no body there, and materialize_tables, which has none and gains nothing: a
    # few angles computed again in a kernel that waits for memory take no time. split_argmax stands here alone: a row in
    # one part keeps one processor of a card busy, and is no slower on a core.
    "cuda": "remove_noop,split_copy_to_slice,splitk_sdpa,fuse_projections,int4_smallm,split_argmax,dead_code",
}

# What a program for the device cannot do without: rows that do not depend on each other, one storage a name, and native
# code of which each part is compiled once: 8 s a block and 25 ms a node, with g++ 12.
FINISH: dict[str, str] = {
    "cpu": "masked_sdpa,panel_linear,share_buffers,outline_blocks{overhead=320}",
    "cuda": "splitk_sdpa,fragment_linear,share_buffers,outline_blocks{overhead=320}",
}


def pipeline_for(device: str, passes: str | None) -> list[Pass]:
    """The whole pipeline: ``passes`` in their order, or those of ``OPTIMISE``, and those of ``FINISH`` that they do not
    name, placed by the facts that each requires and breaks. Raises ``ValueError`` for a device without a pipeline, and
    ``PassError`` for passes that cannot be ordered.
    """
    if device not in FINISH:
        raise ValueError(f"unknown device {device!r}; allowed: {', '.join(FINISH)}")
    asked = parse_pipeline(OPTIMISE[device] if passes is None else passes)
    named = {one.name for one in asked}
    finish = [one for one in parse_pipeline(FINISH[device]) if one.name not in named]
    return arrange([*asked, *finish], kept=len(asked))

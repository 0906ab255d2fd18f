"""Named pipelines, as data. ``--passes`` replaces a device's ``OPTIMISE``; its ``FINISH`` always follows."""

OPTIMISE: dict[str, str] = {
    "cpu": "split_copy_to_slice,materialize_tables",
}

# What a program for the device cannot do without: rows that do not depend on each other, and one storage a name.
FINISH: dict[str, str] = {
    "cpu": "masked_sdpa,panel_linear,share_buffers",
}


def pipeline_for(device: str, passes: str | None) -> str:
    """The text of the whole pipeline. Raises ``ValueError`` for a device without one."""
    if device not in FINISH:
        raise ValueError(f"unknown device {device!r}; allowed: {', '.join(FINISH)}")
    first = OPTIMISE[device] if passes is None else passes
    return ",".join(part for part in (first.strip().strip(","), FINISH[device]) if part)

"""The draft heads that come with the project, each for one checkpoint of a target."""

import json
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / "heads"


def shipped_head(checkpoint: Mapping[str, object]) -> Path | None:
    """The folder of the head that was trained for a checkpoint, by the ``sha256`` of the checkpoint's identity; None
    where there is none.
    """
    for card in sorted(FOLDER.glob("*/card.json")):
        trained_for = json.loads(card.read_text(encoding="utf-8"))["target"]
        if trained_for["sha256"] == checkpoint.get("sha256"):
            return card.parent
    return None

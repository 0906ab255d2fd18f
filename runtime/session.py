"""An artifact's text side: its tokenizer with the start token, stop ids and chat template that the manifest records."""

from eyas.runtime.artifact import TOKENIZER, Artifact
from eyas.runtime.text import Tokenizer


def open_tokenizer(artifact: Artifact) -> Tokenizer:
    """The tokenizer of an artifact. Raises ``ValueError`` for a damaged one."""
    facts = artifact.manifest["tokenizer"]
    return Tokenizer.load(
        artifact.path / TOKENIZER,
        bos_id=facts["bos_id"],
        add_bos=facts["add_bos"],
        stop_ids=facts["stop_ids"],
        chat_template=facts["chat_template"],
    )

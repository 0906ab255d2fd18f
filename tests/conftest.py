"""Programs that many tests run. Each is lowered once a session, all with one cache of compiled code.

``EYAS_TEST_CACHE`` names a folder to keep that cache in between sessions; without it, every session compiles anew.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

# Before the first library with OpenMP is loaded: threads that spin while they wait stall tests on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import chain_target
import pytest

from eyas.lowering.lower import Lowering, Report, Request, lower, open_draft
from eyas.models.speculator import Eagle3Speculator
from eyas.models.target import TARGETS
from eyas.runtime.artifact import Artifact, Program


@dataclass
class Notes:
    """A progress that remembers what it was told."""

    stages: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.stages.append(name)
        yield

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass(frozen=True)
class Lowered:
    """An artifact, what it was made from, and what lowering said."""

    request: Request
    report: Report
    notes: list[str]

    @property
    def path(self) -> Path:
        return self.request.out

    def load(self) -> Program:
        return Artifact.open(self.path).load()

    def copy(self, folder: Path) -> Path:
        """A copy that a test may damage."""
        return Path(shutil.copytree(self.path, folder))

    def speculator(self) -> Eagle3Speculator:
        """The same model, eagerly."""
        return eager_speculator(self.request)


def lower_quietly(request: Request) -> Lowered:
    progress = Notes()
    return Lowered(request, lower(request, progress), progress.notes)


def eager_speculator(request: Request) -> Eagle3Speculator:
    lowering = Lowering(request, Notes())
    lowering.checkpoint = lowering.spec.open_checkpoint(request.checkpoint)
    lowering.draft = open_draft(request.draft, lowering.checkpoint)
    lowering.load_model()
    return lowering.speculator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file comes first, so that no worker is left with it at the end."""
    items.sort(key=lambda item: item.path.name != "test_real_model.py")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> Iterator[Path]:
    """The cache of everything that tests lower, and of whatever asks for the default one."""
    kept, base = os.environ.get("EYAS_TEST_CACHE"), tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # what all workers share
    root = Path(kept) if kept else base / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EYAS_CACHE", str(root))
        patch.setitem(TARGETS, chain_target.SPEC.name, chain_target.SPEC)
        yield root


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="session")
def tiny(artifacts) -> Lowered:
    """Gemma 3 in int8 with an untrained head, 64 positions, windows of 8 rows, and ``target_logits``."""
    return lower_quietly(
        Request("tiny_gemma3", artifacts / "tiny", max_seq_len=64, max_prefill=8, methods=("target_logits",))
    )


@pytest.fixture(scope="session")
def gemma4(artifacts) -> Lowered:
    """Gemma 4 in int4 with an untrained head."""
    return lower_quietly(
        Request("tiny_gemma4", artifacts / "gemma4", quant="int4", max_seq_len=64, max_prefill=8, max_chain=3, chain=3)
    )


@pytest.fixture(scope="session")
def chain(artifacts) -> Callable[..., Lowered]:
    """``chain(kind)``: target and heads of ``chain_target``, dense; compiled for the first kind, which serves all."""
    made: dict[tuple, Lowered] = {}

    def get(kind: str, max_positions: int | None = None) -> Lowered:
        key = kind, max_positions
        if key not in made:
            name = f"chain_{kind}_{max_positions or 'any'}"
            head = chain_target.write_chain_head(artifacts / f"{name}_head", kind, max_positions)
            made[key] = lower_quietly(
                Request("chain", artifacts / name, draft=str(head), quant="none", max_seq_len=64, max_prefill=8)
            )
        return made[key]

    return get


@pytest.fixture(scope="session")
def lowered(tiny, gemma4, chain) -> dict[str, Lowered]:
    """The programs that decoders are tried on, by name."""
    return {"tiny": tiny, "gemma4": gemma4, **{kind: chain(kind) for kind in ("accept", "reject", "mid")}}


@pytest.fixture(scope="session")
def programs(lowered) -> dict[str, Program]:
    """The same, loaded once for all tests: a decoder starts by forgetting what is cached."""
    return {name: made.load() for name, made in lowered.items()}


__all__ = ["Lowered", "Notes", "eager_speculator", "lower_quietly", "replace"]

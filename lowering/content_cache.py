"""Finished things in a folder, by the hash of what they were made from: whole or absent, and checked when read."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

INDEX = "entry.json"
MAKING = ".making-"
STALE = 86400.0  # seconds after which whoever was making an entry is taken to be gone


def default_root() -> Path:
    """Where caches live: ``$EYAS_CACHE``, or ``eyas`` in the user's cache folder."""
    base = os.environ.get("EYAS_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas"


def key_of(*parts: object) -> str:
    """The hash of some text: each part's ``str``, in order."""
    digest = hashlib.sha256()
    for part in parts:
        data = str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class ContentCache:
    """Entries are folders ``root/kind/key`` of files, written elsewhere and renamed into place.

    Two writers of one key do not disturb each other: the first one wins. An entry whose files do not match their
    recorded hashes is removed and made again. The least recently used ones go when ``max_bytes`` is passed. What is
    being written lies in folders named ``making`` and something; ``clear_making`` removes those of processes that were
    ended.
    """

    root: Path
    max_bytes: int = 8 << 30
    making: str = MAKING

    def get(self, kind: str, key: str) -> Path | None:
        """The folder of an entry, or None if there is none or it is damaged."""
        folder = self.root / kind / key
        index = folder / INDEX
        if not index.is_file():
            return None
        if not self._intact(folder):
            shutil.rmtree(folder, ignore_errors=True)
            return None
        os.utime(index)
        return folder

    def _intact(self, folder: Path) -> bool:
        try:
            files: Mapping[str, str] = json.loads((folder / INDEX).read_text())
            return all(file_sha256(folder / name) == digest for name, digest in files.items())
        except (OSError, ValueError, AttributeError):
            return False

    def put(self, kind: str, key: str, fill: Callable[[Path], None]) -> Path:
        """Makes an entry: ``fill`` writes its files into an empty folder. Returns the entry's folder."""
        parent = self.root / kind
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=self.making, dir=parent) as making:
            folder = Path(making) / key
            folder.mkdir()
            fill(folder)
            files = {str(p.relative_to(folder)): file_sha256(p) for p in sorted(folder.rglob("*")) if p.is_file()}
            (folder / INDEX).write_text(json.dumps(files))
            final = parent / key
            try:
                os.rename(folder, final)
            except OSError:  # somebody else finished it first
                if self.get(kind, key) is None:
                    shutil.rmtree(final, ignore_errors=True)
                    os.rename(folder, final)
        self._trim(keep=final)
        return final

    def get_or_put(self, kind: str, key: str, fill: Callable[[Path], None]) -> tuple[Path, bool]:
        """(folder, whether it was there already)."""
        found = self.get(kind, key)
        return (found, True) if found is not None else (self.put(kind, key, fill), False)

    def clear_making(self, patience: float = 5.0) -> None:
        """Removes what is half written, when those who wrote it have ended. Their compilers may take a moment longer to
        end than they did: up to ``patience`` seconds.
        """
        until = time.monotonic() + patience
        while left := list(self.root.glob(f"*/{self.making}*")):
            for folder in left:
                shutil.rmtree(folder, ignore_errors=True)
            if time.monotonic() > until:
                break
            time.sleep(0.02)

    def _trim(self, keep: Path) -> None:
        for folder in self.root.glob(f"*/{MAKING}*"):
            with contextlib.suppress(OSError):  # another process is removing it
                if time.time() - folder.stat().st_mtime > STALE:
                    shutil.rmtree(folder, ignore_errors=True)
        entries = []
        for index in self.root.glob(f"*/*/{INDEX}"):
            try:
                used = index.stat().st_mtime
                size = sum(p.stat().st_size for p in index.parent.rglob("*") if p.is_file())
            except OSError:  # another process is removing it
                continue
            entries.append((used, size, index.parent))
        total = sum(size for _, size, _ in entries)
        for _, size, folder in sorted(entries):
            if total <= self.max_bytes:
                break
            if folder != keep:
                shutil.rmtree(folder, ignore_errors=True)
                total -= size

"""What the command-line tools share: progress on stderr, errors as one line, files that are whole or absent."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PATIENCE = 10.0  # seconds that cleaning up may take before another SIGTERM interrupts it
HEARTBEAT = 10.0  # seconds between signs of life where there is no terminal
USER_ERRORS = (ValueError, FileNotFoundError, NotADirectoryError, PermissionError, MemoryError, KeyError, TypeError)


class ConsoleProgress:
    """Stages with elapsed time: a live line on a terminal, a line now and then elsewhere. Everything goes to stderr."""

    def __init__(self, verbose: bool = True):
        self.console = Console(stderr=True, highlight=False)
        self.verbose, self.start = verbose, time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        if self.console.is_terminal:
            columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
            with Progress(*columns, console=self.console, transient=True) as live:
                live.add_task(name, total=None)
                yield
        else:
            with self._heartbeat(name, begin):
                yield
        self._line(f"{name}: {time.perf_counter() - begin:.1f} s")

    @contextmanager
    def _heartbeat(self, name: str, begin: float) -> Iterator[None]:
        done = threading.Event()

        def beat() -> None:
            while not done.wait(HEARTBEAT):
                self._line(f"{name} ... {time.perf_counter() - begin:.0f} s")

        thread = threading.Thread(target=beat, daemon=True)
        self._line(f"{name} ...")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def note(self, text: str) -> None:
        if self.verbose:
            self._line("  " + text)

    def _line(self, text: str) -> None:
        self.console.print(f"[{time.perf_counter() - self.start:6.1f} s] {text}", markup=False, soft_wrap=True)


class Terminated(KeyboardInterrupt):
    """The process was asked to end, and does what it does on Ctrl-C."""


@contextmanager
def asked_to_end() -> Iterator[None]:
    """Raises ``Terminated`` in the block when the process is sent SIGTERM; more of them are not heard for a while."""

    asked = float("-inf")

    def terminate(*_: object) -> None:
        nonlocal asked
        if time.monotonic() - asked > PATIENCE:
            asked = time.monotonic()
            raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def run_tool(body: Callable[[], int]) -> int:
    """Runs a tool's body. What the user can put right becomes one line and exit code 2; Ctrl-C becomes 130, SIGTERM
    143.
    """
    try:
        with asked_to_end():
            return body()
    except Terminated:
        print("terminated; nothing half-written was left", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("interrupted; nothing half-written was left", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except USER_ERRORS as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"error: {text}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def check_writable(path: Path | None) -> None:
    """Says before the work, not after it, that a file cannot be written there. Raises ``ValueError``."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"no folder {path.parent} for {path.name}; make it first, or name another file")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"the folder {path.parent} may not be written to; name a file elsewhere")


def write_json(path: Path, data: Mapping) -> None:
    """Writes a JSON file under a temporary name, then renames it."""
    check_writable(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)

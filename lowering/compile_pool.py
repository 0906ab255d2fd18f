"""Compiles blocks side by side, in processes of their own, which start while the methods are being traced."""

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from eyas.lowering.aoti_cpu import HOSTS, CompiledBlock, find_compiled
from eyas.lowering.content_cache import MAKING, ContentCache
from eyas.passes.program import Block


def compiler_for(host: str) -> ModuleType:
    """The module that compiles for a host."""
    return compiler_of(next(device for device, hosts in HOSTS.items() if host in hosts))


def compiler_of(device: str) -> ModuleType:
    """``aoti_cpu`` or ``aoti_cuda``, which have the same functions."""
    return import_module(f"eyas.lowering.aoti_{device}")


def default_jobs() -> int:
    """Compiler processes at a time: one a core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# a process that compiles is one of as many as there are cores: it starts none of its own to compile kernels
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}

USUAL_BLOCKS = 10  # of a program: more processes would only take cores from tracing


class Worker:
    """One process that compiles, a job at a time."""

    def __init__(self, cache: ContentCache):
        self._messages = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        command = [
            sys.executable, "-m", "eyas.lowering.compile_worker", str(cache.root), cache.making,
            str(torch.get_num_threads()),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._messages, text=True,
            start_new_session=True, env=os.environ | ALONE,
        )  # fmt: skip

    def ask(self, job: Mapping[str, object]) -> None:
        """Has a job done. Raises ``RuntimeError`` where it fails, or the process ends."""
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        if not line:
            status = self._process.wait()
            hint = " (killed: is there enough memory? --jobs 1 takes less)" if status == -signal.SIGKILL else ""
            raise RuntimeError(f"a compiler process ended with status {status}{hint}: {self._last_words()}")
        if error := json.loads(line).get("error"):
            raise RuntimeError(error)

    def _last_words(self) -> str:
        self._messages.seek(0)
        lines = self._messages.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        """Ends the process and whatever it started."""
        for kind, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):  # the second ends what the first has left
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=seconds)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._messages.close()


class CompilePool:
    """Up to ``jobs`` processes that share a cache, for use in a ``with``: they end with it.

    They start when there is something to compile, or at once where that is likely: where the cache knows nothing of
    this machine, when libraries and headers are made ready meanwhile.
    """

    def __init__(self, cache: ContentCache, jobs: int, device: str = "cpu"):
        self.cache = replace(cache, making=f"{MAKING}{secrets.token_hex(4)}-")
        self._lock = threading.Lock()
        self._ended = False
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._threads = ThreadPoolExecutor(jobs)
        self._ready: list[Future] = []
        if not compiler_of(device).is_prepared(cache):
            self._ready = [
                self._submit({"do": "prepare" if i == 0 else "start", "device": device})
                for i in range(min(jobs, USUAL_BLOCKS))
            ]

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._ended = True
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()
        self.cache.clear_making()

    def _submit(self, job: Mapping[str, object]) -> Future:
        def do() -> None:
            try:
                worker = self._free.get_nowait()
            except queue.Empty:
                with self._lock:
                    if self._ended:
                        raise RuntimeError("the pool has ended") from None
                    worker = Worker(self.cache)
                    self._workers.append(worker)
            try:
                worker.ask(job)
            finally:
                self._free.put(worker)

        return self._threads.submit(do)

    def compile(
        self, blocks: Mapping[str, Block], host: str, done: Callable[[int], None] = lambda left: None
    ) -> dict[str, CompiledBlock]:
        """Native code of every block, the largest ones first; ``done`` is told how many are left. Raises
        ``RuntimeError`` for one that cannot be compiled.
        """
        compiler = compiler_for(host)
        for block in blocks.values():
            compiler.refuse_without_body(block.program)
        for future in self._ready:
            future.result()
        keys = {name: compiler.block_key(block, host, self.cache) for name, block in blocks.items()}
        found = {name: find_compiled(self.cache, key) for name, key in keys.items()}
        waiting = sorted((n for n, one in found.items() if one is None), key=lambda n: -blocks[n].size)
        with tempfile.TemporaryDirectory(prefix="eyas-") as folder:
            futures = {}
            for name in waiting:
                block, path = blocks[name], Path(folder) / f"{name}.pt2"
                torch.export.save(block.program, path)
                futures[name] = self._submit({
                    "do": "block", "program": str(path), "key": block.key, "n_constants": block.n_constants,
                    "n_written": block.n_written, "size": block.size, "host": host, "cache_key": keys[name],
                })  # fmt: skip
            for left, (name, future) in enumerate(futures.items()):
                done(len(futures) - left)
                future.result()
                found[name] = find_compiled(self.cache, keys[name], cached=False)
                if found[name] is None:
                    raise RuntimeError(
                        f"block {name} was compiled, but the cache in {self.cache.root} does not hold it"
                    )
        return found

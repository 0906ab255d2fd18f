"""Compiler processes side by side: what they make is what one makes, and how they fail and end."""

import os
import queue
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from ir import ROWS, Function, export, randn

from eyas.lowering import aoti_cpu, compile_pool
from eyas.lowering.aoti_cpu import compile_block
from eyas.lowering.compile_pool import CompilePool, Worker, default_jobs
from eyas.lowering.content_cache import ContentCache
from eyas.lowering.cpu_kernels import build_libraries
from eyas.passes.outline_blocks import OutlineBlocks
from eyas.passes.program import Block, Program

X = randn(ROWS, 32)


def block(power: int) -> Block:
    program = Program({"forward": export(Function(lambda m, x: (x**power) @ m.w, w=randn(32, 32)), X)})
    OutlineBlocks(unrolled=True).run(program)
    (only,) = program.blocks.values()
    return only


@pytest.fixture(scope="module")
def own(cache, tmp_path_factory) -> ContentCache:
    """A cache of its own with nothing but the kernels."""
    build_libraries(ContentCache(cache))
    folder = tmp_path_factory.mktemp("pool")
    (folder / "cpu_kernels").symlink_to(ContentCache(cache).root / "cpu_kernels")
    return ContentCache(folder)


@pytest.fixture(scope="module")
def compiled(own):
    """Three blocks by two processes."""
    blocks = {str(power): block(power) for power in (2, 3, 4)}
    with CompilePool(own, 2) as pool:
        made = pool.compile(blocks, "eyas")
        workers = list(pool._workers)
    return blocks, made, workers


def test_every_block_is_compiled_by_few_processes(compiled):
    blocks, made, workers = compiled
    assert set(made) == set(blocks) and len({one.code for one in made.values()}) == 3
    assert not any(one.cached for one in made.values()) and all(one.seconds > 0 for one in made.values())
    assert len(workers) == 2 and all(worker._process.poll() is not None for worker in workers), "they end with the pool"


def test_it_is_what_one_process_makes(compiled, own):
    """Found by the same key: what the other process read is the same graph."""
    blocks, made, _ = compiled
    again = compile_block(blocks["3"], own)
    assert again.cached and (again.code, again.constants) == (made["3"].code, made["3"].constants)


def test_nothing_starts_where_everything_is_known(compiled, own):
    blocks, made, _ = compiled
    with CompilePool(own, 2) as pool:
        again = pool.compile(blocks, "eyas")
        assert not pool._workers
    assert all(one.cached for one in again.values()) and {n: o.code for n, o in again.items()} == {
        n: o.code for n, o in made.items()
    }


def test_a_damaged_block_alone_is_compiled_anew(compiled, own):
    blocks, made, _ = compiled
    made["2"].code.write_bytes(b"damaged")
    with CompilePool(own, 2) as pool:
        again = pool.compile(blocks, "eyas")
        assert len(pool._workers) == 1
    assert {name: one.cached for name, one in again.items()} == {"2": False, "3": True, "4": True}
    assert again["2"].code.stat().st_size > 1000


def test_two_pools_at_once_make_the_same(own):
    blocks = {"5": block(5)}
    with CompilePool(own, 1) as one, CompilePool(own, 1) as other:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(2) as threads:
            made = list(threads.map(lambda pool: pool.compile(blocks, "eyas"), (one, other)))
    assert made[0]["5"].code == made[1]["5"].code
    assert not list(own.root.glob("blocks/.making-*"))


def test_what_a_process_says_of_a_failure_is_raised(own, tmp_path):
    worker = Worker(own)
    try:
        with pytest.raises(RuntimeError, match=r"FileNotFoundError|No such file"):
            worker.ask({"do": "block", "program": str(tmp_path / "nothing.pt2"), "host": "eyas"})
        worker.ask({"do": "start"})  # it goes on
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"ended with status -9 \(killed: .*--jobs 1 takes less\): "):
            worker.ask({"do": "start"})
    finally:
        worker.close()


@pytest.mark.parametrize("busy", [False, True])
def test_processes_end_with_the_one_that_started_them(busy, own, tmp_path):
    """Also where that one is killed: their input ends, and one with work to do looks for its parent."""
    root = tmp_path if busy else own.root  # an empty cache: building the libraries takes a while
    job = {"do": "prepare", "device": "cpu"}
    code = (
        "import json, sys, time; from pathlib import Path\n"
        "from eyas.lowering.compile_pool import Worker; from eyas.lowering.content_cache import ContentCache\n"
        "worker = Worker(ContentCache(Path(sys.argv[1]))); worker.ask({'do': 'start'})\n"
        "print(worker._process.pid, flush=True)\n"
        f"{busy} and worker.ask({job}); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    while busy and not list(root.glob("*/.making-*")):
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not is_running(pid):
            assert not list(root.glob("*/.making-*"))
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("a compiler process outlived the one that started it")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_operator_without_a_body_is_named_before_anything_starts(own):
    held = {"q": torch.ones(16, 32, dtype=torch.int8), "s": torch.ones(16)}
    function = Function(lambda m, x: torch.ops.eyas.int8_linear(x, m.q, m.s), **held)
    program = Program({"forward": export(function, X)})
    OutlineBlocks(unrolled=True).run(program)
    with CompilePool(own, 2) as pool:
        with pytest.raises(RuntimeError, match=r"operator eyas\.int8_linear\.default .* has no C\+\+ body"):
            pool.compile(program.blocks, "eyas")
        assert not pool._workers


def test_a_cache_that_knows_nothing_starts_them_at_once(tmp_path, monkeypatch):
    """And has libraries and headers made meanwhile, by one of them."""
    asked = []

    class Idle:
        def __init__(self, cache):
            pass

        def ask(self, job):
            asked.append(job["do"])
            time.sleep(0.2)

        def close(self):
            asked.append("close")

    monkeypatch.setattr(compile_pool, "Worker", Idle)
    with CompilePool(ContentCache(tmp_path), 3):
        time.sleep(0.1)
    assert sorted(asked) == ["close"] * 3 + ["prepare", "start", "start"]


def test_jobs_are_the_cores_that_may_be_used(monkeypatch):
    assert default_jobs() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_jobs() == 1


def test_preparing_compiles_something(own, monkeypatch):
    calls = []
    monkeypatch.setattr(aoti_cpu, "run_inductor", lambda *args: calls.append(args))
    aoti_cpu.prepare(own)
    (((program, host, _, folder)),) = calls
    assert host == "eyas" and not folder.exists() and len(program.graph.nodes) > 2


@pytest.mark.parametrize("deaf", [False, True], ids=["asked to end", "killed"])
def test_a_process_that_is_ended_leaves_nothing_half_written(deaf, own, tmp_path):
    cache = ContentCache(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cpu_kernels").symlink_to(own.root / "cpu_kernels")
    with CompilePool(cache, 1) as pool:
        pool._submit({"do": "start"}).result()
        torch.export.save(block(6).program, tmp_path / "block.pt2")
        job = {"do": "block", "program": str(tmp_path / "block.pt2"), "key": "6", "n_constants": 1, "n_written": 0}
        future = pool._submit({**job, "size": 2, "host": "eyas", "cache_key": "0123"})
        for _ in range(300):
            if list(cache.root.glob("blocks/.making-*")):
                break
            time.sleep(0.1)
        if deaf:
            os.kill(pool._workers[0]._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="a compiler process ended"):
        future.result()
    assert list(cache.root.glob("blocks")) and not list((cache.root / "blocks").iterdir())


def test_a_pool_that_ends_at_once_leaves_no_process(tmp_path, monkeypatch):
    """Also where its threads come to starting them too late."""

    class Late(queue.SimpleQueue):
        def get_nowait(self):
            time.sleep(1.0)
            return super().get_nowait()

    monkeypatch.setattr(compile_pool, "queue", SimpleNamespace(SimpleQueue=Late, Empty=queue.Empty))
    started, stock = [], Worker.__init__
    monkeypatch.setattr(Worker, "__init__", lambda self, cache: (stock(self, cache), started.append(self))[0])
    with CompilePool(ContentCache(tmp_path), 2):
        pass
    for worker in started:
        worker.close()
    assert not started and not list(tmp_path.iterdir())

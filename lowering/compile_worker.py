"""A process that compiles blocks: reads a job a line from its input, answers each with a line.

``python -m eyas.lowering.compile_worker CACHE MAKING THREADS``; ``eyas.lowering.compile_pool`` talks to it, and removes
what it leaves half written in folders of the cache named ``MAKING`` and something.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path


def end_with(parent: int) -> None:
    """Ends this process, and the compilers that it has started, when ``parent`` has ended, however it did."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGTERM)
    time.sleep(5)  # to remove its temporary files
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    parent = os.getppid()
    cache_root, making, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what a compiler prints is no answer
        import torch
        import torch._inductor.compile_fx  # seconds of work that need not wait for a job

        from eyas.kernels import register_triton_operators
        from eyas.lowering.compile_pool import compiler_for, compiler_of
        from eyas.lowering.content_cache import ContentCache
        from eyas.passes.program import Block

        torch.set_num_threads(threads)  # the compiler writes code for as many as there are
        cache = ContentCache(cache_root, making=making)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the compiler's temporary files are removed
        if os.getpgid(0) == os.getpid():  # a group of its own
            threading.Thread(target=end_with, args=(parent,), daemon=True).start()
        for line in sys.stdin:
            job = json.loads(line)
            try:
                if job["do"] == "prepare":
                    compiler_of(job["device"]).prepare(cache)
                elif job["do"] == "block":
                    if job["host"] == "cuda":
                        register_triton_operators()
                    program = torch.export.load(job["program"])
                    block = Block(job["key"], program, job["n_constants"], job["n_written"], job["size"])
                    compiler_for(job["host"]).compile_block(block, cache, job["host"], job["cache_key"])
                answer = {}
            except Exception as error:  # noqa: BLE001  whatever it is, the one who asked must be told
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The ExecuTorch delegate of compiled cpu methods, in the container format of the stock CUDA delegate."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import final

from executorch.backends.aoti.aoti_partitioner import AotiPartitioner
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import PartitionResult
from torch.export import ExportedProgram
from torch.fx import Node

from eyas.runtime.artifact import HOST_KEY
from eyas.runtime.payload import Constant, encode

_payloads: Mapping[str, tuple[Path, tuple[Constant, ...]]] = {}
_host: Path | None = None
STUB = "eyas::compiled_block"


@contextlib.contextmanager
def payloads(calls: Mapping[str, tuple[Path, tuple[Constant, ...]]], host: Path | None) -> Iterator[None]:
    """What the delegates find while they are lowered: the native code and the constants of each call, by its name, and
    the host library, if any.
    """
    global _payloads, _host
    before, (_payloads, _host) = (_payloads, _host), (calls, host)
    try:
        yield
    finally:
        _payloads, _host = before


def is_stub(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "name", lambda: "")().startswith(STUB)


@final
class CpuBackend(BackendDetails):
    """Carries native code that was compiled before; the graph it is given is a stub."""

    @staticmethod
    def preprocess(edge_program, compile_specs: list[CompileSpec]) -> PreprocessResult:
        call = next(node.args[0] for node in edge_program.graph.nodes if is_stub(node))
        path, constants = _payloads[call]
        code = path.read_bytes()
        key = hashlib.sha256(code).hexdigest() + "_so_blob"
        store = NamedDataStore()
        store.add_named_data(key, code, 1, None)
        if _host is not None:
            store.add_named_data(HOST_KEY, _host.read_bytes(), 1, None)
        return PreprocessResult(
            processed_bytes=encode(key, list(constants)),
            debug_handle_map={},
            data_store_output=store.get_named_data_store_output(),
        )


class CpuPartitioner(AotiPartitioner):
    """Hands each call of a block, with the pieces of its results, to a ``CpuBackend`` of its own."""

    def __init__(self):
        super().__init__(CpuBackend.__name__, [])

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        tags = {}
        for node in exported_program.graph.nodes:
            if is_stub(node):
                tag = f"call_{len(tags)}"
                tags[tag] = self.delegation_spec
                for one in (node, *node.users):
                    one.meta["delegation_tag"] = tag
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)

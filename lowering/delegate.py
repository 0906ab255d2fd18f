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

from eyas.runtime.artifact import HOST_KEY
from eyas.runtime.payload import Constant, encode

_payloads: Mapping[str, tuple[Path, tuple[Constant, ...]]] = {}
_host: Path | None = None


@contextlib.contextmanager
def payloads(methods: Mapping[str, tuple[Path, tuple[Constant, ...]]], host: Path | None) -> Iterator[None]:
    """What the delegate finds while it is lowered: each method's native code and constants, and the host library, if
    any.
    """
    global _payloads, _host
    before, (_payloads, _host) = (_payloads, _host), (methods, host)
    try:
        yield
    finally:
        _payloads, _host = before


@final
class CpuBackend(BackendDetails):
    """Carries native code that was compiled before; the graph it is given is a stub."""

    @staticmethod
    def preprocess(edge_program, compile_specs: list[CompileSpec]) -> PreprocessResult:
        method = next(spec.value.decode() for spec in compile_specs if spec.key == "method_name")
        path, constants = _payloads[method]
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
    """Hands a whole method to ``CpuBackend``."""

    def __init__(self, method: str):
        super().__init__(CpuBackend.__name__, [CompileSpec("method_name", method.encode())])

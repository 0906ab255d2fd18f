"""Compiled code as an ExecuTorch delegate, in the container format of the stock CUDA delegate."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from executorch.exir._serialize._named_data_store import NamedDataStore, NamedDataStoreOutput
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.export import ExportedProgram

from eyas.runtime.artifact import BACKENDS, HOST_KEY
from eyas.runtime.payload import Constant, encode


class NativeCode:
    """A file of native code, and the library it is linked against (``host``; None where that is torch's): what several
    delegates share.
    """

    def __init__(self, path: Path, host: Path | None, device: str = "cpu"):
        code = path.read_bytes()
        self.backend = BACKENDS[device]
        self.key = hashlib.sha256(code).hexdigest() + "_so_blob"
        store = NamedDataStore()
        store.add_named_data(self.key, code, 1, None)
        if host is not None:
            store.add_named_data(HOST_KEY, host.read_bytes(), 1, None)
        self.data: NamedDataStoreOutput = store.get_named_data_store_output()

    def delegate(self, stub: ExportedProgram, constants: Sequence[Constant]) -> LoweredBackendModule:
        """A delegate that runs the code with its own ``constants``. ``stub``: a program whose shapes are its shapes."""
        return LoweredBackendModule(stub, self.backend, encode(self.key, list(constants)), [], self.data)

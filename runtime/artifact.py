"""Opens what lowering wrote: checks it, then loads its methods over one pool of buffers."""

import hashlib
import json
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from eyas.runtime.buffers import BufferPool
from eyas.runtime.container_files import DelegateCall, MethodSpec, ProgramFile
from eyas.runtime.native import NAMES, Call, Chain, Container, Host, Tensor
from eyas.runtime.payload import decode, storage_key

FORMAT, FORMAT_VERSION = "eyas-artifact", 1
MANIFEST, PROGRAM, DATA, TOKENIZER = "manifest.json", "model.pte", "model.ptd", "tokenizer.json"
BACKENDS = {"cpu": "CpuBackend", "cuda": "CudaBackend"}  # the delegate of each device
HOST_KEY = "eyas_host"  # the program file's name for the host library's bytes


class ArtifactError(ValueError):
    """An artifact that cannot be used here; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class Artifact:
    """A folder that was checked but not loaded: ``path`` and its ``manifest``."""

    path: Path
    manifest: Mapping[str, object]

    @classmethod
    def open(cls, path: Path | str, check_data: bool = True) -> "Artifact":
        """Reads and checks an artifact, before anything of it is executed.

        Every file must have the size and hash that the manifest states (the data file's hash only with ``check_data``),
        and the native code must be for this machine and this torch. Raises ``ArtifactError``.
        """
        path = Path(path)
        if not path.is_dir():
            raise ArtifactError(f"no artifact at {path}; expected the folder that lowering wrote")
        file = path / MANIFEST
        if not file.is_file():
            raise ArtifactError(f"{path} has no {MANIFEST}; expected the folder that lowering wrote")
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            found = manifest["format"], manifest["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{file} is damaged ({error!r}); copy it again or lower again") from error
        if found != (FORMAT, FORMAT_VERSION):
            raise ArtifactError(
                f"{file} is {found[0]} version {found[1]}; this reader takes {FORMAT} {FORMAT_VERSION}; lower again"
            )
        artifact = cls(path, manifest)
        try:
            artifact._check_files(check_data)
            artifact._check_machine()
            artifact._check_parts()
        except (KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{file} is damaged ({error!r}); copy it again or lower again") from error
        return artifact

    def _check_files(self, check_data: bool) -> None:
        for name in (PROGRAM, DATA, TOKENIZER):
            facts, file = self.manifest["files"][name], self.path / name
            if not file.is_file():
                raise ArtifactError(
                    f"{file} is missing; an artifact consists of {MANIFEST}, {PROGRAM}, {DATA} and {TOKENIZER}; "
                    f"copy it again or lower again"
                )
            size = file.stat().st_size
            if size != facts["bytes"]:
                raise ArtifactError(
                    f"{file} has {size} bytes, the manifest says {facts['bytes']}; copy it again or lower again"
                )
            if name != DATA or check_data:
                with open(file, "rb") as data:
                    digest = hashlib.file_digest(data, "sha256").hexdigest()
                if digest != facts["sha256"]:
                    raise ArtifactError(
                        f"{file} does not match the manifest (sha256 {digest[:12]}..., expected "
                        f"{facts['sha256'][:12]}...); copy it again or lower again"
                    )

    def _check_machine(self) -> None:
        device = self.manifest["device"]
        if device["type"] not in BACKENDS:
            raise ArtifactError(
                f"{self.path} was lowered for {device['type']}; this runtime runs programs for {', '.join(BACKENDS)}"
            )
        if device["architecture"] != platform.machine():
            raise ArtifactError(
                f"{self.path} was lowered for {device['architecture']}, this machine is {platform.machine()}"
            )
        lacking = sorted(set(device["cpu_features"]) - present_features())
        if lacking:
            raise ArtifactError(
                f"{self.path} needs instruction sets that this machine lacks: {', '.join(lacking)}; lower again here"
            )
        if self.manifest["host"]["kind"] == "eyas":
            return
        made_with = self.manifest["versions"]["torch"]
        try:
            here = version("torch")
        except PackageNotFoundError:
            raise ArtifactError(
                f"{self.path} needs PyTorch's libraries, torch {made_with}; pip install torch"
            ) from None
        if here.split("+")[0].split(".")[:2] != made_with.split("+")[0].split(".")[:2]:
            raise ArtifactError(
                f"{self.path} was lowered with torch {made_with}, installed is {here}; "
                f"install that version or lower again"
            )
        if device["type"] == "cuda":
            from eyas.runtime.cuda_native import check_card  # here: it imports torch

            if reason := check_card(device):
                raise ArtifactError(f"{self.path} is a program for cuda, and {reason}; lower again for this machine")

    def _check_parts(self) -> None:
        """That what loading and the tokenizer read of the manifest is there, and of the right kind."""
        manifest, host, text = self.manifest, self.manifest["host"], self.manifest["tokenizer"]
        found = [(host["kind"], str), (text["stop_ids"], list), (text["add_bos"], bool)]
        found += [(text[key], object) for key in ("bos_id", "chat_template")]
        found += [(host[key], str) for key in ("name", "sha256") if host["kind"] == "eyas"]
        found += [(buffer["name"], str) for buffer in manifest["sharing"]]
        found += [(buffer["writers"], list) for buffer in manifest["sharing"]]
        for name in manifest["methods"] | manifest["native_code"]:
            ranges = manifest["methods"][name]
            found += [(digest, str) for digest in manifest["native_code"][name]]
            found += [(manifest["native_code"][name], list), (ranges["min_rows"], int), (ranges["max_rows"], int)]
        for value, kind in found:
            if not isinstance(value, kind):
                raise TypeError(f"{value!r} in the place of a {kind.__name__}")

    def load(self) -> "Program":
        """Loads the methods. Raises ``ArtifactError`` or ``ContainerError``."""
        if self.manifest["device"]["type"] == "cuda":
            from eyas.runtime.cuda_program import CudaProgram  # here: it imports torch

            return CudaProgram(self)
        return Program(self)

    def nbytes(self) -> int:
        """Bytes of all files that the manifest lists."""
        return sum(facts["bytes"] for facts in self.manifest["files"].values())


def present_features() -> set[str]:
    """Instruction sets of this machine, as Linux names them; what cannot be known counts as present."""
    try:
        with open("/proc/cpuinfo") as file:
            line = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return _Everything()
    return set(line.split(":", 1)[-1].split())


class _Everything(set):
    def __rsub__(self, other):
        return set()


class Method:
    """One method of a loaded program: checks its arguments, runs, and gives new tensors.

    ``max_seq_len`` and ``vocab_size`` bound what its positions and its tokens may be.
    """

    def __init__(
        self,
        spec: MethodSpec,
        rows: tuple[int, int],
        max_seq_len: int,
        vocab_size: int,
        host: Host | None,
        chain: Chain,
    ):
        self.name, self.spec, self.min_rows, self.max_rows = spec.name, spec, *rows
        self._host, self._chain = host, chain
        self._bounds = {1: ("positions", max_seq_len), 2: ("tokens", vocab_size)}  # by the number of dimensions

    def __call__(self, *inputs: Tensor | np.ndarray) -> list[Tensor]:
        """Runs the method. Raises ``TypeError`` for a wrong number or dtype, ``ValueError`` for a wrong shape."""
        if len(inputs) != len(self.spec.inputs):
            raise TypeError(f"method {self.name!r} takes {len(self.spec.inputs)} inputs, got {len(inputs)}")
        tensors, rows = [self._own(value) for value in inputs], set()
        for i, (tensor, spec) in enumerate(zip(tensors, self.spec.inputs)):
            if tensor.dtype != NAMES[spec.dtype]:
                raise TypeError(f"input {i} of method {self.name!r} is {NAMES[spec.dtype]}, got {tensor.dtype}")
            dynamic = len(spec.sizes) - 1 if len(spec.sizes) == 1 else 1  # the rows: [M] or [1, M, ...]
            fixed = [(d, s) for d, (s, want) in enumerate(zip(tensor.shape, spec.sizes)) if d != dynamic and s != want]
            if len(tensor.shape) != len(spec.sizes) or fixed:
                shape = ", ".join("rows" if d == dynamic else str(s) for d, s in enumerate(spec.sizes))
                raise ValueError(
                    f"input {i} of method {self.name!r} has shape {list(tensor.shape)}, expected [{shape}]"
                )
            rows.add(tensor.shape[dynamic])
        if len(rows) != 1 or not self.min_rows <= min(rows) <= self.max_rows:
            raise ValueError(
                f"method {self.name!r} takes {self.min_rows} to {self.max_rows} rows, the same in every input; "
                f"got {', '.join(map(str, sorted(rows)))}"
            )
        for i, tensor in enumerate(tensors):
            if tensor.dtype == "int64" and len(tensor.shape) in self._bounds:
                what, bound = self._bounds[len(tensor.shape)]
                low, high = int(tensor.array.min()), int(tensor.array.max())
                if low < 0 or high >= bound:
                    raise ValueError(
                        f"{what} of method {self.name!r} (input {i}) must lie in 0..{bound - 1}, got {low} to {high}"
                    )
        return self._run(tensors)

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._chain.run(tensors)

    def _own(self, value: Tensor | np.ndarray) -> Tensor:
        """``value`` as the native code takes it: a tensor of its own host, dense in row-major order."""
        host = self._host
        if isinstance(value, Tensor) and value.host is host and value.array.flags.c_contiguous:
            return value
        array, dtype = (value.array, value.dtype) if isinstance(value, Tensor) else (np.asarray(value), None)
        return Tensor.of(host, array if array.flags.c_contiguous else array.copy(), dtype)


class Program:
    """A loaded artifact: ``methods``, ``constants`` (the constant methods) and ``buffers``, the one pool they share."""

    device = "cpu"

    def __init__(self, artifact: Artifact):
        self.artifact, manifest = artifact, artifact.manifest
        self.epoch = 0
        file = ProgramFile(artifact.path / PROGRAM)
        self.constants = file.constants
        mutable = [storage_key(self.device, b["name"]) for b in manifest["sharing"] if b["writers"]]
        self.methods: dict[str, Method] = {}
        with tempfile.TemporaryDirectory(prefix="eyas-") as folder:  # private to this user; gone once it is mapped
            self._open(file, mutable, Path(folder))
            for name, spec in file.methods.items():
                calls = [self._call(file, spec, call, Path(folder)) for call in spec.calls]
                numbers = {value: i for i, value in enumerate(spec.input_values)}
                for call in spec.calls:
                    numbers |= {value: len(numbers) + i for i, value in enumerate(call.outputs)}
                steps = [
                    Call(container, tuple(numbers[value] for value in call.inputs))
                    for container, call in zip(calls, spec.calls)
                ]
                self.methods[name] = self._method(spec, steps, [numbers[value] for value in spec.output_values])

    def _open(self, file: ProgramFile, mutable: list[str], folder: Path) -> None:
        """Opens the host of the native code, and the buffers; ``mutable``: the keys of those that are written."""
        self.host = open_host(file, self.artifact.manifest["host"], folder)
        self.buffers = BufferPool(self.host, self.artifact.path / DATA, mutable)

    def _container(self, path: Path) -> Container:
        return Container(self.host, path)

    def _method(self, spec: MethodSpec, steps: list[Call], outputs: list[int]) -> "Method":
        return Method(spec, *self._bounds(spec.name), self.host, Chain(self.host, len(spec.inputs), steps, outputs))

    def _bounds(self, name: str) -> tuple[tuple[int, int], int, int]:
        """What a method's calls may have: rows, positions and token ids."""
        ranges = self.artifact.manifest["methods"][name]
        limits = (int(self.constants[fact]) for fact in ("get_max_seq_len", "get_vocab_size"))
        return (ranges["min_rows"], ranges["max_rows"]), *limits

    def _call(self, file: ProgramFile, spec: MethodSpec, call: DelegateCall, folder: Path) -> Container:
        """The native code of one call, with its constants; code that several calls share is loaded once."""
        if call.backend != BACKENDS[self.device]:
            raise ArtifactError(
                f"method {spec.name!r} is for the delegate {call.backend!r}; a program for {self.device} has "
                f"{BACKENDS[self.device]}"
            )
        try:
            key, constants = decode(call.payload)
        except ValueError as error:
            raise ArtifactError(f"{self.artifact.path / PROGRAM}: method {spec.name!r}: {error}") from error
        path = folder / f"{key[:64]}.so"
        if not path.exists():
            expected = next(
                (h for h in self.artifact.manifest["native_code"].get(spec.name, ()) if key.startswith(h)), None
            )
            unpack(file, key, expected, path)
        container = self._container(path)
        if len(call.outputs) != container.n_outputs:
            raise ArtifactError(
                f"method {spec.name!r} expects {len(call.outputs)} results of the native code {key[:12]}..., "
                f"which gives {container.n_outputs}; lower again"
            )
        container.bind({c.name: self.buffers.tensor(c) for c in constants})
        return container

    def method(self, name: str) -> Method:
        """A method by name. Raises ``KeyError`` naming those there are."""
        if name not in self.methods:
            raise KeyError(f"the program has no method {name!r}; it has {', '.join(self.methods)}")
        return self.methods[name]

    def reset(self) -> int:
        """Forgets all cached positions. Returns ``epoch``, the number of times that this was done."""
        self.buffers.reset()
        self.epoch += 1
        return self.epoch


def open_host(file: ProgramFile, facts: Mapping[str, str], folder: Path) -> Host:
    """The host that a program was linked for: torch's library, or the small one that travels in the program file."""
    if facts["kind"] == "torch":
        return Host.torch()
    return Host.load(unpack(file, HOST_KEY, facts["sha256"], folder / facts["name"]))


def unpack(file: ProgramFile, key: str, expected: str | None, path: Path) -> Path:
    """Writes a method's native code to ``path``, once its hash is what the manifest says."""
    code = file.named(key)
    digest = hashlib.sha256(code).hexdigest()
    if digest != expected:
        raise ArtifactError(f"the native code {key[:12]}... does not match the manifest; lower again")
    path.write_bytes(code)
    return path

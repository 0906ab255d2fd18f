"""Weight files of Hugging Face style folders: safetensors or ``pytorch_model.bin``, whole or in parts, read by rows."""

import hashlib
import json
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.models.weights import RowSource, TensorSource

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # in this order; each also in parts, with an index
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class SafetensorsRows:
    """A ``RowSource`` over one tensor of a safetensors file; nothing is read before it is asked for."""

    handle: safe_open
    name: str
    shape: tuple[int, ...]

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.handle.get_slice(self.name)[start:stop]


def open_weights(folder: Path, formats: tuple[str, ...] = WEIGHT_FILES) -> tuple[list[Path], dict[str, RowSource]]:
    """The weight files of ``folder``, and their tensors by the names in the files. ``formats``: names to look for.

    Raises ``FileNotFoundError`` if there are none or a part is missing, ``ValueError`` if one cannot be read.
    """
    for name in formats:
        if (folder / name).is_file():
            return [folder / name], open_file(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            return open_parts(index)
    here = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
    raise FileNotFoundError(
        f"{folder}: no weights, found {here}; expected {' or '.join(formats)}, or parts of it and an .index.json"
    )


def open_parts(index: Path) -> tuple[list[Path], dict[str, RowSource]]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index}: no 'weight_map'; expected the index of a checkpoint in parts")
    files = {name: index.parent / name for name in sorted(set(places.values()))}
    parts = {name: open_file(file) for name, file in files.items()}
    absent = sorted(name for name, part in places.items() if name not in parts[part])
    if absent:
        raise ValueError(f"{index} places tensors in parts that do not have them: {', '.join(absent)}")
    return list(files.values()), {name: parts[part][name] for name, part in places.items()}


def open_file(file: Path) -> dict[str, RowSource]:
    if not file.is_file():
        raise FileNotFoundError(f"no weight file {file}, which the index beside it names; is the download complete?")
    try:
        if file.suffix == ".safetensors":
            handle = safe_open(file, framework="pt")
            names = handle.keys()
            return {name: SafetensorsRows(handle, name, tuple(handle.get_slice(name).get_shape())) for name in names}
        # Only the zip layout can be mapped; the layout of before PyTorch 1.6 is read whole.
        data = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = next(iter(str(error).splitlines()), "it is empty")
        raise ValueError(
            f"{file} cannot be read as weights ({reason}); is it complete, and not a git-lfs pointer?"
        ) from error
    if not isinstance(data, dict) or not all(isinstance(value, Tensor) for value in data.values()):
        raise ValueError(f"{file} does not hold a plain dictionary of tensors; save the head's state_dict() instead")
    return {name: TensorSource(tensor) for name, tensor in data.items()}


def read_json(path: Path, hint: str = "", optional: bool = False) -> dict:
    """The object in a JSON file; an empty one if it is optional and absent. ``hint``: what to say of a missing one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise FileNotFoundError(f"no {path.name} in {path.parent}{'; ' if hint else ''}{hint}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, expected an object")
    return data


def file_sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()

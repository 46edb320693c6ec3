"""Save and load the weights of a model as one safetensors file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from miniray.errors import CheckpointError
from miniray.train.run import records
from miniray.train.run.tensors import tensorfile
from miniray.train.run.tensors.encoding import Encoder, decode

_STRUCTURE = "miniray"


def save_model(path: str | os.PathLike[str], weights: Any) -> Path:
    """Write weights to one safetensors file, atomically.

    Args:
        path: Path of the file. If writing fails, an existing file is unchanged.
        weights: A dict, list or tuple of arrays, which can be nested. Arrays are named by their
            keys or list indices, joined by dots, such as ``"encoder.0"``.

    Raises:
        CheckpointError: Writing failed.
    """
    path = Path(path)
    encoder = Encoder()
    skeleton = encoder.encode(weights, "model")
    entries = encoder.groups.get("model", {})
    kinds = {"np" if type(e.value).__module__ == "numpy" else "pt" for e in entries.values()}
    metadata = {_STRUCTURE: json.dumps(skeleton, allow_nan=False)}
    if len(kinds) == 1:  # other programs that read the format check this field
        metadata["format"] = kinds.pop()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        records.replace_path(path, lambda aside: tensorfile.write(aside, entries, metadata))
    except OSError as error:
        size = sum(entry.nbytes for entry in entries.values())
        raise CheckpointError(
            f"model file {path} of {size:,} bytes could not be written: {error.strerror}",
            entry=str(path),
        ) from error
    return path


def load_model(path: str | os.PathLike[str]) -> Any:
    """Read a safetensors file. For files of ``save_model``, return weights of the same structure.

    For files of other programs, return a dict of arrays by name. The arrays are torch tensors if
    the metadata names torch or if NumPy lacks one of the types, else NumPy arrays.

    Raises:
        CheckpointError: The file can't be read.
    """
    path = Path(path)
    try:
        with tensorfile.TensorFile(path) as file:
            if _STRUCTURE in file.metadata:
                return decode(json.loads(file.metadata[_STRUCTURE]), {"model": file})
            if file.metadata.get("format") == "pt" or file.needs_torch:
                return {name: file.torch(name) for name in file.names}
            return {name: file.numpy(name) for name in file.names}
    except ImportError as error:
        raise CheckpointError(
            f"model file {path} contains torch tensors, but torch isn't installed. Run "
            "pip install torch",
            entry=str(path),
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"model file {path} can't be read: {error}"
        raise CheckpointError(text, entry=str(path)) from error

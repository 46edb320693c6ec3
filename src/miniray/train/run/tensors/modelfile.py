"""A model's weights as one safetensors file, readable by anything that reads the format."""

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
    """Write weights (a dict, list or tuple of arrays, nested as you like) to one safetensors file.

    Arrays are named by the dict keys that lead to them, or ``"0"``, ``"1"``, … in a list; nested
    ones ``"encoder.0"``. The file is replaced whole: if writing fails, a ``CheckpointError`` is
    raised and ``path`` is as it was.
    """
    path = Path(path)
    encoder = Encoder()
    skeleton = encoder.encode(weights, "model")
    entries = encoder.groups.get("model", {})
    kinds = {"np" if type(e.value).__module__ == "numpy" else "pt" for e in entries.values()}
    metadata = {_STRUCTURE: json.dumps(skeleton, allow_nan=False)}
    if len(kinds) == 1:  # what other readers of the format look for
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
    """Read a safetensors file. What ``save_model`` wrote comes back in the form it had.

    A file of another program is a dict of arrays by name: torch tensors where it says it is
    torch's or has types that numpy lacks, else numpy arrays. Raises ``CheckpointError`` for a file
    that cannot be read.
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
            f"model file {path} has tensors of torch, which is not installed: pip install torch",
            entry=str(path),
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"model file {path} cannot be read: {error}"
        raise CheckpointError(text, entry=str(path)) from error

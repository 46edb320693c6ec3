"""Save a trained Hugging Face model in the format of ``from_pretrained``.

A worker writes the files, because it has the model. The driver moves them to their place, so that
readers see a complete directory.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from miniray.core import session
from miniray.errors import CheckpointError
from miniray.files import replace_directory
from miniray.train.options import warn

#: A directory with one of these files is a saved model, which may be replaced.
_CONFIGS = ("config.json", "adapter_config.json")


@dataclasses.dataclass
class SavedFiles:
    """Result of ``write_model``.

    ``model_class`` is the class of the model, ``is_supported`` whether it can be saved. ``problem``
    is the reason if writing failed. ``unsaved`` lists attributes that have no ``save_pretrained``.
    ``files`` has the contents if the driver may be on a different machine.
    """

    model_class: str
    is_supported: bool
    problem: str = ""
    unsaved: tuple[str, ...] = ()
    files: dict[str, Any] = dataclasses.field(default_factory=dict)


# -- in the driver --------------------------------------------------------------------------------


def save_pretrained(path: str | os.PathLike[str], write: Callable[..., SavedFiles]) -> Path:
    """Save the model that ``write`` writes, and replace the directory ``path`` as a whole.

    Args:
        path: The directory. A model that was saved there before is replaced.
        write: Calls ``write_model`` in a worker with the directory, and whether to send the files.
            If the directory is None, only checks the model.

    Raises:
        TypeError: The model is neither a ``PreTrainedModel`` nor a PEFT model.
        FileExistsError: ``path`` exists and isn't a saved model.
        CheckpointError: The files can't be written. ``path`` is unchanged.
    """
    path = Path(path).expanduser().absolute()
    _check_target(path)
    checked = write(None, False)
    if not checked.is_supported:
        raise TypeError(
            "save_pretrained() needs a transformers.PreTrainedModel or a PEFT model, not "
            f"{checked.model_class}. Use save_final_model() and miniray.train.load_model()."
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    send_files = session.engine().capabilities.multi_node
    try:
        partial.mkdir(parents=True)
        saved = write(str(partial), send_files)
        if saved.problem:
            raise OSError(saved.problem)
        for name, content in saved.files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            content.tofile(partial / name)
        replace_directory(partial, path)
    except OSError as error:
        raise CheckpointError(
            f"model can't be saved to {path}: {error}", entry=str(path)
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for name in saved.unsaved:
        warn(f"{name} has no save_pretrained() and wasn't saved with the model")
    return path


def write_in_worker(group: Any, directory: str | None, send_files: bool) -> SavedFiles:
    """Let worker 0 of a ``WorkerGroup`` write its model; see ``save_pretrained``."""
    method = "_write_pretrained"
    if not group.has(method):
        raise TypeError(
            f"save_pretrained() needs a TorchWorker, not {group.handles[0]._info.class_name}. "
            "Use save_final_model()."
        )
    saved = group.call_some([0], lambda i: group.submit(i, method, directory, send_files), method)
    return saved[0]  # type: ignore[no-any-return]


def _check_target(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file. Pass the path of a directory.")
    if any(path.iterdir()) and not any((path / name).is_file() for name in _CONFIGS):
        raise FileExistsError(f"{path} has files that aren't a saved model. Pass a new directory.")


# -- in a worker ----------------------------------------------------------------------------------


def write_model(
    owner: Any,
    model: Any,
    directory: str | None,
    send_files: bool,
    weights: Mapping[str, Any] | None = None,
) -> SavedFiles:
    """Write the model, and the tokenizer and the processor of ``owner``, to a directory.

    Args:
        owner: The object with the attributes ``tokenizer`` and ``processor``, if it has them.
        model: The model. A compiled model is unwrapped.
        directory: The directory; None to only check the model.
        send_files: Write to a temporary directory and return the contents.
        weights: The full weights by the names of the model's ``state_dict``; by default, those of
            the model.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    kind = type(model)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if directory is None or not _is_supported(model):
        return SavedFiles(name, _is_supported(model))
    with tempfile.TemporaryDirectory() as temporary:
        target = temporary if send_files else directory
        try:
            model.save_pretrained(target, **({} if weights is None else {"state_dict": weights}))
            unsaved = _write_preprocessing(owner, target)
        except Exception as error:
            if not isinstance(error, (OSError, _get_class("safetensors", "SafetensorError"))):
                raise
            return SavedFiles(name, True, problem=str(error))
        files = [path for path in Path(target).rglob("*") if path.is_file() and send_files]
        contents = {str(p.relative_to(target)): np.fromfile(p, np.uint8) for p in files}
    return SavedFiles(name, True, unsaved=unsaved, files=contents)


def _write_preprocessing(owner: Any, directory: str) -> tuple[str, ...]:
    unsaved = []
    for attribute in ("tokenizer", "processor"):
        part: Any = getattr(owner, attribute, None)
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(directory)
        elif part is not None:
            unsaved.append(f"{attribute} {type(part).__name__}")
    return tuple(unsaved)


def _is_supported(model: Any) -> bool:
    classes = (_get_class("transformers", "PreTrainedModel"), _get_class("peft", "PeftModel"))
    return isinstance(model, classes)


def _get_class(module: str, name: str) -> Any:
    """Return a class if its module is loaded, otherwise an empty tuple, for ``isinstance``."""
    return getattr(sys.modules[module], name) if module in sys.modules else ()

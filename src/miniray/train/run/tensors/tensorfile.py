"""Arrays by name in a safetensors file: the package's raw interface, for numpy and torch alike.

``safetensors.numpy`` knows no bfloat16 and ``safetensors.torch`` needs torch and refuses views that
overlap; a checkpoint may hold all of these at once. So entries are handed over as type, shape and
address, and come back as what the reader asks for. torch is imported only for torch's tensors.
Reading runs no code: the format cannot hold any.

A file that is cut short or inconsistent raises ``ValueError``; changed bytes inside the arrays are
found by the checksum that the caller compares.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
from safetensors import SafetensorError, TensorSpec

#: Names of types that both numpy and torch have; the format calls them the same.
_COMMON = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64"),
)
NUMPY_TYPES = frozenset(_COMMON)
TORCH_TYPES = NUMPY_TYPES | {
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
}
#: What the header calls the types that numpy has; it is a file of torch's if there are others.
_NUMPY_CODES = {
    *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64", "C64"),
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@dataclass
class Entry:
    """One array to write: a type of ``TORCH_TYPES``, its shape, and where the bytes are."""

    dtype: str
    shape: tuple[int, ...]
    value: Any  # a numpy array or a torch tensor

    @property
    def nbytes(self) -> int:
        return int(self.value.nbytes)

    def in_memory(self) -> Any:
        """The values in row-major order in host memory; no copy where they lie so already."""
        if isinstance(self.value, np.ndarray):
            return np.ascontiguousarray(self.value)
        return self.value.detach().cpu().resolve_conj().resolve_neg().contiguous()


def write(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None) -> None:
    """Make the file ``path``, not flushed to disk. Raises ``OSError`` where it cannot be."""
    arrays = {name: entry.in_memory() for name, entry in entries.items()}  # alive until written
    specs = {
        name: TensorSpec(
            dtype=entry.dtype,
            shape=list(entry.shape),
            data_ptr=_address(arrays[name]),
            data_len=entry.nbytes,
        )
        for name, entry in entries.items()
    }
    with open(path, "xb") as file:  # the package makes files that only their owner may read
        mode = os.fstat(file.fileno()).st_mode
    try:
        safetensors.serialize_file(specs, path, dict(metadata) if metadata else None)
    except SafetensorError as error:
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    os.chmod(path, mode)


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


class TensorFile:
    """A file's arrays, read when asked for into memory of their own; close it with ``with``.

    Raises ``OSError`` where there is no such file and ``ValueError`` where it is not a whole one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, Any] = {}
        file = self._by("numpy")
        self.metadata: dict[str, str] = file.metadata() or {}
        self.names: list[str] = list(file.keys())

    def _by(self, framework: str) -> Any:
        if framework not in self._open:
            try:
                # Not mapped: what was read must not depend on the file's fate afterwards.
                file = safetensors.safe_open(self._path, framework, backend="pread")
            except SafetensorError as error:
                raise ValueError(str(error)) from None
            self._open[framework] = file.__enter__()  # type: ignore[no-untyped-call]
        return self._open[framework]

    @property
    def needs_torch(self) -> bool:
        """Whether some array has a type that numpy lacks."""
        file = self._by("numpy")
        return any(file.get_slice(name).get_dtype() not in _NUMPY_CODES for name in self.names)

    def numpy(self, name: str) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self._by("numpy").get_tensor(name)
        return array

    def torch(self, name: str) -> Any:
        return self._by("torch").get_tensor(name)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for file in self._open.values():
            file.__exit__(*exc_info)
        self._open.clear()

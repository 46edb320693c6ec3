"""Write and read NumPy arrays and torch tensors in safetensors files.

``safetensors.numpy`` doesn't support bfloat16, and ``safetensors.torch`` needs torch and rejects
overlapping views. A checkpoint can contain all of these, so this module uses the low-level
interface: arrays are passed as type, shape and address, and are read as NumPy arrays or torch
tensors. torch is imported only to read torch tensors. Reading a file never executes code.

Truncated or inconsistent files raise ``ValueError``. Changes inside the arrays are detected by the
checksums of the caller.
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

#: Types that both NumPy and torch have. The format uses the same names.
_COMMON = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64"),
)
NUMPY_TYPES = frozenset(_COMMON)
TORCH_TYPES = NUMPY_TYPES | {
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
}
#: Names of the NumPy types in the header of a file. Files with other types need torch.
_NUMPY_CODES = {
    *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64", "C64"),
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@dataclass
class Entry:
    """An array to write: its type (one of ``TORCH_TYPES``), its shape and its values."""

    dtype: str
    shape: tuple[int, ...]
    value: Any  # a numpy array or a torch tensor

    @property
    def nbytes(self) -> int:
        return int(self.value.nbytes)

    def in_memory(self) -> Any:
        """Return the values in row-major order in host memory, without a copy if possible."""
        if isinstance(self.value, np.ndarray):
            return np.ascontiguousarray(self.value)
        return self.value.detach().cpu().resolve_conj().resolve_neg().contiguous()


def write(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None) -> None:
    """Create the file ``path``, without flushing it to disk. Raise ``OSError`` if that fails."""
    arrays = {name: entry.in_memory() for name, entry in entries.items()}  # keep them alive
    specs = {
        name: TensorSpec(
            dtype=entry.dtype,
            shape=list(entry.shape),
            data_ptr=_address(arrays[name]),
            data_len=entry.nbytes,
        )
        for name, entry in entries.items()
    }
    with open(path, "xb") as file:  # safetensors creates files that only the owner can read
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
    """The arrays of a file, each of which is read into new memory. Use it in a ``with`` block.

    Raises:
        OSError: The file doesn't exist or can't be opened.
        ValueError: The file is truncated or inconsistent.
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
                # Don't map the file, because arrays must stay valid if it changes afterwards.
                file = safetensors.safe_open(self._path, framework, backend="pread")
            except SafetensorError as error:
                raise ValueError(str(error)) from None
            self._open[framework] = file.__enter__()  # type: ignore[no-untyped-call]
        return self._open[framework]

    @property
    def needs_torch(self) -> bool:
        """Whether NumPy lacks the type of any array."""
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

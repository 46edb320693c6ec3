"""The safetensors format: a JSON header, then the arrays' bytes one after another.

Read and written here and not by the ``safetensors`` package because both ways go in one pass: what
is written is checksummed as it is handed to the kernel, what is read is checksummed as it lands in
its array, and tensors of a GPU come to the host one at a time. The package reads what is written
here and the other way round; tests hold that. Reading runs no code: the format cannot hold any.

A file that is cut short or inconsistent raises ``ValueError``; changed bytes inside the arrays are
found by the checksum that the caller compares.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: Format code → bits, numpy's name (None: only torch has it), torch's name.
DTYPES: dict[str, tuple[int, str | None, str]] = {
    "BOOL": (8, "bool", "bool"),
    "U8": (8, "uint8", "uint8"),
    "I8": (8, "int8", "int8"),
    "U16": (16, "uint16", "uint16"),
    "I16": (16, "int16", "int16"),
    "U32": (32, "uint32", "uint32"),
    "I32": (32, "int32", "int32"),
    "U64": (64, "uint64", "uint64"),
    "I64": (64, "int64", "int64"),
    "F16": (16, "float16", "float16"),
    "F32": (32, "float32", "float32"),
    "F64": (64, "float64", "float64"),
    "C64": (64, "complex64", "complex64"),
    "BF16": (16, None, "bfloat16"),
    "F8_E4M3": (8, None, "float8_e4m3fn"),
    "F8_E5M2": (8, None, "float8_e5m2"),
    "F8_E4M3FNUZ": (8, None, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, None, "float8_e5m2fnuz"),
    "F8_E8M0": (8, None, "float8_e8m0fnu"),
}
NUMPY_CODES = {numpy: code for code, (_, numpy, _) in DTYPES.items() if numpy}
TORCH_CODES = {torch: code for code, (_, _, torch) in DTYPES.items()}

_LONGEST_HEADER = 100_000_000  # the package's own limit
_CHUNK = 64 << 20


@dataclass
class Entry:
    """One array to write: its type and shape as the header has them, and where the bytes are."""

    code: str
    shape: tuple[int, ...]
    value: Any  # a numpy array or a torch tensor

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.code][0] // 8

    def raw(self) -> Bytes:
        """The bytes, in row-major order; no copy where they lie so in host memory already."""
        if isinstance(self.value, np.ndarray):
            # Strings, dates and wide complex numbers give no buffer of bytes; viewing as void does.
            flat = np.ascontiguousarray(self.value).reshape(-1)
            return flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
        import torch

        flat = self.value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


class HashingFile:
    """A file with its length and checksum (BLAKE2b) as far as it was written or read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.blake2b(digest_size=32)
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write all of ``data``; an unbuffered file may take less at a time, near a full disk."""
        view = memoryview(data)
        while view.nbytes:
            count = self._file.write(view[:_CHUNK])
            self._hash.update(view[:count])
            self.nbytes += count
            view = view[count:]

    def read(self, size: int) -> bytes:
        data = np.empty(size, np.uint8)
        self.read_into(data)
        return data.tobytes()

    def read_into(self, array: Bytes) -> None:
        view = array.data
        while view.nbytes:
            count = self._file.readinto(view[:_CHUNK])  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"cut short after {self.nbytes} bytes")
            self._hash.update(view[:count])
            self.nbytes += count
            view = view[count:]

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def write(
    file: HashingFile, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None
) -> None:
    """Write ``entries`` by name. Widest types first, so that all of them lie aligned."""
    order = sorted(entries, key=lambda name: -DTYPES[entries[name].code][0])
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        entry = entries[name]
        end = offset + entry.nbytes
        header[name] = {
            "dtype": entry.code,
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(entries[name].raw().data)


@dataclass
class Stored:
    """One array as read: bytes in memory of its own, writable."""

    code: str
    shape: tuple[int, ...]
    data: Bytes

    def numpy(self) -> npt.NDArray[Any]:
        name = DTYPES[self.code][1]
        if name is None:
            raise ValueError(f"numpy has no type for {self.code}; read it as a torch tensor")
        return self.data.view(np.dtype(name)).reshape(self.shape)

    def torch(self) -> Any:
        import torch

        name = DTYPES[self.code][2]
        dtype = getattr(torch, name, None)
        if dtype is None:
            raise ValueError(f"this version of torch ({torch.__version__}) has no type {name}")
        if not self.data.size:
            return torch.empty(self.shape, dtype=dtype)
        return torch.from_numpy(self.data).view(dtype).reshape(self.shape)


def read(file: HashingFile, size: int) -> tuple[dict[str, Stored], dict[str, str]]:
    """All arrays by name, and the metadata. ``size`` is the file's length in bytes.

    Everything in the header is checked against ``size`` before memory is taken, so a damaged one
    cannot ask for more than the file has.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"the header claims {length} bytes of a file of {size}")
    try:
        header = json.loads(file.read(length))
        metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
        parts = sorted((_part(name, spec) for name, spec in header.items()), key=lambda p: p[3:])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the header cannot be read: {error}") from None
    offset = 0
    for name, _, _, begin, end in parts:
        if begin != offset:
            raise ValueError(f"{name} begins at {begin} and not at {offset}")
        offset = end
    if 8 + length + offset != size:
        raise ValueError(f"the arrays take {offset} bytes of {size - 8 - length}")
    found = {}
    for name, code, shape, begin, end in parts:
        data = np.empty(end - begin, np.uint8)
        file.read_into(data)
        found[name] = Stored(code, shape, data)
    return {name: found[name] for name in header}, metadata


def _part(name: str, spec: Any) -> tuple[str, str, tuple[int, ...], int, int]:
    code, (begin, end) = spec["dtype"], spec["data_offsets"]
    shape = tuple(int(n) for n in spec["shape"])
    if code not in DTYPES:
        raise ValueError(f"{name} has the unknown type {code!r}")
    if min(shape, default=0) < 0 or math.prod(shape) * DTYPES[code][0] != (end - begin) * 8:
        raise ValueError(f"{name}: shape {list(shape)} of {code} is not {end - begin} bytes")
    return name, code, shape, int(begin), int(end)


def file_size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size

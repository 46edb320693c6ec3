"""Encode nested state as JSON and arrays, without pickle.

``encode`` accepts dicts with any keys, ``OrderedDict``, lists, tuples, sets, numbers, strings,
bytes, None, NumPy arrays and scalars, and dense torch tensors. ``decode`` returns values of the
same types, bit-identical except for the payload of NaN in Python floats. Values that JSON doesn't
support are encoded as objects with one key that starts with ``$``. A dict that has such keys is
encoded as ``$dict``.

An array that occurs twice, as the same object or as a view of exactly the same memory (tied
weights), is stored once and decoded as one object. Views that overlap partially are decoded as
separate arrays. Tensors are decoded as plain, detached CPU tensors. Containers that occur twice
become equal copies, and containers that contain themselves raise an error.

Other values raise ``CheckpointError`` with the path to the value, or are pickled with
``allow_pickle``. Reading them also requires ``allow_pickle``.
"""

from __future__ import annotations

import base64
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from miniray.errors import CheckpointError
from miniray.train.run.tensors.tensorfile import NUMPY_TYPES, TORCH_TYPES, Entry

#: Group of pickled objects, if they are allowed.
PICKLES = "pickled-objects"
_DEEPEST = 100  # each level needs several of Python's 1000 frames
_LONGEST_INLINE = 256  # bytes; longer ones are arrays
_LONGEST_DECIMAL = 10_000  # bits; Python doesn't convert longer integers to decimal


class ArraySource(Protocol):
    """Arrays by name, such as a ``TensorFile``."""

    def numpy(self, name: str) -> Any: ...

    def torch(self, name: str) -> Any: ...


class StoredTensor(NamedTuple):
    """A tensor that is already stored in a file."""

    group: str
    name: str


class Encoder:
    """Encodes values as JSON, and collects arrays in ``groups``: group name → array name → entry.

    With ``copy``, arrays are copied, so that the caller may change them afterwards.
    """

    def __init__(self, *, allow_pickle: bool = False, copy: bool = False) -> None:
        self.groups: dict[str, dict[str, Entry]] = {}
        self._allow_pickle = allow_pickle
        self.copies = copy
        self._stored: dict[Any, list[Any]] = {}  # identity of an array → its reference
        self._alive: list[Any] = []  # arrays that must stay alive, because their ids are in use
        self._open: set[int] = set()  # containers that are being encoded, to detect cycles

    def encode(self, value: Any, group: str, path: tuple[Any, ...] = ()) -> Any:
        """Encode ``value`` as JSON. Arrays are added to ``group`` and named by ``path``.

        Raises:
            CheckpointError: A value can't be encoded; the error has the path to it.
        """
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if kind is str:
            return _text(value)
        if kind is int:
            return value if value.bit_length() < _LONGEST_DECIMAL else {"$int": hex(value)}
        if kind is float:
            finite = value - value == 0
            return value if finite else {"$float": value.hex()}  # "nan", "inf", "-inf"
        if kind is complex:
            return {"$complex": [self.encode(x, group, path) for x in (value.real, value.imag)]}
        if kind in (bytes, bytearray):
            return self._bytes(value, group, path)
        if kind is StoredTensor:
            return {"$tensor": list(value)}
        if kind in _CONTAINERS:
            return self._container(value, group, path)
        if isinstance(value, np.generic) and _storable(value.dtype):
            return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
        if kind is np.ndarray or kind is np.memmap:
            if _storable(value.dtype):
                return {"$array": self._array(value, group, path)}
        elif _is_plain_tensor(value):
            return {"$tensor": self._tensor(value, group, path)}
        return self._other(value, path)

    def _container(self, value: Any, group: str, path: tuple[Any, ...]) -> Any:
        if id(value) in self._open or len(path) > _DEEPEST:
            why = "contains itself" if id(value) in self._open else "is nested too deeply"
            raise _create_encoding_error(path, f"it {why}")
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                simple = type(value) is dict and all(
                    type(key) is str and not key.startswith("$") and _text(key) == key
                    for key in value
                )
                if simple:
                    return {k: self.encode(v, group, (*path, k)) for k, v in value.items()}
                pairs = [
                    [self.encode(k, group, (*path, "key")), self.encode(v, group, (*path, k))]
                    for k, v in value.items()
                ]
                return {"$dict" if type(value) is dict else "$ordered": pairs}
            items = [self.encode(item, group, (*path, i)) for i, item in enumerate(value)]
        finally:
            self._open.discard(id(value))
        return items if type(value) is list else {_CONTAINERS[type(value)]: items}

    def _bytes(self, value: bytes | bytearray, group: str, path: tuple[Any, ...]) -> Any:
        tag = "$bytes" if type(value) is bytes else "$bytearray"
        if len(value) <= _LONGEST_INLINE:
            return {tag: base64.b64encode(value).decode()}
        data = np.frombuffer(bytes(value), np.uint8)
        return {tag: self._store(Entry("uint8", data.shape, data), group, path)}

    def _array(self, value: Any, group: str, path: tuple[Any, ...]) -> list[Any]:
        where = (value.ctypes.data, value.dtype.str, value.shape, value.strides)
        key = ("numpy", *where) if value.size else id(value)
        if key not in self._stored:
            self._alive.append(value)
            kept = np.array(value, order="C", subok=False) if self.copies else np.asarray(value)
            name = value.dtype.name
            if name in NUMPY_TYPES and value.dtype.isnative:
                self._stored[key] = self._store(Entry(name, value.shape, kept), group, path)
            else:  # the format doesn't support the type: store bytes and the NumPy name
                stored = self._store(Entry("uint8", (value.nbytes,), kept), group, path)
                self._stored[key] = [*stored, value.dtype.str, list(value.shape)]
        return self._stored[key]

    def _tensor(self, value: Any, group: str, path: tuple[Any, ...]) -> list[Any]:
        where = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device)
        # Conjugate and negative views share memory with tensors that have different values.
        flags = (value.is_conj(), value.is_neg())
        key = (*where, *flags) if value.numel() else id(value)
        if key not in self._stored:
            self._alive.append(value)
            kept = value.detach()
            if self.copies:
                kept = kept.clone() if kept.device.type == "cpu" else kept.cpu()
            name = str(value.dtype).removeprefix("torch.")
            shape = tuple(value.shape)
            if name in TORCH_TYPES:
                self._stored[key] = self._store(Entry(name, shape, kept), group, path)
            else:
                entry = Entry("uint8", (value.nbytes,), kept)
                self._stored[key] = [*self._store(entry, group, path), name, list(shape)]
        return self._stored[key]

    def _other(self, value: Any, path: tuple[Any, ...]) -> Any:
        if not self._allow_pickle:
            raise _create_encoding_error(
                path,
                "only dicts, lists, tuples, sets, numbers, strings, bytes, None, NumPy arrays and "
                "dense torch tensors can be stored without pickle. To use pickle, pass "
                "allow_pickle=True",
                value,
            )
        try:
            data = np.frombuffer(pickle.dumps(value), np.uint8)
        except Exception as error:  # a user's __reduce__ can raise anything
            raise _create_encoding_error(
                path, f"pickle can't store it either: {error}", value
            ) from error
        return {"$pickle": self._store(Entry("uint8", data.shape, data), PICKLES, path)}

    def _store(self, entry: Entry, group: str, path: tuple[Any, ...]) -> list[Any]:
        """Add an array to its group, with a name that is derived from ``path``."""
        names = self.groups.setdefault(group, {})
        base = ".".join(str(step) for step in path).encode(errors="replace").decode() or group
        name, count = base, 1
        while name in names or name == "__metadata__":
            count += 1
            name = f"{base}~{count}"
        names[name] = entry
        return [group, name]


def decode(value: Any, groups: Mapping[str, ArraySource], *, allow_pickle: bool = False) -> Any:
    """Return the value that was encoded by ``Encoder.encode``.

    Raises:
        CheckpointError: A part is pickled, and ``allow_pickle`` is False.
        ValueError, KeyError: The JSON and the arrays don't match.
    """
    made: dict[tuple[str, str, str], Any] = {}

    def array(tag: str, ref: list[Any]) -> Any:
        group, name, *raw = ref
        key = (tag, group, name)
        if key not in made:
            made[key] = _rebuild(tag, groups[group], name, raw)
        return made[key]

    def special(tag: str, content: Any) -> Any:
        if tag in ("$array", "$tensor"):
            return array(tag, content)
        if tag in ("$bytes", "$bytearray"):
            plain = (
                base64.b64decode(content)
                if isinstance(content, str)
                else groups[content[0]].numpy(content[1]).tobytes()
            )
            return plain if tag == "$bytes" else bytearray(plain)
        if tag == "$pickle":
            if not allow_pickle:
                raise CheckpointError(
                    f"{content[1]} was stored with pickle, which can execute arbitrary code when "
                    "loaded. If you trust the source of the file, pass allow_pickle=True",
                    entry=content[1],
                )
            return pickle.loads(groups[content[0]].numpy(content[1]).tobytes())
        if tag in ("$dict", "$ordered"):
            pairs = [(back(k), back(v)) for k, v in content]
            return dict(pairs) if tag == "$dict" else OrderedDict(pairs)
        return _SIMPLE[tag](back(content))

    def back(item: Any) -> Any:
        if isinstance(item, list):
            return [back(part) for part in item]
        if isinstance(item, dict):
            if len(item) == 1:
                ((tag, content),) = item.items()
                if tag.startswith("$"):
                    return special(tag, content)
            return {key: back(part) for key, part in item.items()}
        return item

    return back(value)


def _rebuild(tag: str, file: ArraySource, name: str, raw: list[Any]) -> Any:
    if not raw:
        return file.numpy(name) if tag == "$array" else file.torch(name)
    kind, shape = raw
    data = file.numpy(name)
    if tag == "$array":
        dtype = np.dtype(kind)
        return data.view(dtype).reshape(shape) if data.size else np.empty(shape, dtype)
    import torch

    dtype = getattr(torch, kind)
    if not data.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _scalar(content: list[str]) -> Any:
    dtype = np.dtype(content[0])
    data = bytes.fromhex(content[1])
    return np.frombuffer(data, dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]


_CONTAINERS: dict[type, str] = {
    dict: "$dict",
    OrderedDict: "$ordered",
    list: "",
    tuple: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
}
_SIMPLE: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$int": lambda text: int(text, 16),
    "$float": float.fromhex,
    "$complex": lambda parts: complex(*parts),
    "$scalar": _scalar,
    "$text": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
}


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # unpaired surrogates, which JSON parsers might join
        return {"$text": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _storable(dtype: np.dtype[Any]) -> bool:
    """Return whether an array is described by its bytes and its type string."""
    return dtype.kind in "biufcSUMm" and np.dtype(dtype.str) == dtype


def _is_plain_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout is torch.strided and not value.is_quantized and not value.is_meta


def _create_encoding_error(path: tuple[Any, ...], why: str, value: Any = None) -> CheckpointError:
    where = "state" + "".join(f"[{step!r}]" for step in path)
    kind = "" if value is None else f" ({type(value).__module__}.{type(value).__qualname__})"
    return CheckpointError(f"{where}{kind} can't be stored in a checkpoint: {why}", entry=where)

"""Nested state as JSON plus arrays: what a checkpoint holds, without pickle.

``encode`` takes dicts (of any keys), ``OrderedDict``s, lists, tuples, sets, numbers, texts, bytes,
None, numpy arrays and scalars, and dense torch tensors; ``decode`` gives the same back, type for
type and bit for bit (of a Python float that is NaN, only that it is NaN). In the JSON, plain values
are themselves; what JSON lacks is an object with one key that begins with ``$`` (a dict with such
keys of its own is written as ``$dict``).

An array that occurs twice, as the same object or as another view of exactly the same memory (tied
weights), is stored once and comes back as one object; views that overlap in part come back apart.
Tensors come back on the CPU, detached, as plain tensors. Containers that occur twice become equal
copies; one that contains itself is refused.

Anything else is refused with the path that leads to it, or pickled where ``allow_pickle`` is set;
and only with ``allow_pickle`` again is it ever unpickled.
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

#: Where pickled objects go, if they are allowed.
PICKLES = "pickled-objects"
_DEEPEST = 100  # each level takes several of Python's 1000 frames
_LONGEST_INLINE = 256  # bytes; longer ones are arrays
_LONGEST_DECIMAL = 10_000  # bits; Python refuses to write longer integers in decimal


class ArraySource(Protocol):
    """Arrays by name, such as a ``TensorFile``."""

    def numpy(self, name: str) -> Any: ...

    def torch(self, name: str) -> Any: ...


class StoredTensor(NamedTuple):
    """A tensor that is in a file already."""

    group: str
    name: str


class Encoder:
    """Turns values to JSON, gathering arrays in ``groups``: group name → array name → entry.

    ``copy``: take copies of all arrays now, so that the caller may change its own at once.
    """

    def __init__(self, *, allow_pickle: bool = False, copy: bool = False) -> None:
        self.groups: dict[str, dict[str, Entry]] = {}
        self._allow_pickle = allow_pickle
        self.copies = copy
        self._stored: dict[Any, list[Any]] = {}  # identity of an array → its reference
        self._alive: list[Any] = []  # whose identities are in use above
        self._open: set[int] = set()  # containers being encoded: one inside itself is a cycle

    def encode(self, value: Any, group: str, path: tuple[Any, ...] = ()) -> Any:
        """``value`` as JSON. Its arrays go to ``group``, named by ``path``.

        Raises ``CheckpointError`` for what has no form, with ``path``.
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
            else:  # a type the format lacks: as bytes, with its numpy name
                stored = self._store(Entry("uint8", (value.nbytes,), kept), group, path)
                self._stored[key] = [*stored, value.dtype.str, list(value.shape)]
        return self._stored[key]

    def _tensor(self, value: Any, group: str, path: tuple[Any, ...]) -> list[Any]:
        where = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device)
        # Conjugate and negative views have their values' memory, and other values.
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
                "only dicts, lists, tuples, sets, numbers, texts, bytes, None, numpy arrays and "
                "dense torch tensors can be stored without pickle (allow_pickle=True permits it)",
                value,
            )
        try:
            data = np.frombuffer(pickle.dumps(value), np.uint8)
        except Exception as error:  # a user's __reduce__ may raise anything
            raise _create_encoding_error(
                path, f"pickle cannot store it either: {error}", value
            ) from error
        return {"$pickle": self._store(Entry("uint8", data.shape, data), PICKLES, path)}

    def _store(self, entry: Entry, group: str, path: tuple[Any, ...]) -> list[Any]:
        """Put an array into its group, under a name that says where it was."""
        names = self.groups.setdefault(group, {})
        base = ".".join(str(step) for step in path).encode(errors="replace").decode() or group
        name, count = base, 1
        while name in names or name == "__metadata__":
            count += 1
            name = f"{base}~{count}"
        names[name] = entry
        return [group, name]


def decode(value: Any, groups: Mapping[str, ArraySource], *, allow_pickle: bool = False) -> Any:
    """The value that ``Encoder.encode`` was given. Raises ``CheckpointError`` for a pickled part
    without ``allow_pickle``, ``ValueError`` or ``KeyError`` where JSON and arrays do not fit."""
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
                    f"{content[1]} was stored with pickle, which can run any code when read; "
                    "if you trust where it comes from, pass allow_pickle=True",
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
    except UnicodeEncodeError:  # halves of surrogate pairs, which JSON readers join
        return {"$text": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _storable(dtype: np.dtype[Any]) -> bool:
    """Whether the bytes and the short name say it all: no objects, no fields, no foreign types."""
    return dtype.kind in "biufcSUMm" and np.dtype(dtype.str) == dtype


def _is_plain_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout is torch.strided and not value.is_quantized and not value.is_meta


def _create_encoding_error(path: tuple[Any, ...], why: str, value: Any = None) -> CheckpointError:
    where = "state" + "".join(f"[{step!r}]" for step in path)
    kind = "" if value is None else f" ({type(value).__module__}.{type(value).__qualname__})"
    return CheckpointError(f"{where}{kind} cannot go into a checkpoint: {why}", entry=where)

"""Values of Arrow arrays as Python objects, cut from Arrow's buffers with one copy and no more.

Arrow's own ``to_pylist`` makes a scalar object for every value, and ``take`` copies twice. Here an
array is compiled once into a function of the row number that reads offsets and bytes directly.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from miniray.data.source import Getter, struct_getter


def getter(array: Any) -> Getter:
    """A function from a row number to the value, as ``array[i].as_py()`` gives it."""
    get = _plain(array, array.type)
    if not array.null_count or array.buffers()[0] is None:
        return get
    bits, offset = memoryview(array.buffers()[0]).cast("B"), array.offset

    def get_or_none(i: int) -> Any:
        at = offset + i
        return get(i) if bits[at >> 3] >> (at & 7) & 1 else None

    return get_or_none


def is_number(kind: Any) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


#: Arrow's names of types that numpy calls otherwise.
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}


def number_type(kind: Any) -> np.dtype[Any]:
    """The numpy type of a column of numbers."""
    # Not to_pandas_dtype(): before pyarrow 26 that imports pandas.
    name = str(kind)
    return np.dtype(_FLOATS.get(name, name))


def numbers(array: Any) -> npt.NDArray[Any]:
    """All values without a copy; what stands at missing ones is undefined."""
    data = array.buffers()[1] or b""
    if pa.types.is_boolean(array.type):
        bits = np.frombuffer(data, dtype=np.uint8)
        unpacked = np.unpackbits(bits, count=array.offset + len(array), bitorder="little")
        return unpacked[array.offset :].astype(bool)
    found = np.frombuffer(data, dtype=number_type(array.type))
    return found[array.offset : array.offset + len(array)]


def _plain(array: Any, kind: Any) -> Getter:
    """The same for values that are known to be there."""
    if not len(array) or pa.types.is_null(kind):
        return lambda i: None
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return _bytes(array, "i", pa.types.is_string(kind))
    if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
        return _bytes(array, "q", pa.types.is_large_string(kind))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        code: Literal["i", "q"] = "q" if pa.types.is_large_list(kind) else "i"
        return _lists(array, code, kind.value_type)
    if pa.types.is_struct(kind):
        children = enumerate(kind)
        return struct_getter([(child.name, getter(array.field(n))) for n, child in children])
    if pa.types.is_boolean(kind):
        bits, offset = memoryview(array.buffers()[1]).cast("B"), array.offset
        return lambda i: bool(bits[(offset + i) >> 3] >> ((offset + i) & 7) & 1)
    if is_number(kind) and not pa.types.is_float16(kind):
        return numbers(array).data.__getitem__
    if pa.types.is_dictionary(kind):
        index, value = getter(array.indices), getter(array.dictionary)
        return lambda i: value(index(i))
    return lambda i: array[i].as_py()


def _offsets(array: Any, code: Literal["i", "q"]) -> memoryview:
    """Where values begin and end in the child; row 0 first, also where the array is a slice."""
    width = struct.calcsize(code)
    data = memoryview(array.buffers()[1]).cast("B")
    used: memoryview = data[array.offset * width : (array.offset + len(array) + 1) * width]
    return used.cast(code)


def _bytes(array: Any, code: Literal["i", "q"], text: bool) -> Getter:
    offsets = _offsets(array, code)
    data = memoryview(array.buffers()[2] or b"").cast("B")
    if text:
        return lambda i: str(data[offsets[i] : offsets[i + 1]], "utf-8")
    return lambda i: bytes(data[offsets[i] : offsets[i + 1]])


def _lists(array: Any, code: Literal["i", "q"], kind: Any) -> Getter:
    offsets, child = _offsets(array, code), array.values
    if is_number(kind) and not child.null_count and not pa.types.is_boolean(kind):
        flat = numbers(child)
        return lambda i: flat[offsets[i] : offsets[i + 1]].tolist()
    get = getter(child)
    return lambda i: [get(k) for k in range(offsets[i], offsets[i + 1])]

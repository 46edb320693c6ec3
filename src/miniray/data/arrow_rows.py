"""Rows of a block as Arrow record batches, in memory that is given back when they are dropped.

Their values become Python objects with one copy and no more. Arrow's own ``to_pylist`` makes a
scalar object for every value, and ``take`` copies twice. Here an array is compiled once into a
function of the row number that reads offsets and bytes directly.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from miniray.data.loader.columns import NUMBERS
from miniray.data.sources.base import Getter, Layout, Rows, Slabs, struct_getter


class ArrowRows(Rows):
    """Record batches one after the other. Nothing made of them shares their memory."""

    def __init__(
        self,
        batches: Sequence[Any],
        start: int,
        slabs: Slabs | None = None,
        own: Sequence[Any] = (),
    ) -> None:
        self._batches = batches
        self._slabs, self._own = slabs, own
        self._starts = [0]
        for batch in batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
        self._getters: dict[str, Getter] = {}
        self.schema: Any = batches[0].schema if batches else None
        self.start = start
        self.num_rows = self._starts[-1]
        self.nbytes = sum(map(len, own)) or sum(batch.nbytes for batch in batches)
        if self.schema is not None:
            self.layout: Layout = tuple((field.name, str(field.type)) for field in self.schema)

    def __del__(self) -> None:
        self._batches = self._getters = ()  # type: ignore[assignment]
        for slab in self._own:
            self._slabs.give(slab)  # type: ignore[union-attr]

    @property
    def names(self) -> list[str]:
        return [] if self.schema is None else self.schema.names

    def getter(self, name: str) -> Getter:
        """A function from a row to its value in a column."""
        found = self._getters.get(name)
        if found is None:
            found = self._getters[name] = self._compile(name)
        return found

    def _compile(self, name: str) -> Getter:
        each = [getter(batch.column(name)) for batch in self._batches]
        if len(each) == 1:
            return each[0]
        starts = self._starts

        def get(i: int) -> Any:
            batch = bisect_right(starts, i) - 1
            return each[batch](i - starts[batch])

        return get

    def numbers(self, name: str, index: Sequence[int]) -> npt.NDArray[Any] | None:
        kind = str(self.schema.field(name).type)
        if kind not in NUMBERS or any(batch.column(name).null_count for batch in self._batches):
            return None
        asked = np.asarray(index)
        found = np.empty(len(asked), dtype=NUMBERS[kind])
        which = np.searchsorted(self._starts, asked, side="right") - 1
        for number in set(which.tolist()):
            inside = which == number
            values = numbers(self._batches[number].column(name))
            found[inside] = values[asked[inside] - self._starts[number]]
        return found

    def rows(self, index: Sequence[int]) -> list[Any]:
        getters = [(name, self.getter(name)) for name in self.names]
        return [{name: get(i) for name, get in getters} for i in index]

    def arrow(self, index: Sequence[int]) -> Any:
        return pa.Table.from_batches(self._batches).take(pa.array(index))


def rows_of(batches: Iterable[Any], start: int, slabs: Slabs | None) -> ArrowRows:
    """Record batches as rows, copied into slabs one by one as they come."""
    kept, own = [], []
    for batch in batches:
        if slabs is not None and not any(_has_dictionary(field.type) for field in batch.schema):
            own.append(slabs.take(_size_for(batch)))
            batch = _copied(batch, own[-1])
        kept.append(batch)
    if len(own) != len(kept):
        slabs, own = None, []
    return ArrowRows(kept, start, slabs, own)


def _copied(batch: Any, slab: mmap.mmap) -> Any:
    """An Arrow record batch with its data in ``slab``."""
    buffer = pa.py_buffer(slab)
    with pa.ipc.new_stream(pa.FixedSizeBufferWriter(buffer), batch.schema) as stream:
        stream.write_batch(batch)
    with pa.ipc.open_stream(buffer) as stream:
        return stream.read_next_batch()


def _size_for(batch: Any) -> int:
    """Bytes that ``_copied`` needs."""
    return int(pa.ipc.get_record_batch_size(batch) + batch.schema.serialize().size + 64)


def _has_dictionary(kind: Any) -> bool:
    """Whether a type has dictionaries in it, which do not travel with a record batch."""
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


# -- values of arrays ------------------------------------------------------------------------------


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


def numbers(array: Any) -> npt.NDArray[Any]:
    """All values without a copy; what stands at missing ones is undefined."""
    data = array.buffers()[1] or b""
    if pa.types.is_boolean(array.type):
        bits = np.frombuffer(data, dtype=np.uint8)
        unpacked = np.unpackbits(bits, count=array.offset + len(array), bitorder="little")
        return unpacked[array.offset :].astype(bool)
    found = np.frombuffer(data, dtype=NUMBERS[str(array.type)])
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
    if str(kind) in NUMBERS and not pa.types.is_float16(kind):
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
    if str(kind) in NUMBERS and not child.null_count and not pa.types.is_boolean(kind):
        flat = numbers(child)
        return lambda i: flat[offsets[i] : offsets[i + 1]].tolist()
    get = getter(child)
    return lambda i: [get(k) for k in range(offsets[i], offsets[i + 1])]

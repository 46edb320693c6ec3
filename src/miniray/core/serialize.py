"""Values to bytes and back: cloudpickle with pickle-5 buffers kept out of the stream.

``pack`` gives a ``Packed``: the pickle stream, the buffers as views on the original memory (no copy
yet), and the refs and handles found inside. ``unpack`` rebuilds the value over memory that holds
the buffers. How that memory travels is the engine's business.

Refs, handles and shared memory are not in the stream: it holds an index into ``Packed.refs``. So an
engine can forward a value without unpickling it and still know which of them travel with it.

A torch tensor's buffer is marked *private*: the engine hands ``unpack`` writable memory nobody else
sees, or read-only memory, which is then copied. A CUDA tensor is copied to the host through pinned
memory and arrives as a CPU tensor, so that a receiver needs no GPU. All other buffers are handed
over read-only, and numpy makes read-only arrays of them, as with Ray.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

import cloudpickle

from miniray.core.refs import ActorHandle, ObjectRef
from miniray.core.shared_buffer import SharedBuffer
from miniray.errors import NotSerializableError


@dataclasses.dataclass
class Packed:
    """A pickled value. ``buffers[i]`` must be private memory at the receiver where ``private[i]``.

    ``refs`` are the ObjectRefs, ActorHandles and the memory of SharedBuffers inside, in the order
    in which the stream counts them.
    """

    data: bytes | memoryview
    buffers: list[memoryview]
    private: list[bool]
    refs: list[Any]

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(b.nbytes for b in self.buffers)


class _Loading(threading.local):
    """The refs of the value being unpickled in this thread."""

    refs: Sequence[Any] = ()
    #: Tensors may be built over read-only memory; otherwise such memory is copied.
    readonly_tensors = False


_loading = _Loading()


def take_ref(index: int) -> Any:
    """Called by the pickle stream: the ref or handle at ``index`` of the value being loaded."""
    return _loading.refs[index]


def take_buffer(index: int, size: int) -> SharedBuffer:
    """Return a buffer over the memory at ``index`` of the value that is being loaded."""
    return SharedBuffer._over(_loading.refs[index], size)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle with out-of-band buffers, refs by index and torch tensors as buffers."""

    def __init__(self, file: io.BytesIO) -> None:
        buffers: list[memoryview] = []
        private: list[bool] = []
        private_ids: dict[int, pickle.PickleBuffer] = {}

        # A method instead would make a cycle: everything pickled, handles and arrays included,
        # would stay alive in the pickler's memo until the garbage collector comes by.
        def keep_buffer(buffer: pickle.PickleBuffer) -> None:
            # Also small ones: in the stream they would arrive writable, large ones read-only.
            buffers.append(buffer.raw())
            private.append(id(buffer) in private_ids)

        super().__init__(file, protocol=5, buffer_callback=keep_buffer)
        self.buffers = buffers
        self.private = private
        self.refs: list[Any] = []
        #: CUDA devices from which copies are still under way.
        self.devices: set[Any] = set()
        # By id, with the buffer itself as value so that the id is not used again meanwhile.
        self._private_ids = private_ids

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (ObjectRef, ActorHandle)):
            self.refs.append(obj)
            return take_ref, (len(self.refs) - 1,)
        if isinstance(obj, SharedBuffer):
            self.refs.append(obj._open_memory())
            return take_buffer, (len(self.refs) - 1, obj.size)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, getattr(torch, "Tensor", ())):
            reduced = self._reduce_tensor(torch, obj)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Any:
        """A dense tensor as one private buffer; None leaves the others to torch's own way."""
        kind = type(tensor)
        if (
            kind not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout is not torch.strided
            or tensor.device.type not in ("cpu", "cuda")
            or tensor.is_quantized
            or getattr(tensor, "__dict__", None)
        ):
            return None
        flat = tensor.detach() if tensor.requires_grad else tensor
        if flat.is_conj() or flat.is_neg():
            flat = flat.resolve_conj().resolve_neg()
        flat = flat.contiguous().view(-1)  # copies unless contiguous
        if flat.device.type == "cuda":
            self.devices.add(flat.device)
            flat = _start_copy_to_host(torch, flat)
        raw = flat.view(torch.uint8).numpy() if flat.numel() else b""
        buffer = pickle.PickleBuffer(raw)
        self._private_ids[id(buffer)] = buffer
        dtype = _dtype_name(tensor.dtype)
        shape = tuple(tensor.shape)
        is_parameter = kind is torch.nn.Parameter
        return _rebuild_tensor, (buffer, dtype, shape, tensor.requires_grad, is_parameter)


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _start_copy_to_host(torch: Any, tensor: Any) -> Any:
    """A CPU tensor that has the numbers once the device's stream is synchronized."""
    try:
        # torch keeps pinned memory that is given up and hands it out again: pinning is slow.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # the system's limit on locked memory
        return tensor.cpu()
    return host.copy_(tensor, non_blocking=True)


def _rebuild_tensor(
    buffer: Any, dtype_name: str, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool
) -> Any:
    import torch

    dtype = getattr(torch, dtype_name)
    source: Any = memoryview(buffer)
    if source.nbytes == 0:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        if source.readonly and _loading.readonly_tensors:
            source = _pretend_writable(source)
        elif source.readonly:  # a small tensor that came inside a message, as immutable bytes
            source = bytearray(source)
        tensor = torch.frombuffer(source, dtype=dtype)
        if len(shape) != 1:  # there may be hundreds: a call that changes nothing takes most of it
            tensor = tensor.view(shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _pretend_writable(view: memoryview) -> Any:
    """The same memory as a buffer that torch takes without a warning; writing to it crashes."""
    import ctypes

    import numpy as np

    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    buffer = (ctypes.c_char * view.nbytes).from_address(address)
    buffer.owner = view  # type: ignore[attr-defined]  # keeps the memory as long as the tensor
    return buffer


def pack(value: Any, what: str = "value") -> Packed:
    """Pickle ``value``. ``what`` names it in the error.

    Raises ``NotSerializableError`` with the path to the offending attribute. The returned buffers
    are views on the caller's memory: copy or send them before the caller can change it.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception as error:  # pickling runs arbitrary user code: anything may be raised
        raise _explain(value, what, error) from error
    for device in pickler.devices:  # all copies run at once; here is where they must be complete
        sys.modules["torch"].cuda.current_stream(device).synchronize()
    return Packed(file.getvalue(), pickler.buffers, pickler.private, pickler.refs)


def unpack(
    data: bytes | memoryview,
    buffers: Sequence[Any] = (),
    refs: Sequence[Any] = (),
    *,
    readonly_tensors: bool = False,
) -> Any:
    """The value. ``buffers`` stay referenced by what is built over them.

    With ``readonly_tensors`` nobody may write to the tensors, and read-only buffers need no copy.
    """
    previous = _loading.refs, _loading.readonly_tensors
    _loading.refs, _loading.readonly_tensors = refs, readonly_tensors
    try:
        return pickle.loads(data, buffers=buffers)
    finally:
        _loading.refs, _loading.readonly_tensors = previous


# -- explaining what cannot be pickled -------------------------------------------------------------


def _explain(value: Any, what: str, error: Exception) -> NotSerializableError:
    path, culprit = _find_culprit(value, what, depth=8)
    message = (
        f"{path} cannot be sent to another process: "
        f"{type(culprit).__module__}.{type(culprit).__qualname__} object: {error}"
    )
    if path != what:
        message += f"\n  in {what}, of type {type(value).__qualname__}"
    if isinstance(culprit, types.GeneratorType):
        message += "\n  Make a list of it: list(...)."
    else:
        message += "\n  Create it inside the worker instead, or leave it out with __getstate__."
    return NotSerializableError(message, path)


def _find_culprit(value: Any, path: str, depth: int) -> tuple[str, Any]:
    """The innermost part of ``value`` that fails to pickle by itself, and the way to it."""
    if depth:
        for step, child in _children(value):
            if not _pickles(child):
                return _find_culprit(child, path + step, depth - 1)
    return path, value


def _pickles(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO()).dump(value)
    except Exception:  # the question is only whether it fails
        return False
    return True


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    found: list[tuple[str, Any]] = []
    closure = getattr(value, "__closure__", None)
    code = getattr(value, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, closure or (), strict=False):
            try:
                found.append((f" (captured variable {name!r})", cell.cell_contents))
            except ValueError:  # an empty cell
                continue
        namespace = getattr(value, "__globals__", {})
        found += [
            (f" (global {name!r})", namespace[name]) for name in code.co_names if name in namespace
        ]
    if hasattr(value, "__self__") and not isinstance(value.__self__, type(sys)):
        found.append((".__self__", value.__self__))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, (dict, types.MappingProxyType)):  # the latter: of a class
        found += [(f".{name}", item) for name, item in attributes.items()]
    return found

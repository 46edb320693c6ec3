"""Functional collectives: by them DTensor, tensor-parallel layers and compiled code communicate.

They are operators of torch that return at once. A rank waits where it needs the result, in another
operator, ``wait_tensor``: the event is open until then, as that of a call with ``async_op=True``.

Calls from Python are seen: all of eager mode, its backward, and what inductor generates. Calls from
C++ are not: AOTInductor's, and in older torch those of the backward of tensor parallel layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from sys import _getframe as getframe
from threading import get_ident
from time import monotonic_ns
from typing import Any

from miniray.doctor import instrument_groups, recorder
from miniray.doctor.box import Added
from miniray.doctor.instrument import broken, failed, works
from miniray.doctor.instrument_collectives import dtype_name, remember, waited
from miniray.doctor.instrument_groups import group_name, inside
from miniray.doctor.recorder import Recorder
from miniray.doctor.sites import call_site

#: Operator → the collective that it is. All take what is sent first, and the ``group_name``.
_OPERATORS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce_coalesced",
    "all_reduce_coalesced_": "all_reduce_coalesced",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "all_gather_into_tensor_out": "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_tensor_out": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all_single",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}

#: Open events by the storage of their result, as torch itself finds what ``wait_tensor`` waits for.
_open: dict[int, Added] = {}
#: What a group is called, by what the operators are given: its name in torch.
_groups: dict[Any, str] = {}


class _Replaced:
    """What an operator calls, in the place of the function in C++.

    torch takes the hash of that function for the operator's, and its tables have been made by now.
    """

    def __init__(self, original: Any, call: Callable[..., Any]) -> None:
        self._original = original
        self._call = call

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._original, args, kwargs)

    def __hash__(self) -> int:
        return hash(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def change_functional(module: Any) -> None:
    """``module`` is ``torch.distributed._functional_collectives``."""
    import torch

    for space in (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd):
        for operator, name in _OPERATORS.items():
            packet = getattr(space, operator, None)
            if packet is not None:
                _change(packet, _make(module, name, packet.default._schema))
    _change(torch.ops._c10d_functional.wait_tensor, _wait)
    instrument_groups.when_changed.append(_groups.clear)


def _change(packet: Any, call: Callable[..., Any]) -> None:
    """Both of its callables: eager mode calls the operator, compiled code its only overload."""
    for target in (packet, packet.default):
        target._op = _Replaced(target._op, call)


def _make(module: Any, name: str, schema: Any) -> Callable[..., Any]:
    import torch

    is_tracing = module._are_we_tracing
    no_dispatch = torch.Tensor.__torch_dispatch__
    names = [argument.name for argument in schema.arguments]

    def call(original: Any, args: Any, kwargs: Any) -> Any:
        current = recorder._current
        sent = args[0] if args else kwargs.get(names[0])
        if sent.__class__ is list and sent:
            sent = sent[0]
        if (
            current is None
            or get_ident() in inside  # a mode of torch that calls the same operator again
            or (broken and not works("functional collectives"))
            # Tensors that stand for others: it is called again with those, or never for real.
            or getattr(type(sent), "__torch_dispatch__", None) is not no_dispatch
            or is_tracing()
        ):
            return original(*args, **kwargs)
        try:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            added = _begin(current, name, sent, given)
        except Exception as error:  # whatever an odd argument makes it raise
            failed("functional collectives", error)
            return original(*args, **kwargs)
        thread = get_ident()
        inside.add(thread)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            current.end(added)
            raise
        finally:
            inside.discard(thread)
        for tensor in result if result.__class__ is list else [result]:
            remember(_open, _storage(tensor), added)
        return result

    return call


def _begin(current: Recorder, name: str, sent: Any, given: Mapping[str, Any]) -> Added:
    import torch.distributed.distributed_c10d as c10d

    group = given["group_name"]
    known = _groups.get(group)
    if known is None:
        resolved = c10d._resolve_process_group(group) if isinstance(group, str) else group
        known = _groups[group] = group_name(c10d, resolved)
    shape = tuple(sent.shape)
    op = f"src={given['src']}" if name == "broadcast" else given.get("reduce_op", "").upper()
    if name == "reduce_scatter_tensor":  # what a rank gets is what counts, as in ``reduce_scatter``
        shape = (shape[0] // given["group_size"], *shape[1:])
    site = call_site(getframe(1))
    call = current.collective(
        name, op, known, shape, dtype_name(sent.dtype), site, blocking=False, functional=True
    )
    return current.begin(call, monotonic_ns())


def _wait(original: Any, args: Any, kwargs: Any) -> Any:
    added = _open.pop(_storage(args[0]), None) if _open and args else None
    return waited(added, original, args, kwargs)


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)

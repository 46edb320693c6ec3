"""torch.distributed: every collective is an event, open while it runs.

With NCCL a collective that has *ended* here is one that was handed to the GPU: that call does not
wait for the others. The rank that handed over fewer than the others is the one they wait for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from sys import _getframe as getframe
from threading import get_ident
from time import monotonic_ns
from types import FrameType
from typing import Any

from miniray.doctor import instrument_groups, model, recorder
from miniray.doctor.box import Added, Call
from miniray.doctor.instrument import broken, failed, replace, works
from miniray.doctor.instrument_groups import group_name, inside
from miniray.doctor.layout import EVENT_SLOTS, EVENT_WORDS, FIRST_EVENT
from miniray.doctor.recorder import Recorder
from miniray.doctor.sites import call_site, is_at

#: name → (the argument that is sent, the arguments that say how)
_COLLECTIVES: dict[str, tuple[str, tuple[str, ...]]] = {
    "all_reduce": ("tensor", ("op",)),
    "all_reduce_coalesced": ("tensors", ("op",)),
    "broadcast": ("tensor", ("src", "group_src")),
    "reduce": ("tensor", ("op", "dst", "group_dst")),
    "all_gather": ("tensor", ()),
    "all_gather_coalesced": ("input_tensor_list", ()),
    "all_gather_into_tensor": ("input_tensor", ()),
    "all_gather_single": ("input_tensor", ()),
    "_all_gather_base": ("input_tensor", ()),
    "gather": ("tensor", ("dst", "group_dst")),
    "scatter": ("tensor", ("src", "group_src")),
    "reduce_scatter": ("output", ("op",)),
    "reduce_scatter_tensor": ("output", ("op",)),
    "reduce_scatter_single": ("output", ("op",)),
    "_reduce_scatter_base": ("output", ("op",)),
    "all_to_all": ("input_tensor_list", ()),
    "all_to_all_single": ("input", ()),
    "barrier": ("", ()),
    "monitored_barrier": ("", ()),
    "all_gather_object": ("", ()),
    "gather_object": ("", ("dst", "group_dst")),
    "broadcast_object_list": ("", ("src", "group_src")),
    "scatter_object_list": ("", ("src", "group_src")),
}
# isend and irecv are left alone: P2POp compares its argument with the function object itself.
_POINT_TO_POINT: dict[str, tuple[str, tuple[str, ...]]] = {
    "send": ("tensor", ("dst", "group_dst")),
    "recv": ("tensor", ("src", "group_src")),
    "send_object_list": ("", ("dst", "group_dst")),
    "recv_object_list": ("", ("src", "group_src")),
    "batch_isend_irecv": ("", ()),
}
_MOST_OPEN = 1024

#: The events of collectives called with async_op=True, by the id of the Work that torch returned.
_async_events: dict[int, Added] = {}


#: (recorder, shape, dtype, details, id of the group, whether asynchronous) of the last call at a
#: line, and what that call is for the recorder: the same again needs no words to be found.
_Known = tuple[tuple[Recorder, Any, Any, list[Any], int, bool], Call]
#: (recorder, shape, dtype, the other arguments, keywords, what it is for the recorder) of the
#: last call by an instruction of the user's (id of its code, where in it): the same again needs no
#: line to be found. Of those that send their first argument, return when they are done and are not
#: made of others.
_Plain = tuple[
    Recorder, Any, Any, tuple[Any, ...], dict[str, Any],
    int, int, tuple[int, ...], Callable[[], int], int,
]  # fmt: skip
#: By site and by instruction. Forgotten when groups come or go, for their ids are reused.
_known: list[dict[Any, Any]] = []


def _forget() -> None:
    for calls in _known:
        calls.clear()


def change_collectives(module: Any) -> None:
    """``module`` is ``torch.distributed.distributed_c10d``."""
    for kind, table in ((model.COLLECTIVE, _COLLECTIVES), (model.POINT_TO_POINT, _POINT_TO_POINT)):
        for name, (payload, details) in table.items():
            if hasattr(module, name):
                replace(module, name, _make_collective(module, kind, name, payload, details))
    instrument_groups.when_changed.append(_forget)
    instrument_groups.change_groups(module)


def _make_collective(
    module: Any, kind: str, name: str, payload: str, details: tuple[str, ...]
) -> Callable[[Any], Any]:
    import torch

    is_compiling = torch.compiler.is_dynamo_compiling

    def make(original: Any) -> Any:
        parameters = list(inspect.signature(original).parameters)
        payload_at = parameters.index(payload) if payload in parameters else -1
        group_at = parameters.index("group") if "group" in parameters else -1
        async_at = parameters.index("async_op") if "async_op" in parameters else -1
        details_at = [(parameters.index(word), word) for word in details if word in parameters]
        outsider = getattr(module.GroupMember, "NON_GROUP_MEMBER", None)
        is_plain = payload == "tensor" and payload_at == 0
        known: dict[str, _Known] = {}
        plain: dict[tuple[int, int], _Plain] = {}
        _known.extend((known, plain))

        def collective(*args: Any, **kwargs: Any) -> Any:
            # torch.compile knows collectives by identity: what it traces must be the original.
            if is_compiling():
                return original(*args, **kwargs)
            current = recorder._current
            if (
                current is None
                or (inside and get_ident() in inside)
                or (broken and not works("collectives"))
            ):
                return original(*args, **kwargs)
            caller = getframe(1)
            last = plain.get((id(caller.f_code), caller.f_lasti))
            if last is None or not args:
                return in_general(current, caller, args, kwargs)
            was, shape, dtype, others, keywords, first, second, sizes, next_one, cell = last
            sent = args[0]
            if (
                getattr(sent, "shape", None) != shape
                or sent.dtype is not dtype
                or args[1:] != others
                or kwargs != keywords
                or current is not was
            ):
                return in_general(current, caller, args, kwargs)
            started = monotonic_ns()
            count = current.next_event()  # here and below as ``Box.begin`` does
            at = FIRST_EVENT + count % EVENT_SLOTS * EVENT_WORDS
            ints = current.ints
            ints[at] = count
            ints[at + 1] = started
            ints[at + 2] = 0
            ints[at + 3] = next_one()
            ints[at + 4] = ints[4]
            ints[at + 5] = first
            ints[at + 6] = second
            if sizes:
                for index, size in enumerate(sizes, at + 7):
                    ints[index] = size
            ints[at + 13] = count
            ints[cell] = count
            try:
                return original(*args, **kwargs)
            finally:
                now = monotonic_ns()
                current.collective_ns += now - started
                if ints[at] == count:
                    ints[at + 2] = now  # as ``Box.end_event`` does

        def in_general(current: Recorder, caller: FrameType, args: Any, kwargs: Any) -> Any:
            try:
                call, is_async = begin(current, caller, args, kwargs)
            except Exception as error:  # whatever an odd argument makes it raise
                failed("collectives", error)
                call = None
            if call is None:
                return original(*args, **kwargs)
            thread = get_ident()
            started = monotonic_ns()
            added = current.begin(call, started)
            inside.add(thread)
            ended = True
            try:
                result = original(*args, **kwargs)
                if is_async and result is not None:
                    ended = False
                    _remember(module, result, added)
                return result
            finally:
                inside.discard(thread)
                now = monotonic_ns()
                current.collective_ns += now - started
                if ended:
                    current.box.end_event(added, now)

        def begin(
            current: Recorder, caller: FrameType, args: Any, kwargs: Any
        ) -> tuple[Call | None, bool]:
            """What the call is for the recorder, if anything, and whether it is asynchronous."""
            count = len(args)
            group = None
            if group_at >= 0:
                group = args[group_at] if count > group_at else kwargs.get("group")
                if group is not None and group is outsider:  # not of this group: does nothing
                    return None, False
            is_async = async_at >= 0 and bool(
                args[async_at] if count > async_at else kwargs.get("async_op")
            )
            shape: Any = ()
            dtype: Any = None
            if payload_at >= 0:
                sent = args[payload_at] if count > payload_at else kwargs.get(payload)
                if sent.__class__ is list and sent:
                    sent = sent[0]
                if sent is not None:
                    shape, dtype = sent.shape, sent.dtype
            how = []
            for at, word in details_at:
                how.append(args[at] if count > at else kwargs.get(word))
            site = call_site(caller)
            same = current, shape, dtype, how, id(group), is_async
            last = known.get(site)
            if last is not None and last[0] == same:
                call = last[1]
            else:
                call = current.collective(
                    name, _in_words(how), group_name(module, group), tuple(map(int, shape)),
                    dtype_name(dtype), site, blocking=not is_async, kind=kind,
                )  # fmt: skip
                known[site] = same, call
            if is_plain and count and not is_async and is_at(caller, site):
                here = id(caller.f_code), caller.f_lasti
                plain[here] = (current, shape, dtype, args[1:], kwargs, *call)
            return call, is_async

        def _in_words(how: list[Any]) -> str:
            op = ""
            for (_, word), value in zip(details_at, how, strict=True):
                if word == "op":
                    op = _op_name(value)
                elif value is not None:
                    op = f"{op} {word}={value}" if op else f"{word}={value}"
            return op

        return collective

    return make


def _remember(module: Any, work: Any, added: Added) -> None:
    if not hasattr(module.Work.wait, "__wrapped__"):
        _change_work(module)  # only now: it is in the way of every other collective, too
    remember(_async_events, id(work), added)


def remember(events: dict[int, Added], key: int, added: Added) -> None:
    """Keep an open event for the call that will wait for it."""
    if len(events) >= _MOST_OPEN:  # those that nobody waits for: forget the oldest
        del events[next(iter(events))]
    events[key] = added


def _change_work(module: Any) -> None:
    """``Work.wait()`` of a collective called with async_op=True: that is where a rank hangs."""
    original = module.Work.wait

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        return waited(_async_events.pop(id(self), None), original, (self, *args), kwargs)

    module.Work.wait = wait


def waited(added: Added | None, original: Any, args: Any, kwargs: Any) -> Any:
    """Call what waits for the open event, if it is one that is known."""
    current = recorder._current
    if added is None or current is None:
        return original(*args, **kwargs)
    current.box.wait_for(added)
    started = monotonic_ns()
    try:
        return original(*args, **kwargs)
    finally:
        now = monotonic_ns()
        current.collective_ns += now - started
        current.box.end_event(added, now)


_names: dict[Any, str] = {}
_ops: dict[int, str] = {}


def dtype_name(dtype: Any) -> str:
    if dtype is None:
        return ""
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = str(dtype).removeprefix("torch.")
    return name


def _op_name(op: Any) -> str:
    """``ReduceOp.SUM`` and its like; the default, which is not among the arguments, is SUM."""
    if op is None:
        return "SUM"
    name = _ops.get(id(op))
    if name is None:
        name = str(op).rpartition(".")[2]
        if isinstance(op, int) or type(op).__name__ == "RedOpType":  # one object for each, for ever
            _ops[id(op)] = name
    return name

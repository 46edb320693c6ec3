"""torch.distributed: every collective is an event, open while it runs.

With NCCL a collective that has *ended* here is one that was handed to the GPU: that call does not
wait for the others. The rank that handed over fewer than the others is the one they wait for.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

from miniray.doctor import model, recorder, sites
from miniray.doctor.instrument import broken, failed, here, replace, works
from miniray.doctor.recorder import Call, Recorder

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
_async_events: dict[int, int] = {}
_groups: dict[int, str] = {}


#: (recorder, shape, dtype, details, id of the group, whether asynchronous) of the last call at a
#: line, and that call: the same again needs no words to be found.
_Known = tuple[tuple[Recorder, Any, Any, tuple[Any, ...], int, bool], Call]
#: Of each kind of collective, by site. Forgotten when groups come or go, for their ids are reused.
_known: list[dict[str, _Known]] = []


def _forget_groups() -> None:
    _groups.clear()
    for calls in _known:
        calls.clear()


def change_collectives(module: Any) -> None:
    """``module`` is ``torch.distributed.distributed_c10d``."""
    for kind, table in ((model.COLLECTIVE, _COLLECTIVES), (model.POINT_TO_POINT, _POINT_TO_POINT)):
        for name, (payload, details) in table.items():
            if hasattr(module, name):
                replace(module, name, _make_collective(module, kind, name, payload, details))
    replace(module, "init_process_group", lambda original: _make_init(module, original))
    replace(module, "new_group", lambda original: _make_new_group(module, original))
    replace(module, "destroy_process_group", _make_destroy)
    _change_work(module)
    if (current := recorder.current()) is not None:
        current.update(distributed_available=True)
        if module.is_initialized():
            _note_group(module, current)


def group_name(module: Any, group: Any) -> str:
    """A name for a process group that is equal on all its ranks: "default" or "ranks 0,2 (#1)"."""
    key = id(group)
    name = _groups.get(key)
    if name is None:
        default = module._get_default_group()
        if group is None or group is default:
            name = "default"
        else:
            ranks = module.get_process_group_ranks(group)
            shown = ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{len(ranks)} of them"
            name = f"ranks {shown} (#{str(group.group_name)[:8]})"
        _groups[key] = name
    return name


def _make_collective(
    module: Any, kind: str, name: str, payload: str, details: tuple[str, ...]
) -> Callable[[Any], Any]:
    import torch

    def make(original: Any) -> Any:
        parameters = list(inspect.signature(original).parameters)
        payload_at = parameters.index(payload) if payload in parameters else -1
        group_at = parameters.index("group") if "group" in parameters else -1
        async_at = parameters.index("async_op") if "async_op" in parameters else -1
        details_at = [(parameters.index(word), word) for word in details if word in parameters]
        outsider = getattr(module.GroupMember, "NON_GROUP_MEMBER", None)
        known: dict[str, _Known] = {}
        _known.append(known)

        def begin(current: Recorder, args: Any, kwargs: Any, group: Any, is_async: bool) -> int:
            count = len(args)
            shape: Any = ()
            dtype: Any = None
            if payload_at >= 0:
                sent = args[payload_at] if count > payload_at else kwargs.get(payload)
                if isinstance(sent, (list, tuple)) and sent:
                    sent = sent[0]
                if sent is not None:
                    shape, dtype = sent.shape, sent.dtype
            how = tuple([args[at] if count > at else kwargs.get(word) for at, word in details_at])
            site = sites.call_site(sys._getframe(2))
            now = current, shape, dtype, how, id(group), is_async
            last = known.get(site)
            if last is None or last[0] != now:
                call = current.prepare(
                    name, _in_words(how), group_name(module, group), tuple(shape),
                    _dtype_name(dtype), site, blocking=not is_async, kind=kind,
                )  # fmt: skip
                last = known[site] = now, call
            return current.begin(last[1])

        def _in_words(how: tuple[Any, ...]) -> str:
            op = ""
            for (_, word), value in zip(details_at, how, strict=True):
                if word == "op":
                    op = _op_name(value)
                elif value is not None:
                    op = f"{op} {word}={value}" if op else f"{word}={value}"
            return op

        def collective(*args: Any, **kwargs: Any) -> Any:
            # torch.compile knows collectives by identity: what it traces must be the original.
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            current = recorder._current
            if current is None or here.collective or (broken and not works("collectives")):
                return original(*args, **kwargs)
            count = len(args)
            group = None
            if group_at >= 0:
                group = args[group_at] if count > group_at else kwargs.get("group")
                if group is not None and group is outsider:  # not of this group: does nothing
                    return original(*args, **kwargs)
            is_async = async_at >= 0 and bool(
                args[async_at] if count > async_at else kwargs.get("async_op")
            )
            try:
                number = begin(current, args, kwargs, group, is_async)
            except Exception as error:  # whatever an odd argument makes it raise
                failed("collectives", error)
                return original(*args, **kwargs)
            here.collective = True
            started = monotonic()
            ended = True
            try:
                result = original(*args, **kwargs)
                if is_async and result is not None:
                    ended = False
                    _remember(result, number)
                return result
            finally:
                here.collective = False
                now = monotonic()
                current.collective_seconds += now - started
                if ended:
                    current.box.end_event(number, now)

        return collective

    return make


def _remember(work: Any, number: int) -> None:
    if len(_async_events) >= _MOST_OPEN:  # works that nobody waits for: forget the oldest
        del _async_events[next(iter(_async_events))]
    _async_events[id(work)] = number


def _change_work(module: Any) -> None:
    """``Work.wait()`` of a collective called with async_op=True: that is where a rank hangs."""
    original = module.Work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = _async_events.pop(id(self), None) if _async_events else None
        current = recorder._current
        if number is None or current is None:
            return original(self, *args, **kwargs)
        current.box.wait_for(number)
        started = monotonic()
        try:
            return original(self, *args, **kwargs)
        finally:
            current.collective_seconds += monotonic() - started
            current.end(number)

    wait.__doc__ = original.__doc__
    module.Work.wait = wait


def _make_init(module: Any, original: Any) -> Any:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        current = recorder.current()
        if current is None:
            return original(*args, **kwargs)
        site = sites.call_site(sys._getframe(1))
        backend = str(args[0] if args else kwargs.get("backend") or "")
        current.set_phase("init", site)
        current.note(world_size_wanted=kwargs.get("world_size", -1), rank_wanted=kwargs.get("rank"))
        number = current.event(model.GROUP, "init_process_group", backend, site=site, is_open=True)
        here.collective = True
        try:
            result = original(*args, **kwargs)
        finally:
            here.collective = False
            current.end(number)
        _forget_groups()
        _note_group(module, current)
        current.set_phase("compute", site)
        return result

    return init_process_group


def _note_group(module: Any, current: Recorder) -> None:
    rank, size = module.get_rank(), module.get_world_size()
    fields: dict[str, Any] = {
        "initialised": True,
        "backend": str(module.get_backend()),
        "group_rank": rank,
        "group_size": size,
    }
    if current.world_size == 1 < size and rank == current.rank:
        # A launcher that starts the other ranks from inside of rank 0 (Lightning): only now is it
        # known how many there are.
        current.world_size = size
        fields.update(world_size=size, local_world_size=size)
    current.update(**fields)


def _make_new_group(module: Any, original: Any) -> Any:
    def new_group(*args: Any, **kwargs: Any) -> Any:
        current = recorder.current()
        if current is None or here.collective or not module.is_initialized():
            return original(*args, **kwargs)
        ranks = args[0] if args else kwargs.get("ranks")
        op = "" if ranks is None else f"ranks={list(ranks)}"[:200]
        site = sites.call_site(sys._getframe(1))
        # All ranks must make all groups, in the same order: as much a collective as any other.
        number = current.collective("new_group", op, "default", site=site)
        here.collective = True
        try:
            return original(*args, **kwargs)
        finally:
            here.collective = False
            current.end(number)

    return new_group


def _make_destroy(original: Any) -> Any:
    def destroy_process_group(group: Any = None) -> Any:
        current = recorder.current()
        if current is None:
            return original(group)
        site = sites.call_site(sys._getframe(1))
        number = current.event(model.GROUP, "destroy_process_group", site=site, is_open=True)
        try:
            return original(group)
        finally:
            current.end(number)
            _forget_groups()
            if group is None:
                current.update(initialised=False)

    return destroy_process_group


_names: dict[Any, str] = {}
_ops: dict[int, str] = {}


def _dtype_name(dtype: Any) -> str:
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

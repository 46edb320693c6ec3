"""Process groups of torch.distributed: when they are made and left, and what they are called."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from sys import _getframe as getframe
from threading import get_ident
from time import monotonic_ns
from typing import Any

from miniray.doctor import model, recorder
from miniray.doctor.instrument import replace
from miniray.doctor.recorder import Recorder
from miniray.doctor.sites import call_site

#: Threads that are in a collective: one made of others is recorded once.
inside: set[int] = set()
#: Called when groups come or go: their ids are used again.
when_changed: list[Callable[[], None]] = []
_groups: dict[int, str] = {}
#: The parameters of ``init_process_group``, by position.
_PARAMETERS = ("backend", "init_method", "timeout", "world_size", "rank", "store")


def change_groups(module: Any) -> None:
    """``module`` is ``torch.distributed.distributed_c10d``."""
    replace(module, "init_process_group", lambda original: _make_init(module, original))
    replace(module, "new_group", lambda original: _make_new_group(module, original))
    replace(module, "destroy_process_group", _make_destroy)
    if (current := recorder.current()) is not None:
        current.update(distributed_available=True)
        if module.is_initialized():
            _note_group(module, current)


def _forget() -> None:
    _groups.clear()
    for action in when_changed:
        action()


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
            _note_members(name, ranks)
        _groups[key] = name
    return name


def _note_members(name: str, ranks: Sequence[int]) -> None:
    """Record which ranks a group has, as rows of a name and a range, usually one per group."""
    current = recorder.current()
    if current is None:
        return
    known = current.info.get("notes", {}).get("groups", [])
    if all(row[0] != name for row in known):
        rows = [[name, part.start, part.stop, part.step] for part in _as_ranges(ranks)]
        current.note(groups=[*known, *rows])


def _as_ranges(ranks: Sequence[int]) -> list[range]:
    """Return one range for ranks at equal distances, else one per rank."""
    found = sorted(ranks)
    step = found[1] - found[0] if len(found) > 1 else 1
    whole = range(found[0], found[-1] + 1, step)
    return [whole] if list(whole) == found else [range(rank, rank + 1) for rank in found]


def _make_init(module: Any, original: Any) -> Any:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        current = recorder.current()
        if current is None:
            return original(*args, **kwargs)
        site = call_site(getframe(1))
        backend = str(args[0] if args else kwargs.get("backend") or "")
        current.set_phase("init", site)
        current.note(asked=_asked(args, kwargs))
        added = current.event(model.GROUP, "init_process_group", backend, site=site, is_open=True)
        thread = get_ident()
        inside.add(thread)
        try:
            result = original(*args, **kwargs)
        finally:
            inside.discard(thread)
            current.end(added)
        _forget()
        _note_group(module, current)
        current.set_phase("compute", site)
        return result

    return init_process_group


def _asked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Rank, world size and meeting place that a call of ``init_process_group`` asks for.

    None for what cannot be known.
    """
    given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
    method = given.get("init_method")
    place: str | None = str(method)
    if given.get("store") is not None:
        place = None
    elif method in (None, "env://"):
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    found: dict[str, Any] = {"place": place}
    for name in ("rank", "world_size"):
        unsaid = given.get(name) in (None, -1)
        text = os.environ.get(name.upper(), "") if unsaid else str(given[name])
        found[name] = int(text) if text.isdigit() else None
    return found


def _note_group(module: Any, current: Recorder) -> None:
    rank, size = module.get_rank(), module.get_world_size()
    backend = str(module.get_backend())
    if backend == "undefined":  # none was asked for: one for each kind of device
        backend = str(module.get_backend_config())
    fields: dict[str, Any] = {
        "initialised": True,
        "backend": backend,
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
        current, thread = recorder.current(), get_ident()
        # With local synchronisation only its members make a group.
        local = kwargs.get("use_local_synchronization")
        if current is None or thread in inside or local or not module.is_initialized():
            return original(*args, **kwargs)
        ranks = args[0] if args else kwargs.get("ranks")
        op = "" if ranks is None else f"ranks={list(ranks)}"[:200]
        site = call_site(getframe(1))
        # All ranks must make all groups, in the same order: as much a collective as any other.
        call = current.collective("new_group", op, "default", site=site)
        added = current.begin(call, monotonic_ns())
        inside.add(thread)
        try:
            return original(*args, **kwargs)
        finally:
            inside.discard(thread)
            current.end(added)

    return new_group


def _make_destroy(original: Any) -> Any:
    def destroy_process_group(group: Any = None) -> Any:
        current = recorder.current()
        if current is None:
            return original(group)
        site = call_site(getframe(1))
        added = current.event(model.GROUP, model.DESTROY, site=site, is_open=True)
        try:
            return original(group)
        finally:
            current.end(added)
            _forget()
            if group is None:
                current.update(initialised=False)

    return destroy_process_group

"""DistributedDataParallel: construction, forward, and parameters that get no gradient.

DDP talks to the other ranks in C++, out of Python's sight: when it is made (shapes are compared,
weights sent), in forward (buffers are sent), in backward (gradients are averaged). Each of these is
recorded as a collective of DDP's group, in its place in the sequence.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Iterable
from sys import _getframe as getframe
from time import monotonic_ns
from typing import Any

from miniray.doctor import model, recorder
from miniray.doctor.box import Added, Call
from miniray.doctor.events import Place
from miniray.doctor.instrument import failed, replace, works
from miniray.doctor.instrument_groups import group_name
from miniray.doctor.instrument_training import state
from miniray.doctor.layout import MOMENT
from miniray.doctor.model import site_from
from miniray.doctor.recorder import Recorder
from miniray.doctor.sites import call_site

_MOST_NAMES = 64
#: Looking for unused parameters may take this share of the time between two looks.
_LOOK_SHARE = 0.001


class Observed:
    """What is known of one DDP model."""

    def __init__(self, ddp: Any, group: str, info: dict[str, Any]) -> None:
        self.ddp = weakref.ref(ddp)
        self.group = group
        self.info = info
        self.parameters = [
            (name, weakref.ref(p)) for name, p in ddp.module.named_parameters() if p.requires_grad
        ]
        self.next_look = 0  # nanoseconds
        #: Buffers may be sent in forward; whether they are, torch knows each time.
        self.has_buffers = bool(ddp.modules_buffers)

    def backward_at(self, current: Recorder, place: Place) -> Call:
        """What a backward of this model, called at this line, is for the recorder."""
        call = current.collective("DDP.backward", "", self.group, site=place[3])
        place[2][self] = call
        return call


#: By the id of the model: to find it by a weak reference takes three times as long.
_observed: dict[int, Observed] = {}


def change_ddp(module: Any) -> None:
    """``module`` is ``torch.nn.parallel.distributed``."""
    ddp_class = module.DistributedDataParallel
    replace(ddp_class, "__init__", _make_init)
    replace(ddp_class, "forward", _make_forward)
    state.after_backward = _look_for_unused


def change_join(module: Any) -> None:
    """``module`` is ``torch.distributed.algorithms.join``.

    A rank that is out of data answers the others' collectives in C++: sequences of a run that uses
    this must not be compared, and the box says so.
    """
    original = module.Join.__enter__

    def enter(self: Any) -> Any:
        if (current := recorder.current()) is not None:
            current.note(join=True)
        return original(self)

    module.Join.__enter__ = enter


def _make_init(original: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        current = recorder.current()
        if current is None or not works("models") or not _c10d().is_initialized():
            original(self, *args, **kwargs)  # without a group it says what is missing
            return
        site = call_site(getframe(1))
        added: Added | None = None
        info: dict[str, Any] = {}
        try:
            info = _describe(args[0] if args else kwargs["module"], kwargs, site)
            group = group_name(_c10d(), kwargs.get("process_group"))
            current.models.append(info)
            current.write_info()
            said = f"{info['parameters']} parameters {info['digest']}"
            call = current.collective("DDP.__init__", said, group, site=site)
            added = current.begin(call, monotonic_ns())
        except Exception as error:  # a module that counts its parameters in a way of its own
            failed("models", error)
        try:
            original(self, *args, **kwargs)
        finally:
            if added is not None:
                current.end(added)
        if added is not None:
            info["device"] = str(getattr(self, "device", ""))
            _observed[id(self)] = Observed(self, group, info)
            weakref.finalize(self, _observed.pop, id(self), None).atexit = False
            current.write_info()

    return init


def _describe(wrapped: Any, kwargs: dict[str, Any], site: str) -> dict[str, Any]:
    names: list[str] = []
    elements = 0
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in wrapped.named_parameters():
        if not parameter.requires_grad:
            continue
        line = f"{name} {tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
        names.append(line)
        elements += parameter.numel()
        digest.update(line.encode())
    return {
        "name": type(wrapped).__name__,
        "parameters": len(names),
        "elements": elements,
        "digest": digest.hexdigest(),
        "names": names[:_MOST_NAMES],
        "buffers": sum(1 for _ in wrapped.buffers()),
        "find_unused": bool(kwargs.get("find_unused_parameters", False)),
        "static_graph": bool(kwargs.get("static_graph", False)),
        "device": "",
        "site": list(site_from(site)),
        "unused": [],
        "unused_step": -1,
    }


def _make_forward(original: Any) -> Any:
    import torch

    is_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled

    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        current = recorder._current
        self = args[0]
        if current is None or (observed := _observed.get(id(self))) is None:
            return original(*args, **kwargs)
        try:
            caller = getframe(3)  # of Module.__call__
        except ValueError:
            caller = getframe(1)
        code, at, place = current.last_forward
        if caller.f_code is not code or caller.f_lasti != at:
            last = current.place_at("forward", getframe(1), caller)
            current.last_forward = last
            place = last[2]
        ints = current.ints
        ints[2] = monotonic_ns() & MOMENT | place[0]  # Cell.PHASE
        sync = self.require_backward_grad_sync and is_grad_enabled()
        added: Added | None = None
        if observed.has_buffers and self.will_sync_module_buffers():
            call = current.collective("DDP.forward", "buffers", observed.group, site=place[3])
            added = current.begin(call, monotonic_ns())
        try:
            output = original(*args, **kwargs)
        finally:
            if added is not None:
                current.end(added)
            ints[2] = monotonic_ns() & MOMENT | place[1]
        if sync and state.pending is not observed:
            if state.pending is None:
                state.pending = observed
            else:
                state.others[observed] = None
        return output

    return forward


def _look_for_unused(current: Recorder, models: Iterable[Observed]) -> int:
    """After a backward: which parameters have no gradient at all? Gives when to look again.

    With ``zero_grad(set_to_none=True)``, the default, these took no part. One of them is why DDP's
    other ranks wait for ever, unless ``find_unused_parameters`` is on.
    """
    began = monotonic_ns()
    again = []
    for observed in models:
        now = monotonic_ns()
        if now >= observed.next_look:
            _look_at(current, observed)
            observed.next_look = now + int((monotonic_ns() - now) / _LOOK_SHARE)
        again.append(observed.next_look)
    return min(again, default=began)


def _look_at(current: Recorder, observed: Observed) -> None:
    unused = [
        name
        for name, reference in observed.parameters
        if (parameter := reference()) is not None and parameter.grad is None
    ]
    if len(unused) == len(observed.parameters):
        return  # it took no part: the backward was another model's
    if unused[:_MOST_NAMES] != observed.info["unused"]:
        observed.info["unused"] = unused[:_MOST_NAMES]
        observed.info["unused_step"] = current.step_number + 1
        current.write_info()
        if unused:
            shown = ", ".join(unused[:8])
            current.event(model.MODEL, "parameters without a gradient", shown)


def _c10d() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]

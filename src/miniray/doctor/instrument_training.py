"""Backward passes, losses and optimizer steps.

A loss is reported by the trainer or by ``doctor.step``. If neither reports losses, it is the tensor
that ``backward`` is called on, if that has one element. On the CPU reading it costs a microsecond.
On a GPU reading it at once would make the rank wait for the GPU: the value is copied without
waiting, at most ten times per second, and read when the copy has arrived. So a loss on a GPU is
recorded some steps late, and the first non-finite one is exact to these steps only.

A step is a step of the first optimizer that makes one; others (a GAN has two) do not count again.
"""

from __future__ import annotations

import weakref
from sys import _getframe as getframe
from time import monotonic, monotonic_ns
from typing import Any

from miniray.doctor import model, recorder
from miniray.doctor.box import Added
from miniray.doctor.events import Place
from miniray.doctor.instrument import broken, failed, replace, works
from miniray.doctor.layout import EVENT_SLOTS, EVENT_WORDS, FIRST_EVENT, MOMENT, NO_LOSS
from miniray.doctor.recorder import Recorder

_GPU_LOSS_SECONDS = 0.1


class State:
    """What the observers of one process remember between calls."""

    def __init__(self) -> None:
        #: The DDP model that ran forward and will average gradients in the next backward, and
        #: others that did, seldom as there are any.
        self.pending: Any = None
        self.others: dict[Any, None] = {}
        #: Set by ``instrument_ddp``: looks for unused parameters; gives when to look again.
        self.after_backward: Any = None
        self.next_look = 0  # nanoseconds
        #: A backward that runs others (checkpointing) is recorded once. On a GPU those run in
        #: another thread.
        self.in_backward = False
        self.scaled: tuple[int, Any] | None = None  # (id of the scaled loss, the loss itself)
        self.after_optimizer = 0  # the place to return to
        self.clock = 0  # id of the optimizer whose steps count
        self.arriving: tuple[Any, Any, int, str] | None = None  # (copy, event, step, site)
        self.next_copy = 0.0


state = State()


def change_autograd(module: Any) -> None:
    """``torch.autograd.backward`` is what ``Tensor.backward`` calls, too."""

    import torch

    tensor = torch.Tensor

    def make(original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            current = recorder._current
            if current is None or state.in_backward:
                return original(*args, **kwargs)
            # Written out, here and where there are other phases: this runs cold, once a step, and
            # every twenty instructions less are a microsecond.
            try:
                caller = getframe(2)  # of Tensor.backward
            except ValueError:
                caller = getframe(1)
            code, at, place = current.last_backward
            if caller.f_code is not code or caller.f_lasti != at:
                last = current.place_at("backward", getframe(1), caller)
                current.last_backward = last
                place = last[2]
            ints = current.ints
            if not current.explicit_losses and (not broken or works("losses")):
                try:
                    loss: Any = args[0] if args else kwargs.get("tensors")
                    value = None
                    if (
                        loss.__class__ is tensor
                        and loss.is_cpu
                        and len(args) == 4  # as ``Tensor.backward`` gives them
                        and args[1] is None  # the gradient: without one the loss has one element
                        and state.scaled is None
                    ):
                        value = loss.tolist()  # ``item`` takes longer
                    if value.__class__ is float:
                        # As ``Tally.set_loss`` does.
                        current.loss = value
                        current.floats[64] = value  # Real.LOSS
                        ints[11] = ints[4] + 1  # Cell.LOSS_STEP, Cell.STEP
                        if value - value != 0.0:
                            current.count_nonfinite(value, place[3], ints[11])
                    else:
                        _observe_backward(current, loss, place[3])
                except Exception as error:  # a tensor of a kind we do not know
                    failed("losses", error)
            started = monotonic_ns()
            ints[2] = started & MOMENT | place[0]  # Cell.PHASE
            ints[9] += 1  # Cell.BACKWARDS
            ddp = state.pending
            if ddp is not None:
                # As ``Box.begin`` does.
                call = place[2].get(ddp) or ddp.backward_at(current, place)
                count = current.next_event()
                at = FIRST_EVENT + count % EVENT_SLOTS * EVENT_WORDS
                ints[at] = count
                ints[at + 1] = started
                ints[at + 2] = 0
                ints[at + 3] = call[3]()
                ints[at + 4] = ints[4]
                ints[at + 5] = call[0]
                ints[at + 6] = call[1]
                ints[at + 13] = count
                ints[1] = count  # Cell.OPEN
                others = _begin_others(current, place, started) if state.others else ()
            state.in_backward = True
            try:
                return original(*args, **kwargs)
            finally:
                state.in_backward = False
                ended = monotonic_ns()
                current.backward_ns += ended - started
                ints[2] = ended & MOMENT | place[1]
                if ddp is not None:
                    state.pending = None
                    if ints[at] == count:
                        ints[at + 2] = ended  # as ``Box.end_event`` does
                    for other, other_added in others:
                        del state.others[other]
                        current.box.end_event(other_added, ended)
                    if ended > state.next_look:
                        models = [ddp, *(other for other, _ in others)]
                        state.next_look = state.after_backward(current, models)

        return backward

    replace(module, "backward", make)


def _begin_others(current: Recorder, place: Place, started: int) -> list[tuple[Any, Added]]:
    """Of several models in one backward, what is done with the first, for the rest."""
    return [
        (ddp, current.begin(place[2].get(ddp) or ddp.backward_at(current, place), started))
        for ddp in state.others
    ]


def _observe_backward(current: Recorder, loss: Any, site: str) -> None:
    """Record what ``backward`` is called on, if it is a loss."""
    if loss.__class__ is list or loss.__class__ is tuple:
        if len(loss) != 1:
            return
        loss = loss[0]
    if state.scaled is not None:
        # The gradient scaler multiplies the loss by 65536: the user's number is the one before.
        scaled, plain = state.scaled
        state.scaled = None
        loss = plain if scaled == id(loss) else loss
    observe_loss(current, loss, site)


def observe_loss(current: Recorder, loss: Any, site: str) -> None:
    """Record a loss of the current step. A tensor on a GPU is read later, without waiting."""
    on_cpu = getattr(loss, "is_cpu", None)  # a GradientEdge has none
    if on_cpu:
        if loss.numel() == 1:
            current.set_loss(loss.item(), site)
    elif on_cpu is not None and loss.is_cuda:
        _observe_gpu_loss(current, loss, site)


def _observe_gpu_loss(current: Recorder, loss: Any, site: str) -> None:
    now = monotonic()
    if now < state.next_copy or loss.numel() != 1:
        return
    import torch

    if current.info.get("device") != loss.device.index:
        current.update(device=loss.device.index)
    if state.arriving is not None:
        copy, event, step, seen_at = state.arriving
        if not event.query():
            return
        current.set_loss(float(copy), seen_at, step)
    state.next_copy = now + _GPU_LOSS_SECONDS
    copy = torch.empty((), dtype=torch.float32, pin_memory=True)
    copy.copy_(loss.detach().reshape(()), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    state.arriving = copy, event, current.step_number + 1, site


def change_scaler(module: Any) -> None:
    original = module.GradScaler.scale

    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        current = recorder._current
        if current is not None and not current.explicit_losses and result is not outputs:
            state.scaled = id(result), outputs
        return result

    scale.__doc__ = original.__doc__
    module.GradScaler.scale = scale


def change_optimizer(module: Any) -> None:
    """By torch's own hooks: they run around the step of every optimizer there is."""

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        current = recorder._current
        if current is not None:
            caller = getframe(2)  # of the wrapper that torch has around each step
            code, at, place = current.last_optimizer
            if caller.f_code is not code or caller.f_lasti != at:
                last = current.place_at("optimizer", getframe(1), caller)
                current.last_optimizer = last
                place = last[2]
            state.after_optimizer = place[1]
            current.ints[2] = monotonic_ns() & MOMENT | place[0]  # Cell.PHASE

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        current = recorder._current
        if current is None:
            return
        now = monotonic_ns()
        current.ints[2] = now & MOMENT | state.after_optimizer
        if not state.clock:
            state.clock = id(optimizer)
            weakref.finalize(optimizer, setattr, state, "clock", 0).atexit = False
            current.event(model.NOTE, "optimizer", type(optimizer).__name__)
        if id(optimizer) == state.clock and not current.explicit_steps:
            # As ``Tally.end_step`` does.
            ints = current.ints
            ints[4] += 1  # Cell.STEP
            current.pending_steps.append(
                (now, current.data_ns, current.backward_ns, current.collective_ns, current.loss,
                 ints[6])  # Cell.BATCH_SIZE
            )  # fmt: skip
            current.loss = NO_LOSS
            if now > current.next_flush:
                current.flush_tally()

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)

"""Having torch report to the recorder, from outside and without a change in the user's script.

``install`` may be called at any time: what is not imported yet is changed when it is. Every change
is a thin function around the original, which calls it with what it was given and returns what it
returned. In a process without a recorder (a forked DataLoader worker, say) they do nothing else.

Observing must never break what it observes. If an observer fails, it says so once, as a warning and
as an event in the box, and is not used again.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from miniray import import_hooks
from miniray.doctor import model, recorder, sites

_installed = False
#: Observers that failed. Nearly always empty: to ask that first costs less than ``works``.
broken: set[str] = set()


def install() -> None:
    """Change what is imported and what will be. Once a process; further calls do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    from miniray.doctor import (
        instrument_collectives,
        instrument_data,
        instrument_ddp,
        instrument_functional,
        instrument_training,
        loader_observer,
    )

    import_hooks.when_imported(
        "miniray.data.observers", functools.partial(_change_safely, loader_observer.register)
    )
    import_hooks.when_imported("tqdm.std", functools.partial(_change_safely, change_tqdm))
    # The end of torch's import must be observable; see ``_change_whole``.
    import_hooks.when_imported("torch", lambda _: None)
    for module, change in (
        ("torch.distributed.distributed_c10d", instrument_collectives.change_collectives),
        ("torch.distributed._functional_collectives", instrument_functional.change_functional),
        ("torch.distributed.algorithms.join", instrument_ddp.change_join),
        ("torch.nn.parallel.distributed", instrument_ddp.change_ddp),
        ("torch.utils.data.dataloader", instrument_data.change_loader),
        ("torch.utils.data.distributed", instrument_data.change_sampler),
        ("torch.autograd", instrument_training.change_autograd),
        ("torch.optim.optimizer", instrument_training.change_optimizer),
        ("torch.amp.grad_scaler", instrument_training.change_scaler),
    ):
        import_hooks.when_imported(module, functools.partial(_change_whole, change))


def _change_whole(change: Callable[[Any], None], module: Any) -> None:
    """What torch imports on its way is changed when all of torch is there."""
    import_hooks.when_imported("torch", lambda _: _change_safely(change, module))


def _change_safely(change: Callable[[Any], None], module: Any) -> None:
    try:
        change(module)
    except Exception as error:  # a version of torch that has moved things must still be importable
        failed(module.__name__, error)


def replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(original)`` in the place of ``module.name``, wherever that was imported to."""
    original = getattr(module, name)
    changed = functools.wraps(original)(make(original))
    setattr(module, name, changed)
    for other in list(sys.modules.values()):
        # __dict__ and not getattr: that would run lazy modules' own code.
        names = getattr(other, "__dict__", None)
        if names is not None and names.get(name) is original:
            names[name] = changed


def failed(observer: str, error: BaseException) -> None:
    """An observer raised: say it once, and let ``works`` be False for it from now on."""
    if observer in broken:
        return
    broken.add(observer)
    text = f"{type(error).__name__}: {error}"
    if (current := recorder.current()) is not None:
        current.event(model.NOTE, f"the recorder of {observer} failed", text[:200])
    warnings.warn(
        f"miniray.doctor no longer records {observer} in this process: {text}", stacklevel=3
    )


def works(observer: str) -> bool:
    return observer not in broken


def change_tqdm(module: Any) -> None:
    """A progress bar that is made is an event: between two barriers it has hung real runs."""

    def make(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            current = recorder.current()
            if current is not None and not getattr(self, "disable", False):
                total = getattr(self, "total", None)
                site = sites.call_site(sys._getframe(1))
                current.event(model.BAR, "tqdm", f"total={total}", site=site)

        return init

    original = module.tqdm.__init__
    module.tqdm.__init__ = functools.wraps(original)(make(original))

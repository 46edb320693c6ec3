"""What goes into a checkpoint and how a run is taken up from it.

A checkpoint has the weights (one copy if all workers are in sync, else every worker's own), what
the workers' ``get_state`` gave, the state of the sync strategy, and the history. With the same
number of workers, a fixed seed and workers that save what they need (optimizer, random numbers,
position in the data), going on gives the same bits as never having stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import miniray
from miniray.errors import CheckpointError
from miniray.train.arguments import warn
from miniray.train.checkpoint import CheckpointStore
from miniray.train.records import simplify

if TYPE_CHECKING:
    from miniray.train.saving import Saving

_FORMAT = 1


def collect(trainer: Saving) -> dict[str, Any]:
    """The state of a run between two epochs."""
    group = trainer._group
    assert group is not None
    state: dict[str, Any] = {
        "format": _FORMAT,
        "kind": trainer._kind,
        "num_workers": len(group.handles),
        "history": [simplify(record) for record in trainer.history],
        "callbacks": [callback.get_state() for callback in trainer.callbacks],
        "callback_types": _types(trainer),
        "weights": None,
        "worker_states": None,
        "extra": trainer._extra_state(),
    }
    if group.has("get_weights"):
        if trainer._workers_in_sync():
            state["weights"] = [trainer.model_weights()]
        else:
            state["weights"] = group.call("get_weights", lambda _: (), {})
    if group.has("get_state"):
        state["worker_states"] = group.call("get_state", lambda _: (), {})
    return state


def apply(trainer: Saving, state: dict[str, Any]) -> None:
    """Give the workers what was saved. Says so where their number is another than then.

    A worker that is lost meanwhile is replaced within ``max_failures``, and gets it too.
    """
    workers = trainer.workers
    if state.get("format") != _FORMAT:
        raise CheckpointError(f"the checkpoint has format {state.get('format')!r}, not {_FORMAT}")
    kind = state.get("kind", trainer._kind)  # the first checkpoints did not say
    if kind != trainer._kind:
        raise CheckpointError(
            f"this is no checkpoint of a {type(trainer).__name__}, but one of {kind!r}. "
            "From one kind of trainer to another the weights go as a file: save_final_model(), and "
            "load_model() where the model is made"
        )
    weights, states = state["weights"], state["worker_states"]
    before = state["num_workers"]
    if before != len(workers):
        kept = min(before, len(workers))
        text = f"resuming a run of {before} workers on {len(workers)}: data is sharded anew"
        if weights is not None and len(weights) > 1:
            text += ", the workers' weights are averaged"
        if states is not None:
            others = "the others start fresh" if kept == before else "that of the others is dropped"
            text += f", workers 0 to {kept - 1} take up their own state and {others}"
        tell(trainer, "resumed_on_other_size", text)
    _give_callbacks(trainer, state)
    if weights is not None and len(weights) != len(workers):
        weights = [miniray.put(_mean(weights))] * len(workers)
    complete = False
    while not complete:  # one that is lost meanwhile is replaced, and needs all of it again
        before = list(workers)
        if weights is not None:
            trainer._give("set_weights", dict(enumerate(weights)))
        if states is not None:
            trainer._give("set_state", dict(enumerate(states[: len(workers)])))
        complete = list(workers) == before
    trainer._load_extra_state(state["extra"])


def _types(trainer: Saving) -> list[str]:
    return [type(callback).__qualname__ for callback in trainer.callbacks]


def _give_callbacks(trainer: Saving, state: dict[str, Any]) -> None:
    """Each gets the state of the next one of its type: there may be other callbacks by now."""
    saved = list(
        zip(state.get("callback_types", _types(trainer)), state["callbacks"], strict=False)
    )
    for callback, kind in zip(trainer.callbacks, _types(trainer), strict=True):
        mine = next((i for i, (type_, _) in enumerate(saved) if type_ == kind), None)
        if mine is not None:
            callback.set_state(saved.pop(mine)[1])


def tell(trainer: Saving, event: str, text: str) -> None:
    """Say that the run goes on otherwise than it was: a warning, and an event of the run."""
    warn(text)
    trainer._on_worker_event({"event": event, "message": text})


def _mean(weights: list[Any]) -> Any:
    if len(weights) == 1:
        return weights[0]
    from miniray.ps.weights import mean

    return mean(weights)


def locate(
    path: str | Path,
    store: CheckpointStore | None,
    run: Path | None,
    trainer: str,
) -> tuple[CheckpointStore, str | Path]:
    """(the store, what to load from it) for what a user may call a checkpoint.

    ``"latest"`` is that of the store, else of ``run``, else of the newest run of the trainer.
    """
    if str(path) == "latest":
        if store is not None:
            return store, "latest"
        path = run / "checkpoints" if run is not None else _newest(trainer)
    where = Path(path).expanduser()
    if where.name == "checkpoints":
        return CheckpointStore(where), "latest"
    if (where / "checkpoints").is_dir() or (where / "run.json").is_file():
        return CheckpointStore(where / "checkpoints"), "latest"
    return CheckpointStore(where.parent), where


def _newest(trainer: str) -> Path:
    """The checkpoints of the newest run of a trainer that has any."""
    found = Path("runs").glob(f"{trainer}-[0-9]*/checkpoints")
    runs = [p for p in found if any(p.iterdir())]
    if not runs:
        raise CheckpointError(
            f"resume=True, but {Path('runs').resolve()} has no run of {trainer} with a checkpoint; "
            "name the run with run_dir=, name= or resume=PATH"
        )
    return max(runs, key=lambda p: p.stat().st_mtime)

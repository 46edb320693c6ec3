"""Weights & Biases, online or offline."""

from __future__ import annotations

import inspect
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniray.checks import check_options, check_text
from miniray.train.run.loggers.base import LoggedRun, Logger, NewSteps, get_axis, get_numbers


class WandbLogger(Logger):
    """Logs to Weights & Biases.

    If ``wandb.init()`` was called before ``train()``, metrics go to that run, which stays open.
    Otherwise a run is created, and a later attempt continues it. W&B can't delete steps, so only
    steps above the last logged one are sent. After a restart, the metric ``restarts`` counts them.

    With ``mode="offline"`` (or ``WANDB_MODE=offline``), ``wandb sync`` uploads the files in
    ``wandb/`` of the run directory.

    Args:
        project: Name of the project; ``WANDB_PROJECT`` or ``"miniray"`` by default.
        **options: Further arguments of ``wandb.init()``, such as ``entity``, ``tags`` or ``mode``.
    """

    packages = ("wandb",)
    extra = "wandb"

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self._project = None if project is None else check_text("project", project)
        self._options = options
        self._run: Any = None
        self._ours = True  # whether this logger created the run
        self._state = LoggedRun(Path(), "")
        self._new = NewSteps(self._state)
        self._check_packages()
        if options:
            import wandb

            known = inspect.signature(wandb.init).parameters
            check_options("wandb.init()", options, known)

    def open(self, run: LoggedRun) -> str:
        import wandb

        self._state, self._new = run, NewSteps(run)
        self._ours = wandb.run is None
        options = {
            "project": self._project or os.environ.get("WANDB_PROJECT") or "miniray",
            "name": run.name,
            "dir": str(run.path),
            "id": run.run_id or secrets.token_hex(4),
            "resume": "allow",
            **self._options,
        }
        self._run = wandb.init(**options) if self._ours else wandb.run
        return str(self._run.id)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, step: int | None, epoch: int, metrics: Mapping[str, Any]) -> None:
        position = get_axis(step, epoch)
        new = self._new.select(position, get_numbers(step, metrics))
        if new:
            self._run.log(new, step=position)

    def log_artifact(self, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"{path.stem}-{self._run.id}", type=path.stem)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        if self._run is not None and self._ours:
            self._run.finish(exit_code=0 if self._state.state == "finished" else 1)
        self._run = None

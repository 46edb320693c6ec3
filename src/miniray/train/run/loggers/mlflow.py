"""MLflow: a tracking server, a database or a local directory."""

from __future__ import annotations

import collections
import importlib.util
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from miniray.checks import check_text, suggest_options
from miniray.train.run.loggers.base import (
    LoggedRun,
    Logger,
    NewSteps,
    flatten,
    get_axis,
    get_numbers,
)

T = TypeVar("T")

#: MLflow's names for the states of a run. All others are FAILED.
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "preempted": "KILLED"}
#: Addresses that mlflow-skinny alone doesn't support.
_DATABASES = ("mssql", "mysql", "postgresql", "sqlite")
#: Largest number of parameters in one request, and of characters in a value.
_MOST_PARAMS, _LONGEST_VALUE = 100, 6000
#: Number of records that may wait for the server before ``log`` blocks.
_MOST_PENDING = 100


@suggest_options()
class MLflowLogger(Logger):
    """Logs to MLflow. The package ``mlflow-skinny`` is sufficient.

    A later attempt of a run continues its MLflow run. MLflow can't delete steps, so only steps
    above the last logged one are sent. After a restart, the metric ``restarts`` counts them.
    Metrics are sent to a server in the background.

    Args:
        experiment: Name of the experiment; ``MLFLOW_EXPERIMENT_NAME`` or ``"miniray"`` by default.
        tracking_uri: Address of a server, a local path, or a database such as ``sqlite:///PATH``,
            which needs the package ``mlflow``. The default is ``MLFLOW_TRACKING_URI`` or
            ``mlflow.set_tracking_uri()`` if set, else the directory ``mlruns``.
    """

    packages = ("mlflow",)
    extra = "mlflow"

    def __init__(
        self, experiment: str | None = None, tracking_uri: str | Path | None = None
    ) -> None:
        self._experiment = None if experiment is None else check_text("experiment", experiment)
        self._uri = None if tracking_uri is None else check_text("tracking_uri", str(tracking_uri))
        self._client: Any = None
        self._id = ""
        self._is_remote = False
        self._state = LoggedRun(Path(), "")
        self._new = NewSteps(self._state)
        self._pending: collections.deque[Any] = collections.deque()
        self._check_packages()
        scheme = (self._uri or "").partition(":")[0].partition("+")[0]
        if scheme in _DATABASES and importlib.util.find_spec("sqlalchemy") is None:
            raise ImportError(
                f"MLflowLogger needs sqlalchemy for tracking_uri={self._uri!r}. "
                "Install it with: pip install mlflow"
            )

    def open(self, run: LoggedRun) -> str:
        from mlflow.tracking import MlflowClient

        uri = self._choose_uri()
        # Its threads don't keep the order of steps, which files do keep.
        self._is_remote = uri.startswith("http")
        if "://" not in uri or uri.startswith("file:"):
            # Since version 3, MLflow warns its users away from directories. Here it was chosen.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        self._state, self._new = run, NewSteps(run)
        if run.run_id is not None:
            self._id = run.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            created = self._client.create_run(self._find_experiment(), run_name=run.name)
            self._id = created.info.run_id
        return self._id

    def _choose_uri(self) -> str:
        import mlflow

        if self._uri is not None:
            return self._uri
        if mlflow.is_tracking_uri_set():
            return str(mlflow.get_tracking_uri())
        return Path("mlruns").resolve().as_uri()  # MLflow remembers what it found at each address

    def _find_experiment(self) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "miniray"
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration as parameters, which MLflow doesn't allow to change.

        After a resume, parameters with a different value keep the first one.
        """
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params
        params = [
            Param(name, str(value)[:_LONGEST_VALUE])
            for name, value in _clean_names(flatten(config)).items()
            if name not in known and value is not None
        ]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])

    def log(self, step: int | None, epoch: int, metrics: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        position = get_axis(step, epoch)
        new = self._new.select(position, _clean_names(get_numbers(step, metrics)))
        now = int(time.time() * 1000)
        batch = [Metric(name, value, now, position) for name, value in new.items()]
        if batch:
            sent = self._client.log_batch(self._id, metrics=batch, synchronous=not self._is_remote)
            if sent is not None:
                self._pending.append(sent)
        if len(self._pending) > _MOST_PENDING:
            self._pending.popleft().wait()

    def log_artifact(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def close(self) -> None:
        if self._client is None:
            return
        while self._pending:
            self._pending.popleft().wait()
        self._client.set_terminated(self._id, _STATUS.get(self._state.state, "FAILED"))
        self._client = None


def _clean_names(values: Mapping[str, T]) -> dict[str, T]:
    """Replace characters that MLflow doesn't allow in names, such as the one in ``mAP@50``."""
    return {re.sub(r"[^\w.:/ -]", "_", name): value for name, value in values.items()}

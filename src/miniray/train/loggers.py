"""Callbacks that write the results of every epoch for other programs: a table, TensorBoard."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from miniray.train import files, records
from miniray.train.callbacks import Callback

__all__ = ["CSVLogger", "TensorBoard"]


class CSVLogger(Callback):
    """Writes a table with a row an epoch (default: ``metrics.csv`` in the run directory).

    Columns may appear later: the file is then replaced whole, with empty cells above. Rows of
    epochs that are done again (a resumed run, or a new one with the same path) are replaced. Lists
    and dicts are written as JSON.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._given = path
        self._path: Path | None = None
        self._columns: list[str] = []

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        self._path = Path(self._given) if self._given is not None else None
        self._columns = []

    def on_epoch_end(self, trainer: Any, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        path = self._path = self._path or Path(trainer.run.path) / "metrics.csv"
        row = {"epoch": str(epoch), **{k: _cell(v) for k, v in result.items() if k != "epoch"}}
        new = [name for name in row if name not in self._columns]
        if not new and path.exists():
            with open(path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow(row)
            return
        before = _rows_before(path, epoch)
        older = list(before[0]) if before else []
        self._columns = list(dict.fromkeys([*older, *self._columns, *row]))
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, self._columns, restval="")
        table.writeheader()
        table.writerows([*before, row])
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_text(path, text.getvalue())


class TensorBoard(Callback):
    """Writes the numbers of every epoch as TensorBoard scalars (default: in the run directory).

    ``ImportError`` at the start of training where tensorboard is not installed.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = directory
        self._writer: Any = None

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"the TensorBoard callback needs torch and tensorboard ({error}): "
                "pip install torch tensorboard"
            ) from None
        directory = self._directory or Path(trainer.run.path) / "tensorboard"
        # What a run that is taken up again wrote of epochs that are now to be done is not shown.
        self._writer = SummaryWriter(str(directory), purge_step=trainer.epoch)

    def on_epoch_end(self, trainer: Any, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        for key, value in result.items():
            plain = records.number(value)
            if plain is not None and key != "epoch":  # which is the axis
                self._writer.add_scalar(key, plain, epoch)
        self._writer.flush()  # so that a run that is killed later can be looked at

    def on_train_end(self, trainer: Any, history: Any, **kwargs: Any) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    plain = records.to_json(value)
    return json.dumps(plain) if isinstance(plain, (dict, list, bool)) else str(plain)


def _rows_before(path: Path, epoch: int) -> list[dict[str, str]]:
    """The table's rows of earlier epochs, as they are."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, restval=""))
    except FileNotFoundError:
        return []
    return [row for row in rows if row.get("epoch", "").isdigit() and int(row["epoch"]) < epoch]

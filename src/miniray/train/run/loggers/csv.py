"""CSV: a table with one row per record."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniray.checks import check_path, suggest_options
from miniray.train.run import records
from miniray.train.run.loggers.base import LoggedRun, Logger, StepTracker, get_axis


@suggest_options()
class CSVLogger(Logger):
    """Writes a table with one row per record.

    If a record has a new metric, the table gets a column, with empty cells in the rows above. When
    a run continues from a checkpoint, rows of repeated steps are replaced. Lists and dicts are
    written as JSON.

    Args:
        path: Path of the table; ``metrics.csv`` in the run directory by default.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._given = None if path is None else Path(check_path("path", path))
        self._path = Path()
        self._columns: list[str] = []
        self._tracker = StepTracker()

    def open(self, run: LoggedRun) -> None:
        self._path = self._given or run.path / "metrics.csv"
        self._columns = []
        self._tracker = StepTracker()

    def log(self, step: int | None, epoch: int, metrics: Mapping[str, Any]) -> None:
        axis = {"epoch": epoch} if step is None else {"step": step, "epoch": epoch}
        row = {name: _format_cell(value) for name, value in {**axis, **metrics, **axis}.items()}
        position = get_axis(step, epoch)
        repeated = self._tracker.is_repeated(position, row)
        self._tracker.move_to(position, row)
        if not repeated and set(row) <= set(self._columns) and self._path.exists():
            with open(self._path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow(row)
            return
        rows = self._read_rows()
        if repeated or not self._columns:  # the first row since open() may be of an earlier step
            name = next(iter(axis))
            rows = [r for r in rows if r.get(name, "").isdigit() and int(r[name]) < position]
        self._columns = list(dict.fromkeys([*(rows[0] if rows else ()), *self._columns, *row]))
        self._write([*rows, row])

    def _read_rows(self) -> list[dict[str, str]]:
        try:
            with open(self._path, newline="", encoding="utf-8") as file:
                return list(csv.DictReader(file, restval=""))
        except FileNotFoundError:
            return []

    def _write(self, rows: list[dict[str, str]]) -> None:
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, self._columns, restval="")
        table.writeheader()
        table.writerows(rows)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        records.replace_text(self._path, text.getvalue())


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    plain = records.to_json(value)
    return json.dumps(plain) if isinstance(plain, (dict, list, bool)) else str(plain)

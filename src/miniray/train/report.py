"""A run as one HTML page that needs nothing else: what ran, its epochs, its curves."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.train.records import number
from miniray.train.rundir import RunDirectory

if TYPE_CHECKING:
    from miniray.train.results import TrainResult

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; }}
body {{ padding: 0 1rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; }}
th:first-child, td:first-child {{ text-align: left; }}
img {{ max-width: 100%; background: #fff; border-radius: 6px; }}
.wide {{ overflow-x: auto; }}
</style></head><body>
<h1>{title}</h1>
<p>{summary}</p>
{curves}
<h2>Epochs</h2><div class="wide">{epochs}</div>
<h2>Run</h2><div class="wide">{facts}</div>
</body></html>
"""


def write_report(result: TrainResult, path: str | Path | None = None) -> Path:
    """Write ``report.html`` into the run's directory, or to ``path``; returns where it is.

    Curves are in it where matplotlib is installed.
    """
    run = RunDirectory(result.run_dir).read_run()
    target = result.run_dir / "report.html" if path is None else Path(path)
    last = ", ".join(
        f"{key} {value:.4g}"
        for key in result
        if key != "epoch" and (value := number(result[key])) is not None
    )
    columns = [key for key in result if number(result[key]) is not None]
    rows = [[record.get(key) for key in columns] for record in result.history]
    page = _PAGE.format(
        title=html.escape(result.run_dir.name),
        summary=html.escape(f"{result.epochs} epochs in {result.wall_time:.1f} s. Last: {last}."),
        curves=_curves(result),
        epochs=_table(columns, rows),
        facts=_table(["", ""], sorted(_flat(run).items())),
    )
    target.write_text(page, "utf-8")
    return target


def _curves(result: TrainResult) -> str:
    try:
        picture = result.plot().read_bytes()
    except (ImportError, ValueError) as error:  # no matplotlib, or nothing to draw
        return f"<p>No curves: {html.escape(str(error))}</p>"
    data = base64.b64encode(picture).decode()
    return f'<img alt="curves of the metrics by epoch" src="data:image/png;base64,{data}">'


def _table(columns: list[str], rows: list[Any]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_text(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat

"""The function that writes reports, so that trainers don't import ``miniray.report``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_writer: Callable[..., Path] | str = "miniray.report:write_report"


def register_report_writer(writer: Callable[..., Path] | str) -> None:
    """Set the function ``writer(run_dir, path=None) -> Path`` that writes reports.

    A name such as ``"module:function"`` is imported when the first report is written.
    """
    global _writer
    _writer = writer


def write_report(
    run_dir: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> Path:
    """Write the report of a run with the registered writer, and return the path of the report."""
    writer: Any = _writer
    if isinstance(writer, str):
        module, _, function = writer.partition(":")
        writer = getattr(importlib.import_module(module), function)
    report: Path = writer(run_dir, path)
    return report

"""The list of runs: each one's state as ``run.json`` and its process say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniray.dashboard.access import NotFoundError, Root
from miniray.doctor import runfile
from miniray.report.run import unix_time

_MOST_RUNS = 500


class Listing:
    """All runs under the root, newest first. ``refresh`` reads only files that changed."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._read: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}
        self.runs: list[dict[str, Any]] = []

    def refresh(self) -> bool:
        """Whether anything in the list is new."""
        found = []
        for name in self._root.names():
            try:
                found.append(self._entry(name))
            except (NotFoundError, OSError):  # deleted just now
                self._read.pop(name, None)
        found.sort(key=lambda entry: (entry["changed"], entry["name"]), reverse=True)
        del found[_MOST_RUNS:]
        before, self.runs = self.runs, found
        return before != found

    def _entry(self, name: str) -> dict[str, Any]:
        path = self._root.run(name)
        run = self._run_json(name, path)
        config = run.get("config")
        config = config if isinstance(config, Mapping) else {}
        started = run.get("started")
        return {
            "name": name,
            "state": runfile.state_of(run),
            "started": started if isinstance(started, str) else None,
            "ended": run.get("ended") if isinstance(run.get("ended"), str) else None,
            "world_size": run.get("world_size"),
            "kind": str(config.get("trainer") or config.get("launcher") or ""),
            # Of the folder itself: that of the boxes would change with every heartbeat.
            "changed": unix_time(started) or path.stat().st_mtime,
        }

    def _run_json(self, name: str, path: Path) -> dict[str, Any]:
        try:
            file = self._root.inside(path / "run.json")
        except NotFoundError:
            return {}
        status = file.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        if name not in self._read or self._read[name][0] != stamp:
            self._read[name] = (stamp, runfile.read_json(file)[0])  # the doctor says what is wrong
        return self._read[name][1]

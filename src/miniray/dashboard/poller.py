"""Poll the list of runs and the runs that are shown on open pages.

A single thread polls once per second and uses at most a quarter of a CPU core. Runs in progress are
polled even after their page was closed, so that their timelines have no gaps.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

from miniray.dashboard.access import NotFoundError, ServedDirectory
from miniray.dashboard.monitor import RunMonitor
from miniray.runs.listing import RunEntry, read_entry

#: Seconds between two polls if pages are open, and if no pages are open.
_INTERVAL, _IDLE_INTERVAL = 1.0, 5.0
#: Seconds after the last view of a run. After this time, the run isn't polled anymore if it has
#: ended, and its monitor may be dropped.
_KEEP = 60.0
_MOST_MONITORS, _MOST_RUNNING = 16, 4
_MOST_LISTED = 500


class Poller:
    """Poll runs in a background thread that ``start`` starts and ``close`` stops."""

    def __init__(self, root: ServedDirectory, interval: float = _INTERVAL) -> None:
        self._root = root
        self._interval = interval
        self._listing = Listing(root)
        self._monitors: dict[str, RunMonitor] = {}
        self._news = threading.Condition()
        self._wake = threading.Event()
        self._stopped = False
        self._asked = -_IDLE_INTERVAL  # time of the last request
        self._thread = threading.Thread(target=self._loop, name="dashboard-poller", daemon=True)

    def start(self) -> None:
        self._listing.refresh()  # so that the first request doesn't see an empty list
        self._thread.start()

    def close(self) -> None:
        with self._news:
            self._stopped = True
            self._news.notify_all()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def runs(self) -> list[dict[str, Any]]:
        """Return all runs. The entry of a monitored run includes the severity of its findings."""
        known = {name: monitor.state.get("severity") for name, monitor in [*self._monitors.items()]}
        return [{**run, "severity": known.get(run["name"])} for run in self._listing.runs]

    def monitor(self, name: str) -> RunMonitor:
        """Return the monitor of a run after the run has been polled at least once.

        Raise ``NotFoundError`` if the run doesn't exist.
        """
        with self._news:
            monitor = self._monitors.get(name)
            if monitor is None:
                monitor = self._monitors[name] = RunMonitor(self._root, name)
                self._wake.set()
            monitor.viewed = time.monotonic()
            while not monitor.state and not self._stopped:
                self._news.wait(1.0)
        return monitor

    def news(self, names: list[str], seen: str) -> dict[str, Any]:
        """Return the list of runs, and the state of each run in ``names``.

        Parts that haven't changed since the previous response are omitted. ``seen`` is the value of
        the field ``seen`` in the previous response, or ``""`` for the first request. The method
        doesn't wait for changes, because a browser opens only a few connections to a server
        and all tabs share these connections.
        """
        if not self._has_viewers:
            self._wake.set()
        self._asked = time.monotonic()
        parts = [self.runs(), *(self.monitor(name).state for name in names)]
        now = [f"{zlib.crc32(json.dumps(part).encode()):x}" for part in parts]
        known = zip(parts, now, [*seen.split(","), *[""] * len(now)], strict=False)
        fresh = [None if mark == before else part for part, mark, before in known]
        return {"seen": ",".join(now), "runs": fresh[0], "states": list(filter(None, fresh[1:]))}

    @property
    def _has_viewers(self) -> bool:
        return time.monotonic() - self._asked < _IDLE_INTERVAL

    def _loop(self) -> None:
        while not self._stopped:
            self._wake.clear()
            began = time.monotonic()
            behind = self._poll_all()
            spent = time.monotonic() - began
            if not behind:
                least = self._interval if self._has_viewers else _IDLE_INTERVAL
                self._wake.wait(max(least, 3 * spent))

    def _poll_all(self) -> bool:
        """Poll the list and all monitored runs once.

        Return True if a file is so long that the next poll has to read the rest of it.
        """
        self._listing.refresh()
        if self._has_viewers:
            self._monitor_running()
        with self._news:
            monitors = list(self._monitors.values())
        behind = False
        for monitor in monitors:
            idle = time.monotonic() - monitor.viewed
            if monitor.state and not monitor.live and not monitor.behind and idle > _KEEP:
                continue
            try:
                monitor.poll()
            except Exception as error:
                # An unexpected record of one run must not affect the pages of the other runs. Show
                # the error on the page instead.
                traceback.print_exc()
                monitor.state = {**monitor.state, "name": monitor.name, "error": repr(error)}
            behind = behind or monitor.behind
            with self._news:
                self._news.notify_all()
            if self._stopped:
                return False
        with self._news:
            self._drop_idle_monitors()
        return behind

    def _monitor_running(self) -> None:
        """Monitor the newest runs in progress, because the list shows whether a run is stuck."""
        running = [entry["name"] for entry in self._listing.runs if entry["state"] == "running"]
        with self._news:
            for name in running[:_MOST_RUNNING]:
                if name not in self._monitors:
                    try:
                        self._monitors[name] = RunMonitor(self._root, name)
                    except NotFoundError:  # deleted after the list was created
                        continue

    def _drop_idle_monitors(self) -> None:
        """If there are too many monitors, drop those that were viewed least recently."""
        spare = sorted(self._monitors.values(), key=lambda monitor: -monitor.viewed)[
            _MOST_MONITORS:
        ]
        for monitor in spare:
            if time.monotonic() - monitor.viewed > _KEEP:
                del self._monitors[monitor.name]


class Listing:
    """The list of all runs in the directory, starting with the newest.

    ``refresh`` reads only the files that have changed.
    """

    def __init__(self, root: ServedDirectory) -> None:
        self._root = root
        self._read: dict[str, tuple[tuple[int, ...], RunEntry]] = {}
        self.runs: list[dict[str, Any]] = []

    def refresh(self) -> None:
        found = []
        for name in self._root.names():
            try:
                found.append(self._entry(name))
            except (NotFoundError, OSError):  # the run has been deleted in the meantime
                self._read.pop(name, None)
        found.sort(key=lambda entry: (entry["changed"], entry["name"]), reverse=True)
        del found[_MOST_LISTED:]
        self.runs = found

    def _entry(self, name: str) -> dict[str, Any]:
        entry = self._read_entry(name, self._root.run(name))
        info = entry.info
        config = info.get("config") or {}
        return {
            "name": name,
            "state": entry.state,
            "started": info.get("started"),
            "ended": info.get("ended"),
            "world_size": info.get("world_size"),
            "kind": str(config.get("trainer") or config.get("launcher") or ""),
            "changed": entry.order[0],
        }

    def _read_entry(self, name: str, path: Path) -> RunEntry:
        """Return the contents of ``run.json``. The file is read again only if it has changed.

        If the file is damaged, the doctor reports the problem.
        """
        stamp = self._stamp(path)
        if name not in self._read or self._read[name][0] != stamp:
            self._read[name] = (stamp, read_entry(path) if stamp else RunEntry(path, {}, ""))
        return self._read[name][1]

    def _stamp(self, path: Path) -> tuple[int, ...]:
        """Return a value that changes if ``run.json`` changes, or () if the file doesn't exist."""
        try:
            status = self._root.inside(path / "run.json").stat()
        except (NotFoundError, OSError):
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size

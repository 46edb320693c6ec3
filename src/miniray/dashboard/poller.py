"""The one thread that reads: the list of runs, and every run that somebody looks at.

It reads as often as a second where that is cheap, and never spends more than a quarter of a core.
A run that lives is watched on when its page is closed, so that its lanes have no gap.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

from miniray.dashboard.access import NotFoundError, Root
from miniray.dashboard.watch import Watch
from miniray.runs.listing import RunEntry, read_entry

#: Seconds between two looks: while somebody looks on, and while nobody does.
_PAUSE, _LONG_PAUSE = 1.0, 5.0
#: Seconds after which a run that ended, or nobody's run, is no longer looked at, and forgotten.
_KEEP = 60.0
_MOST_WATCHED, _MOST_RUNNING = 16, 4
_MOST_LISTED = 500


class Poller:
    """``start``, ``watch`` a run, ask for ``news`` of it, ``close``."""

    def __init__(self, root: Root, interval: float = _PAUSE) -> None:
        self._root = root
        self._interval = interval
        self._listing = Listing(root)
        self._watches: dict[str, Watch] = {}
        self._news = threading.Condition()
        self._wake = threading.Event()
        self._stopped = False
        self._asked = -_LONG_PAUSE  # when anybody last was
        self._thread = threading.Thread(target=self._loop, name="dashboard-poller", daemon=True)

    def start(self) -> None:
        self._listing.refresh()  # nobody who asks at once is told that there are no runs
        self._thread.start()

    def close(self) -> None:
        with self._news:
            self._stopped = True
            self._news.notify_all()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def runs(self) -> list[dict[str, Any]]:
        """All runs; of those that are watched, what the doctor thinks as well."""
        known = {name: watch.state.get("severity") for name, watch in [*self._watches.items()]}
        return [{**run, "severity": known.get(run["name"])} for run in self._listing.runs]

    def watch(self, name: str) -> Watch:
        """The watch of a run, polled once at least. ``NotFoundError`` where there is none."""
        with self._news:
            watch = self._watches.get(name)
            if watch is None:
                watch = self._watches[name] = Watch(self._root, name)
                self._wake.set()
            watch.viewed = time.monotonic()
            while not watch.state and not self._stopped:
                self._news.wait(1.0)
        return watch

    def news(self, names: list[str], seen: str) -> dict[str, Any]:
        """The list and these runs' states, each whole where it is not as ``seen``.

        ``seen`` is the last answer's own, and empty at first. Nothing is waited for: a browser has
        few connections to one server, for all of its tabs together.
        """
        if not self._looked_at:
            self._wake.set()
        self._asked = time.monotonic()
        parts = [self.runs(), *(self.watch(name).state for name in names)]
        now = [f"{zlib.crc32(json.dumps(part).encode()):x}" for part in parts]
        known = zip(parts, now, [*seen.split(","), *[""] * len(now)], strict=False)
        fresh = [None if mark == before else part for part, mark, before in known]
        return {"seen": ",".join(now), "runs": fresh[0], "states": list(filter(None, fresh[1:]))}

    @property
    def _looked_at(self) -> bool:
        return time.monotonic() - self._asked < _LONG_PAUSE

    def _loop(self) -> None:
        while not self._stopped:
            self._wake.clear()
            began = time.monotonic()
            behind = self._look()
            spent = time.monotonic() - began
            if not behind:
                least = self._interval if self._looked_at else _LONG_PAUSE
                self._wake.wait(max(least, 3 * spent))

    def _look(self) -> bool:
        """Everything once; whether a file was too long to be read at once."""
        self._listing.refresh()
        if self._looked_at:
            self._watch_running()
        with self._news:
            watches = list(self._watches.values())
        behind = False
        for watch in watches:
            idle = time.monotonic() - watch.viewed
            if watch.state and not watch.live and not watch.behind and idle > _KEEP:
                continue
            try:
                watch.poll()
            except Exception as error:
                # A record nobody foresaw must not end the page for all runs: it is told instead.
                traceback.print_exc()
                watch.state = {**watch.state, "name": watch.name, "error": repr(error)}
            behind = behind or watch.behind
            with self._news:
                self._news.notify_all()
            if self._stopped:
                return False
        with self._news:
            self._forget()
        return behind

    def _watch_running(self) -> None:
        """The list says of runs that go on whether they are stuck: so they are looked at too."""
        running = [entry["name"] for entry in self._listing.runs if entry["state"] == "running"]
        with self._news:
            for name in running[:_MOST_RUNNING]:
                if name not in self._watches:
                    try:
                        self._watches[name] = Watch(self._root, name)
                    except NotFoundError:  # deleted since the list was made
                        continue

    def _forget(self) -> None:
        """Of more runs than can be kept in memory, those go that were looked at longest ago."""
        spare = sorted(self._watches.values(), key=lambda watch: -watch.viewed)[_MOST_WATCHED:]
        for watch in spare:
            if time.monotonic() - watch.viewed > _KEEP:
                del self._watches[watch.name]


class Listing:
    """All runs under the root, newest first. ``refresh`` reads only files that changed."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._read: dict[str, tuple[tuple[int, ...], RunEntry]] = {}
        self.runs: list[dict[str, Any]] = []

    def refresh(self) -> None:
        found = []
        for name in self._root.names():
            try:
                found.append(self._entry(name))
            except (NotFoundError, OSError):  # deleted just now
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
        """Read ``run.json`` again if it changed. The doctor reports what is wrong with it."""
        stamp = self._stamp(path)
        if name not in self._read or self._read[name][0] != stamp:
            self._read[name] = (stamp, read_entry(path) if stamp else RunEntry(path, {}, ""))
        return self._read[name][1]

    def _stamp(self, path: Path) -> tuple[int, ...]:
        """Return what changes with ``run.json``; () if the root doesn't contain it."""
        try:
            status = self._root.inside(path / "run.json").stat()
        except (NotFoundError, OSError):
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size

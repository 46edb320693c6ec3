"""Handle the HTTP requests of the page.

The ``access`` module checks each request, and ``poller`` and ``monitor`` provide the content of the
response. Each response contains the security headers in ``_HEADERS``. The page sends only one type
of POST request, which requests the stack of a rank.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from miniray.dashboard import access, logs
from miniray.dashboard.access import NotFoundError
from miniray.dashboard.monitor import NoStackError

if TYPE_CHECKING:
    from miniray.dashboard import DashboardServer

_STATIC = Path(__file__).parent / "static"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    # plotly needs inline styles. Scripts may be loaded only from this server.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FORBIDDEN = (
    "403: Open the address that `miniray dashboard` printed, including the token. The dashboard is "
    "only served to localhost.\n"
)
_MIN_GZIP_BYTES = 2048
_MOST_COMPARED = 8
_MOST_BUCKETS = 1000
_LONGEST_SEARCH = 200


class BadRequestError(ValueError):
    """A parameter of the request is missing or invalid."""


class Handler(BaseHTTPRequestHandler):
    """Handle the requests of one connection. The server sets the attribute ``dashboard``."""

    dashboard: DashboardServer
    server_version = "miniray"
    sys_version = ""
    _entering = False
    timeout = 30  # seconds to wait for a request, so that a silent client can't block a thread

    def do_GET(self) -> None:
        routes: dict[str, Callable[[], None]] = {
            "/api/news": self._news,
            "/api/chart": self._chart,
            "/api/timelines": self._timelines,
            "/api/log": self._log,
            "/api/search": self._search,
        }
        self._answer(routes, reads=True)

    def do_POST(self) -> None:
        self._answer({"/api/stack": self._stack}, reads=False)

    def _answer(self, routes: dict[str, Callable[[], None]], reads: bool) -> None:
        try:
            url = urlsplit(self.path)
            self._query = parse_qs(url.query, keep_blank_values=True)
        except ValueError:
            return self._text(400, "400: The address is invalid.\n")
        token = self._query.get("token", [None])[0]
        same_origin = access.is_same_origin(self.headers.get("Host"), self.headers.get("Origin"))
        # Browsers send the origin of a request. The value is "none" if the user typed the address.
        site = self.headers.get("Sec-Fetch-Site", "none")
        same_origin = same_origin and (
            site in ("same-origin", "none") or (reads and url.path == "/")
        )
        gate, code = self.dashboard.gate, self._query.get("code", [None])[0]
        # Only a request for the page itself may redeem the code, so that other requests can't
        # make the code invalid.
        is_page = same_origin and reads and url.path == "/"
        redeemed = is_page and code is not None and gate.redeem(code)
        if not same_origin or not (redeemed or gate.allows(dict(self.headers.items()), token)):
            return self._text(403, _FORBIDDEN)
        try:
            if url.path in routes:
                routes[url.path]()
            elif reads and url.path in _FILES:
                name, kind = _FILES[url.path]
                # Store the token in a cookie. The page removes the token or the code from the
                # address.
                self._entering = token is not None or redeemed
                self._send(200, (_STATIC / name).read_bytes(), kind, "no-cache")
            elif reads and url.path == "/plotly.min.js":
                body = self.dashboard.plotly.read_bytes()
                self._send(200, body, "text/javascript", "private, max-age=86400")
            else:
                self._text(404, "404: Page not found.\n")
        except (NotFoundError, FileNotFoundError):
            self._text(404, "404: Run or file not found.\n")
        except BadRequestError as error:
            self._text(400, f"400: {error}\n")
        except NoStackError as error:
            self._text(409, str(error))
        except (BrokenPipeError, ConnectionError, TimeoutError):
            self.close_connection = True  # the client has disconnected

    # -- answers ----------------------------------------------------------------------------------

    def _news(self) -> None:
        names = self._query.get("run", [])[:_MOST_COMPARED]
        self._json(self.dashboard.poller.news(names, self._query.get("seen", [""])[0]))

    def _chart(self) -> None:
        low, high = self._number("from"), self._number("to")
        monitor = self.dashboard.poller.monitor(self._one("run"))
        self._json(monitor.chart(self._one("name"), self._one("by_rank") == "1", low, high))

    def _timelines(self) -> None:
        seconds, buckets = self._number("seconds"), self._whole("buckets")
        if buckets is None or not 1 <= buckets <= _MOST_BUCKETS:
            raise BadRequestError(f"buckets must be between 1 and {_MOST_BUCKETS}")
        monitor = self.dashboard.poller.monitor(self._one("run"))
        self._json(monitor.timelines(seconds, buckets))

    def _log(self) -> None:
        since, before = self._whole("since"), self._whole("before")
        path = self._log_file(self._one("run"), self._one("rank"))
        nothing = {"lines": [], "rest": "", "start": 0, "end": 0, "size": 0, "missing": True}
        self._json(nothing if path is None else logs.tail(path, since, before))

    def _search(self) -> None:
        """Search the log of a single rank or the logs of all ranks."""
        run, rank, text = self._one("run"), self._one("rank"), self._one("q")
        if not 0 < len(text) <= _LONGEST_SEARCH:
            raise BadRequestError(f"q must have 1 to {_LONGEST_SEARCH} characters")
        folder = self.dashboard.root.run(run) / "ranks"
        names = [file.stem for file in folder.glob("*.log")] if rank == "all" else [rank]
        found = {}
        for name in sorted(filter(_is_rank, names), key=int):
            try:
                path = self._log_file(run, name)
            except NotFoundError:
                if rank != "all":
                    raise
                continue  # a link that leads out of the served directory
            searched = logs.search(path, text) if path is not None else {"total": 0}
            if searched["total"]:
                found[name] = searched
        self._json(found)

    def _stack(self) -> None:
        rank = self._one("rank")
        if not _is_rank(rank):
            raise BadRequestError("rank must be a number")
        self._json(self.dashboard.poller.monitor(self._one("run")).stack(int(rank)))

    # -- parts ------------------------------------------------------------------------------------

    def _log_file(self, run: str, rank: str) -> Path | None:
        """Return the path to a rank's log, or None if the rank has no log."""
        if not _is_rank(rank):
            raise BadRequestError("rank must be a number")
        root = self.dashboard.root
        path = root.run(run) / "ranks" / f"{int(rank)}.log"
        if not os.path.lexists(path):
            return None
        real = root.inside(path)
        if not real.is_file():  # reading a pipe could block forever
            raise NotFoundError(str(path))
        return real

    def _one(self, name: str) -> str:
        values = self._query.get(name, [])
        if len(values) != 1:
            raise BadRequestError(f"{name} must be passed exactly once")
        return values[0]

    def _number(self, name: str) -> float | None:
        if name not in self._query:
            return None
        try:
            value = float(self._one(name))
        except ValueError:
            raise BadRequestError(f"{name} must be a number") from None
        if not math.isfinite(value):
            raise BadRequestError(f"{name} must be a finite number")
        return value

    def _whole(self, name: str) -> int | None:
        value = self._number(name)
        return None if value is None else max(0, int(value))

    def _json(self, value: Any) -> None:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        body = text.encode(errors="replace")  # file names may not be valid UTF-8
        self._send(200, body, "application/json", "no-store")

    def _text(self, status: int, text: str) -> None:
        self._send(status, text.encode(), "text/plain; charset=utf-8", "no-store")

    def _send(self, status: int, body: bytes, kind: str, cache: str) -> None:
        takes = "gzip" in (self.headers.get("Accept-Encoding") or "")
        packed = takes and len(body) > _MIN_GZIP_BYTES
        if packed:  # the page may be opened over a slow ssh connection
            body = gzip.compress(body, 1)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", cache)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if self._entering:
            self.send_header("Set-Cookie", self.dashboard.gate.cookie())
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Don't log requests, because their addresses contain the token."""


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 8

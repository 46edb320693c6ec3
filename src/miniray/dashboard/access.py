"""Who may look, and at what: the token, the Host header, and files inside the run root only.

A page of any web site may send requests to 127.0.0.1 from the user's own browser, and one on
another port of localhost even sends our cookie along. So every request must show the token, name a
loopback host (a name that somebody pointed at 127.0.0.1 is none) and not come from another origin.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import threading
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

from miniray.runs.listing import is_run


class NotFoundError(LookupError):
    """No such run or file, or it lies outside of the root: which of the two is not said."""


class Gate:
    """Authentication of one server. ``allows`` decides on each request.

    A request shows the token, in the address or in the cookie. The address that opens the browser
    contains a code instead, because command lines are visible to all users of the machine. The code
    works once, and is exchanged for the cookie.
    """

    def __init__(self, port: int) -> None:
        self.token = secrets.token_urlsafe(24)
        self._code: str | None = None
        self._lock = threading.Lock()
        self.cookie_name = f"miniray_{port}"  # cookies are the same on all ports

    def allows(self, headers: Mapping[str, str], query_token: str | None) -> bool:
        """Whether whoever sent this has the token, in the address or in the cookie."""
        shown = query_token
        if shown is None:
            cookie: SimpleCookie = SimpleCookie()
            try:
                cookie.load(headers.get("Cookie") or "")
            except CookieError:
                return False
            shown = cookie[self.cookie_name].value if self.cookie_name in cookie else ""
        return hmac.compare_digest(shown.encode(), self.token.encode())

    def new_code(self) -> str:
        """Return a code that can be redeemed once. Earlier codes become invalid."""
        with self._lock:
            self._code = secrets.token_urlsafe(24)
            return self._code

    def redeem(self, code: str) -> bool:
        """Return True if ``code`` is valid. It isn't afterwards."""
        with self._lock:
            valid = self._code is not None and hmac.compare_digest(
                code.encode(), self._code.encode()
            )
            if valid:
                self._code = None
            return valid

    def cookie(self) -> str:
        return f"{self.cookie_name}={self.token}; Path=/; HttpOnly; SameSite=Strict"


def is_loopback(host: str) -> bool:
    """``127.0.0.1``, ``::1``, ``localhost``; a name that merely resolves to these is none."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_ours(host_header: str | None, origin: str | None) -> bool:
    """Whether a request names us by a loopback name and comes from no other page.

    Ports are free: through ``ssh -L`` the browser's differs from ours.
    """
    if not host_header:
        return False
    try:
        host = urlsplit(f"//{host_header}").hostname
        if origin is not None and urlsplit(origin).netloc.lower() != host_header.lower():
            return False
    except ValueError:
        return False
    return host is not None and is_loopback(host)


class Root:
    """The directory that is served: of runs, or one run by itself.

    Symbolic links are followed only where they stay inside. ``FileNotFoundError`` where there is no
    such directory.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise FileNotFoundError(f"there is no directory {path}")
        self.path = path.resolve()
        self.is_run = is_run(self.path)

    def names(self) -> list[str]:
        """Names of all runs, in no order."""
        if self.is_run:
            return [self.path.name]
        found = []
        try:
            entries = list(self.path.iterdir())
        except OSError:  # the root itself was deleted or closed to us: then it holds no runs
            return []
        for entry in entries:
            try:
                self.run(entry.name)
            except NotFoundError:
                continue
            found.append(entry.name)
        return found

    def run(self, name: str) -> Path:
        """The directory of a run; ``NotFoundError`` for everything that is none of ours."""
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise NotFoundError(name)
        if self.is_run and name != self.path.name:
            raise NotFoundError(name)
        path = self.path if self.is_run else self.inside(self.path / name)
        if not is_run(path):
            raise NotFoundError(name)
        if os.path.lexists(path / "run.json"):
            self.inside(path / "run.json")
        return path

    def inside(self, path: Path) -> Path:
        """``path`` with links followed; ``NotFoundError`` where that is nothing, or outside."""
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
            raise NotFoundError(str(path)) from None
        if not real.is_relative_to(self.path):
            raise NotFoundError(str(path))
        return real

"""Control access to the dashboard: check the token, the Host header and file paths.

Any web page can send requests to 127.0.0.1 from the user's browser. Requests from a page on a
different port of localhost even include the cookie of the dashboard. Every request must therefore
contain the token, name a loopback host (DNS rebinding uses other names) and not come from a
different origin.
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
    """The run or file doesn't exist, or is outside of the served directory.

    The error doesn't reveal which one.
    """


class Gate:
    """Authentication of one server. ``allows`` decides on each request.

    Requests contain the token, in the address or in a cookie. The address that is passed to the
    browser contains a code instead, because all users of the machine can see command lines. The
    code works once and is exchanged for the cookie.
    """

    def __init__(self, port: int) -> None:
        self.token = secrets.token_urlsafe(24)
        self._code: str | None = None
        self._lock = threading.Lock()
        self.cookie_name = f"miniray_{port}"  # cookies are shared between ports

    def allows(self, headers: Mapping[str, str], query_token: str | None) -> bool:
        """Return True if the request contains the token, in the address or in the cookie."""
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
    """Return True for ``localhost`` and loopback addresses such as ``127.0.0.1`` and ``::1``.

    Names that merely resolve to such an address are rejected.
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_same_origin(host_header: str | None, origin: str | None) -> bool:
    """Return True if the request uses a loopback host name and comes from our own page.

    The port isn't compared with ours, because it is different behind ``ssh -L``.
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


class ServedDirectory:
    """The directory that is served: a directory of runs, or a single run.

    Symbolic links are followed only if they stay inside. Raise ``FileNotFoundError`` if the
    directory doesn't exist.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise FileNotFoundError(f"Directory {path} doesn't exist.")
        self.path = path.resolve()
        self.is_run = is_run(self.path)

    def names(self) -> list[str]:
        """Return the names of all runs, unordered."""
        if self.is_run:
            return [self.path.name]
        found = []
        try:
            entries = list(self.path.iterdir())
        except OSError:  # the directory was deleted or isn't readable
            return []
        for entry in entries:
            try:
                self.run(entry.name)
            except NotFoundError:
                continue
            found.append(entry.name)
        return found

    def run(self, name: str) -> Path:
        """Return the directory of a run. Raise ``NotFoundError`` if it isn't served."""
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
        """Return ``path`` with links resolved.

        Raise ``NotFoundError`` if it doesn't exist or is outside of the served directory.
        """
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: a symlink loop, before Python 3.13
            raise NotFoundError(str(path)) from None
        if not real.is_relative_to(self.path):
            raise NotFoundError(str(path))
        return real

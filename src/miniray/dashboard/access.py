"""Control access to the dashboard by checking the token, the Host header and file paths.

Any web page can send requests to 127.0.0.1 from the user's browser. Requests from a page on a
different port of localhost even include the cookie of the dashboard. Therefore, every request must
contain the token and must not come from a different origin. To prevent DNS rebinding attacks, the
Host header must also name a loopback host.
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
    """The run or file doesn't exist, or it is outside of the served directory.

    The error intentionally doesn't reveal which of these reasons applies.
    """


class Gate:
    """Authenticate the requests to one server.

    A request contains the token either in its address or in a cookie. All users of the machine can
    see the command line that opens the browser. Therefore, the address on this command line
    contains a single-use code instead of the token, and the browser exchanges the code for the
    cookie.
    """

    def __init__(self, port: int) -> None:
        self.token = secrets.token_urlsafe(24)
        self._code: str | None = None
        self._lock = threading.Lock()
        self.cookie_name = f"miniray_{port}"  # cookies are shared between ports

    def allows(self, headers: Mapping[str, str], query_token: str | None) -> bool:
        """Return True if the request contains the token in its address or in its cookie."""
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
        """Return a new code that can be redeemed once. All earlier codes become invalid."""
        with self._lock:
            self._code = secrets.token_urlsafe(24)
            return self._code

    def redeem(self, code: str) -> bool:
        """Return True if ``code`` is valid. After this call, the code is no longer valid."""
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
    """Return True for ``localhost`` and for loopback addresses such as ``127.0.0.1`` and ``::1``.

    Return False for other names, even if they resolve to a loopback address.
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_same_origin(host_header: str | None, origin: str | None) -> bool:
    """Return True if a request uses a loopback host name and comes from the dashboard's own page.

    The port in the Host header isn't compared with the port of the server, because the two ports
    may differ if the user forwards the port with ``ssh -L``.
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
    """The directory that the dashboard serves, which is either a run or a directory of runs.

    A symbolic link is followed only if its target is within this directory. The constructor
    raises ``FileNotFoundError`` if the directory doesn't exist.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise FileNotFoundError(f"Directory {path} doesn't exist.")
        self.path = path.resolve()
        self.is_run = is_run(self.path)

    def names(self) -> list[str]:
        """Return the names of all runs in arbitrary order."""
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
        """Return the directory of a run. Raise ``NotFoundError`` if the run isn't served."""
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
        """Return ``path`` with all symbolic links resolved.

        Raise ``NotFoundError`` if the path doesn't exist or is outside of the served directory.
        """
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):  # before Python 3.13, symlink loops raise RuntimeError
            raise NotFoundError(str(path)) from None
        if not real.is_relative_to(self.path):
            raise NotFoundError(str(path))
        return real

"""The live page over run directories: ``miniray dashboard``.

::

    miniray.dashboard.serve(Path("runs"))       # prints its address, serves until Ctrl-C

Reads run directories and nothing else: a run that lives, hangs or died last week is shown alike,
and its ranks do nothing for it. Needs plotly (``pip install 'miniray[dashboard]'``), and no torch.
"""

from __future__ import annotations

import importlib.util
import socket
import socketserver
import sys
import threading
import webbrowser
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

from miniray.dashboard import access
from miniray.dashboard.handler import Handler
from miniray.dashboard.poller import Poller

__all__ = ["Server", "serve"]


def serve(
    root: Path,
    *,
    run: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    open_browser: bool = True,
) -> None:
    """Serve the runs under ``root`` (or the one run that ``root`` is) until Ctrl-C.

    Prints the address, which holds the token. ``FileNotFoundError`` where there is no such
    directory or no run of that name, ``ValueError`` for a host other than this machine,
    ``ImportError`` without plotly, ``OSError`` where the port is taken.
    """
    server = Server(root, run=run, host=host, port=port)
    server.start()
    try:
        print(f"miniray dashboard: {server.url}", flush=True)
        print(f"  runs in {server.root.path}; Ctrl-C ends it", flush=True)
        if open_browser and sys.stdout.isatty():
            webbrowser.open(server.new_browser_url())
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    finally:
        server.close()


class Server:
    """The dashboard as an object, for tests and for programs: ``start()``, ``url``, ``close()``.

    ``close`` ends every thread the server has started, open pages included.
    """

    def __init__(
        self,
        root: Path,
        *,
        run: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        interval: float = 1.0,
    ) -> None:
        if not access.is_loopback(host):
            raise ValueError(
                f"the dashboard is served to this machine only, not on {host!r}; from another one, "
                "use `ssh -L 8080:localhost:PORT`"
            )
        self.plotly = _find_plotly()
        self.root = access.Root(Path(root))
        if run is not None:
            try:
                self.root.run(run)
            except access.NotFoundError:
                raise FileNotFoundError(f"there is no run {run!r} in {self.root.path}") from None
        self._run = run
        self.poller = Poller(self.root, interval)
        handler = type("DashboardHandler", (Handler,), {"dashboard": self})
        self._http = _Http((host, port), handler)
        self.gate = access.Gate(self.port)
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="dashboard-server", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    @property
    def address(self) -> str:
        """Without the token."""
        host = str(self._http.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"{self.address}?token={self.gate.token}{self._run_parameter}"

    def new_browser_url(self) -> str:
        """Return an address that works once and doesn't contain the token."""
        return f"{self.address}?code={self.gate.new_code()}{self._run_parameter}"

    @property
    def _run_parameter(self) -> str:
        return f"&run={quote(self._run, safe='')}" if self._run is not None else ""

    def start(self) -> None:
        self.poller.start()
        self._thread.start()

    def close(self) -> None:
        """End, whatever is open. Harmless when called twice."""
        self.poller.close()
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.hang_up()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    """A thread a connection. ``hang_up`` closes all, so that no thread waits for a client."""

    daemon_threads = False  # so that server_close waits for them
    block_on_close = True

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._open: set[Any] = set()
        self._guard = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the look-up of our own name that HTTPServer makes: it may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        with self._guard:
            for request in self._open:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:  # the client was quicker
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in mid-answer is no error; everything else is shown."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def _find_plotly() -> Path:
    """plotly.js inside of the Python package, which need not be imported for it."""
    found = importlib.util.find_spec("plotly")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise ImportError("the dashboard needs plotly: pip install 'miniray[dashboard]'")

"""Serve a live web page that shows runs, as ``miniray dashboard`` does.

::

    miniray.dashboard.serve(Path("runs"))       # prints its address, serves until Ctrl-C

The server only reads run directories. Therefore, it works in the same way for running, hung and
finished runs, and it causes no work on the ranks. The dashboard requires plotly, which
``pip install 'miniray[dashboard]'`` installs. It doesn't require torch.
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

__all__ = ["DashboardServer", "serve"]


def serve(
    root: Path,
    *,
    run: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    open_browser: bool = True,
) -> None:
    """Serve the runs in ``root`` until the user presses Ctrl-C.

    ``root`` is either a directory of runs or the directory of a single run. The function prints the
    address of the page, which contains the access token.

    Raises:
        FileNotFoundError: The directory doesn't exist, or it contains no run named ``run``.
        ValueError: ``host`` isn't a loopback address.
        ImportError: plotly isn't installed.
        OSError: The port is in use.
    """
    server = DashboardServer(root, run=run, host=host, port=port)
    server.start()
    try:
        print(f"miniray dashboard: {server.url}", flush=True)
        print(f"Runs in {server.root.path}. Press Ctrl-C to quit.", flush=True)
        if open_browser and sys.stdout.isatty():
            webbrowser.open(server.new_browser_url())
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    finally:
        server.close()


class DashboardServer:
    """A dashboard that a program can start and stop with ``start()`` and ``close()``.

    ``url`` is the address of the page. ``close`` stops all threads of the server, even if pages are
    still open.
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
                f"The dashboard is only served on a loopback address, not on {host!r}. To open it "
                "from a different machine, use `ssh -L 8080:localhost:PORT`."
            )
        self.plotly = _find_plotly()
        self.root = access.ServedDirectory(Path(root))
        if run is not None:
            try:
                self.root.run(run)
            except access.NotFoundError:
                raise FileNotFoundError(f"{self.root.path} contains no run {run!r}.") from None
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
        """The address of the page without the token."""
        host = str(self._http.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def url(self) -> str:
        """The address to open in a browser, which includes the token."""
        return f"{self.address}?token={self.gate.token}{self._run_parameter}"

    def new_browser_url(self) -> str:
        """Return an address that can be used only once and doesn't contain the token."""
        return f"{self.address}?code={self.gate.new_code()}{self._run_parameter}"

    @property
    def _run_parameter(self) -> str:
        return f"&run={quote(self._run, safe='')}" if self._run is not None else ""

    def start(self) -> None:
        self.poller.start()
        self._thread.start()

    def close(self) -> None:
        """Stop the server. This method may be called more than once."""
        self.poller.close()
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.close_connections()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    """An HTTP server that handles each connection in a separate thread.

    ``close_connections`` closes all connections, so that no thread continues to wait for a client.
    """

    daemon_threads = False  # server_close must wait for the threads
    block_on_close = True

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._open: set[Any] = set()
        self._guard = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind the socket without the DNS lookup in ``HTTPServer``, which may take seconds."""
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

    def close_connections(self) -> None:
        with self._guard:
            for request in self._open:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:  # the client has already disconnected
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print all errors except those caused by clients that have disconnected."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def _find_plotly() -> Path:
    """Return the path of ``plotly.min.js`` in the plotly package, without importing the package."""
    found = importlib.util.find_spec("plotly")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise ImportError("The dashboard needs plotly: pip install 'miniray[dashboard]'")

"""Fixtures: a server for a temporary directory of runs, and ranks that end with the test."""

import http.client
import json
import time

import pytest

from miniray.dashboard import DashboardServer
from tests.doctor.helpers import Ranks

pytest.importorskip("plotly", reason="the dashboard needs plotly: pip install 'miniray[dashboard]'")


class Client:
    """Send requests with arbitrary headers."""

    def __init__(self, server):
        self.server = server

    def ask(self, path, method="GET", cookie=True, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if cookie:
            headers["Cookie"] = self.server.gate.cookie().partition(";")[0]
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    def json(self, path, method="GET"):
        status, body = self.ask(path, method)
        assert status == 200, (status, body)
        return json.loads(body)

    def news(self, *runs):
        """Yield changes as ("runs" or "state", value)."""
        query, seen = "".join(f"run={name}&" for name in runs), ""
        while True:
            found = self.json(f"/api/news?{query}seen={seen}")
            seen = found["seen"]
            if found["runs"] is not None:
                yield "runs", found["runs"]
            yield from (("state", state) for state in found["states"])
            time.sleep(0.02)

    def state(self, run, wanted=lambda state: True):
        """Return the first state of the run for which ``wanted`` is true."""
        return next(v for name, v in self.news(run) if name == "state" and wanted(v))


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "runs"
    path.mkdir()
    return path


@pytest.fixture
def ranks():
    """Ranks that are forked before the server starts its threads."""
    made = Ranks()
    yield made
    made.end()


@pytest.fixture
def start():
    """Return a function that starts a server and returns its client."""
    servers = []

    def start_server(path, **options):
        server = DashboardServer(path, interval=0.1, **options)
        servers.append(server)
        server.start()
        return Client(server)

    yield start_server
    for server in servers:
        server.close()

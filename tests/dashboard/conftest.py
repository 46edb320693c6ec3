"""A server over a temporary directory of runs, and ranks that end with the test."""

import http.client
import json
import time

import pytest

from miniray.dashboard import DashboardServer
from tests.doctor.helpers import Ranks

pytest.importorskip("plotly", reason="the dashboard needs plotly: pip install 'miniray[dashboard]'")


class Client:
    """Requests as a program would send them; headers may be anything."""

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
        """What is new, as ("runs" or "state", value), for as long as one asks."""
        query, seen = "".join(f"run={name}&" for name in runs), ""
        while True:
            found = self.json(f"/api/news?{query}seen={seen}")
            seen = found["seen"]
            if found["runs"] is not None:
                yield "runs", found["runs"]
            yield from (("state", state) for state in found["states"])
            time.sleep(0.02)

    def state(self, run, wanted=lambda state: True):
        """The first state of the run that is ``wanted``."""
        return next(v for name, v in self.news(run) if name == "state" and wanted(v))


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "runs"
    path.mkdir()
    return path


@pytest.fixture
def ranks():
    """Forked before the server starts: a fork should find one thread."""
    made = Ranks()
    yield made
    made.end()


@pytest.fixture
def start():
    """``start(root)`` gives a client of a new server."""
    servers = []

    def start_server(path, **options):
        server = DashboardServer(path, interval=0.1, **options)
        servers.append(server)
        server.start()
        return Client(server)

    yield start_server
    for server in servers:
        server.close()

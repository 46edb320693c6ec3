import json
import re

import pytest

from tests.doctor.helpers import Ranks

#: Markup that would make a browser load or execute something.
FETCHES = re.compile(r"https?:|//\w|src=|href=|<script|<link|url\(|@import|javascript:", re.I)


@pytest.fixture
def ranks():
    found = Ranks()
    yield found
    found.end()


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes a run directory with run.json, metrics and events."""

    def make(name="by-hand", metrics=(), events=(), steps=(), **info):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        fields = {"format": 1, "name": name, "state": "finished", "versions": {"miniray": "0.1.0"}}
        (folder / "run.json").write_text(json.dumps({**fields, **info}))
        files = {"metrics": metrics, "steps": steps, "events": events}
        for file, lines in files.items():
            if lines:
                (folder / f"{file}.jsonl").write_text(
                    "".join(json.dumps(line) + "\n" for line in lines)
                )
        return folder

    return make

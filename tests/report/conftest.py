import json
import re

import pytest

from tests.doctor.helpers import Ranks

#: Anything that would make a browser fetch something, or run something.
FETCHES = re.compile(r"https?:|//\w|src=|href=|<script|<link|url\(|@import|javascript:", re.I)


@pytest.fixture
def ranks():
    found = Ranks()
    yield found
    found.end()


@pytest.fixture
def make_run(tmp_path):
    """Writes a run directory by hand: fields of run.json, lines of metrics and events."""

    def make(name="by-hand", metrics=(), events=(), **info):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        said = {"format": 1, "name": name, "state": "finished", "versions": {"miniray": "0.1.0"}}
        (folder / "run.json").write_text(json.dumps({**said, **info}))
        for file, lines in (("metrics.jsonl", metrics), ("events.jsonl", events)):
            if lines:
                (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return make

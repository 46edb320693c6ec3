"""The zygote: what it loads before anybody asks it to fork, and its end before it was used."""

import os
import sys
import time
import types

import psutil

from miniray.core.local import spawner


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_the_driver_has_is_loaded_at_once_and_a_zygote_without_workers_just_ends(
    tmp_path, monkeypatch
):
    began = tmp_path / "began"
    (tmp_path / "heavy_for_zygote.py").write_text(
        f"import time\nopen({str(began)!r}, 'w').close()\ntime.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "heavy_for_zygote", types.ModuleType("heavy_for_zygote"))
    monkeypatch.setattr(spawner, "PRELOAD", ("heavy_for_zygote", "not_in_the_driver"))
    zygote = spawner.Zygote()
    try:
        process = psutil.Process(zygote.pid)
        assert os.getpid() == process.ppid()
        wait_for(began.exists)  # nobody has told it of a session yet
    finally:
        zygote.close()  # in the midst of an import that takes ten minutes
    assert not process.is_running()

import os
import subprocess
import sys

import pytest


@pytest.fixture
def miniray_cli(tmp_path):
    """Runs ``miniray ARGS`` as a user would: a process of its own, in an empty folder."""

    def run(*args, **env):
        return subprocess.run(
            [sys.executable, "-m", "miniray", *args],
            cwd=tmp_path,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    return run


@pytest.fixture
def miniray_on_terminal(miniray_on_terminal_with):
    """The same on a pseudo-terminal; returns everything that appeared on it."""
    return lambda *args, **env: miniray_on_terminal_with("", *args, **env)


@pytest.fixture
def miniray_on_terminal_with(tmp_path):
    """On a pseudo-terminal where ``keys`` were typed."""
    pty = pytest.importorskip("pty")

    def run(keys, *args, **env):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "miniray", *args],
            cwd=tmp_path,
            env=environment(TERM="xterm-256color", **env),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        os.write(ours, keys.encode())
        seen = b""
        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:  # Linux's way to say that the other end is closed
            pass
        finally:
            os.close(ours)
            code = process.wait(timeout=50)
        return code, seen.decode()

    return run


def environment(**extra):
    """This process's, without what would change how the command behaves."""
    dropped = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS")
    kept = {
        k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("MINIRAY_")
    }
    return {**kept, **extra}

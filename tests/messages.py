"""Wording of errors and warnings that tests expect, in one golden file per package of tests.

An entry is the name of the test in brackets, and the message below it.
"""

import fcntl
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

HEADER = """\
# Wording of errors and warnings that the tests of this package expect. After a change of wording,
# run the tests with --update-golden, and review the diff.
"""
NAME = re.compile(r"^\[(test_\w+\.py::.+)\]$", re.MULTILINE)
#: Parts of a message that differ between runs, and the text that replaces them.
VARIABLE_PARTS = (
    (re.compile(r"\bpid \d+"), "pid 1"),
    (re.compile(r"\b0x[0-9a-f]{6,}"), "0x1"),
    (re.compile(r"\b[0-9a-f]{16,}\b"), "0123456789abcdef"),  # IDs and checksums
    (re.compile(r"-20\d{6}-\d{6}\b"), "-20260101-000000"),  # names of runs
    (re.compile(r"(\.py\"?(?:, line |:))\d+"), r"\g<1>1"),
)


def format_message(error, base):
    """Return type and message of an error, without the traceback of a remote process.

    ``error`` can also be a text. ``base`` contains the temporary directories of tests.
    """
    while getattr(error, "cause", None) is not None:
        error = error.cause
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    text = re.sub(rf"{re.escape(str(base))}/[\w-]+", "/tmp", text)
    text = text.replace(f"{ROOT}/", "")
    for pattern, replacement in VARIABLE_PARTS:
        text = pattern.sub(replacement, text)
    return text.strip()


def read_messages(path):
    """Return the messages in a file by the names of their entries."""
    text = path.read_text("utf-8") if path.exists() else ""
    parts = NAME.split(text)[1:]
    return {name: body.strip("\n") for name, body in zip(parts[::2], parts[1::2], strict=True)}


def update_messages(path, test, messages):
    """Replace the entries of a test in a file."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "a") as lock:  # tests of a package may run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = {
            name: text
            for name, text in read_messages(path).items()
            if name != test and not name.startswith(f"{test} (")
        }
        entries.update(messages)
        body = "".join(f"\n[{name}]\n{entries[name]}\n" for name in sorted(entries))
        path.write_text(HEADER + body, "utf-8")

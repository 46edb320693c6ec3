"""Run scripts one after the other in this process: ``run_blocks.py FOLDER...``.

Each folder has a ``block.py``, which runs as ``__main__`` with the folder as working directory.
Its stdout goes to ``out`` and its stderr to ``err`` in that folder. The first script that fails
ends the process with its exit code, so the scripts after it leave no ``out``.
"""

import linecache
import os
import runpy
import sys
import traceback
from pathlib import Path

import miniray


def run(folder):
    """Run ``block.py`` in ``folder`` and return its exit code."""
    os.chdir(folder)
    sys.path[0] = folder
    for fd, name in ((1, "out"), (2, "err")):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), fd)
    linecache.clearcache()  # all scripts have the same relative path
    try:
        runpy.run_path("block.py", run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        miniray.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    for argument in [str(Path(argument).resolve()) for argument in sys.argv[1:]]:
        code = run(argument)
        if code:
            sys.exit(code)

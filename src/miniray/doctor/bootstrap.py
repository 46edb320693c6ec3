"""``python -m miniray.doctor.bootstrap script.py args``: what ``miniray run`` starts for each rank.

Attaches the recorder and then runs the script as ``python script.py args`` would: with the same
``__main__``, ``sys.argv`` and ``sys.path``, and tracebacks that begin in the script.
"""

from __future__ import annotations

import faulthandler
import io
import os
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader

from miniray.doctor import attaching, leaving, processes, recorder


def main() -> None:
    arguments = sys.argv[1:]
    _die_with_launcher()
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a crash in C leaves its stack in the rank's log
    attaching.attach(instrumented=os.environ.get("MINIRAY_INSTRUMENT", "1") != "0")
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            _run_script(arguments[0])
    except SystemExit as stop:
        current = recorder.current()
        if current is not None:
            leaving.record(current, stop.code, stop.__context__)
        raise
    except BaseException as error:
        # Shown here and not by Python, so that the frames of this file are not in it.
        trace = error.__traceback__
        while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _run_script(path: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        sys.path[0] = os.path.dirname(os.path.abspath(path))
    with io.open_code(os.path.abspath(path)) as file:
        source = file.read()
    module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    module.__dict__.update(__file__=path, __loader__=loader, __spec__=None, __cached__=None)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _is_ours(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<frozen runpy")


def _die_with_launcher() -> None:
    launcher = os.environ.get("MINIRAY_LAUNCHER_PID")
    if launcher is None:
        return
    processes.die_with_parent()
    if os.getppid() != int(launcher):  # it ended before we asked
        os._exit(1)


if __name__ == "__main__":
    main()

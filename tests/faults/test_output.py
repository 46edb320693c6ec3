"""What workers print: every line, whole, on the terminal and in the log, whatever ends them."""

import collections
import glob
import os
import re
import subprocess
import time

import pytest

import miniray
from tests.faults.helpers import eventually

LINE = re.compile(r"^\((\w+) pid=(\d+)\) (.*)$")


def shown(text):
    """[(name, pid, line), ...] of what the terminal got."""
    lines = []
    for line in text.splitlines():
        match = LINE.match(line)
        assert match, f"not a whole line with a prefix: {line!r}"
        lines.append((match[1], int(match[2]), match[3]))
    return lines


def log_files(folder):
    """What is in the log files, by the file's name."""
    found = {}
    for path in glob.glob(f"{folder}/miniray-{os.getuid()}/logs/*/*.log"):
        with open(path) as file:
            found[os.path.basename(path)] = file.read()
    return found


def test_no_line_is_lost_or_torn(drivers, own_directory):
    status, out, err = drivers.run(
        """
        import sys, miniray

        @miniray.remote
        class Printer:
            def print(self, number):
                for i in range(5000):
                    print(f"{number} line {i} " + "x" * (i % 300))
                    if i % 50 == 0:
                        print(f"{number} error {i}", file=sys.stderr)

        with miniray.init():
            actors = [Printer.options(name=f"printer{n}").remote() for n in range(4)]
            miniray.get([a.print.remote(n) for n, a in enumerate(actors)])
        """
    )
    assert (status, bool(err)) == (0, True)
    expected = [f"{n} line {i} " + "x" * (i % 300) for n in range(4) for i in range(5000)]
    lines = shown(out)
    assert collections.Counter(line for _, _, line in lines) == collections.Counter(expected)
    for n in range(4):  # each in its own order, under its own name, from one process
        mine = [line for name, _, line in lines if name == f"printer{n}"]
        assert mine == expected[n * 5000 : (n + 1) * 5000]
        assert len({pid for name, pid, _ in lines if name == f"printer{n}"}) == 1
    assert len(shown(err)) == 400
    assert sum(text.count("\n") for text in log_files(own_directory).values()) == 20_400


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), 9)", "os._exit(3)", "os.abort()", "sys.exit(1)", "1 / 0"]
)
def test_last_words_are_shown(drivers, own_directory, end):
    status, out, _ = drivers.run(
        f"""
        import os, sys, miniray

        @miniray.remote
        class Victim:
            def die(self):
                for i in range(1000):
                    print("word", i)
                os.write(1, b"no newline at the end")
                {end}

        victim = Victim.remote()
        try:
            miniray.get(victim.die.remote())
        except miniray.errors.MinirayError as error:
            pass
        """
    )
    assert status == 0
    lines = [line for _, _, line in shown(out)]
    assert lines == [*(f"word {i}" for i in range(1000)), "no newline at the end"]
    (text,) = log_files(own_directory).values()
    assert text.endswith("word 999\nno newline at the end") or "Traceback" in text


def test_the_streams_stay_apart(drivers):
    _, out, err = drivers.run(
        """
        import os, subprocess, sys, miniray

        @miniray.remote
        def speak():
            print("python out")
            print("python err", file=sys.stderr)
            os.write(1, b"c out\\n")
            os.write(2, b"c err\\n")
            subprocess.run(["sh", "-c", "echo program out; echo program err >&2"])

        miniray.get(speak.remote())
        """
    )
    assert [line for _, _, line in shown(out)] == ["python out", "c out", "program out"]
    assert [line for _, _, line in shown(err)] == ["python err", "c err", "program err"]


def test_odd_bytes_and_long_lines(drivers, own_directory):
    _, out, _ = drivers.run(
        """
        import os, miniray

        @miniray.remote
        def speak():
            os.write(1, b"caf\\xc3\\xa9 \\xff\\xfe\\n")
            os.write(1, b"first \\xc3")
            os.write(1, b"\\xa9 half\\r\\n")
            os.write(1, b"a" * 300_000 + b"\\n")
            os.write(1, b"\\n")
            print("end")

        miniray.get(speak.remote())
        """
    )
    lines = [line for _, _, line in shown(out)]
    assert lines[0].startswith("café ")
    assert lines[1] == "first é half"
    assert "".join(lines[2:-2]) == "a" * 300_000
    assert lines[-2:] == ["", "end"]


def test_a_terminal_that_knows_only_ascii(drivers, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    status, out, err = drivers.run(
        """
        import os, miniray

        @miniray.remote
        def speak():
            os.write(1, b"caf\\xc3\\xa9\\nplain\\n")

        miniray.get(speak.remote())
        """
    )
    assert status == 0, err
    assert [line for _, _, line in shown(out)] == ["caf\\xe9", "plain"]


def test_log_to_driver_off(drivers, own_directory):
    status, out, err = drivers.run(
        """
        import sys, miniray
        miniray.init(log_to_driver=False)

        @miniray.remote(max_retries=0)
        def speak():
            print("for the file")
            print("also for the file", file=sys.stderr)
            sys.exit(3)

        try:
            miniray.get(speak.remote())
        except miniray.errors.WorkerCrashedError as error:
            assert "for the file" in str(error), error
        """
    )
    assert (status, out, err) == (0, "", "")
    (text,) = log_files(own_directory).values()
    assert text == "for the file\nalso for the file\n"


def test_a_closed_terminal_does_not_stop_the_work(drivers, own_directory):
    status, _, err = drivers.run(
        """
        import os, sys, miniray

        @miniray.remote
        class Printer:
            def print(self, count):
                for i in range(count):
                    print("line", i)
                return count

        printer = Printer.remote()
        miniray.get(printer.print.remote(10))
        sys.stdout.close()
        assert miniray.get(printer.print.remote(20_000), timeout=20) == 20_000
        """
    )
    assert status == 0, err
    (text,) = log_files(own_directory).values()
    assert text.count("\n") == 20_010


def test_a_terminal_nobody_reads_does_not_stop_the_work(drivers):
    """The pipe behind stdout is full: printing waits, calls do not."""
    driver = drivers.start(
        """
        import sys, miniray

        @miniray.remote
        class Printer:
            def print(self):
                for i in range(5_000):
                    print("x" * 100)

            def ping(self):
                return 1

        printer, other = Printer.remote(), Printer.remote()
        ref = printer.print.remote()
        for _ in range(100):
            assert miniray.get(other.ping.remote(), timeout=10) == 1
        print("done", file=sys.stderr, flush=True)
        sys.stdin.readline()
        miniray.get(ref)
        """,
        stdin=subprocess.PIPE,
    )
    assert driver.process.stderr.readline() == "done\n"
    out, _ = driver.process.communicate("\n", timeout=20)
    assert len(shown(out)) == 5_000
    driver.assert_nothing_left()


def test_a_worker_that_never_stops_printing(drivers):
    """Its lines are shown as they come, others' too, and do not pile up in the driver."""
    driver = drivers.start(
        """
        import os, sys, time, psutil, miniray

        @miniray.remote
        class Printer:
            def flood(self):
                while True:
                    os.write(1, b"flood\\n" * 10_000)

            def say(self, text):
                print(text)

            def crash(self):
                os._exit(3)

        flood = Printer.options(name="flood").remote()
        other = Printer.options(name="other").remote()
        flood.flood.remote()
        start = psutil.Process().memory_info().rss
        for i in range(20):
            miniray.get(other.say.remote(f"line {i}"), timeout=10)
            time.sleep(0.05)
        print("grown", psutil.Process().memory_info().rss - start, file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            miniray.get(other.crash.remote(), timeout=10)
        except miniray.errors.ActorDiedError:
            print("noticed", time.monotonic() - start, file=sys.stderr, flush=True)
        """
    )
    said = collections.Counter(line.split(" ")[0] for line in driver.process.stdout)
    assert said["(flood"] > 10_000
    assert said["(other"] == 20
    words = dict(line.split() for line in driver.process.stderr)
    assert int(words["grown"]) < 100_000_000
    assert float(words["noticed"]) < 2
    driver.assert_nothing_left()


def test_logs_of_a_live_session_are_kept(engine, drivers, own_directory):
    """Old sessions' logs are removed when new ones start, however many; a running one's stay."""

    @miniray.remote
    class Speaker:
        def speak(self):
            print("here")

    miniray.get(Speaker.remote().speak.remote())
    mine = engine.node.info.log_dir
    os.utime(mine, (0, 0))
    status, _, err = drivers.run(
        """
        import miniray
        for _ in range(12):
            miniray.init(num_workers=1)
            miniray.shutdown()
        """
    )
    assert status == 0, err
    late = Speaker.options(name="late").remote()
    miniray.get(late.speak.remote(), timeout=10)
    (path,) = glob.glob(f"{mine}/late-*.log")
    eventually(lambda: os.path.getsize(path))


def test_output_is_shown_while_the_worker_runs(drivers):
    driver = drivers.start(
        """
        import time, miniray

        @miniray.remote
        def speak():
            print("now")
            time.sleep(600)

        miniray.get(speak.remote())
        """
    )
    start = time.monotonic()
    line = driver.process.stdout.readline()
    assert line.endswith("now\n")
    assert time.monotonic() - start < 5
    driver.process.kill()
    driver.process.wait()
    driver.assert_nothing_left()


def test_a_breakpoint_says_where_it_would_work(engine):
    @miniray.remote
    def stops():
        breakpoint()  # noqa: T100

    def stops_with(debugger):
        return stops.options(runtime_env={"env_vars": {"PYTHONBREAKPOINT": debugger}})

    with pytest.raises(RuntimeError, match="MINIRAY_BACKEND=inline"):
        miniray.get(stops_with("").remote())
    miniray.get(stops_with("os.getpid").remote())  # another debugger

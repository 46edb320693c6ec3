"""Ranks as forked processes, for tests that need several."""

import faulthandler
import os
import signal
import sys
import time
import traceback

from miniray.doctor import recorder


class Ranks:
    """Forked children that each run a function; all of them are ended at the end of the test."""

    def __init__(self):
        self.pids = []

    def start(self, function, *args):
        """Run ``function(*args)`` in a child; its exit status is 0, or 3 if it raised."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            status = 3
            try:
                faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads
                function(*args)
                status = 0
            except BaseException as error:
                if recorder.current() is not None:
                    recorder.current().record_exception(error)
                traceback.print_exc()
            finally:
                recorder.stop()
                os._exit(status)
        self.pids.append(pid)
        return pid

    def wait(self, limit=40.0):
        """Exit statuses of those not waited for yet, in the order they were started."""
        deadline = time.monotonic() + limit
        return [self._wait_for(pid, deadline) for pid in list(self.pids)]

    def _wait_for(self, pid, deadline):
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.pids.remove(pid)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)  # for the stacks, which say what it waits for
        raise TimeoutError(f"process {pid} still runs")

    def end(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def wait_until(condition, limit=40.0):
    """The condition's first true value; fails the test after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError("it did not come true in time")

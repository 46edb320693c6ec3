"""Workers for the tests of the parameter server."""

import os
import signal
import time

import miniray


@miniray.remote
class Worker:
    """Holds any weights, and fails on demand."""

    def __init__(self, weights):
        self.weights = weights
        self.fail = None

    def get_weights(self):
        self._maybe_fail("get_weights")
        return self.weights

    def set_weights(self, weights):
        self._maybe_fail("set_weights")
        self.weights = weights

    def pid(self):
        return os.getpid()

    def fail_in(self, method, how="raise"):
        self.fail = (method, how)

    def _maybe_fail(self, method):
        if self.fail is None or self.fail[0] != method:
            return
        how = self.fail[1]
        if how == "raise":
            raise KeyError(f"{method} does not work")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(how))


def workers(*weights):
    return [Worker.remote(w) for w in weights]


def weights_of(handles):
    return miniray.get([w.get_weights.remote() for w in handles])


def call(server, method, *args):
    return miniray.get(getattr(server, method).remote(*args))


def error_text(error):
    """Return type and message of an error, without the traceback of the remote process."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}\n"

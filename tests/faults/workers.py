"""Actors and tasks that many of the tests here use."""

import gc
import os
import signal
import threading
import time

import numpy as np
import psutil

import miniray


@miniray.remote
class Counter:
    def __init__(self):
        self.value = 0

    def add(self, n=1):
        self.value += n
        return self.value

    def echo(self, value):
        return value

    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds

    def pid(self):
        return os.getpid()


@miniray.remote
def double(x):
    return 2 * x


@miniray.remote
class Worker:
    def __init__(self, *held):
        self.held = list(held)

    def pid(self):
        return os.getpid()

    def hold(self, *values):
        self.held.extend(values)

    def drop(self):
        self.held.clear()
        gc.collect()

    def echo(self, value):
        return value

    def box(self, size):
        return [miniray.put(np.ones(size, np.uint8)), {"deep": [miniray.put(size)]}]

    def fail(self, payload):
        raise ValueError(payload)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def footprint(self):
        return footprint()


def footprint():
    """(descriptors, threads, resident bytes) of this process."""
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), threading.active_count(), process.memory_info().rss

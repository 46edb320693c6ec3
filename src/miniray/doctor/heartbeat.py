"""A thread that keeps time, memory and GPU figures in the box fresh while the main thread is stuck.

It stops beating when the process is stopped or when C code holds Python's lock for ever, and that
is what a stale heartbeat of a living process means. It never keeps the process alive, and forked
children do not have it.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.doctor import in_flight
from miniray.doctor.gpu import GpuMeter
from miniray.doctor.layout import Cell, Real
from miniray.doctor.memory_history import History

if TYPE_CHECKING:
    from miniray.doctor.recorder import Recorder

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Heartbeat:
    """Beats every ``interval`` seconds until ``stop``."""

    def __init__(self, recorder: Recorder, interval: float) -> None:
        if interval <= 0:
            raise ValueError(f"the heartbeat's interval must be more than 0 seconds: {interval}")
        self._recorder = recorder
        self._interval = interval
        self._stop = threading.Event()
        self._gpu: GpuMeter | None = GpuMeter()
        self._history = History()
        self._error = 0
        self._memory: Any = None
        try:
            self._memory = open("/proc/self/statm", "rb", buffering=0)
        except OSError:  # not Linux: the peak stands for the current size
            self._memory = None
        self._thread = threading.Thread(target=self._run, name="miniray-heartbeat", daemon=True)

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._gpu is not None:
            self._gpu.close()
        if self._memory is not None:
            self._memory.close()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.beat()

    def beat(self) -> None:
        box = self._recorder.box
        box.floats[Real.CLOCK] = time.time() - time.monotonic()
        rss = self._rss()
        box.ints[Cell.RSS] = rss
        if rss > box.ints[Cell.PEAK_RSS]:
            box.ints[Cell.PEAK_RSS] = rss
        box.floats[Real.CPU_SECONDS] = time.process_time()
        if self._history.add(time.monotonic(), box.ints[Cell.STEP], rss):
            self._recorder.note_later(memory=self._history.points)
        self._error = in_flight.look(self._recorder, self._error)
        self._measure_gpu()
        self._recorder.flush()
        box.ints[Cell.HEARTBEAT] = time.monotonic_ns()

    def _measure_gpu(self) -> None:
        if self._gpu is None:
            return
        try:
            self._gpu.measure(self._recorder)
        except Exception as error:  # a driver in trouble must not stop the heart
            self._recorder.note(gpu_meter=f"{type(error).__name__}: {error}")
            self._gpu = None

    def _rss(self) -> int:
        if self._memory is None:
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._memory.seek(0)
        return int(self._memory.read().split()[1]) * _PAGE

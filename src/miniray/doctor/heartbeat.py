"""A thread that keeps time, memory and GPU figures in the box fresh while the main thread is stuck.

It stops beating when the process is stopped or when C code holds Python's lock for ever, and that
is what a stale heartbeat of a living process means. It never keeps the process alive, and forked
children do not have it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.doctor import in_flight
from miniray.doctor.layout import Cell, Real

if TYPE_CHECKING:
    from miniray.doctor.recorder import Recorder

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_POINTS = 48


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
        self._recorder.measure_gauges()
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


class History:
    """A rank's resident memory over its life, as points (seconds since the start, step, bytes).

    At most 48, evenly spaced: when it is full, every second one goes and the space between them
    doubles. So it is written less and less often, and a run of a week fits.
    """

    def __init__(self) -> None:
        self.points: list[tuple[float, int, int]] = []
        self._space = 0.0
        self._began: float | None = None

    def add(self, now: float, step: int, rss: int) -> bool:
        """Note a point if enough time has passed; whether it was noted."""
        if self._began is None:
            self._began = now
        seconds = now - self._began
        if self.points and seconds - self.points[-1][0] < self._space:
            return False
        if len(self.points) >= _MOST_POINTS:
            self.points = self.points[::2]
            self._space = self.points[-1][0] / (len(self.points) - 1)
        self.points.append((round(seconds, 1), step, rss))
        return True


class GpuMeter:
    """NVML's figures of the GPU the rank's tensors are on, where ``nvidia-ml-py`` is there.

    Nothing is initialised on the GPU and torch is not imported: until the rank itself uses CUDA
    there is nothing to measure.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._device = -1
        self._missing = False

    def measure(self, recorder: Recorder) -> None:
        """Write the figures into the box; without a GPU, NVML or CUDA in use, nothing."""
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        # While torch is being imported by the main thread its parts may not be there yet.
        if self._missing or not getattr(cuda, "is_initialized", bool)():
            return
        assert cuda is not None
        device = recorder.info.get("device")
        device = recorder.info.get("local_rank", 0) if device is None else device
        device = min(int(device), cuda.device_count() - 1)
        box = recorder.box
        box.ints[Cell.GPU_PROCESS_MEMORY] = cuda.memory_reserved(device)
        if device != self._device and not self._open(recorder, cuda, device):
            self._missing = True
            return
        nvml, handle = self._nvml, self._handle
        try:
            box.ints[Cell.GPU_MEMORY] = nvml.nvmlDeviceGetMemoryInfo(handle).used
            box.ints[Cell.GPU_UTILISATION] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            box.floats[Real.GPU_POWER] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        except nvml.NVMLError as error:
            recorder.note(nvml=f"{error}")
            self._missing = True

    def _open(self, recorder: Recorder, cuda: Any, device: int) -> bool:
        properties = cuda.get_device_properties(device)
        known = {
            "index": device,
            "name": properties.name,
            "uuid": str(getattr(properties, "uuid", "")),
            "memory_total": properties.total_memory,
            "power_limit": 0.0,
        }
        try:
            import pynvml  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            recorder.update(gpu=known)
            recorder.note(nvml="nvidia-ml-py is not installed: no utilisation and power")
            return False
        try:
            pynvml.nvmlInit()
            # By its UUID: torch counts visible devices only, NVML counts all.
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{known['uuid']}".encode())
            known["index"] = pynvml.nvmlDeviceGetIndex(handle)
            known["power_limit"] = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        except pynvml.NVMLError as error:
            recorder.update(gpu=known)
            recorder.note(nvml=f"{error}")
            return False
        self._nvml, self._handle, self._device = pynvml, handle, device
        recorder.update(gpu=known)
        return True

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

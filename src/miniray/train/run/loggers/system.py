"""CPU, memory and GPUs of the driver's machine, as metrics."""

from __future__ import annotations

import time
from typing import Any

from miniray.limits import memory_available, memory_total

#: Seconds between two samples. Records that come sooner have no system metrics.
_INTERVAL_S = 1.0


class SystemMetrics:
    """Samples the machine when a record is logged. Runs in the driver, never in a rank."""

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._nvml, self._gpus = _open_gpus()
        psutil.cpu_percent()  # the first call only starts the measurement
        self._next = 0.0

    def sample(self) -> dict[str, float]:
        """Return the metrics by name, or {} if the last sample is less than a second old."""
        if time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + _INTERVAL_S
        total = memory_total()
        used = total - min(memory_available(), total)
        found = {
            "system/cpu_percent": float(self._psutil.cpu_percent()),
            "system/memory_percent": 100 * used / total,
            "system/memory_gb": used / 1e9,
        }
        for index, gpu in enumerate(self._gpus):
            found |= self._sample_gpu(f"system/gpu{index}", gpu)
        return found

    def _sample_gpu(self, prefix: str, gpu: Any) -> dict[str, float]:
        try:
            return {
                f"{prefix}_percent": float(self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
                f"{prefix}_memory_gb": self._nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9,
            }
        except self._nvml.NVMLError:  # such as NotSupported on a MIG slice
            return {}


def _open_gpus() -> tuple[Any, list[Any]]:
    """Return NVML and its devices; no devices if there is no GPU or no ``nvidia-ml-py``."""
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    except pynvml.NVMLError:  # no driver
        return None, []

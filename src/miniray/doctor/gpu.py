"""NVML's figures of the rank's GPU, where the package ``nvidia-ml-py`` and a GPU are there.

Nothing is initialised on the GPU and torch is not imported: until the rank itself uses CUDA there
is nothing to measure.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from miniray.doctor.layout import Cell, Real

if TYPE_CHECKING:
    from miniray.doctor.recorder import Recorder


class GpuMeter:
    """Measures the GPU the rank's tensors are on, once CUDA is in use."""

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

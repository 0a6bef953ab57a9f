"""Clocks, power and temperature through the driver's management library, in microseconds rather than a process each."""

from __future__ import annotations

import ctypes
import functools

_SUCCESS, _SM_CLOCK, _MEMORY_CLOCK, _CORE = 0, 1, 2, 0


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == _SUCCESS else None


def _device(uuid: str) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The library, and its handle of the GPU with this UUID ("GPU-..."); None where there is none."""
    library = _library()
    device = ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != _SUCCESS:
        return None
    return library, device


def energy(uuid: str) -> float | None:
    """Joules that the GPU with this UUID has used since the driver was loaded; None where that cannot be read."""
    found = _device(uuid)
    millijoules = ctypes.c_ulonglong()
    if found is None or found[0].nvmlDeviceGetTotalEnergyConsumption(found[1], ctypes.byref(millijoules)) != _SUCCESS:
        return None
    return millijoules.value * 1e-3


def state(uuid: str) -> dict[str, float]:
    """State of the GPU with this UUID ("GPU-..."): MHz, watts and degrees Celsius; what cannot be read is absent."""
    place = _device(uuid)
    if place is None:
        return {}
    library, device = place
    found = {}
    for name, function, arguments, scale in (
        ("sm_clock_mhz", library.nvmlDeviceGetClockInfo, (_SM_CLOCK,), 1.0),
        ("memory_clock_mhz", library.nvmlDeviceGetClockInfo, (_MEMORY_CLOCK,), 1.0),
        ("power_w", library.nvmlDeviceGetPowerUsage, (), 1e-3),
        ("temperature_c", library.nvmlDeviceGetTemperature, (_CORE,), 1.0),
    ):
        value = ctypes.c_uint()
        if function(device, *arguments, ctypes.byref(value)) == _SUCCESS:
            found[name] = value.value * scale
    return found

"""Ask the GPU driver about its memory without CUDA, so that processes that never load torch may ask."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

NVML = "libnvidia-ml.so.1"  # part of the driver


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of one GPU in bytes."""

    total: int
    free: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_memory(index: int) -> GpuMemory | None:
    """Return the memory of the GPU with CUDA's number `index`; None if the driver does not report it."""
    name = _visible_name(index, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if name is None:
        return None
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        if name.isdecimal():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if failed or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return GpuMemory(memory.total, memory.free)
    finally:
        nvml.nvmlShutdown()


def _visible_name(index: int, visible: str | None) -> str | None:
    """Return the driver's name of a GPU, a number or a UUID; None if it is not visible. CUDA's numbers are normally the driver's."""
    if visible is None:
        return str(index)
    names = [name.strip() for name in visible.split(",")]
    return names[index] or None if index < len(names) else None

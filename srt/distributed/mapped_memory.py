"""Memory of one GPU that other processes of the host map, to write there from their own GPUs."""

from __future__ import annotations

import ctypes
from typing import Any, Final, Protocol

import torch

from srt.kernels.build.cuda_source import checked, cuda

HANDLE_BYTES: Final = 64
LOCATION_BYTES: Final = 16
"""Of what CUDA calls a bus id, which is the same in all processes where device numbers need not be."""


class MappedMemory(Protocol):
    """What is asked of CUDA, for one device. RuntimeError where it cannot be done."""

    @property
    def location(self) -> bytes:
        """Of the device: LOCATION_BYTES that other processes understand."""

    def reaches(self, location: bytes) -> bool:
        """Whether programs of this device can write to memory of that one."""

    def take(self, num_bytes: int, value: int) -> int:
        """The address of new memory, filled with a number of 32 bits: of nothing else, as who maps it gets whole blocks."""

    def free(self, address: int) -> None:
        """Nobody may map it any more."""

    def handle_of(self, address: int) -> bytes:
        """HANDLE_BYTES by which other processes of the host can map the memory that begins there."""

    def map(self, handle: bytes) -> int:
        """The address here of another process's memory."""

    def unmap(self, address: int) -> None:
        """Once the device has done what was launched."""

    def write(self, address: int, data: bytes) -> None: ...

    def read(self, address: int, num_bytes: int) -> bytes: ...


class CudaMemory:
    """Of the driver, and not PyTorch's, whose memory is parts of larger blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # PyTorch makes its context when it is first needed
        self._driver: Any = cuda()[0]

    @property
    def location(self) -> bytes:
        said: bytes = self._call("cuDeviceGetPCIBusId", LOCATION_BYTES, self._number())
        return said.rstrip(b"\0").ljust(LOCATION_BYTES, b"\0")

    def reaches(self, location: bytes) -> bool:
        other = self._call("cuDeviceGetByPCIBusId", location.rstrip(b"\0"))
        return bool(self._call("cuDeviceCanAccessPeer", self._number(), other))

    def take(self, num_bytes: int, value: int) -> int:
        address = int(self._call("cuMemAlloc", num_bytes))
        self._call("cuMemsetD32", address, value, num_bytes // 4)
        torch.cuda.synchronize(self._device)
        return address

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def handle_of(self, address: int) -> bytes:
        handle = self._call("cuIpcGetMemHandle", address)
        return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)

    def map(self, handle: bytes) -> int:
        copy = self._driver.CUipcMemHandle()
        ctypes.memmove(int(copy.getPtr()), handle, HANDLE_BYTES)
        flags = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        return int(self._call("cuIpcOpenMemHandle", copy, flags))

    def unmap(self, address: int) -> None:
        torch.cuda.synchronize(self._device)
        self._call("cuIpcCloseMemHandle", address)

    def write(self, address: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._call("cuMemcpyHtoD", address, ctypes.addressof(buffer), len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(num_bytes)
        self._call("cuMemcpyDtoH", ctypes.addressof(buffer), address, num_bytes)
        return buffer.raw

    def _number(self) -> Any:
        with torch.cuda.device(self._device):
            return checked(self._driver.cuDeviceGet(torch.cuda.current_device()))

    def _call(self, name: str, *arguments: Any) -> Any:
        with torch.cuda.device(self._device):
            return checked(getattr(self._driver, name)(*arguments))

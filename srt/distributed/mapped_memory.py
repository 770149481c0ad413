"""GPU memory that other processes of the host map, so that their GPUs can write to it."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final, Protocol

import torch

from srt.kernels.build.cuda_source import checked, cuda

HANDLE_BYTES: Final = 64
LOCATION_BYTES: Final = 16
"""Length of CUDA's PCI bus id, which is the same in all processes, unlike device numbers."""

BLOCK_BYTES: Final = 2 << 20
"""CUDA's unit of mapping: memory of whole blocks shares none with other memory."""


class MappedMemory(Protocol):
    """The CUDA operations needed on one device. Each raises RuntimeError if CUDA refuses."""

    @property
    def location(self) -> bytes:
        """Identity of the device: LOCATION_BYTES that mean the same in other processes."""

    def reaches(self, location: bytes) -> bool:
        """Return whether kernels of this device can write to the memory of that one."""

    def allocate(self, num_bytes: int, value: int) -> int:
        """Allocate memory filled with a 32-bit value and return its address. It must be a block of its own: mapping shares whole blocks."""

    def free(self, address: int) -> None:
        """Free the memory; no process may still map it."""

    def handle_of(self, address: int) -> bytes:
        """Return HANDLE_BYTES with which other processes of the host can map the memory that starts at `address`."""

    def map(self, handle: bytes) -> int:
        """Map another process' memory and return its address here."""

    def unmap(self, address: int) -> None:
        """Unmap the memory once the device has finished all launched work."""

    def register(self, address: int, num_bytes: int) -> int:
        """Let the device access this memory of the host from now on, and return its address there. Both are whole pages."""

    def write(self, address: int, data: bytes) -> None:
        """Write the data. When this returns, other processes read it."""

    def read(self, address: int, num_bytes: int) -> bytes: ...


class CudaMemory:
    """Memory from the CUDA driver. PyTorch's allocator does not serve, because it hands out parts of larger blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # makes PyTorch create its context, which it does at first use
        self._driver: Any = cuda()[0]

    @property
    def location(self) -> bytes:
        said: bytes = self._call("cuDeviceGetPCIBusId", LOCATION_BYTES, self._number())
        return said.rstrip(b"\0").ljust(LOCATION_BYTES, b"\0")

    def reaches(self, location: bytes) -> bool:
        other = self._call("cuDeviceGetByPCIBusId", location.rstrip(b"\0"))
        return bool(self._call("cuDeviceCanAccessPeer", self._number(), other))

    def allocate(self, num_bytes: int, value: int) -> int:
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

    def register(self, address: int, num_bytes: int) -> int:
        flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE | self._driver.CU_MEMHOSTREGISTER_DEVICEMAP
        self._call("cuMemHostRegister", address, num_bytes, flags)
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def write(self, address: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._call("cuMemcpyHtoD", address, ctypes.addressof(buffer), len(data))
        torch.cuda.synchronize(self._device)  # a short copy returns before it has reached the device

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


def view_of(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor at this address, in memory from `allocate`. The memory must outlive the tensor."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, math.prod(shape) * dtype.itemsize)
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, strides)

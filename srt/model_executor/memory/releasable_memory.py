"""Parts of a GPU's memory that go back to the device and come again at the same addresses.

PyTorch's allocator takes the segments of such a part from CUDA's virtual memory management. Graphs and tables of addresses remain valid,
because the addresses stay reserved while there is no memory behind them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from itertools import accumulate
from typing import Any, Final, Protocol

import torch

from srt.kernels.build.cuda_source import checked, cuda
from srt.protocol.engine_work import MEMORY_TAGS
from srt.utils.errors import StartError
from srt.utils.host import usable_cores

COPY_BYTES: Final = 1 << 30
"""Copied between two reports of progress."""
POPULATE_BYTES: Final = 64 << 20
MOST_THREADS: Final = 8
MADV_POPULATE_WRITE: Final = 23
ALLOCATE: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
FREE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
Report = Callable[[], None]


class VirtualMemory(Protocol):
    """The CUDA operations needed on one device. Each raises RuntimeError if CUDA refuses."""

    @property
    def block_bytes(self) -> int:
        """The unit in which memory is reserved and mapped."""

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses and return the first one."""

    def free(self, address: int, num_bytes: int) -> None:
        """Give the addresses back, behind which there is no memory any more."""

    def map(self, address: int, num_bytes: int) -> None:
        """Put memory behind reserved addresses. RuntimeError, with nothing changed, if the device has too little."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Give the memory behind these addresses back to the device. No work that uses it may be left."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin memory of the host, so that copies are fast."""

    def unpin(self, address: int) -> None: ...

    def copy_to_host(self, host: int, address: int, num_bytes: int) -> None: ...

    def copy_from_host(self, address: int, host: int, num_bytes: int) -> None: ...

    def clear(self, address: int, num_bytes: int) -> None:
        """Fill the memory with zeros."""

    def synchronize(self) -> None:
        """Wait until all work is done, copies included."""


class CudaVirtualMemory:
    """The CUDA driver's virtual memory management."""

    def __init__(self, device: torch.device) -> None:
        """RuntimeError if the device does not have it."""
        torch.cuda.synchronize(device)  # makes PyTorch create its context, which it does at first use
        self._device = device
        self._driver: Any = cuda()[0]
        driver, kind = self._driver, self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type, self._kind.location.id = kind, device.index or 0
        self._access = driver.CUmemAccessDesc()
        self._access.location.type, self._access.location.id = kind, device.index or 0
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        unit = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._block_bytes = int(checked(driver.cuMemGetAllocationGranularity(self._kind, unit)))

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def reserve(self, num_bytes: int) -> int:
        return int(checked(self._driver.cuMemAddressReserve(num_bytes, 0, 0, 0)))

    def free(self, address: int, num_bytes: int) -> None:
        checked(self._driver.cuMemAddressFree(address, num_bytes))

    def map(self, address: int, num_bytes: int) -> None:
        driver = self._driver
        memory = checked(driver.cuMemCreate(num_bytes, self._kind, 0))
        try:
            checked(driver.cuMemMap(address, num_bytes, 0, memory, 0))
        finally:
            checked(driver.cuMemRelease(memory))  # a mapping keeps the memory
        try:
            checked(driver.cuMemSetAccess(address, num_bytes, [self._access], 1))
        except RuntimeError:
            self.unmap(address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        checked(self._driver.cuMemUnmap(address, num_bytes))

    def pin(self, address: int, num_bytes: int) -> None:
        checked(self._driver.cuMemHostRegister(address, num_bytes, 0))

    def unpin(self, address: int) -> None:
        checked(self._driver.cuMemHostUnregister(address))

    def copy_to_host(self, host: int, address: int, num_bytes: int) -> None:
        checked(self._driver.cuMemcpyDtoHAsync(host, address, num_bytes, 0))

    def copy_from_host(self, address: int, host: int, num_bytes: int) -> None:
        checked(self._driver.cuMemcpyHtoDAsync(address, host, num_bytes, 0))

    def clear(self, address: int, num_bytes: int) -> None:
        checked(self._driver.cuMemsetD8Async(address, 0, num_bytes, 0))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class HostCopy:
    """A copy of a part's memory on the host, pinned if CUDA can."""

    def __init__(self, memory: VirtualMemory, num_bytes: int) -> None:
        """OSError or RuntimeError if there is too little memory."""
        self._memory = memory
        self._pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # large pages are pinned faster
            with suppress(OSError):
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.c_char.from_buffer(self._pages)
        self.address = ctypes.addressof(start)
        del start  # the pages could not be given back while it exists
        _populate(self.address, num_bytes)
        self._is_pinned = False
        with suppress(RuntimeError):  # unpinned memory is copied too, only slower
            memory.pin(self.address, num_bytes)
            self._is_pinned = True

    def close(self) -> None:
        """Give the memory back to the host."""
        if self._is_pinned:
            self._memory.unpin(self.address)
        self._pages.close()


def _populate(address: int, num_bytes: int) -> None:
    """Let the kernel provide the pages of this memory, in threads: pinning them would do so in one. Kernels before 5.14 cannot."""
    libc = ctypes.CDLL(None)

    def provide(start: int) -> None:
        size = min(POPULATE_BYTES, num_bytes - start)
        libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores())) as threads:
        list(threads.map(provide, range(0, num_bytes, POPULATE_BYTES)))


class ReleasablePart:
    """One part of a worker's memory, such as the weights. There is memory behind all of its segments, or behind none."""

    def __init__(self, memory: VirtualMemory, *, keeps_content: bool) -> None:
        """A part that does not keep its content is zero when it comes back."""
        self._memory = memory
        self._keeps_content = keeps_content
        self._segments: dict[int, int] = {}  # first address -> bytes
        self._copy: HostCopy | None = None
        self._places: dict[int, int] = {}  # first address -> where the copy of this segment begins
        self.is_released = False

    @property
    def num_bytes(self) -> int:
        """The bytes of all segments, whether there is memory behind them or not."""
        return sum(self._segments.values())

    @property
    def num_kept_bytes(self) -> int:
        """The bytes that a copy on the host takes."""
        return self.num_bytes if self._keeps_content else 0

    @property
    def segments(self) -> dict[int, int]:
        """The bytes of each segment by its first address."""
        return dict(self._segments)

    def allocate(self, num_bytes: int) -> int:
        """Add a segment of at least this size and return its address. RuntimeError if the device has too little memory."""
        assert not self.is_released, "memory is allocated in a part that is released"
        memory = self._memory
        size = -(-num_bytes // memory.block_bytes) * memory.block_bytes
        address = memory.reserve(size)
        try:
            memory.map(address, size)
        except RuntimeError:
            memory.free(address, size)
            raise
        self._segments[address] = size
        return address

    def free(self, address: int) -> None:
        """Remove a segment."""
        size = self._segments.pop(address)
        if not self.is_released:
            self._memory.synchronize()
            self._memory.unmap(address, size)
        self._memory.free(address, size)

    def save(self, report: Report) -> None:
        """Copy the content to the host, if the part keeps it. OSError or RuntimeError, with nothing changed, if that fails."""
        if not self._keeps_content or not self._segments:
            return
        assert self._copy is None, "the content is saved already"
        copy = HostCopy(self._memory, self.num_bytes)
        self._places = dict(
            zip(self._segments, accumulate(self._segments.values(), initial=copy.address), strict=False)
        )
        try:
            self._memory.synchronize()  # the copies wait for no other stream
            for address, host, size in self._pieces():
                self._memory.copy_to_host(host, address, size)
                self._memory.synchronize()
                report()
        except BaseException:
            copy.close()
            raise
        self._copy = copy

    def forget_copy(self) -> None:
        """Give the copy on the host back."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def unmap(self) -> int:
        """Give the memory back to the device and return its bytes. What is to be kept was saved before."""
        assert not self.is_released, "the part is released already"
        self._memory.synchronize()
        for address, size in self._segments.items():
            self._memory.unmap(address, size)
        self.is_released = True
        return self.num_bytes

    def map(self) -> None:
        """Take memory for all segments again, of undefined content. RuntimeError, with nothing changed, if the device has too little."""
        assert self.is_released, "the part is not released"
        mapped: list[int] = []
        try:
            for address, size in self._segments.items():
                self._memory.map(address, size)
                mapped.append(address)
        except RuntimeError:
            for address in mapped:
                self._memory.unmap(address, self._segments[address])
            raise
        self.is_released = False

    def restore(self, report: Report) -> None:
        """Bring the content back, and give the copy on the host back; or fill the memory with zeros."""
        if self._copy is None:
            for address, size in self._segments.items():
                self._memory.clear(address, size)
            self._memory.synchronize()
            return
        for address, host, size in self._pieces():
            self._memory.copy_from_host(address, host, size)
            self._memory.synchronize()
            report()
        self.forget_copy()

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield pieces of all segments: address, place in the copy, and bytes."""
        for address, size in self._segments.items():
            for start in range(0, size, COPY_BYTES):
                yield address + start, self._places[address] + start, min(COPY_BYTES, size - start)


def releasable_parts(device: torch.device) -> dict[str, ReleasablePart]:
    """Return the parts of a GPU's memory that can be released, by tag; none on a CPU. StartError if the GPU cannot do it."""
    if device.type != "cuda":
        return {}
    try:
        memory = CudaVirtualMemory(device)
    except RuntimeError as error:
        raise StartError(
            f"--enable-memory-saver needs virtual memory management, which {device} does not have ({error}): leave it out."
        ) from error
    return {tag: ReleasablePart(memory, keeps_content=tag != "kv_cache") for tag in MEMORY_TAGS}


class TorchPool:
    """Lets PyTorch take memory from a part. Lives as long as the process: the memory that it gave may be used until then."""

    def __init__(self, part: ReleasablePart) -> None:
        def allocate(num_bytes: int, device: int, stream: int | None) -> int:
            try:
                return part.allocate(num_bytes)
            except RuntimeError:
                return 0  # PyTorch frees what it does not use and tries again, then says that memory is short

        def free(address: int, num_bytes: int, device: int, stream: int | None) -> None:
            part.free(address)

        functions = ALLOCATE(allocate), FREE(free)
        first, second = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        _unlock_allocator()
        self._allocator = torch._C._cuda_customAllocator(first, second)
        for kept in (*functions, self._allocator):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let what this thread allocates inside the block be memory of the part."""
        pool = torch.cuda.MemPool(self._allocator)
        with torch.cuda.use_mem_pool(pool):
            yield
        del pool  # segments that nothing uses any more are freed

    def handle(self) -> tuple[int, int]:
        """Return a handle with which graphs take memory of the part when they are captured."""
        pool = torch.cuda.MemPool(self._allocator)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        return pool.id


@cache
def _unlock_allocator() -> None:
    """Let PyTorch's allocator hold no lock while it takes memory.

    It would wait for the GIL then, while a thread that has the GIL and frees a tensor would wait for the lock.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    setting = ",".join(filter(None, (given, "release_lock_on_cudamalloc:True")))
    apply = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (apply or torch.cuda.memory._set_allocator_settings)(setting)

"""Parts of a device's memory that are released and come back, on a device that only counts."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from srt.model_executor.memory import memory_loan
from srt.model_executor.memory.memory_loan import DeviceMemoryLoan
from srt.model_executor.memory.releasable_memory import CudaVirtualMemory, HostCopy, ReleasablePart
from srt.utils.errors import UpdateError

BLOCK = 4096


def idle() -> None:
    """Report progress to nobody."""


class CountingMemory:
    """A device with `num_blocks` blocks. Memory that is mapped holds what chance has put there."""

    block_bytes = BLOCK

    def __init__(self, num_blocks: int) -> None:
        self.num_free = num_blocks
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, bytearray] = {}
        self.pinned: set[int] = set()
        self.refuses_pins = False
        self._random = random.Random(0)
        self._next = BLOCK

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes % BLOCK == 0
        address, self._next = self._next, self._next + num_bytes + BLOCK
        self.reserved[address] = num_bytes
        return address

    def free(self, address: int, num_bytes: int) -> None:
        assert address not in self.mapped, "addresses are given back while there is memory behind them"
        assert self.reserved.pop(address) == num_bytes

    def map(self, address: int, num_bytes: int) -> None:
        assert self.reserved[address] == num_bytes and address not in self.mapped
        if num_bytes // BLOCK > self.num_free:
            raise RuntimeError("CUDA says CUDA_ERROR_OUT_OF_MEMORY")
        self.num_free -= num_bytes // BLOCK
        self.mapped[address] = bytearray(self._random.randbytes(num_bytes))

    def unmap(self, address: int, num_bytes: int) -> None:
        assert len(self.mapped.pop(address)) == num_bytes
        self.num_free += num_bytes // BLOCK

    def pin(self, address: int, num_bytes: int) -> None:
        if self.refuses_pins:
            raise RuntimeError("CUDA says CUDA_ERROR_NOT_SUPPORTED")
        self.pinned.add(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)

    def copy_to_host(self, host: int, address: int, num_bytes: int) -> None:
        first, memory = self._segment(address)
        ctypes.memmove(host, bytes(memory[address - first : address - first + num_bytes]), num_bytes)

    def copy_from_host(self, address: int, host: int, num_bytes: int) -> None:
        first, memory = self._segment(address)
        memory[address - first : address - first + num_bytes] = ctypes.string_at(host, num_bytes)

    def clear(self, address: int, num_bytes: int) -> None:
        self.mapped[address][:num_bytes] = bytes(num_bytes)

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def _segment(self, address: int) -> tuple[int, bytearray]:
        return next((first, one) for first, one in self.mapped.items() if first <= address < first + len(one))


def filled_part(memory: CountingMemory, *, keeps_content: bool = True) -> ReleasablePart:
    part = ReleasablePart(memory, keeps_content=keeps_content)
    for num_bytes in (1, BLOCK, 3 * BLOCK - 1):
        part.allocate(num_bytes)
    return part


def test_a_part_comes_back_with_its_content_at_its_addresses() -> None:
    memory = CountingMemory(8)
    part = filled_part(memory)
    assert part.num_bytes == part.num_kept_bytes == 5 * BLOCK and memory.num_free == 3
    content, segments = {first: bytes(one) for first, one in memory.mapped.items()}, part.segments
    for _ in range(3):
        part.save(idle)
        assert part.unmap() == 5 * BLOCK
        assert part.is_released and memory.num_free == 8 and not memory.mapped
        part.map()
        part.restore(idle)
        assert {first: bytes(one) for first, one in memory.mapped.items()} == content
        assert part.segments == segments == memory.reserved and not memory.pinned


def test_large_segments_are_copied_in_pieces_that_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srt.model_executor.memory.releasable_memory.COPY_BYTES", BLOCK)
    memory, reports = CountingMemory(8), list[str]()
    part = filled_part(memory)
    content = {first: bytes(one) for first, one in memory.mapped.items()}
    part.save(lambda: reports.append("saved"))
    part.unmap()
    part.map()
    part.restore(lambda: reports.append("restored"))
    assert reports == ["saved"] * 5 + ["restored"] * 5
    assert {first: bytes(one) for first, one in memory.mapped.items()} == content


def test_what_keeps_no_content_is_zero_afterwards() -> None:
    memory = CountingMemory(8)
    part = filled_part(memory, keeps_content=False)
    part.save(idle)
    assert not memory.pinned and part.num_kept_bytes == 0
    part.unmap()
    part.map()
    part.restore(idle)
    assert all(not any(one) for one in memory.mapped.values())


def test_a_part_comes_back_whole_or_not_at_all() -> None:
    memory = CountingMemory(8)
    part = filled_part(memory)
    content = {first: bytes(one) for first, one in memory.mapped.items()}
    part.save(idle)
    part.unmap()
    for num_left in range(5):
        memory.num_free = num_left
        with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
            part.map()
        assert part.is_released and not memory.mapped and memory.num_free == num_left
    memory.num_free = 5
    part.map()
    part.restore(idle)
    assert {first: bytes(one) for first, one in memory.mapped.items()} == content


def test_a_segment_that_does_not_fit_leaves_nothing_reserved() -> None:
    memory = CountingMemory(1)
    part = ReleasablePart(memory, keeps_content=True)
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        part.allocate(2 * BLOCK)
    assert not memory.reserved and part.num_bytes == 0


def test_a_copy_that_fails_leaves_the_part_as_it_was() -> None:
    memory = CountingMemory(8)
    part = filled_part(memory)

    def fail() -> None:
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        part.save(fail)
    assert not memory.pinned and not part.is_released
    part.save(idle)
    part.forget_copy()
    assert not memory.pinned
    part.save(idle)


def test_freed_segments_go_with_and_without_memory_behind_them() -> None:
    memory = CountingMemory(8)
    part = filled_part(memory)
    first, *others = part.segments
    part.free(first)
    assert memory.num_free == 4
    part.unmap()
    for address in others:
        part.free(address)
    assert memory.num_free == 8 and not memory.reserved


def test_segments_freed_meanwhile_move_no_content_of_others() -> None:
    memory = CountingMemory(8)
    part = filled_part(memory)
    content = {first: bytes(one) for first, one in memory.mapped.items()}
    part.save(idle)
    part.unmap()
    first, *others = part.segments
    part.free(first)  # as PyTorch's allocator does with segments that nothing uses, when its cache is emptied
    part.map()
    part.restore(idle)
    assert {first: bytes(one) for first, one in memory.mapped.items()} == {one: content[one] for one in others}


def test_content_is_copied_when_earlier_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies' stream does not wait for streams that PyTorch creates."""
    memory, pending = CountingMemory(8), [7]
    part = filled_part(memory)
    first = next(iter(part.segments))
    memory.mapped[first][0] = 0

    def finish() -> None:
        if pending:
            memory.mapped[first][0] = pending.pop()

    monkeypatch.setattr(memory, "synchronize", finish)
    part.save(idle)
    part.unmap()
    part.map()
    part.restore(idle)
    assert memory.mapped[first][0] == 7


def test_memory_that_cannot_be_pinned_is_copied_all_the_same() -> None:
    memory = CountingMemory(8)
    memory.refuses_pins = True
    part = filled_part(memory)
    content = {first: bytes(one) for first, one in memory.mapped.items()}
    part.save(idle)
    part.unmap()
    part.map()
    part.restore(idle)
    assert {first: bytes(one) for first, one in memory.mapped.items()} == content


def test_a_copy_on_the_host_is_given_back() -> None:
    memory = CountingMemory(0)
    copy = HostCopy(memory, 1 << 20)
    assert memory.pinned == {copy.address}
    ctypes.memset(copy.address, 7, 1 << 20)
    copy.close()
    assert not memory.pinned
    maps = open("/proc/self/maps").read()  # noqa: SIM115
    assert f"{copy.address:x}-" not in maps


def test_memory_that_cannot_be_accessed_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    done, refusal = (0, 1), type("Refusal", (int,), {"name": "CUDA_ERROR_OUT_OF_MEMORY"})(2)
    driver = MagicMock()
    driver.cuMemGetAllocationGranularity.return_value = driver.cuMemCreate.return_value = done
    for call in (driver.cuMemMap, driver.cuMemRelease, driver.cuMemUnmap):
        call.return_value = (0,)
    driver.cuMemSetAccess.return_value = (refusal,)
    monkeypatch.setattr("srt.model_executor.memory.releasable_memory.cuda", lambda: (driver,))
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        CudaVirtualMemory(torch.device("cuda", 0)).map(BLOCK, 2 * BLOCK)
    driver.cuMemUnmap.assert_called_once_with(BLOCK, 2 * BLOCK)
    driver.cuMemRelease.assert_called_once()


def test_the_copies_of_all_ranks_must_fit_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CountingMemory(8)
    part = filled_part(memory)
    loaded = SimpleNamespace(
        tp=SimpleNamespace(size=2, min_int=lambda value: value), memory=SimpleNamespace(parts={"weights": part})
    )
    loan = DeviceMemoryLoan(SimpleNamespace(loaded=loaded))  # type: ignore[arg-type]  # what it needs of a runner
    for available in (5 * BLOCK, 10 * BLOCK - 1):
        monkeypatch.setattr(memory_loan, "available_memory_bytes", lambda left=available: left)
        with pytest.raises(UpdateError, match="a copy of weights takes"):
            loan.release(["weights"], None, idle)
        assert not part.is_released and not memory.pinned
    monkeypatch.setattr(memory_loan, "available_memory_bytes", lambda: 10 * BLOCK)
    assert loan.release(["weights"], None, idle) == 5 * BLOCK

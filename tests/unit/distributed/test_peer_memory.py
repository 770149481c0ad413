"""How ranks agree on memory that they write for each other, without a GPU: what CUDA is asked for is a dictionary here."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from srt.distributed import row_division
from srt.distributed.errors import CollectiveError
from srt.distributed.mapped_memory import HANDLE_BYTES, LOCATION_BYTES
from srt.distributed.parallel_state import TensorParallel
from srt.distributed.peer_memory import Boxes, PeerMemory, divided_place, large_place, medium_place
from srt.distributed.peer_setup import open_peer_memory
from srt.kernels.build import hopper
from srt.kernels.collectives import medium_sum
from srt.kernels.collectives.large_sum import boxed_bytes
from tests.support.ranks import run_ranks


class Host:
    """The GPUs' memory: what lies at an address, and what of it is mapped."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks: dict[int, bytearray] = {}
        self.num_mapped = 0


class FakeMemory:
    """One rank's GPU."""

    def __init__(self, host: Host, rank: int) -> None:
        self._host = host
        self._rank = rank
        self._aliases: dict[int, int] = {}

    @property
    def location(self) -> bytes:
        return bytes([1 + self._rank]).ljust(LOCATION_BYTES, b"\0")

    def reaches(self, location: bytes) -> bool:
        return location != self.location

    def allocate(self, num_bytes: int, value: int) -> int:
        address = (1 + self._rank) << 40
        with self._host.lock:
            self._host.blocks[address] = bytearray(value.to_bytes(4, "little") * (num_bytes // 4))
        return address

    def free(self, address: int) -> None:
        with self._host.lock:
            assert not self._host.num_mapped, "somebody may still write there"
            del self._host.blocks[address]

    def handle_of(self, address: int) -> bytes:
        return address.to_bytes(HANDLE_BYTES, "little")

    def register(self, address: int, num_bytes: int) -> int:
        raise AssertionError("ranks share no memory of the host")

    def map(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        alias = address | (1 + self._rank) << 32
        with self._host.lock:
            self._host.num_mapped += 1
        self._aliases[alias] = address
        return alias

    def unmap(self, address: int) -> None:
        del self._aliases[address]
        with self._host.lock:
            self._host.num_mapped -= 1

    def write(self, address: int, data: bytes) -> None:
        block, place = self._find(address)
        block[place : place + len(data)] = data

    def read(self, address: int, num_bytes: int) -> bytes:
        block, place = self._find(address)
        return bytes(block[place : place + num_bytes])

    def _find(self, address: int) -> tuple[bytearray, int]:
        for alias, real in self._aliases.items():
            if alias <= address < alias + (1 << 32):
                return self._host.blocks[real], address - alias
        real = address & ~((1 << 32) - 1)
        return self._host.blocks[real], address - real


class Unreachable(FakeMemory):
    def reaches(self, location: bytes) -> bool:
        return False


class Unmappable(FakeMemory):
    def map(self, handle: bytes) -> int:
        raise RuntimeError("CUDA says CUDA_ERROR_INVALID_CONTEXT")


class Elsewhere(FakeMemory):
    """Where a handle leads to memory that is not the other's."""

    def read(self, address: int, num_bytes: int) -> bytes:
        return bytes(num_bytes)


class Full(FakeMemory):
    def allocate(self, num_bytes: int, value: int) -> int:
        raise RuntimeError("CUDA says CUDA_ERROR_OUT_OF_MEMORY")


def open_on(size: int, folder: Path, host: Host, memory_of: Callable[[int], FakeMemory | None]) -> list[bool]:
    """Which ranks have it, closed again."""

    def work(tp: TensorParallel) -> bool:
        peers = open_peer_memory(tp, lambda: memory_of(tp.rank), timeout_s=1)
        tp.min_int(0)
        if peers is not None:
            assert host.num_mapped == size * (size - 1)
        tp.min_int(0)
        if peers is not None:
            assert peers.lost_peer is None
            peers.close()
            peers.close()
        return peers is not None

    return run_ranks(size, folder, work)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_maps_all_others_and_unmaps_them_in_the_end(size: int, tmp_path: Path) -> None:
    host = Host()
    assert open_on(size, tmp_path, host, lambda rank: FakeMemory(host, rank)) == [True] * size
    assert host.num_mapped == 0
    assert [len(block) for block in host.blocks.values()] == [large_place(size)] * size, "others may map it to the end"


def test_medium_and_large_sums_have_their_boxes_behind_those_of_small_tensors(tmp_path: Path) -> None:
    host, most_bytes = Host(), boxed_bytes(2, 3 << 20)

    def work(tp: TensorParallel) -> tuple[set[int], set[int], bool]:
        memory = FakeMemory(host, tp.rank)
        peers = open_peer_memory(
            tp, lambda: memory, timeout_s=1, most_large_bytes=most_bytes, most_divided_bytes=5 << 20
        )
        assert peers is not None and peers._large is not None and peers._medium is not None
        assert peers._divisions is not None
        divided_at = peers._divisions.address - peers._mail.memories[tp.rank]
        assert divided_at == peers._divisions.peer_address - peers._mail.memories[1 - tp.rank]
        assert divided_at == divided_place(2, most_bytes)
        tp.min_int(0)
        small, medium, large = peers._mail, peers._medium.mail, peers._large.mail
        places = [{mail.memories[rank] - small.memories[rank] for rank in range(tp.size)} for mail in (medium, large)]
        own = small.memories[tp.rank] + medium_place(2)
        is_empty = memory.read(own, medium_sum.memory_bytes(2)) == medium_sum.EMPTY_BYTE * medium_sum.memory_bytes(2)
        is_rest_filled = memory.read(own - 4, 4) == memory.read(small.memories[tp.rank] + large_place(2), 4) == bytes(4)
        tp.min_int(0)
        peers.close()
        return places[0], places[1], is_empty and is_rest_filled and medium.rank == large.rank == tp.rank

    assert run_ranks(2, tmp_path, work) == [({medium_place(2)}, {large_place(2)}, True)] * 2
    sizes = [len(block) for block in host.blocks.values()]
    assert sizes == [divided_place(2, most_bytes) + row_division.memory_bytes(5 << 20)] * 2


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Unreachable, "RuntimeError: its GPU cannot write to the memory of rank 0's"),
        (Unmappable, "RuntimeError: CUDA says CUDA_ERROR_INVALID_CONTEXT"),
        (Elsewhere, "RuntimeError: it finds other memory than that of rank 0"),
        (Full, "RuntimeError: CUDA says CUDA_ERROR_OUT_OF_MEMORY"),
        (None, "RuntimeError: there is no kernel for its GPU"),
    ],
)
def test_where_one_rank_cannot_all_use_nccl_and_one_line_says_why(
    kind: type[FakeMemory] | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host()

    def memory_of(rank: int) -> FakeMemory | None:
        if rank != 2:
            return FakeMemory(host, rank)
        return None if kind is None else kind(host, rank)

    with caplog.at_level(logging.INFO):
        assert open_on(3, tmp_path, host, memory_of) == [False] * 3
    assert caplog.messages == [f"Sums over GPUs go through NCCL: rank 2: {said}"]
    assert host.num_mapped == 0 and not host.blocks, "nothing is left behind"


def test_more_ranks_than_the_kernel_knows_use_nccl(tmp_path: Path) -> None:
    host = Host()
    assert open_on(9, tmp_path, host, lambda rank: FakeMemory(host, rank)) == [False] * 9


def test_peers_add_what_is_small_or_large_in_precompiling_too(tmp_path: Path) -> None:
    class Recorder:
        """Of what is asked."""

        lost_peer = None

        def __init__(self) -> None:
            self.asked: list[str] = []

        def add(self, x: torch.Tensor) -> torch.Tensor | None:
            self.asked.append("add")
            return x + 1 if x.nbytes <= 8 else None

        def add_large(self, x: torch.Tensor) -> torch.Tensor | None:
            self.asked.append("add large")
            return x + 2 if x.nbytes > 16 else None

        def gather(self, x: torch.Tensor) -> torch.Tensor | None:
            self.asked.append("gather")
            return None

        def close(self) -> None:
            self.asked.append("close")

    def work(tp: TensorParallel) -> tuple[list[list[float]], list[str]]:
        recorder = Recorder()
        other = TensorParallel(tp.rank, tp.size, tp._group, tp.device, recorder)  # type: ignore[arg-type]  # which is asked the same
        few, many, most = (
            torch.tensor([1.0, 2.0]),
            torch.tensor([1.0, 2.0, 3.0]),
            torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        )
        sums = [other.all_reduce(few).tolist(), other.all_reduce(many).tolist(), other.all_gather(few).tolist()]
        with other.alone():
            sums += [other.all_reduce(few).tolist(), other.all_reduce(most).tolist()]
        tp.min_int(0)
        other.close()
        other.close()
        return sums, recorder.asked

    asked = ["add", "add", "add large", "gather", "add", "add", "add large", "close"]
    expected = [[2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 2.0, 1.0, 2.0], [2.0, 3.0], [3.0, 4.0, 5.0, 6.0, 7.0]], asked
    assert run_ranks(2, tmp_path, work) == [expected] * 2


def test_who_was_waited_for_in_vain_is_told_as_the_ranks_error(tmp_path: Path) -> None:
    host = Host()

    def work(tp: TensorParallel) -> str:
        peers = open_peer_memory(tp, lambda: FakeMemory(host, tp.rank), timeout_s=2.5)
        assert isinstance(peers, PeerMemory)
        peers._missing[0] = 1 + (1 - tp.rank)  # as the device writes it
        ours = TensorParallel(tp.rank, tp.size, tp._group, tp.device, peers)
        with ours.naming_lost_peer():
            pass
        with pytest.raises(ValueError, match="ours"), tp.naming_lost_peer():
            raise ValueError("ours")
        with pytest.raises(CollectiveError) as raised, ours.naming_lost_peer():
            raise RuntimeError("CUDA error: unspecified launch failure")
        return str(raised.value)

    said = run_ranks(2, tmp_path, work)
    for rank in (0, 1):
        assert said[rank].startswith(f"rank {rank} lost the others: rank {1 - rank} sent nothing for 2.5 s; ")
        assert "--disable-custom-all-reduce" in said[rank]


@pytest.mark.parametrize(
    ("ranks", "shape", "adds", "norms"),
    [
        (2, (1, 4096), "medium_sum", None),
        (2, (2, 4096), "medium_sum", "medium_sum"),
        (2, (512, 4096), "medium_sum", "medium_sum"),
        (2, (513, 4096), "large_sum", "large_sum"),
        (2, (3, 4100), "peer_sum", "peer_sum"),
        (2, (4, 4100), "medium_sum", "peer_sum"),
        (2, (600, 1024), "medium_sum", None),
        (2, (1500, 1024), "medium_sum", "large_sum"),
        (2, (130, 12288), "medium_sum", None),
        (2, (2, 3), None, None),
        (2, (0, 4096), None, None),
        (4, (256, 4096), "medium_sum", "medium_sum"),
        (4, (257, 4096), "large_sum", "large_sum"),
        (8, (64, 4096), "medium_sum", "medium_sum"),
        (8, (65, 4096), None, None),
    ],
)
def test_the_shape_alone_decides_which_kernel_adds_and_which_norms(
    ranks: int, shape: tuple[int, int], adds: str | None, norms: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []

    def is_precompiled(kernel: hopper.Variant, compile_it: object) -> bool:
        launched.append(kernel.name)
        return True

    monkeypatch.setattr(hopper, "is_precompiled", is_precompiled)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    peers = PeerMemory(Boxes(None, 0, ranks, 1, boxed_bytes(ranks, 8 << 20)), torch.device("cpu"), timeout_s=1)
    x = torch.zeros(shape, dtype=torch.bfloat16)
    found = peers.add(x)
    assert (peers.add_large(x) if found is None else found) is not None or adds is None
    assert set(launched) == ({adds} if adds else set())
    launched.clear()
    assert (peers.add_and_norm(x, x, torch.ones(shape[1]).bfloat16(), 1e-6) is None) == (norms is None)
    assert set(launched) == ({norms} if norms else set())

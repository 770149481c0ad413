"""The protocol by which two ranks divide rows, without GPUs: what each stream does is a list here, and streams run in any order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F

from srt.distributed import row_division
from srt.distributed.mapped_memory import view_of
from srt.distributed.row_division import FEWEST_ROWS, RowDivision, RowDivisions, box_bytes, memory_bytes
from srt.kernels.build.arrival import Arrival
from srt.kernels.collectives.divided_sum import MOST_ROW_BYTES
from tests.support.stage_device import HostMemory, numbers_at

COLUMNS: Final = 8
SIZES: Final = FEWEST_ROWS + 3, 2 * FEWEST_ROWS + 3  # rows of steps
ROWS: Final = max(SIZES)
EPS: Final = 1e-5
SUMS: Final = 4  # of a step
SCALE: Final = 1.5
MOST_BYTES: Final = (ROWS + 1) * COLUMNS * 4
REAL_SEND: Final = RowDivisions.send
Work = Callable[[], bool]
"""Does its work once what it waits for is there, and says whether it was."""


@dataclass
class Device:
    """The streams of a rank: each runs its works in order."""

    main: deque[Work] = field(default_factory=deque)
    copies: deque[Work] = field(default_factory=deque)
    num_main: int = 0
    """Works of the main stream that have ended."""
    num_copies: int = 0

    def launch(self, work: Callable[[], object], arrival: Arrival | None = None) -> None:
        def run() -> bool:
            if arrival is not None and numbers_at(arrival.at, 1)[0] != arrival.number:
                return False
            work()
            self.num_main += 1
            return True

        self.main.append(run)

    def copy(self, work: Callable[[], object]) -> None:
        """Copy once all has ended that the main stream has been given."""
        behind = self.num_main + len(self.main)

        def run() -> bool:
            if self.num_main < behind:
                return False
            work()
            self.num_copies += 1
            return True

        self.copies.append(run)

    def await_copies(self) -> None:
        """Let the main stream wait for all copies so far."""
        behind = self.num_copies + len(self.copies)

        def run() -> bool:
            if self.num_copies < behind:
                return False
            self.num_main += 1
            return True

        self.main.append(run)


class Rank:
    """One rank, whose products multiply by a number for each sum."""

    def __init__(self, rank: int, addresses: Sequence[int], device: Device) -> None:
        own, there = addresses[rank], addresses[1 - rank]
        self.divisions = RowDivisions(own, there, MOST_BYTES, rank, 0, 0, torch.device("cpu"))
        self.device = device
        self.rank = rank

    def divide(self, num_rows: int) -> RowDivision:
        division = self.divisions.divide(num_rows, COLUMNS, torch.float32, is_alone=False)
        assert division is not None
        return division

    def step(self, num_rows: int) -> torch.Tensor:
        """Launch a step, and return where its result will be."""
        division, x, hidden = self.divide(num_rows), torch.ones(num_rows, COLUMNS), torch.ones(num_rows, COLUMNS)
        for number in range(SUMS):
            x = self.sum(division, x, hidden, factor(self.rank, number))
        return x

    def sum(self, division: RowDivision, x: torch.Tensor, hidden: torch.Tensor, by: float) -> torch.Tensor:
        place, part = division.begin_sum(), torch.empty(division.own.stop - division.own.start, COLUMNS)
        self.device.launch(lambda: torch.mul(x[division.others], by, out=place))
        division.send_part()
        self.device.launch(lambda: torch.mul(x[division.own], by, out=part))
        normed = division.finish_sum(part, hidden, torch.ones(COLUMNS), EPS)
        product = torch.empty(len(x), COLUMNS)
        self.device.launch(lambda: torch.mul(normed[division.own], SCALE, out=product[division.own]))
        division.await_others()
        self.device.launch(lambda: torch.mul(normed[division.others], SCALE, out=product[division.others]))
        return product


def factor(rank: int, number: int) -> float:
    return 0.5 + rank + number / 4


class Stuck(Exception):
    """Every stream waits."""


class World:
    """Two ranks, and what is launched on which of them."""

    def __init__(self) -> None:
        self._memories = [HostMemory(rank) for rank in range(2)]
        addresses = [memory.allocate(memory_bytes(MOST_BYTES), 0) for memory in self._memories]
        self.ranks = [Rank(rank, addresses, Device()) for rank in range(2)]
        self.device = self.ranks[0].device

    def finish(self, part: Any, sent: Any, arrival: Arrival, hidden: Any, weight: Any, eps: float, normed: Any) -> None:
        def work() -> None:
            hidden.add_(part + sent)
            normed.copy_(F.rms_norm(hidden, weight.shape, weight, eps))

        self.device.launch(work, arrival)

    def wait(self, arrival: Arrival, _: torch.device) -> None:
        self.device.launch(lambda: None, arrival)

    def send(self, divisions: RowDivisions, rows: torch.Tensor, place: int, number_place: int) -> None:
        there = view_of(divisions.peer_address + place, tuple(rows.shape), rows.dtype, rows.device)
        number = divisions.number
        self.device.copy(lambda: there.copy_(rows))
        self.device.copy(lambda: numbers_at(divisions.peer_address + number_place, 1).fill(number))

    def run_steps(self, seed: int) -> list[torch.Tensor]:
        """Launch steps of several sizes on both ranks, and run what was launched: the next work of a stream drawn at random, one after the
        other. Return the results of all steps.
        """
        rng = random.Random(seed)
        sizes = [rng.choice(SIZES) for _ in range(3)]
        results = []
        for rank in self.ranks:
            self.device = rank.device
            results += [rank.step(num_rows) for num_rows in sizes]
        streams = [stream for rank in self.ranks for stream in (rank.device.main, rank.device.copies)]
        late = rng.choice((None, *streams))  # which works only if no other can
        while any(streams):
            rng.shuffle(streams)
            streams.sort(key=lambda stream: stream is late)
            if not any(stream[0]() and [stream.popleft()] for stream in streams if stream):
                raise Stuck
        return results


def expected() -> torch.Tensor:
    """A row of every step's result: all rows are alike."""
    hidden, x = torch.ones(1, COLUMNS), torch.ones(1, COLUMNS)
    for number in range(SUMS):
        hidden = hidden + (x * factor(0, number) + x * factor(1, number))
        x = F.rms_norm(hidden, (COLUMNS,), torch.ones(COLUMNS), EPS) * SCALE
    return x


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(row_division, "finish_rows", lambda *arguments: made.finish(*arguments))
    monkeypatch.setattr(row_division, "await_arrival", lambda *arguments: made.wait(*arguments))
    monkeypatch.setattr(RowDivisions, "send", lambda *arguments: made.send(*arguments))
    monkeypatch.setattr(RowDivisions, "begin_step", lambda _: made.device.await_copies())
    return made


def goes_wrong(world: World) -> bool:
    """Return whether in some of 40 orders a result is not that of one rank, or every stream waits."""
    right = expected()
    try:
        return not all(
            torch.allclose(found, right.expand_as(found)) for seed in range(40) for found in world.run_steps(seed)
        )
    except Stuck:
        return True


def test_whichever_stream_is_late_both_ranks_compute_all_rows(world: World) -> None:
    assert not goes_wrong(world)


def test_norms_that_nobody_awaits_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "wait", lambda *_: world.device.launch(lambda: None))
    assert goes_wrong(world)


def test_a_number_before_its_data_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(divisions: RowDivisions, rows: torch.Tensor, place: int, number_place: int) -> None:
        there = view_of(divisions.peer_address + place, tuple(rows.shape), rows.dtype, rows.device)
        number = divisions.number
        world.device.copy(lambda: numbers_at(divisions.peer_address + number_place, 1).fill(number))
        world.device.copy(lambda: there.copy_(rows))

    monkeypatch.setattr(world, "send", send)
    assert goes_wrong(world)


def test_a_step_that_does_not_await_copies_of_the_last_one_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its halves may be others, so it may write what is still copied."""
    monkeypatch.setattr(RowDivisions, "begin_step", lambda _: None)
    assert goes_wrong(world)


def test_norms_must_be_awaited_before_the_next_sum(world: World) -> None:
    division = world.ranks[0].divide(ROWS)
    part = torch.ones(len(division.begin_sum()), COLUMNS)
    own = torch.ones(division.own.stop - division.own.start, COLUMNS)
    division.send_part()
    division.finish_sum(own, torch.ones(ROWS, COLUMNS), torch.ones(COLUMNS), EPS)
    with pytest.raises(AssertionError, match="may still arrive"):
        division.begin_sum()
    division.late_rows()
    assert division.begin_sum().shape == part.shape


@pytest.mark.parametrize(
    ("num_rows", "halves"), [(2048, (1024, 1024)), (2049, (1280, 769)), (8192, (4096, 4096)), (8300, (4352, 3948))]
)
def test_the_first_rank_has_whole_tiles(num_rows: int, halves: tuple[int, int], world: World) -> None:
    divisions = [RowDivisions(1, 2, 1 << 30, rank, 0, 0, torch.device("cpu")) for rank in range(2)]
    made = [one.divide(num_rows, COLUMNS, torch.bfloat16, is_alone=False) for one in divisions]
    assert made[0] is not None and made[1] is not None
    first, second = slice(0, halves[0]), slice(halves[0], num_rows)
    assert (made[0].own, made[0].others, made[1].own, made[1].others) == (first, second, second, first)


def test_steps_that_are_not_divided(world: World) -> None:
    divisions = world.ranks[0].divisions

    def divides(num_rows: int = ROWS, columns: int = COLUMNS, is_alone: bool = False) -> bool:
        return divisions.divide(num_rows, columns, torch.float32, is_alone) is not None

    assert divides() and not divides(FEWEST_ROWS - 1) and not divides(is_alone=True)
    assert not divides(2 * ROWS), "they have no room"
    assert not divides(FEWEST_ROWS, COLUMNS - 1), "rows are no multiple of 16 bytes"


def test_compiling_ahead_sends_and_counts_nothing_and_may_fail_anywhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    divisions = world.ranks[0].divisions
    with monkeypatch.context() as patch:
        patch.setattr(row_division, "is_precompiling", lambda: True)
        division = divisions.divide(ROWS, COLUMNS, torch.float32, is_alone=True)
        assert division is not None
        division.begin_sum()
        REAL_SEND(divisions, torch.ones(1), 0, 0)
        part = torch.ones(division.own.stop - division.own.start, COLUMNS)
        division.finish_sum(part, torch.ones(ROWS, COLUMNS), torch.ones(COLUMNS), EPS)
        assert divisions.number == 0
    world.ranks[0].divide(ROWS).begin_sum()
    assert divisions.number == 1


def test_a_copy_waits_for_its_source_and_its_number_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[Any, ...]] = []

    class Driver:
        @staticmethod
        def cuMemcpyDtoDAsync(to: int, source: int, num_bytes: int, stream: int) -> tuple[int]:
            done.append(("copy", to, source, num_bytes, stream))
            return (0,)

        @staticmethod
        def cuStreamWriteValue64(stream: int, to: int, value: int, flags: int) -> tuple[int]:
            done.append(("number", to, value, stream))
            return (0,)

    copies = SimpleNamespace(cuda_stream=77, wait_stream=lambda stream: done.append(("wait for", stream)))
    divisions = RowDivisions(1000, 5000, MOST_BYTES, 0, 0, 0, torch.device("cpu"))
    divisions.number = 3
    monkeypatch.setitem(vars(divisions), "_copies", copies)
    monkeypatch.setattr(row_division, "cuda", lambda: (Driver, None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "main")
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    rows = torch.ones(4, COLUMNS)
    divisions.send(rows, 256, 128)
    assert done == [
        ("wait for", "main"),
        ("copy", 5256, rows.data_ptr(), rows.nbytes, 77),
        ("number", 5128, 3, 77),
    ]


@pytest.mark.parametrize("num_rows", [2048, 2049, 2303, 8191])
def test_the_box_has_room_for_the_larger_half_of_the_widest_rows(num_rows: int) -> None:
    larger = -(-num_rows // 2 // 256) * 256
    assert larger * MOST_ROW_BYTES <= box_bytes(num_rows * MOST_ROW_BYTES) < (larger + 512) * MOST_ROW_BYTES

"""Ids on their way from a device to the host: seen when all of them are there, whatever else was launched, recorded or forgotten."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch

from srt.layers.sampler import Draws
from srt.model_executor.step.draw_store import LOOKS, RING, DrawStore, StepIds, store_draws_reference

MAX_ROWS = 6


class LateDevice:
    """Runs a store when it is told to, and then the words arrive one by one."""

    def __init__(self, last: int = 0) -> None:
        """As it is after so many stores, all of them of ids 0."""
        self.error: Exception | None = None
        self.only_records = False
        self._launched: deque[Draws] = deque()
        self._words = torch.zeros((RING, MAX_ROWS), dtype=torch.int64)
        self._last = torch.full((1,), last)
        for back in range(min(last, RING)):
            self._words[(last - back) % RING] = (self._last - back) << 32
        self.store = DrawStore(self._words, self._last, self._launch, self._is_idle)
        self.store._number = last

    def launch(self, *ids: int, values: Sequence[float] | None = None) -> StepIds:
        """A step that draws these."""
        rows, nothing = torch.arange(len(ids)), torch.zeros(len(ids))
        draws = Draws(torch.tensor(ids), nothing if values is None else torch.tensor(values))
        self.store.store(draws, rows, 0 * rows, torch.zeros(MAX_ROWS, 1, dtype=torch.int32))
        return self.store.latest(len(ids))

    def run(self, order: Sequence[int] | None = None) -> Iterator[None]:
        """The oldest store that was launched; the words of its rows arrive in this order, one with each turn."""
        draws = self._launched.popleft()
        words, rows = self._words.clone(), torch.arange(len(draws.ids))
        table = torch.zeros(MAX_ROWS, 1, dtype=torch.int32)
        store_draws_reference(draws.ids, draws.values, rows, 0 * rows, table, words, self._last)
        entry = int(self._last) % RING
        for row in rows.tolist() if order is None else order:
            self._words[entry, row] = words[entry, row]
            yield

    def run_all(self) -> None:
        while self._launched:
            list(self.run())

    def _launch(self, ids: torch.Tensor, values: torch.Tensor, *others: torch.Tensor) -> bool:
        if not self.only_records:
            self._launched.append(Draws(ids, values))
        return not self.only_records

    def _is_idle(self) -> bool:
        if self.error is not None:
            raise self.error
        return not self._launched


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [3, 0, 1, 2], [1, 3, 0, 2]])
def test_a_step_is_ready_when_the_ids_of_all_rows_are_there_in_whatever_order_they_come(
    device: LateDevice, order: list[int]
) -> None:
    step = device.launch(7, 0, 9, (1 << 31) - 1)
    assert not step.is_ready()
    is_ready = [step.is_ready() for _ in device.run(order)]
    assert is_ready == [False, False, False, True]
    assert step.wait().tolist() == [7, 0, 9, (1 << 31) - 1]


def test_a_row_without_a_finite_value_has_no_id(device: LateDevice) -> None:
    values = [0.0, float("nan"), float("inf"), float("-inf"), -3.0]
    step = device.launch(4, 5, 6, 7, 8, values=values)
    device.run_all()
    assert step.wait().tolist() == [4, -1, -1, -1, 8]


@pytest.mark.parametrize("last", [0, 5, (1 << 31) - RING, (1 << 32) - RING, (1 << 32) - 1, (1 << 40) - 2])
def test_ids_of_earlier_steps_are_never_taken_for_those_of_a_later_one(last: int) -> None:
    """Entries are used anew, by steps of more and of fewer rows; numbers of 32 bits begin anew as well."""
    device, rng = LateDevice(last), random.Random(0)
    for step in range(4 * RING):
        ids = [step * 10 + row for row in range(rng.randint(1, MAX_ROWS))]
        late = device.launch(*ids)
        order = rng.sample(range(len(ids)), len(ids))
        assert [late.is_ready() for _ in device.run(order)] == [False] * (len(ids) - 1) + [True]
        assert late.wait().tolist() == ids


def test_padding_is_not_waited_for(device: LateDevice) -> None:
    device.launch(5, 6, 7, 8)
    step = device.store.latest(2)
    is_ready = [step.is_ready() for _ in device.run([1, 0, 3, 2])]
    assert is_ready == [False, True, True, True]
    assert step.wait().tolist() == [5, 6]


def test_steps_in_flight_are_answered_each_with_its_own_ids(device: LateDevice) -> None:
    steps = [device.launch(row, 10 + row) for row in range(RING)]
    for index, step in enumerate(steps):
        assert not step.is_ready()
        list(device.run())
        assert step.wait().tolist() == [index, 10 + index]


def test_ids_that_were_read_outlive_their_entry(device: LateDevice) -> None:
    step = device.launch(1, 2)
    device.run_all()
    assert step.is_ready()
    for _ in range(2 * RING):
        device.launch(8, 9)
        device.run_all()
    assert step.wait().tolist() == [1, 2]


def test_ids_that_may_be_overwritten_are_not_read(device: LateDevice) -> None:
    step = device.launch(1, 2)
    list(device.run())
    for _ in range(RING):
        device.launch(3, 4)
    with pytest.raises(AssertionError, match="the ids of store 1 may be overwritten: 8 stores were launched after it"):
        step.is_ready()


def test_the_ids_of_all_steps_in_flight_are_kept() -> None:
    window, table = RING + 3, torch.zeros((1, 64), dtype=torch.int32)
    store = DrawStore.allocate(torch.device("cpu"), 4, window=window)
    outputs = []
    for number in range(window):
        draws = Draws(torch.tensor([number]), torch.zeros(1))
        store.store(draws, torch.tensor([0]), torch.tensor([number]), table)
        outputs.append(store.latest(1))
    assert [output.wait().tolist() for output in outputs] == [[number] for number in range(window)]


def test_a_device_that_fails_is_not_looked_at_for_ever(device: LateDevice) -> None:
    step = device.launch(1, 2)
    device.error = RuntimeError("an illegal memory access was encountered")
    assert not any(step.is_ready() for _ in range(LOOKS - 1))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        step.is_ready()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        step.wait()


def test_a_device_that_takes_its_time_is_waited_for(device: LateDevice) -> None:
    step = device.launch(1, 2)
    assert not any(step.is_ready() for _ in range(3 * LOOKS))
    device.run_all()
    assert step.wait().tolist() == [1, 2]


def test_ids_that_come_as_the_device_is_asked_are_seen(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    step = device.launch(1, 2)

    def finish() -> bool:
        device.run_all()
        return True

    monkeypatch.setattr(device.store, "is_idle", finish)
    assert step.wait().tolist() == [1, 2]


def test_a_step_whose_ids_never_come_is_a_fault_and_not_a_hang(device: LateDevice) -> None:
    device.only_records = True
    device.store.replay(lambda: None)
    step = device.store.latest(2)
    with pytest.raises(AssertionError, match="the device is idle, but 2 ids of store 1 have not arrived"):
        step.wait()


def test_a_store_that_nobody_counted_is_a_fault_and_not_another_steps_ids(device: LateDevice) -> None:
    uncounted = Draws(torch.tensor([5, 5]), torch.zeros(2))
    device._launched.append(uncounted)
    device.run_all()
    with pytest.raises(AssertionError, match="the device has run store 1, but only 0 were launched"):
        device.launch(1, 2)
    with pytest.raises(AssertionError, match="the device has run store 1, but only 0 were launched"):
        device.store.replay(lambda: None)


def test_whatever_is_recorded_forgotten_or_fails_later_steps_have_their_own_ids(device: LateDevice) -> None:
    expected, found = [], []
    rng = random.Random(1)
    for number in range(60):
        match rng.choice(["step", "replay", "record", "forget", "fail"]):
            case "step":
                step, ids = device.launch(number, 1), [number, 1]
            case "replay":
                graph = Draws(torch.tensor([number, 2]), torch.zeros(2))
                device.store.replay(partial(device._launched.append, graph))
                step, ids = device.store.latest(2), [number, 2]
            case "record":
                device.only_records = True
                device.launch(number, 3)
                device.only_records = False
                continue
            case "forget":
                device.launch(number, 4)
                continue
            case _:
                with pytest.raises(ZeroDivisionError):
                    device.store.replay(lambda: 1 // 0)  # type: ignore[arg-type]  # raises
                continue
        device.run_all()
        found.append(step.wait().tolist())
        expected.append(ids)
    assert found == expected
    assert len(found) > 15


def test_where_nothing_was_ever_stored_ids_are_zeros(device: LateDevice) -> None:
    """As in a precompiling, which launches nothing and waits for nothing."""
    device.only_records = True
    assert device.launch(5, 6, 7).wait().tolist() == [0, 0, 0]


def test_a_stand_in_for_a_graph_that_calls_store_is_counted_once(device: LateDevice) -> None:
    device.store.replay(partial(device.launch, 3, 4))  # type: ignore[arg-type]  # what it returns is nobody's
    step = device.store.latest(2)
    device.run_all()
    assert step.wait().tolist() == [3, 4]

"""Ids reach the host of a real GPU through its page-locked memory: from kernels and from graphs, while the device goes on."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from srt.layers.sampler import Draws
from srt.model_executor.graphs.cuda_graph_runner import GraphCapture, Work
from srt.model_executor.step.draw_store import RING, DrawStore, StepIds

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
MAX_ROWS = 1024


class World:
    """Graphs of some sizes, which draw what `ids` says; rows that stand still; and a store."""

    def __init__(self) -> None:
        self.draw_store = DrawStore.allocate(CUDA, MAX_ROWS, window=2)
        self.ids = torch.zeros(MAX_ROWS, dtype=torch.int64, device=CUDA)
        self.values = torch.zeros(MAX_ROWS, device=CUDA)
        self.tokens = torch.zeros((MAX_ROWS, 4), dtype=torch.int32, device=CUDA)
        self._slots = torch.arange(MAX_ROWS, device=CUDA)
        self._positions = torch.full((MAX_ROWS,), 2, device=CUDA)
        self._capture = GraphCapture(CUDA)
        self._graphs: dict[int, Work] = {}

    def store(self, size: int) -> None:
        rows = slice(0, size)
        draws = Draws(self.ids[rows], self.values[rows])
        self.draw_store.store(draws, self._slots[rows], self._positions[rows], self.tokens)

    def capture(self, size: int) -> None:
        self._graphs[size] = self._capture(partial(self.store, size))

    def step(self, ids: list[int], is_replay: bool) -> StepIds:
        """The ids are copied to the device behind what it is doing, and what they are stored by is launched."""
        drawn = torch.tensor(ids).pin_memory()
        self.ids[: len(ids)].copy_(drawn, non_blocking=True)
        size = min((size for size in self._graphs if size >= len(ids)), default=0) if is_replay else 0
        if size:
            self.draw_store.replay(self._graphs[size])
        else:
            self.store(len(ids))
        return self.draw_store.latest(len(ids))


def test_every_step_gets_its_own_ids_from_kernels_and_graphs() -> None:
    world, rng = World(), random.Random(0)
    before: tuple[StepIds, list[int]] | None = None
    for number in range(400):
        if number in (60, 120, 180, 240):
            world.capture({60: 1, 120: 64, 180: 300, 240: MAX_ROWS}[number])
        ids = [rng.randrange(1 << 31) for _ in range(rng.choice([1, 3, 33, 64, 257, MAX_ROWS]))]
        step = world.step(ids, is_replay=rng.random() < 0.6)
        if before is not None:
            assert before[0].wait().tolist() == before[1]
        before = step, ids
    assert before is not None
    assert before[0].wait().tolist() == before[1]
    torch.cuda.synchronize()
    assert int(world.draw_store.last) == world.draw_store._number
    assert world.tokens[: len(ids), 2].tolist() == ids


def test_a_row_without_a_finite_value_has_no_id() -> None:
    world = World()
    world.values[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert world.step([5, 6, 7, 8], is_replay=False).wait().tolist() == [-1, -1, -1, 8]


def test_ids_are_not_there_before_the_device_has_come_to_them() -> None:
    world = World()
    world.step([1, 2], is_replay=False).wait()
    torch.cuda._sleep(200_000_000)  # a tenth of a second and more
    step = world.step([3, 4], is_replay=False)
    assert not step.is_ready()
    assert step.wait().tolist() == [3, 4]


def test_as_many_steps_as_are_kept_can_be_launched_ahead() -> None:
    world = World()
    torch.cuda._sleep(20_000_000)
    steps = [(world.step([number, 100 + number], is_replay=False), number) for number in range(RING)]
    for step, number in steps:
        assert step.wait().tolist() == [number, 100 + number]

"""Stages that exchange steps through memory that they map from each other, as GPUs do; here it is memory of this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from srt.distributed.parallel_state import TensorParallel
from srt.distributed.pipeline import Pipeline
from srt.distributed.stage_memory import LinkSizes
from srt.kernels.build.cuda_source import compile_source
from srt.kernels.build.hopper import ARCHITECTURE
from srt.kernels.collectives.stage_link import KERNELS
from srt.utils.errors import StartError
from tests.support.ranks import run_stages
from tests.support.stage_device import HostMemory, open_links

SIZES = LinkSizes(row_bytes=64, most_rows=7, most_ids=5, most_in_flight=3)
COUNTS = [7, 1, 4, 7, 2, 5, 5, 3, 7, 1, 6, 4]  # tokens of steps


class Drawn:
    """Ids of a step that are in host memory already."""

    def __init__(self, ids: list[int]) -> None:
        self.words = torch.tensor([(9 << 32) | (one & 0xFFFFFFFF) for one in ids])

    def wait(self) -> np.ndarray:
        raise AssertionError("no host waits for ids that a device sends")


def rows_of(step: int, stage: int) -> torch.Tensor:
    """The hidden states that a stage sends in a step."""
    return torch.randn(COUNTS[step], 16, generator=torch.Generator().manual_seed(100 * step + stage))


def ids_of(step: int) -> list[int]:
    return [1000 * step + row if row != 2 else -1 for row in range(1 + step % 5)]


def test_every_stage_receives_what_was_sent_in_each_of_many_steps(tmp_path: Path) -> None:
    def work(tp: TensorParallel, pipeline: Pipeline) -> list[list[int]]:
        links = open_links(pipeline, SIZES, HostMemory(pipeline.stage))
        found, table = [], torch.full((6, 40), -7, dtype=torch.int32)
        for step in range(len(COUNTS)):
            if pipeline.stage:
                received = torch.empty(COUNTS[step], 16)
                links.receive_hidden(received)
                assert torch.equal(received, rows_of(step, pipeline.stage - 1))
            if pipeline.stage < 2:
                links.send_hidden(rows_of(step, pipeline.stage))
                ids, count = links.receive_ids(len(ids_of(step))), len(ids_of(step))
                slots = np.array([-1 if row == 3 else row for row in range(count)])
                links.write_ids(ids, slots, np.full(count, step), table)
                found.append(ids.wait().tolist())
                expected = [-7 if row == 3 else max(0, id_) for row, id_ in enumerate(found[-1])]
                assert table[:count, step].tolist() == expected
            else:
                links.send_ids(Drawn(ids_of(step)))
        return found

    first, second, _ = run_stages(3, 1, tmp_path, work)
    assert first == second == [ids_of(step) for step in range(len(COUNTS))]


@pytest.mark.parametrize("reason", ["kernels", "reach"])
def test_a_stage_that_cannot_take_part_is_named_on_every_stage(reason: str, tmp_path: Path) -> None:
    def work(tp: TensorParallel, pipeline: Pipeline) -> str:
        memory = HostMemory(pipeline.stage)
        memory.reaches_others = reason != "reach"
        with pytest.raises(StartError) as refusal:
            open_links(pipeline, SIZES, None if reason == "kernels" and pipeline.stage == 1 else memory)
        return str(refusal.value)

    sentences = run_stages(2, 1, tmp_path, work)
    assert sentences[0] == sentences[1]
    assert ("rank 1" if reason == "kernels" else "rank 0") in sentences[0]


def test_ids_of_an_entry_are_not_taken_for_those_of_an_earlier_step(tmp_path: Path) -> None:
    def work(tp: TensorParallel, pipeline: Pipeline) -> None:
        links = open_links(pipeline, SIZES, HostMemory(pipeline.stage))
        if pipeline.stage == 0:
            for _ in range(SIZES.num_id_entries):
                links.receive_ids(1).wait()
            late = links.receive_ids(1)  # of the entry of the first step
            assert not late.has_ended
            pipeline.min_int(0)
            pipeline.min_int(0)
            assert late.has_ended and late.wait().tolist() == [50]
        else:
            for step in range(SIZES.num_id_entries):
                links.send_ids(Drawn([step]))
            pipeline.min_int(0)
            links.send_ids(Drawn([50]))
            pipeline.min_int(0)

    run_stages(2, 1, tmp_path, work)


def test_the_kernels_compile() -> None:
    for kernel in KERNELS:
        assert compile_source(kernel.source, kernel.constants, ARCHITECTURE)

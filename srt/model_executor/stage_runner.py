"""Runners for the stages of a pipeline. They wait for each other only by messages; each runs all steps in the order of the plans.

The stages before the last draw nothing. They launch a step, go on to the next one, and get its ids from the last stage later. A row
decodes again at the earliest when its id is drawn, but the message with the id may come later than the plan that relies on it. So a
stage waits for the ids of the rows that decode before it runs them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from srt.distributed.pipeline import Arrival, Pipeline
from srt.layers.logits_processor import LogitsProcessorOutput
from srt.layers.token_masks import TokenMasks
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.model_runner import ModelRunner, sampling_info
from srt.model_executor.step.executed_step import ExecutedStep, ModelRunnerOutput
from srt.model_executor.step.plan_arrays import write_tables
from srt.model_executor.step.slot_mirror import Ints
from srt.model_executor.step.step_output import SampledRows, StepOutput, sampled_rows
from srt.model_executor.step.step_planner import HostStep
from srt.model_executor.step.step_sampler import StepSampler


def build_stage_runner(loaded: LoadedModel, state: DeviceState) -> ModelRunner:
    """Create the runner of one stage of a pipeline. All its steps run without graphs."""
    kind = LastStageRunner if loaded.stage.is_last else EarlierStageRunner
    return kind(loaded, state, StepSampler(loaded, state), StepGraphs(loaded))


class StageRunner(ModelRunner):
    """What the runners of all stages have in common."""

    def __init__(self, loaded: LoadedModel, state: DeviceState, sampler: StepSampler, graphs: StepGraphs) -> None:
        super().__init__(loaded, state, sampler, graphs)
        assert loaded.device.type == "cpu", "stages exchange memory of the host"
        self._pipeline: Pipeline = loaded.pipeline

    def forward_extend(self, batch: ForwardBatch) -> torch.Tensor:
        loaded = self.loaded
        if not loaded.stage.is_first:
            shape = len(batch.input_ids), loaded.config.hidden_size
            batch.stage_input = self._pipeline.receive_hidden(shape, loaded.dtype)
        hidden = super().forward_extend(batch)
        if not loaded.stage.is_last:
            self._pipeline.send_hidden(hidden)
        return hidden


class LastStageRunner(StageRunner):
    """A runner that draws, and sends what it drew to the other stages."""

    def _sample(self, step: ExecutedStep, masks: TokenMasks | None) -> StepOutput:
        output = super()._sample(step, masks)
        assert isinstance(step, ModelRunnerOutput), "steps of a stage have no fixed buffers"
        if step.sampling_info.num_rows:
            assert output.drawn is not None, "rows that sample have ids"
            self._pipeline.send_ids(torch.from_numpy(output.drawn.wait().copy()))
        return output


@dataclass(slots=True)
class _Awaited:
    """The rows of a step whose ids are on their way, with the positions of these ids."""

    arrival: Arrival
    slots: Ints
    positions: Ints
    is_kept: NDArray[np.bool_]  # False for rows whose slot has been given to another request since


class AwaitedIds:
    """The ids that the last stage has still to send, in the order of their steps, and the token table that they are written to."""

    def __init__(self, token_table: torch.Tensor) -> None:
        self._token_table = token_table
        self._steps: deque[_Awaited] = deque()

    def add(self, arrival: Arrival, slots: Ints, positions: Ints) -> None:
        """Expect an id for each of these positions of these slots."""
        self._steps.append(_Awaited(arrival, slots, positions, np.ones(len(slots), np.bool_)))

    def drop(self, slots: Ints) -> None:
        """Write no more ids for these slots: other requests have been admitted to them."""
        for step in self._steps:
            step.is_kept &= ~np.isin(step.slots, slots)

    def write_for(self, slots: Ints) -> None:
        """Write the ids that have arrived. Wait until all ids of these slots have."""
        last = max((n for n, step in enumerate(self._steps) if np.isin(step.slots, slots).any()), default=-1)
        while self._steps and (last >= 0 or self._steps[0].arrival.has_ended):
            self._write(self._steps.popleft())
            last -= 1

    def write_all(self) -> None:
        """Wait for all ids, and write them."""
        while self._steps:
            self._write(self._steps.popleft())

    def _write(self, step: _Awaited) -> None:
        # An id of -1 marks a row whose logits were not finite. The request ends, but a step of it may be planned already.
        ids = step.arrival.wait().clamp(min=0)
        kept = torch.from_numpy(step.is_kept)
        self._token_table[torch.from_numpy(step.slots)[kept], torch.from_numpy(step.positions)[kept]] = ids[kept]


class EarlierStageRunner(StageRunner):
    """A runner whose steps end with hidden states for the next stage."""

    def __init__(self, loaded: LoadedModel, state: DeviceState, sampler: StepSampler, graphs: StepGraphs) -> None:
        super().__init__(loaded, state, sampler, graphs)
        self._awaited = AwaitedIds(state.req_to_token_pool.token_table)

    def _execute_planned(self, host: HostStep) -> ModelRunnerOutput:
        state, plan = self.state, self.loaded.staging.copy(host.arrays)
        self._awaited.drop(host.arrays.admitted_slots)
        self._awaited.write_for(host.rows.slots[len(host.rows.extend_lens) :])
        write_tables(plan, state.req_to_token_pool)
        batch = ForwardBatch.init_new(
            host.rows, plan.rows, state.req_to_token_pool, state.token_to_kv_pool, self.loaded.attn_backend
        )
        self.forward(batch)
        return ModelRunnerOutput(sampling_info(plan, batch), host, plan, LogitsProcessorOutput(None, None))

    def _sample(self, step: ExecutedStep, masks: TokenMasks | None) -> StepOutput:
        """Begin to receive the ids that the last stage draws, by whatever masks."""
        assert isinstance(step, ModelRunnerOutput), "steps of a stage have no fixed buffers"
        rows = step.host.rows
        if not len(rows.sample_rows):
            return StepOutput(None, [], self.loaded.device)
        arrival = self._pipeline.receive_ids(len(rows.sample_rows))
        self._awaited.add(arrival, rows.slots[rows.sample_rows], rows.seq_lens[rows.sample_rows])
        return ReceivedOutput(arrival, self.loaded.device)

    @torch.inference_mode()
    def reset(self) -> None:
        self._awaited.write_all()
        super().reset()


class ReceivedOutput(StepOutput):
    """The output of a step that another stage draws. It cannot be polled: `is_ready` holds after some thread has called `wait`."""

    def __init__(self, arrival: Arrival, device: torch.device) -> None:
        super().__init__(None, [], device)
        self._arrival = arrival

    @property
    def must_be_awaited(self) -> bool:
        return not self._arrival.has_ended

    def is_ready(self) -> bool:
        return self._arrival.has_ended

    def wait(self) -> None:
        self._arrival.wait()

    def result(self) -> SampledRows:
        counts, ids = sampled_rows(self._arrival.wait().numpy())
        return SampledRows(counts, ids, [])

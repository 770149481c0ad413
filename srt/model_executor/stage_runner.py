"""Runners for the stages of a pipeline. They wait for each other only by what they exchange; each runs all steps in the order of the plans.

The stages before the last draw nothing. They launch a step, go on to the next one, and get its ids from the last stage later. A row
may be planned again before its id is drawn, or before the id has arrived. So a stage waits for the ids of the rows that decode before it
runs them: on a CPU the process does, on a GPU the device, behind the steps that were launched before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from srt.distributed.expert_exchange import ExpertExchange
from srt.distributed.pipeline import Pipeline, StageIds
from srt.layers.logits_processor import LogitsProcessorOutput
from srt.layers.token_masks import TokenMasks
from srt.model_executor.attention_group_runner import AttentionGroupRunner
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_executor.graphs.decode_runner import HIDDEN
from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.model_runner import ModelRunner, sampling_info
from srt.model_executor.step.executed_step import DecodeOutput, ExecutedStep, ModelRunnerOutput
from srt.model_executor.step.plan_arrays import write_tables
from srt.model_executor.step.slot_mirror import Ints
from srt.model_executor.step.step_output import SampledRows, StepOutput, sampled_rows
from srt.model_executor.step.step_planner import DecodeStep, HostStep
from srt.model_executor.step.step_sampler import StepSampler


def new_runner(loaded: LoadedModel, state: DeviceState, sampler: StepSampler, graphs: StepGraphs) -> ModelRunner:
    """Create the runner of a whole model, of an attention group, or of one stage of a pipeline."""
    exchange = loaded.tp.exchange
    if isinstance(exchange, ExpertExchange):
        return AttentionGroupRunner(loaded, state, sampler, graphs, exchange)
    if loaded.stage.num_stages == 1:
        return ModelRunner(loaded, state, sampler, graphs)
    kind = LastStageRunner if loaded.stage.is_last else EarlierStageRunner
    return kind(loaded, state, sampler, graphs)


class StageRunner(ModelRunner):
    """What the runners of all stages have in common."""

    def __init__(self, loaded: LoadedModel, state: DeviceState, sampler: StepSampler, graphs: StepGraphs) -> None:
        super().__init__(loaded, state, sampler, graphs)
        self._pipeline: Pipeline = loaded.pipeline

    def forward_extend(self, batch: ForwardBatch) -> torch.Tensor:
        loaded = self.loaded
        if not loaded.stage.is_first:
            shape = len(batch.input_ids), loaded.config.hidden_size
            batch.stage_input = torch.empty(shape, dtype=loaded.dtype, device=loaded.device)
            self._pipeline.links.receive_hidden(batch.stage_input)
        hidden = super().forward_extend(batch)
        if not loaded.stage.is_last:
            self._pipeline.links.send_hidden(hidden)
        return hidden

    def forward_decode(self, step: DecodeStep) -> DecodeOutput:
        stage, runner = self.loaded.stage, self._decode_runner
        if not stage.is_first:
            assert runner is not None, "a runner without graphs.decodes has no fixed buffers for decode steps"
            self._pipeline.links.receive_hidden(runner.buffers.pp_proxy_tensors[HIDDEN][: len(step.slots)])
        output = super().forward_decode(step)
        if not stage.is_last:
            self._pipeline.links.send_hidden(output.logits)
        return output


class LastStageRunner(StageRunner):
    """A runner that draws, and sends what it drew to the other stages."""

    def _sample(self, step: ExecutedStep, masks: TokenMasks | None) -> StepOutput:
        output = super()._sample(step, masks)
        if output.drawn is not None:
            self._pipeline.links.send_ids(output.drawn)
        return output


@dataclass(slots=True)
class _Awaited:
    """The rows of a step whose ids are on their way, with the positions of these ids."""

    ids: StageIds
    slots: Ints
    positions: Ints
    is_kept: NDArray[np.bool_]  # False for rows whose slot has been given to another request since


class AwaitedIds:
    """The ids that the last stage has still to send, in the order of their steps.

    `write` writes the ids of a step to the token table once they have arrived: on a CPU it waits for them, on a GPU the device does.
    """

    def __init__(self, write: Callable[[StageIds, Ints, Ints], None]) -> None:
        self._write_ids = write
        self._steps: deque[_Awaited] = deque()

    def add(self, ids: StageIds, slots: Ints, positions: Ints) -> None:
        """Expect an id for each of these positions of these slots."""
        self._steps.append(_Awaited(ids, slots, positions, np.ones(len(slots), np.bool_)))

    def drop(self, slots: Ints) -> None:
        """Write no more ids for these slots: other requests have been admitted to them."""
        for step in self._steps:
            step.is_kept &= ~np.isin(step.slots, slots)

    def write_for(self, slots: Ints) -> None:
        """Write the ids that have arrived, and before any later work all ids of these slots."""
        last = max((n for n, step in enumerate(self._steps) if np.isin(step.slots, slots).any()), default=-1)
        while self._steps and (last >= 0 or self._steps[0].ids.has_ended):
            self._write(self._steps.popleft())
            last -= 1

    def write_all(self) -> None:
        """Write all ids."""
        while self._steps:
            self._write(self._steps.popleft())

    def _write(self, step: _Awaited) -> None:
        self._write_ids(step.ids, np.where(step.is_kept, step.slots, -1), step.positions)


class EarlierStageRunner(StageRunner):
    """A runner whose steps end with hidden states for the next stage."""

    def __init__(self, loaded: LoadedModel, state: DeviceState, sampler: StepSampler, graphs: StepGraphs) -> None:
        super().__init__(loaded, state, sampler, graphs)
        self._awaited = AwaitedIds(self._write_ids)

    def _write_ids(self, ids: StageIds, slots: Ints, positions: Ints) -> None:
        self._pipeline.links.write_ids(ids, slots, positions, self.state.req_to_token_pool.token_table)

    def forward_decode(self, step: DecodeStep) -> DecodeOutput:
        self._awaited.write_for(step.slots)
        return super().forward_decode(step)

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
        if isinstance(step, DecodeOutput):
            assert self._decode_runner is not None
            self._decode_runner.store_nothing()
            return self._received(step.step.slots, step.step.seq_lens)
        assert isinstance(step, ModelRunnerOutput), "only a runner that speculates has other steps"
        rows = step.host.rows
        if not len(rows.sample_rows):
            return StepOutput(None, [], self.loaded.device)
        return self._received(rows.slots[rows.sample_rows], rows.seq_lens[rows.sample_rows])

    def _received(self, slots: Ints, positions: Ints) -> ReceivedOutput:
        ids = self._pipeline.links.receive_ids(len(slots))
        self._awaited.add(ids, slots, positions)
        return ReceivedOutput(ids, self.loaded.device)

    @torch.inference_mode()
    def reset(self) -> None:
        self._awaited.write_all()
        super().reset()


class ReceivedOutput(StepOutput):
    """The output of a step that another stage draws."""

    def __init__(self, ids: StageIds, device: torch.device) -> None:
        super().__init__(None, [], device)
        self._received = ids

    @property
    def must_be_awaited(self) -> bool:
        return self._received.must_be_awaited and not self._received.has_ended

    def is_ready(self) -> bool:
        return self._received.has_ended

    def wait(self) -> None:
        self._received.wait()

    def result(self) -> SampledRows:
        counts, ids = sampled_rows(self._received.wait().numpy())
        return SampledRows(counts, ids, [])

"""From a step's hidden states to its rows' logits, draws and logprobs: one class for a CPU, one for a device with tables and kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from srt.layers.logits_processor import LogprobArrays, Logprobs, pick_logprobs
from srt.layers.sampler import Draws
from srt.model_executor.step.executed_step import ModelRunnerOutput
from srt.model_executor.step.logprob_plan import LogprobPlan, LogprobSegment
from srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingKind

if TYPE_CHECKING:
    from srt.model_executor.graphs.decode_runner import DecodeRunner
    from srt.model_executor.loaded_model import LoadedModel
    from srt.model_executor.memory.device_state import DeviceState

LogprobParts = list[tuple[Logprobs, list[LogprobSegment]]]


class StepSampler:
    """Logits in float32, in memory of their own, drawn from as the plan describes the rows: a greedy row has no noise to compute."""

    def __init__(self, loaded: LoadedModel, state: DeviceState) -> None:
        self._lm_head = loaded.model.lm_head
        self._logits_processor = loaded.logits_processor
        self._sampler = state.sampler

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows whose logits are computed: these, and perhaps others behind them."""
        return rows

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, this rank's columns] of the hidden states."""
        return self._logits_processor.logits(hidden, self._lm_head)

    def draws_by_row(self, kind: SamplingKind, masks: torch.Tensor | None) -> bool:
        """Whether the device's tables say all that has to be known to draw rows of this kind."""
        del kind, masks
        return False

    def draws_of(
        self, step: ModelRunnerOutput, logits: torch.Tensor, masks: torch.Tensor | None
    ) -> tuple[Draws, LogprobParts]:
        """The draws of an executed step, and the logprobs that are wanted of them."""
        wanted, arrays = step.host.output_logprobs, step.plan.output_logprobs
        return self.draw(logits.to(torch.float32), step.sampling_info, masks, wanted, arrays)

    def draw(
        self,
        logits: torch.Tensor,
        info: SamplingBatchInfo,
        masks: torch.Tensor | None,
        wanted: LogprobPlan,
        arrays: LogprobArrays[torch.Tensor],
    ) -> tuple[Draws, LogprobParts]:
        """The rows' draws from float32 logits, which are overwritten, and the logprobs that are wanted of them."""
        if not wanted.segments:
            return self._sampler.draw(logits, info, masks), []
        # Drawing overwrites the logits, and logprobs are the model's own.
        log_probs = self._logits_processor.log_softmax(logits[arrays.rows])
        draws = self._sampler.draw(logits, info, masks)
        logprobs = pick_logprobs(log_probs, draws.ids[arrays.rows], arrays.of_ids, wanted.top)
        return draws, [(logprobs, wanted.segments)]


class RowSampler(StepSampler):
    """Logits in the memory of the decodes' logits, drawn from as the device's tables say, with noise for greedy rows too.

    New memory would wait for the device, and the noise costs a GPU nothing.
    """

    def __init__(self, loaded: LoadedModel, state: DeviceState, decodes: DecodeRunner) -> None:
        super().__init__(loaded, state)
        self._decodes = decodes
        self._tables = state.req_to_token_pool

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """As many as decodes have: for other numbers libraries would load another kernel now and then, which waits for the device."""
        return self._decodes.padded(rows) if len(rows) else rows

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decodes.logits_of(hidden)

    def draws_by_row(self, kind: SamplingKind, masks: torch.Tensor | None) -> bool:
        return masks is None and kind is not SamplingKind.OTHER

    def draws_of(
        self, step: ModelRunnerOutput, logits: torch.Tensor, masks: torch.Tensor | None
    ) -> tuple[Draws, LogprobParts]:
        info, kind = step.sampling_info, step.host.kind
        if not self.draws_by_row(kind, masks):
            return super().draws_of(step, logits, masks)
        rows = self._tables.draws.of(info.slots)
        if kind is SamplingKind.ADJUSTED:
            return self._sampler.draw_adjusted(logits, info.slots, rows, info.positions), []
        if kind is SamplingKind.FILTERED:
            return self._sampler.draw_filtered(logits, rows, info.positions), []
        return self._sampler.draw_plain(logits, rows.temperatures, rows.seeds, info.positions), []

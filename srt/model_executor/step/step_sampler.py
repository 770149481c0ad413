"""Compute logits, draws and logprobs from a step's hidden states. One class serves a CPU, the other a GPU and its graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from srt.layers.logits_processor import LogprobArrays, Logprobs
from srt.layers.sampler import Draws
from srt.layers.token_masks import TokenMasks, apply_token_masks
from srt.model_executor.step.executed_step import ModelRunnerOutput
from srt.model_executor.step.logprob_plan import LogprobPlan, LogprobSegment
from srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingKind

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch
    from srt.model_executor.graphs.decode_runner import DecodeRunner
    from srt.model_executor.loaded_model import LoadedModel
    from srt.model_executor.memory.device_state import DeviceState

LogprobParts = list[tuple[Logprobs, list[LogprobSegment]]]


class StepSampler:
    """Draws from float32 logits in new memory, with the plan's parameters for each row, so that greedy rows need no noise."""

    def __init__(self, loaded: LoadedModel, state: DeviceState) -> None:
        if loaded.stage.is_last:  # other stages have no output layer, and call none of this object's methods
            self._lm_head = loaded.model.lm_head
        self._logits_processor = loaded.logits_processor
        self._sampler = state.sampler

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows whose logits to compute: the given ones, perhaps followed by padding."""
        return rows

    @property
    def reads_all_tokens(self) -> bool:
        """Whether `outputs_of` needs the hidden states of all tokens, not only of those that sample."""
        return False

    def outputs_of(
        self, hidden: torch.Tensor, batch: ForwardBatch, sample_tokens: torch.Tensor, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the rows for `logits_of`: the hidden states of the tokens in `sample_tokens`, the last ones of `sample_rows`."""
        return hidden[sample_tokens] if batch.output_tokens is None else hidden

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits [rows, this rank's columns] of the hidden states."""
        return self._logits_processor.logits(hidden, self._lm_head)

    def draws_by_row(self, kind: SamplingKind) -> bool:
        """Return whether decode rows of this kind are drawn from the decodes' logits, with the parameters in the device's tables alone."""
        return kind is SamplingKind.PLAIN

    def mask(self, logits: torch.Tensor, masks: TokenMasks | None) -> None:
        """Forbid in these logits, which are overwritten, what the masks forbid."""
        if masks is not None:
            apply_token_masks(logits, masks, self._lm_head.shard_start)

    def draws_of(
        self, step: ModelRunnerOutput, logits: torch.Tensor, masks: TokenMasks | None
    ) -> tuple[Draws, LogprobParts]:
        """Draw for an executed step, and compute the logprobs that requests want."""
        wanted, arrays = step.host.output_logprobs, step.plan.output_logprobs
        return self.draw(logits.to(torch.float32), step.sampling_info, masks, wanted, arrays)

    def draw(
        self,
        logits: torch.Tensor,
        info: SamplingBatchInfo,
        masks: TokenMasks | None,
        wanted: LogprobPlan,
        arrays: LogprobArrays[torch.Tensor],
    ) -> tuple[Draws, LogprobParts]:
        """Draw from float32 logits, which are overwritten, and compute the logprobs that requests want."""
        if not wanted.segments:
            self.mask(logits, masks)
            return self._sampler.draw(logits, info), []
        # Computed first, because drawing overwrites the logits, and logprobs are those of the model.
        log_probs = self._logits_processor.log_softmax(logits[arrays.rows])
        self.mask(logits, masks)
        draws = self._sampler.draw(logits, info)
        logprobs = self._logits_processor.pick_logprobs(log_probs, draws.ids[arrays.rows], arrays.of_ids, wanted.top)
        return draws, [(logprobs, wanted.segments)]


class RowSampler(StepSampler):
    """Draws from logits in the memory of the decodes' logits, with the parameters in the device's tables, and noise for greedy rows too.

    Allocating new memory would wait for the device, and the noise costs a GPU nothing.
    """

    def __init__(self, loaded: LoadedModel, state: DeviceState, decodes: DecodeRunner) -> None:
        super().__init__(loaded, state)
        self._decodes = decodes
        self._tables = state.req_to_token_pool

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Pad the rows to a size of decode steps: for others, libraries would sometimes load a kernel, which waits for the device."""
        return self._decodes.padded(rows) if len(rows) else rows

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decodes.logits_of(hidden)

    def draws_by_row(self, kind: SamplingKind) -> bool:
        return kind is not SamplingKind.OTHER

    def draws_of(
        self, step: ModelRunnerOutput, logits: torch.Tensor, masks: TokenMasks | None
    ) -> tuple[Draws, LogprobParts]:
        info, kind = step.sampling_info, step.host.kind
        if not self.draws_by_row(kind):
            return super().draws_of(step, logits, masks)
        self.mask(logits, masks)
        rows = self._tables.draws.of(info.slots)
        if kind is SamplingKind.ADJUSTED:
            return self._sampler.draw_adjusted(logits, info.slots, rows, info.positions), []
        if kind is SamplingKind.FILTERED:
            return self._sampler.draw_filtered(logits, rows, info.positions), []
        return self._sampler.draw_plain(logits, rows.temperatures, rows.seeds, info.positions), []

"""A runner for GPUs whose decode rows bring drafts, which the same step verifies.

Rows bring 1 + k tokens in steps in which every row decodes. In steps with prompts they bring one. The device chooses the draws that count,
and the host hears which. It launches the next step before, if that has drafts of the same rows again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import structs

from srt.layers.token_masks import TokenMasks
from srt.model_executor.graphs.row_tokens import NO_ROWS
from srt.model_executor.graphs.verify_runner import VerifyRunner
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.step.executed_step import ExecutedStep, VerifyOutput
from srt.model_executor.step.slot_mirror import Ints
from srt.model_executor.step.step_output import StepOutput, VerifiedOnDevice
from srt.model_executor.step.step_planner import VerifyStep
from srt.protocol.messages import PlanSection
from srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingKind
from srt.speculative.drafter import DeviceDrafter, DraftLimits

if TYPE_CHECKING:
    from srt.model_executor.graphs.step_graphs import StepGraphs
    from srt.model_executor.loaded_model import LoadedModel
    from srt.model_executor.memory.device_state import DeviceState
    from srt.model_executor.step.step_sampler import StepSampler


@dataclass(slots=True)
class _Launched:
    """A step with drafts of which the host does not know yet how long its rows have become."""

    step: VerifyStep
    starts: Ints  # lengths of the rows before the step, or the most that they can be
    output: VerifiedOnDevice


class GraphSpeculatingRunner(ModelRunner):
    """A runner for GPUs. Steps without drafts run as they do without speculation."""

    def __init__(
        self,
        loaded: LoadedModel,
        state: DeviceState,
        sampler: StepSampler,
        graphs: StepGraphs,
        verifier: VerifyRunner,
        drafter: DeviceDrafter,
        most_drafts: int,
        *,
        may_rest: bool = True,
        warming_up: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`may_rest` is that of `DraftLimits`, and `warming_up` what the method of this name returns."""
        super().__init__(loaded, state, sampler, graphs)
        self._warming_up = warming_up
        self._verifier = verifier
        self._drafter = drafter
        self._excess: Ints = np.zeros(state.num_slots, np.int64)
        self._most_drafts = most_drafts
        self._limits = DraftLimits(state.num_slots, most_drafts, may_rest=may_rest)
        self._launched: deque[_Launched] = deque()

    @property
    def max_row_tokens(self) -> int:
        return 1 + self._most_drafts

    def warming_up(self) -> AbstractContextManager[None]:
        return self._warming_up()

    def reset(self) -> None:
        super().reset()
        self._drafter.reset()
        self._launched.clear()

    # ---- A step

    def _execute(self, section: PlanSection) -> ExecutedStep:
        slots = section.decode_slots.astype(np.int64)
        if section.row_tokens > 1:
            self._limits.begin_step()
        drafting = slots[self._limits.want(slots)] if section.row_tokens > 1 else NO_ROWS
        if not len(drafting) and not section.admissions and not len(section.extend_slots):
            return self._execute_plainly(section)
        if not self._can_draft_ahead(section, drafting):
            self._enter_all()
        elif self._launched and (len(self._launched) > 1 or self._hears_early(self._launched[0].output)):
            self._enter(self._launched.popleft())
        self._enter_changes(section)
        if self._launched and self._lacks_room(slots):
            self._enter_all()
        rows = structs.replace(section, admissions=[], pages=[])
        if len(rows.extend_slots):
            executed = super()._execute(rows)
            self._drafter.read_prompts(rows)
            return executed
        num_drafts = self._draft(slots, section.row_tokens - 1)
        if not num_drafts.any():
            self._enter_all()
            return super()._execute(rows)
        step = self._planner.plan_verification(rows, num_drafts)
        self._verifier.stage(step.slots, step.num_draws)
        self._verifier.forward()
        return VerifyOutput(step, self._verifier.logits[: int(step.num_draws.sum())])

    def _execute_plainly(self, section: PlanSection) -> ExecutedStep:
        """Run a step in which every row decodes and none drafts, as a server without speculation does."""
        self._enter_all()
        if any(len(delta.slots) for delta in section.pages):
            self._drafter.enter_pages(section)
        return super()._execute(section)

    def _can_draft_ahead(self, section: PlanSection, slots: Ints) -> bool:
        """Return whether a step can be launched before the host knows how long its rows are; it knows how long they are at most."""
        if section.admissions or len(section.extend_slots):
            return False
        if self._planner.wants_logprobs(section.decode_slots.astype(np.int64)):
            return False
        return self._drafter.can_draft_ahead(slots)

    def _hears_early(self, output: VerifiedOnDevice) -> bool:
        """Return whether to read this output before the step behind it is launched.

        Ranks see it at different times and must bring the same drafts, so several ranks never do.
        """
        return self.loaded.tp.size == 1 and output.is_ready()

    def _enter_changes(self, section: PlanSection) -> None:
        """Write the section's admissions and pages into the tables, so that drafts find them there."""
        for admission in section.admissions:
            self._limits.admit(admission)
        if section.admissions or any(len(delta.slots) for delta in section.pages):
            self.write_changes(section)
            self._drafter.enter_changes(section)

    def _lacks_room(self, slots: Ints) -> bool:
        """Return whether a row would have no position left if all drafts in flight were right.

        Then the scheduler has heard already that some were wrong, or it would not have planned another step of the row.
        """
        lengths, room = self._planner.slots.lengths_and_room(slots)
        return bool((lengths >= room).any())

    def _draft(self, slots: Ints, most: int) -> Ints:
        most = min(most, self._verifier.max_tokens // max(len(slots), 1) - 1)
        if most <= 0:
            return np.zeros_like(slots)
        lengths, room = self._planner.slots.lengths_and_room(slots)
        rows = self._limits.rows(slots, lengths, room, most)
        if not rows.most.any():
            return rows.most
        return self._drafter.draft_ahead(rows) if self._launched else self._drafter.draft(rows)

    # ---- Its draws

    def _sample(self, step: ExecutedStep, masks: TokenMasks | None) -> StepOutput:
        if not isinstance(step, VerifyOutput):
            return super()._sample(step, masks)
        output = self._sample_drafts(step, masks)
        self._launched.append(_Launched(step.step, step.step.starts, output))
        return output

    def _sample_drafts(self, output: VerifyOutput, masks: TokenMasks | None) -> VerifiedOnDevice:
        step, logits = output
        num_tokens, verifier = len(logits), self._verifier
        if masks is not None:  # their rows are those that sample, and rows with masks have one draw each
            firsts = torch.from_numpy(np.cumsum(step.num_draws) - step.num_draws).to(masks.rows.device)
            masks = replace(masks, rows=firsts[masks.rows.long()].to(torch.int32))
        if step.kind is not SamplingKind.OTHER:
            self._sampler.mask(logits, masks)
            verifier.sample(step.kind)
            return VerifiedOnDevice(verifier.outcome[:num_tokens], step.num_draws, [])
        arrays = self.loaded.staging.copy_sampling(self._planner.sampling_of_drafts(step))
        slots, positions = verifier.token_slots[:num_tokens], verifier.next_positions(num_tokens)
        info = SamplingBatchInfo(num_tokens, slots, positions, arrays.sampling)
        draws, logprobs = self._sampler.draw(
            logits.to(torch.float32), info, masks, step.output_logprobs, arrays.output_logprobs
        )
        verifier.accept(draws)
        return VerifiedOnDevice(verifier.outcome[:num_tokens], step.num_draws, logprobs)

    def _enter_all(self) -> None:
        """Wait for the steps with drafts, so that the host knows how long their rows are."""
        while self._launched:
            self._enter(self._launched.popleft())

    def _enter(self, launched: _Launched) -> None:
        """Wait for the step, and correct the lengths of its rows: they were planned as if all of its drafts were right."""
        step = launched.step
        counts, _ = launched.output.rows()
        known = np.maximum(counts, 1).astype(np.int64)  # a row that failed has a token too, which nobody sees
        excess = step.num_draws - known
        lengths, _ = self._planner.slots.lengths_and_room(step.slots)
        self._planner.set_lengths(step.slots, lengths - excess)
        self._excess[step.slots] = excess
        for later in self._launched:
            later.starts = later.starts - self._excess[later.step.slots]
        self._excess[step.slots] = 0
        self._drafter.note_lengths(step.slots, launched.starts + known)
        drafted = step.num_draws > 1
        self._limits.note(step.slots[drafted], step.num_draws[drafted] - 1, known[drafted] - 1)

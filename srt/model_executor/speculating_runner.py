"""A runner whose decode rows bring drafts: guesses of their next tokens, which the same step verifies.

A row that brings k drafts computes 1 + k tokens, as a chunk of a prompt does, and draws behind each. The draws up to the first one
that differs from its draft count. The keys and values behind them are written anew by the row's next steps.

Lengths are read from the tables, which on a CPU are the host's own memory. So a step is planned when the one before has run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import structs

from srt.kernels.cpu.sequence_steps import MOST_TOKENS, SequenceSteps
from srt.layers.logits_processor import LogitsProcessorOutput
from srt.layers.sampler import Draws
from srt.layers.token_masks import TokenMasks
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_executor.model_runner import ModelRunner, sampling_info
from srt.model_executor.step.executed_step import ExecutedStep, ModelRunnerOutput, VerifiedRows
from srt.model_executor.step.slot_mirror import Ints
from srt.model_executor.step.step_output import StepOutput, VerifiedOutput
from srt.protocol.messages import Int32Array, PlanSection
from srt.speculative.acceptance import count_accepted
from srt.speculative.drafter import Drafter, DraftLimits

if TYPE_CHECKING:
    from srt.model_executor.graphs.step_graphs import StepGraphs
    from srt.model_executor.loaded_model import LoadedModel
    from srt.model_executor.memory.device_state import DeviceState
    from srt.model_executor.step.step_planner import HostStep
    from srt.model_executor.step.step_sampler import StepSampler


class SpeculatingRunner(ModelRunner):
    """A runner for CPUs. Steps without drafts run as they do without speculation."""

    def __init__(
        self,
        loaded: LoadedModel,
        state: DeviceState,
        sampler: StepSampler,
        graphs: StepGraphs,
        drafter: Drafter,
        most_drafts: int,
    ) -> None:
        super().__init__(loaded, state, sampler, graphs)
        assert loaded.device.type == "cpu", "the lengths of rows are read from the tables"
        self._drafter = drafter
        self._most_drafts = most_drafts
        self._limits = DraftLimits(state.num_slots, most_drafts)
        self._has_masks = np.zeros(state.num_slots, np.bool_)  # rows that need a mask for each token
        self._pages: Int32Array = state.req_to_token_pool.page_tables.numpy()
        self._tokens: Int32Array = state.req_to_token_pool.token_table.numpy()
        step = None if graphs.decodes is None else graphs.decodes.cpu_step
        self._steps = None if step is None else SequenceSteps(step, state.req_to_token_pool, loaded.config.vocab_size)
        self._lengths: Ints = state.req_to_token_pool.seq_lens.numpy()

    @property
    def max_row_tokens(self) -> int:
        return 1 + self._most_drafts

    def reset(self) -> None:
        super().reset()
        self._drafter.reset()

    def _execute(self, section: PlanSection) -> ExecutedStep:
        self._enter_changes(section)
        rows = structs.replace(section, admissions=[], pages=[])
        step = self._execute_rows(rows)
        if len(rows.extend_slots):
            self._drafter.read_prompts(rows)
        return step

    def _execute_rows(self, rows: PlanSection) -> ExecutedStep:
        slots = rows.decode_slots.astype(np.int64)
        lengths, num_drafts = self._draft(slots, rows.row_tokens - 1)
        if not num_drafts.any():
            return super()._execute(rows)
        num_tokens = len(slots) + int(num_drafts.sum())
        if self._steps is None or len(rows.extend_slots) or num_tokens > MOST_TOKENS:
            return self._execute_planned(self._planner.plan(rows, num_drafts))
        if self._planner.draws_plainly(slots) and not self._has_masks[slots].any():
            ids, counts = self._steps.verify(slots, lengths, 1 + num_drafts)
            self._note(slots, lengths, 1 + num_drafts, counts)
            return VerifiedRows(ids, counts)
        return self._verify(self._planner.plan(rows, num_drafts))

    def _verify(self, host: HostStep) -> ModelRunnerOutput:
        """Run a step in which every token draws by the compiled code, so that drafts change no bit of a row's logits."""
        assert self._steps is not None, "the compiled code is there"
        state, plan = self.state, self.loaded.staging.copy(host.arrays)
        tables = state.req_to_token_pool
        batch = ForwardBatch.init_new(host.rows, plan.rows, tables, state.token_to_kv_pool, self.loaded.attn_backend)
        logits = self._steps.step.logits_of(batch, plan.rows.token_slots)
        return ModelRunnerOutput(sampling_info(plan, batch), host, plan, LogitsProcessorOutput(logits, None))

    def _enter_changes(self, section: PlanSection) -> None:
        """Write the section's admissions and pages into the tables, so that drafts find them there."""
        for admission in section.admissions:
            self._limits.admit(admission)
            self._has_masks[admission.slot] = bool(admission.resource)
        if section.admissions:
            self.write_changes(section)
            self._drafter.enter_changes(section)
        elif any(len(delta.slots) for delta in section.pages):
            groups, slots, columns, pages = self._planner.note_pages(section.pages)
            self._pages[groups if len(groups) else 0, slots, columns] = pages
            self._drafter.enter_pages(section)

    def _draft(self, slots: Ints, most: int) -> tuple[Ints, Ints]:
        """Draft for the rows that may. Return their lengths and numbers of drafts."""
        lengths, room = self._planner.slots.lengths_and_room(slots)
        if not len(slots) or not most:
            return lengths, np.zeros_like(slots)
        self._limits.begin_step()
        rows = self._limits.rows(slots, lengths, room, most)
        return lengths, self._drafter.draft(rows) if rows.most.any() else rows.most

    def _sample(self, step: ExecutedStep, masks: TokenMasks | None) -> StepOutput:
        if isinstance(step, VerifiedRows):
            assert masks is None, "rows with masks are not verified as they run"
            return VerifiedOutput(*step, [], self.loaded.device)
        if not isinstance(step, ModelRunnerOutput) or step.host.num_draws is None:
            return super()._sample(step, masks)
        logits, num_draws, info = step.logits_output.next_token_logits, step.host.num_draws, step.sampling_info
        assert logits is not None, "a step with drafts draws"
        if masks is not None:  # their rows are those that sample, which have one draw each
            firsts = torch.from_numpy(np.cumsum(num_draws) - num_draws)
            masks = replace(masks, rows=firsts[masks.rows.long()].to(torch.int32))
        draws, logprobs = self._sampler.draws_of(step, logits, masks)
        ids, counts = self._accept(draws, info.slots.numpy(), info.positions.numpy(), num_draws)
        return VerifiedOutput(ids, counts, self._prompt_parts(step) + logprobs, self.loaded.device)

    def _accept(self, draws: Draws, slots: Ints, positions: Ints, num_draws: Ints) -> tuple[Int32Array, Int32Array]:
        """Keep the draws that count, set the rows' lengths by them, and return their ids and numbers. `num_draws` are those of each row."""
        tokens, ids, values = self._tokens, draws.ids.numpy(), draws.values.numpy()
        drafts = tokens[slots, positions].astype(np.int64)
        counts = count_accepted(ids, drafts, np.isfinite(values), num_draws)
        firsts = np.cumsum(num_draws) - num_draws
        known = np.maximum(counts, 1)  # a row that failed has a token too, which nobody sees
        places = np.arange(len(ids)) - np.repeat(firsts, num_draws)
        kept = places < np.repeat(known, num_draws)
        tokens[slots[kept], positions[kept]] = ids[kept]
        row_slots, lengths = slots[firsts], positions[firsts] - 1
        self._lengths[row_slots] = lengths + known
        self._note(row_slots, lengths, num_draws, counts)
        told = places < np.repeat(counts, num_draws)
        return ids[told].astype(np.int32), counts.astype(np.int32)

    def _note(self, slots: Ints, lengths: Ints, num_draws: Ints, counts: Ints | Int32Array) -> None:
        """Note how many draws of each row count, behind its last known token at position `lengths[i]`."""
        known = np.maximum(counts, 1).astype(np.int64)
        lengths = lengths + known
        self._planner.set_lengths(slots, lengths)
        self._drafter.note_lengths(slots, lengths)
        drafted = num_draws > 1
        self._limits.note(slots[drafted], num_draws[drafted] - 1, known[drafted] - 1)

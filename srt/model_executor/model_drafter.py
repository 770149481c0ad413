"""Guess with a smaller model, which runs beside the model on the same tables and page numbers.

It draws with the request's own noise, temperature, filters, penalties and biases. So its guess is the model's own draw as often as
the two distributions allow. Its keys and values lie in pages of the same numbers, so a cached prefix has them as well; they are only
missing behind tokens that a row computed while it drafted nothing.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from srt.kernels.cpu.sequence_steps import MOST_TOKENS, SequenceSteps
from srt.layers.sampler import Sampler
from srt.model_executor.memory.device_state import DeviceState, init_kv_pool
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import Int32Array, LogprobSpec, PlanSection, int32_array
from srt.speculative.drafter import DraftRows, Ints

if TYPE_CHECKING:
    from srt.model_executor.loaded_model import LoadedModel

NO_SLOTS = int32_array()
IDLE = PlanSection([], [], NO_SLOTS, NO_SLOTS, NO_SLOTS, NO_SLOTS, NO_SLOTS)


def drafting_state(loaded: LoadedModel, state: DeviceState) -> DeviceState:
    """Create a smaller model's state beside `state`: with its tables, but lengths and KV memory of its own."""
    tables = copy.copy(state.req_to_token_pool)
    tables.seq_lens = tables.seq_lens.clone()
    tables.windows, tables.window_pages = (), ()
    kv_pool = init_kv_pool(loaded, state.num_pages, [])
    sampler = Sampler(loaded.tp, loaded.config.vocab_size, loaded.model.lm_head.shard_start, tables)
    return DeviceState(tables, kv_pool, sampler, state.max_request_tokens)


class ModelDrafter:
    """Runs a model's steps as its own scheduler would plan them: chunks of prompts, then several tokens of each row that drafts."""

    def __init__(self, runner: ModelRunner) -> None:
        """`runner` has a state made by `drafting_state`."""
        self._runner = runner
        tables, decodes = runner.state.req_to_token_pool, runner.graphs.decodes
        self._computed: Ints = tables.seq_lens.numpy()  # positions computed by the smaller model
        self._tokens = tables.token_table.numpy()
        step = None if decodes is None else decodes.cpu_step
        self._steps = None if step is None else SequenceSteps(step, tables, runner.loaded.config.vocab_size)

    def reset(self) -> None:
        self._runner.reset()

    def enter_changes(self, changes: PlanSection) -> None:
        admissions = [structs.replace(a, logprobs=LogprobSpec(), resource="") for a in changes.admissions]
        self._runner.write_changes(structs.replace(changes, admissions=admissions, pages=changes.pages[:1]))

    def enter_pages(self, changes: PlanSection) -> None:
        self._runner.planner.note_pages(changes.pages[:1])

    def read_prompts(self, section: PlanSection) -> None:
        none = np.zeros_like(section.extend_samples)
        self._runner.launch(structs.replace(section, extend_samples=none, decode_slots=NO_SLOTS))

    def draft(self, rows: DraftRows) -> Ints:
        drafting = rows.most > 0
        slots, lengths, most = rows.slots[drafting], rows.lengths[drafting], rows.most[drafting]
        if self._steps is not None and len(slots) <= MOST_TOKENS and self._runner.planner.draws_plainly(slots):
            self._draft_plainly(self._steps, slots, lengths, most)
            return rows.most
        sent = slots.astype(np.int32)
        self._catch_up(sent, lengths)
        for num_drafts in range(int(most.max())):
            self._runner.launch(structs.replace(IDLE, decode_slots=sent[most > num_drafts]))
        return rows.most

    def _draft_plainly(self, steps: SequenceSteps, slots: Ints, lengths: Ints, most: Ints) -> None:
        """Draft in one call of the compiled code, which also computes the tokens that rows lack, if they are few."""
        starts = self._computed[slots]
        if int((lengths - starts).sum()) + len(slots) > MOST_TOKENS:
            self._catch_up(slots.astype(np.int32), lengths)
            starts = lengths
        steps.draft(slots, starts, lengths, most)
        self._computed[slots] = ends = lengths + most
        self._runner.planner.set_lengths(slots, ends)

    def _catch_up(self, slots: Int32Array, lengths: Ints) -> None:
        """Compute the tokens that rows lack before their last known one. After drafts that were all right it is one."""
        starts = self._computed[slots]
        counts = lengths - starts
        late = counts > 0
        if not late.any():
            return
        behind, ones = slots[late], np.ones(int(late.sum()), np.int32)
        if counts.max() > 1:
            chunks = starts[late].astype(np.int32), counts[late].astype(np.int32), 0 * ones
            self._runner.launch(PlanSection([], [], behind, *chunks, NO_SLOTS))
            return
        known = self._tokens[behind, lengths[late]]
        self._runner.launch(structs.replace(IDLE, decode_slots=behind))
        self._tokens[behind, lengths[late]] = known  # which the step's draws have replaced

    def note_lengths(self, slots: Ints, lengths: Ints) -> None:
        right = np.minimum(self._computed[slots], lengths)
        self._computed[slots] = right
        self._runner.planner.set_lengths(slots, right)

"""The steps of a head that drafts from a model's hidden states (EAGLE-3, MTP), beside the model's own, on its tables.

A head has an entry of keys and values for each token but the first: it is computed from the token and the fused hidden states of the token
before. It lies where the token's own keys and values lie, in pages of the same numbers, and depends on no later token. So a cached prefix
has the head's entries, but for tokens that were decoded in steps without drafts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from srt.kernels.cpu.head_step import CpuHeadStep, can_draft
from srt.layers.sampler import Draws, Sampler
from srt.mem_cache.memory_pool import ReqToTokenPool
from srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, HostRows, RowArrays
from srt.model_executor.loaded_head import LoadedHead
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.step.slot_mirror import Ints
from srt.model_executor.step.step_planner import row_arrays
from srt.models.eagle3 import ALONE, Eagle3Head
from srt.protocol.messages import Int32Array, PageDelta
from srt.sampling.sampling_batch_info import SamplingKind
from srt.utils.eagle3_config import Eagle3Config

SLOTS_AT_ONCE = 16  # whose locations are looked up together
NONE: Ints = np.zeros(0, np.int64)
MINUS_INF = float("-inf")


class HeadTables(ReqToTokenPool):
    """A model's tables as its head reads them: entry i of a slot is that of its token i + 1.

    Pages have one entry. So the table of pages is one of locations. On a GPU `look_up` brings it up to date before steps of the head; on a
    CPU `append_pages` writes it.
    """

    def __init__(self, tables: ReqToTokenPool) -> None:
        vars(self).update(vars(tables))
        self._whole = tables
        self.page_size, self.windows, self.window_pages = 1, (), ()
        num_slots, length = tables.token_table.shape
        self._locations = torch.empty((num_slots, length), dtype=torch.int32, device=tables.token_table.device)
        self.page_tables = self._locations[None, :, 1:]
        self.page_table = self.page_tables[0]
        self.token_table = tables.token_table[:, 1:]
        self.max_pages = length - 1
        self.seq_lens = torch.zeros_like(tables.seq_lens)
        self._num_pages: Ints = np.zeros(num_slots, np.int64)  # that `append_pages` has written for each slot
        self._changed: dict[int, None] = {}  # slots whose pages have changed, in order
        self.clear()

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget the entries of all slots. The model's tables are left alone."""
        self._locations.fill_(self._whole.num_pages * self._whole.page_size)  # in the dummy page
        self.seq_lens.zero_()
        self._num_pages[:] = 0
        self._changed.clear()

    def forget_pages(self, slot: int) -> None:
        """Begin a slot anew, with no pages."""
        self._num_pages[slot] = 0

    def append_pages(self, delta: PageDelta) -> None:
        """Write the locations of new pages, in the host's memory."""
        size, table, first = self._whole.page_size, self._locations.numpy(), 0
        for slot, count in zip(delta.slots.tolist(), delta.counts.tolist(), strict=True):
            pages = delta.pages[first : first + count]
            locations = (pages[:, None] * size + np.arange(size, dtype=np.int32)).ravel()
            row = table[slot, int(self._num_pages[slot]) * size :]
            row[: len(locations)] = locations[: len(row)]
            self._num_pages[slot] += count
            first += count

    def note_pages(self, slots: Int32Array) -> None:
        """Note that these slots have other pages, though the model's tables may get them later."""
        self._changed.update(dict.fromkeys(slots.tolist()))

    def look_up(self) -> None:
        """Read the locations of the slots whose pages have changed."""
        if not self._changed:
            return
        slots = np.array(list(self._changed), np.int64)
        self._changed.clear()
        positions = torch.arange(self._locations.shape[1], device=self._locations.device)
        for first in range(0, len(slots), SLOTS_AT_ONCE):
            some = to_device(slots[first : first + SLOTS_AT_ONCE], self._locations.device)
            self._locations[some] = self._whole.locations(some[:, None], positions).to(torch.int32)

    @property
    def token_locations(self) -> torch.Tensor:
        """Where each token of each slot lies [slots, tokens] int32."""
        return self._locations

    def locations_before(self, slots: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """Return where the fused hidden states are from which these entries are computed."""
        return self._locations[slots, entries].long()


class HeadSteps:
    """Computes entries of the head, and draws from its logits. Positions are those of tokens, so entries begin at position 1."""

    def __init__(self, loaded: LoadedHead, state: DeviceState) -> None:
        features = state.token_to_kv_pool.features
        assert features is not None, "the model keeps its hidden states for the head"
        self._loaded, self._head, self._features = loaded, loaded.head, features
        self.tables = HeadTables(state.req_to_token_pool)
        self.whole = state.req_to_token_pool
        num_locations = (state.num_pages + 1) * state.page_size
        self._pool = loaded.new_pool(num_locations)
        self._no_rows = ForwardBatch.empty(self.tables, self._pool, loaded.attn_backend)
        is_own = loaded.head.lm_head is not None
        vocab_size = loaded.config.target_vocab_size
        self._sampler = Sampler(ALONE, vocab_size, 0, self.whole) if is_own else state.sampler
        output = loaded.head.output_layer
        self._draft_logits = self._new_logits(output.shard_size, 0.0)
        self._logits, self._tokens = self._draft_logits, None
        if isinstance(loaded.head, Eagle3Head) and not loaded.head.covers_all:
            # Tokens that the head does not know cannot win.
            self._logits, self._tokens = self._new_logits(vocab_size, MINUS_INF), loaded.head.d2t.tokens

    def _new_logits(self, num_columns: int, value: float) -> torch.Tensor:
        size = (self.whole.num_slots, num_columns)
        return torch.full(size, value, dtype=self._loaded.dtype, device=self._loaded.device)

    def new_hidden(self, num_rows: int) -> torch.Tensor:
        """Allocate the hidden states of this many tokens."""
        size = (num_rows, self._loaded.config.layer.hidden_size)
        return torch.zeros(size, dtype=self._loaded.dtype, device=self._loaded.device)

    def extend(self, slots: Ints, starts: Ints, ends: Ints, has_outputs: bool) -> torch.Tensor:
        """Compute the entries of positions `starts[i]` to `ends[i] - 1`, before which the model has run.

        With outputs, return the hidden states of each row's last token, else none.
        """
        device, none = self._loaded.device, NONE
        self.tables.look_up()
        host = HostRows(slots, ends - 1, starts - 1, ends - starts, none)
        arrays = row_arrays(host)
        rows = RowArrays(*(to_device(getattr(arrays, name), device) for name in arrays.__slots__))
        batch = ForwardBatch.init_new(host, rows, self.tables, self._pool, self._loaded.attn_backend)
        batch.stage_input = self._features_before(rows.token_slots, batch.positions)
        lasts = np.cumsum(ends - starts) - 1 if has_outputs else none
        batch.output_tokens = to_device(lasts, device)
        self._loaded.attn_backend.init_forward_metadata(batch)
        hidden: torch.Tensor = self._head(batch.input_ids, batch.positions, batch)
        return hidden

    def run_tokens(
        self, slots: torch.Tensor, positions: torch.Tensor, features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute entries one by one, and return their hidden states. Without `features` the model has run before all of them.

        Never waits for a GPU, so a graph can hold it.
        """
        entries = positions - 1
        slots_cpu, lens_cpu = (NONE, NONE) if slots.is_cuda else (slots.numpy(), positions.numpy())
        batch = replace(
            self._no_rows,
            forward_mode=ForwardMode.DECODE,
            batch_size=len(slots),
            input_ids=self.tables.tokens(slots, entries),
            positions=entries,
            out_cache_loc=self.tables.locations(slots, entries),
            req_pool_indices=slots,
            seq_lens=positions,
            req_pool_indices_cpu=slots_cpu,
            seq_lens_cpu=lens_cpu,
            stage_input=self._features_before(slots, entries) if features is None else features,
        )
        self._loaded.attn_backend.plan_decode(batch)
        hidden: torch.Tensor = self._head(batch.input_ids, batch.positions, batch)
        return hidden

    def next_features(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the entries of the next tokens are computed from, where the model has not run."""
        return self._head.next_features(hidden)

    def draw(self, kind: SamplingKind, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> Draws:
        """Draw a token for each of these positions, as the model's sampler would, behind entries with these hidden states."""
        drafts, logits = self._draft_logits[: len(hidden)], self._logits[: len(hidden)]
        self._head.output_layer.logits_into(self._head.norm(hidden), drafts)
        if self._tokens is not None:
            logits.index_copy_(1, self._tokens, drafts)
        rows = self.whole.draws.of(slots)
        if kind is SamplingKind.PLAIN:
            return self._sampler.draw_plain(logits, rows.temperatures, rows.seeds, positions)
        if kind is SamplingKind.FILTERED:
            return self._sampler.draw_filtered(logits, rows, positions)
        return self._sampler.draw_adjusted(logits, slots, rows, positions)

    def compiled(self) -> CpuHeadStep | None:
        """Return the compiled code for drafts of one rank on a CPU; None if it does not serve this head."""
        head, config = self._head, self._loaded.config
        if not isinstance(head, Eagle3Head) or not isinstance(config, Eagle3Config):
            return None
        if not can_draft(head, config, self._loaded.dtype):
            return None
        return CpuHeadStep(head, config, self._pool, self._features, self.tables.token_locations, self.tables)

    def _features_before(self, slots: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        return self._features.memory[self.tables.locations_before(slots, entries)]


def to_device(numbers: Ints, device: torch.device) -> torch.Tensor:
    """Copy numbers to the device, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

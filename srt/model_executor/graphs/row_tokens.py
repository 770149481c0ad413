"""Several tokens of each row at once, as decode rows of their own: each sees the positions of its slot up to its own.

Few tokens are read one by one, more of them row by row. The streaming kernel of keys and values must not read them: it requests all keys
but a row's newest ones before the kernels of its own step have ended, and here several keys of a slot are new. That of latents may read
them: only the product that absorbs queries may still run when it starts, and all latents are stored by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from srt.layers.attention.base import TokenRows
from srt.layers.sampler import Draws
from srt.mem_cache.memory_pool import DrawTables, ReqToTokenPool
from srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.step.slot_mirror import Ints
from srt.sampling.sampling_batch_info import SamplingKind

NUM_BUFFERS = 3  # one for each step in flight and one more
CAPTURED_KINDS = (SamplingKind.PLAIN, SamplingKind.FILTERED, SamplingKind.ADJUSTED)


NO_ROWS: Ints = np.zeros(0, np.int64)


class TokenInputs(NamedTuple):
    """What the model reads of each token of a step. All are int64 tensors with an entry for each token."""

    ids: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor  # positions that the token sees
    locations: tuple[torch.Tensor, ...]  # by page group

    @classmethod
    def of(cls, tables: ReqToTokenPool, slots: torch.Tensor, positions: torch.Tensor) -> TokenInputs:
        groups = range(1 + len(tables.windows))
        locations = tuple(tables.locations(slots, positions, group) for group in groups)
        return cls(tables.tokens(slots, positions), slots, positions, positions + 1, locations)


class RowTokens:
    """Runs the model for tokens at given positions of given slots. Keys and values of all are stored before any of them attends."""

    def __init__(self, loaded: LoadedModel, state: DeviceState) -> None:
        self._model, self._backend = loaded.model, loaded.attn_backend
        self._num_distinct, self._features = loaded.num_distinct_layers, state.token_to_kv_pool.features
        self._logits_processor = loaded.logits_processor
        self._tables: ReqToTokenPool = state.req_to_token_pool
        self._no_rows = ForwardBatch.empty(state.req_to_token_pool, state.token_to_kv_pool, loaded.attn_backend)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Inside, run only as many layers as together use all kernels."""
        features = self._features
        of_features = nullcontext() if features is None else features.of_shortened(self._num_distinct)
        with self._model.shortened(self._num_distinct), of_features:
            yield

    def hidden_of(self, inputs: TokenInputs, rows: TokenRows | None = None, most_tokens: int = 1) -> torch.Tensor:
        """Return the hidden states [tokens, hidden size]. Never waits for a GPU, so a graph can hold it.

        With `rows`, of up to `most_tokens` tokens each, keys are read once for all tokens of a row, where attention can do that.
        """
        ids, slots, seq_lens = inputs.ids, inputs.slots, inputs.seq_lens
        # Attention on a GPU finds lengths on the device; on a CPU they are in the host's memory already.
        slots_cpu, seq_lens_cpu = (NO_ROWS, NO_ROWS) if ids.is_cuda else (slots.numpy(), seq_lens.numpy())
        batch = replace(
            self._no_rows,
            forward_mode=ForwardMode.DECODE,
            batch_size=len(ids),
            input_ids=ids,
            positions=inputs.positions,
            out_cache_loc=inputs.locations[0],
            window_locations=inputs.locations[1:],
            req_pool_indices=slots,
            seq_lens=seq_lens,
            req_pool_indices_cpu=slots_cpu,
            seq_lens_cpu=seq_lens_cpu,
        )
        self._backend.plan_decode(batch)
        readings = self._backend.draft_readings
        if rows is not None and readings is not None:
            readings.begin_drafts(rows, most_tokens)
        hidden: torch.Tensor = self._model(ids, inputs.positions, batch)
        return hidden

    def logits_into(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Compute the logits of these hidden states."""
        self._logits_processor.logits_into(hidden, self._model.lm_head, logits)


class TableDraws:
    """Draws by the parameters in the tables, for each kind of sampling that a graph can hold."""

    def __init__(self, state: DeviceState) -> None:
        self._sampler, self._tables = state.sampler, state.req_to_token_pool

    def draw(self, kind: SamplingKind, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> Draws:
        """Draw for these positions of these slots. Logits are overwritten if the kind is ADJUSTED and they are float32."""
        return self.draw_rows(kind, logits, slots, self._tables.draws.of(slots), positions)

    def draw_rows(
        self,
        kind: SamplingKind,
        logits: torch.Tensor,
        slots: torch.Tensor,
        rows: DrawTables,
        positions: torch.Tensor,
    ) -> Draws:
        """Do what `draw` does, by these parameters of each row of logits."""
        if kind is SamplingKind.PLAIN:
            return self._sampler.draw_plain(logits, rows.temperatures, rows.seeds, positions)
        if kind is SamplingKind.FILTERED:
            return self._sampler.draw_filtered(logits, rows, positions)
        return self._sampler.draw_adjusted(logits, slots, rows, positions)


class Staged:
    """Rows of int64 numbers that the host sends to the device in one copy, from one of a few buffers in turn."""

    def __init__(self, num_rows: int, num_columns: int, device: torch.device) -> None:
        self.tensor = torch.zeros((num_rows, num_columns), dtype=torch.int64, device=device)
        self._buffers = [_Buffer(self.tensor) for _ in range(NUM_BUFFERS)]
        self._next = 0

    def begin(self) -> Ints:
        """Return the memory for the next numbers, which has any content. Call `send` when they are written."""
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next].begin()

    def send(self) -> None:
        """Enqueue the copy."""
        self._buffers[self._next].send(self.tensor)


class _Buffer:
    """Memory for the numbers that are sent next, pinned if there is a GPU, and the event recorded after its latest copy."""

    def __init__(self, target: torch.Tensor) -> None:
        self._memory = torch.zeros(target.shape, dtype=target.dtype, pin_memory=target.is_cuda)
        self._host: Ints = self._memory.numpy()
        self._copied = torch.cuda.Event() if target.is_cuda else None

    def begin(self) -> Ints:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host

    def send(self, target: torch.Tensor) -> None:
        target.copy_(self._memory, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

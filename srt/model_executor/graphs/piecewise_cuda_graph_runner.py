"""Capture steps with prompt tokens as CUDA graphs: a graph for each piece between two attentions, which are launched anew each time.

Such a step has about ten launches per layer. The device may finish a small chunk of a prompt, or any chunk of a small model, before the
host has launched it. So for a few numbers of tokens everything is captured except attention, whose work depends on lengths. A step with
fewer tokens is padded to one of these sizes.

The smallest steps are done before the host has launched even their attentions. For these, attention is captured as well, with kernels
that find the lengths on the device: one launch for the whole step. Its first tokens are prompts, its last are decodes, with padding
between them.

Steps in which a row has a LoRA adapter have graphs of their own, which read the number of each token's adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from srt.layers.adapters import PromptAdapters
from srt.layers.attention.attention_spec import AttentionLayer, AttentionSpec
from srt.layers.attention.base import AnyRows, AttentionBackend, PromptGraphs, Views
from srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, LayerAttention, PackedDecodes
from srt.model_executor.graphs.cuda_graph_runner import Capture, Misses, Work, is_far, smallest
from srt.model_executor.graphs.graph_kernels import Graph
from srt.model_executor.graphs.piece_inputs import PieceInputs
from srt.utils.pipeline_stage import Stage

if TYPE_CHECKING:
    from srt.model_executor.loaded_model import LoadedModel
    from srt.model_executor.memory.device_state import DeviceState
    from srt.models.any_model import AnyModel

LAUNCH_S = 0.8e-3  # time to launch a layer kernel by kernel: 0.35e-3 to 1.0e-3 on hosts of an H200
ADAPTED_LAUNCH_S = 1.6e-3  # the same with LoRA adapters: 57e-3 for 36 layers
ATTENTION_LAUNCH_S = 0.15e-3  # time to launch a layer in pieces
MOST_PIECE_TOKENS = 8192  # prompt tokens of a captured step; decodes come on top
MOST_WHOLE_TOKENS = 1024  # with more tokens, kernels that are planned on the host are faster
MOST_WHOLE_PAIRS = 1 << 24
"""Largest number of pairs of a prompt's token and a position that it may see. With as many, for 16 heads in 28 layers, the kernels planned
on the host are 4 ms faster."""
FLOPS = 600e12  # at which prompts are computed, per second


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory that the graphs of all sizes read and write."""

    qkv: torch.Tensor  # [tokens, (heads, KV heads, KV heads) * head_dim], or as packed rows of latents are
    attended: torch.Tensor  # [tokens, heads * value_dim]
    hidden: torch.Tensor  # [outputs, hidden size]: the result; of all tokens in a stage before the last


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The graphs of one size. Piece i ends at the attention of layer i; the last ends with the model. A whole step is one piece."""

    replays: list[Work]
    layers: list[AttentionLayer]


class _StandIn(LayerAttention):
    """The common part of the two stand-ins for attention."""

    @property
    def packed_decodes(self) -> PackedDecodes | None:
        return None

    def place_of(self, qkv: torch.Tensor) -> torch.Tensor:
        return qkv

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        keys, values = layer.split_kv_heads(k), layer.split_kv_heads(v)
        batch.token_to_kv_pool.set_kv(layer.layer_id, batch.locations_of(layer.layer_id), keys, values)
        return self.attend(q, k, v, layer, batch)


class _Breaks(_StandIn):
    """Stands in for attention while pieces are captured: hands over its inputs, ends the piece, and returns the buffer of its output."""

    def __init__(self, runner: PiecewiseCudaGraphRunner, cut: Work) -> None:
        self._runner = runner
        self._cut = cut
        self.layers: list[AttentionLayer] = []

    def place_of(self, qkv: torch.Tensor) -> torch.Tensor:
        return self._runner.place_of(qkv)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        out = self._runner.hand_over(q, k, v)
        self.layers.append(layer)
        self._cut()
        return out


class _Whole(_StandIn):
    """Stands in for attention while whole steps are captured: launches attention that reads the rows from the device."""

    def __init__(self, runner: PiecewiseCudaGraphRunner, graphs: PromptGraphs, rows: AnyRows) -> None:
        self._runner = runner
        self._graphs = graphs
        self._rows = rows

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        out = self._runner.place_of_attended(len(q))
        self._graphs.attend_any(q, self._rows, layer, batch, out)
        return out


class PiecewiseCudaGraphRunner:
    """Captures one size at a time, in the order of CudaGraphRunner. All ranks receive the requests to capture between the same steps."""

    def __init__(
        self,
        sizes: Sequence[int],
        model: AnyModel,
        hidden_size: int,
        spec: AttentionSpec,
        attn_backend: AttentionBackend,
        tables: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        device: torch.device,
        capture: Capture | None,
        most_whole: int = 0,
        stage: Stage | None = None,
        adapters: PromptAdapters | None = None,
    ) -> None:
        """`sizes` are numbers of tokens, at least one. Those up to `most_whole` are captured with their attention. Without `capture` they
        can only be precompiled. With `adapters` the graphs serve steps in which they are applied, without them all other steps."""
        self._sizes = tuple(sorted(sizes))
        self._model = model
        self._hidden_size = hidden_size
        self._spec = spec
        self._device = device
        self._attn_backend = attn_backend
        self._no_rows = ForwardBatch.empty(tables, kv_pool, attn_backend)
        self._capture = capture
        self._returns_all = stage is not None and not stage.is_last
        received = None
        if stage is not None and not stage.is_first:
            received = torch.zeros((self._sizes[-1], hidden_size), dtype=spec.dtype, device=device)
        self._adapters = adapters
        no_adapter = None if adapters is None else adapters.none
        self._inputs = PieceInputs(tables, self._sizes[-1], device, received, no_adapter)
        self._most_whole = most_whole
        self._buffers: _Buffers | None = None
        self._pieces: dict[int, _Pieces] = {}
        self._misses = Misses()

    @classmethod
    def of(
        cls, loaded: LoadedModel, state: DeviceState, capture: Capture | None, adapters: PromptAdapters | None = None
    ) -> PiecewiseCudaGraphRunner | None:
        """Create the runner for a worker's model and memory; None if the options leave no size, or no size is worth a graph.

        Attention groups have none: all would have to pad their prompts to one number of tokens.
        """
        if loaded.tp.exchange is not None:
            return None
        args, num_layers = loaded.args, loaded.config.num_layers
        num_weights = num_layers * loaded.weights_per_layer
        most = args.piecewise_cuda_graph_max_tokens
        if most is None:
            chunk = MOST_PIECE_TOKENS if args.prefill_chunk == -1 else args.prefill_chunk
            largest = min(chunk, MOST_PIECE_TOKENS) + state.num_slots
            launch_s = LAUNCH_S if adapters is None else ADAPTED_LAUNCH_S
            most = min(worthwhile_tokens(num_layers, num_weights, launch_s), largest)
        if not most:
            return None
        return cls(
            piece_sizes(most),
            loaded.model,
            loaded.config.hidden_size,
            loaded.attention_spec,
            loaded.attn_backend,
            state.req_to_token_pool,
            state.token_to_kv_pool,
            loaded.device,
            capture,
            most_whole_tokens(num_layers, num_weights) if loaded.captures_prompts else 0,
            loaded.stage,
            adapters,
        )

    @classmethod
    def of_adapted(
        cls, loaded: LoadedModel, state: DeviceState, capture: Capture | None
    ) -> PiecewiseCudaGraphRunner | None:
        """Create the runner of steps in which a row has an adapter; None if the server has no adapters that graphs can read."""
        adapters = None if loaded.adapters is None else loaded.adapters.step.of_prompts
        return None if adapters is None else cls.of(loaded, state, capture, adapters)

    @property
    def num_left(self) -> int:
        return len(self._sizes) - len(self._pieces)

    def can_run(self, batch: ForwardBatch) -> bool:
        """Return whether a captured size serves the batch without much padding. Records a miss if the best size is not captured."""
        if batch.output_tokens is None and not self._returns_all:
            return False  # graphs have room for the hidden states of one token per request
        num_tokens = self._least_size(batch)
        best, size = smallest(self._sizes, num_tokens), self._captured_size(num_tokens)
        if best is None:
            return False
        self._misses.record(best, size)
        return not is_far(size, best)

    def _least_size(self, batch: ForwardBatch) -> int:
        num_tokens = len(batch.input_ids)
        return num_tokens if self._can_be_whole(batch) else max(num_tokens, self._most_whole + 1)

    def _captured_size(self, num_tokens: int) -> int | None:
        return smallest(sorted(self._pieces), num_tokens)

    def _can_be_whole(self, batch: ForwardBatch) -> bool:
        num_extends, rows = batch.num_extend_rows, self._inputs.rows
        pairs = int(batch.extend_seq_lens_cpu @ batch.seq_lens_cpu[:num_extends])
        have_room = num_extends <= len(rows.extend_lens) and batch.num_decode_rows <= len(rows.decode_lens)
        return have_room and pairs <= MOST_WHOLE_PAIRS

    @property
    def next_size(self) -> int:
        return self._misses.next_of(self._sizes, self._pieces)

    @property
    def next_graph(self) -> Graph:
        """The name of the graph to capture next, as yielded by `precompile`."""
        return self._name_of(self.next_size)

    def _name_of(self, size: int) -> Graph:
        return size if self._adapters is None else ("adapted prompts", size)

    @property
    def is_missing_one(self) -> bool:
        return self._misses.size > 0

    def forget_missed(self) -> None:
        self._misses.forget()

    def give_up(self, size: int) -> None:
        """Capture no more sizes, and drop this one if it was captured."""
        self._pieces.pop(size, None)
        self._sizes = tuple(sorted(self._pieces))
        self.forget_missed()

    def capture_next(self) -> int:
        """Capture one more size, and return it. Only padding runs, so the tables do not change."""
        size = self.next_size
        self._populate_padding(size)
        self.capture_one_batch_size(size)
        return size

    def capture_one_batch_size(self, size: int) -> None:
        """Capture steps of `size` tokens with the current contents of the inputs."""
        self._pieces[size] = self._capture_whole(size) if self._is_whole(size) else self._capture_pieces(size)
        self._misses.record_capture(self._captured_size(self._misses.size))

    def _capture_whole(self, size: int) -> _Pieces:
        assert self._capture is not None
        return _Pieces([self._capture(partial(self._run_whole, size))], [])

    def _capture_pieces(self, size: int) -> _Pieces:
        assert self._capture is not None
        breaks = list[_Breaks]()

        def work(cut: Work) -> None:
            breaks.append(_Breaks(self, cut))
            self._run(self._padding_batch(size, breaks[-1]))

        return _Pieces(self._capture.pieces(work), breaks[-1].layers)

    def precompile(self) -> Iterator[Graph]:
        """Run the work of each size, then yield the name of its graph."""
        for size in reversed(self._sizes):
            self._populate_padding(size)
            if self._is_whole(size):
                self._run_whole(size)
            else:
                self._run(self._padding_batch(size, _Breaks(self, lambda: None)))
            yield self._name_of(size)

    def replay(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the hidden states of a batch for which `can_run` holds. The next step overwrites them."""
        size, buffers = self._captured_size(self._least_size(batch)), self._buffers
        assert size is not None and buffers is not None
        pieces = self._pieces[size]
        self.replay_prepare(batch, size)
        if not self._is_whole(size):
            num_tokens = len(batch.input_ids)
            first = pieces.layers[0]  # all layers have the same heads
            q, k, v = first.split_packed(buffers.qkv[:num_tokens])
            views = Views.of(q, k, v, first, batch, buffers.attended[:num_tokens])
            for replay, layer in zip(pieces.replays, pieces.layers, strict=False):
                replay()
                self._attn_backend.attend_views(views, layer, batch)
        pieces.replays[-1]()
        if batch.output_tokens is not None:
            return buffers.hidden[: len(batch.output_tokens)]
        num_tokens, num_first = len(batch.input_ids), self._num_first(batch, size)
        if num_first == num_tokens:
            return buffers.hidden[:num_tokens]
        return torch.cat((buffers.hidden[:num_first], buffers.hidden[size - num_tokens + num_first : size]))

    def _num_first(self, batch: ForwardBatch, size: int) -> int:
        """Return how many of the batch's tokens are at the beginning of those that graphs of this size read; the others are at the end."""
        return batch.num_extend_tokens if self._is_whole(size) else len(batch.input_ids)

    def replay_prepare(self, batch: ForwardBatch, size: int) -> None:
        """Copy the batch to where the graphs of this size read, and plan the attentions between pieces."""
        num_first = self._num_first(batch, size)
        self._inputs.populate_from_forward_batch(batch, size, num_first)
        if self._adapters is not None:
            self._inputs.populate_adapters(self._adapters.numbers, size, num_first)
        if self._is_whole(size):
            self._inputs.populate_rows(batch, size)
        else:
            self._attn_backend.init_forward_metadata(batch)

    def _is_whole(self, size: int) -> bool:
        return size <= self._most_whole

    def _run_whole(self, size: int) -> None:
        graphs, rows = self._attn_backend.prompt_graphs, self._inputs.rows_of(size)
        assert graphs is not None, "this attention backend cannot capture prompts"
        batch = self._padding_batch(size, _Whole(self, graphs, rows))
        graphs.begin_any(rows, batch)
        self._run(batch)

    def _run(self, batch: ForwardBatch) -> None:
        assert self._buffers is not None
        with self._applied_adapters(batch):
            hidden = self._model(batch.input_ids, batch.positions, batch)
        self._buffers.hidden[: len(hidden)].copy_(hidden)

    def _applied_adapters(self, batch: ForwardBatch) -> AbstractContextManager[None]:
        """Return the context in which a step of padding runs."""
        numbers = self._inputs.adapters
        if self._adapters is None or numbers is None:
            return nullcontext()
        return self._adapters.applied_to_tokens(numbers[: len(batch.input_ids)], batch.output_tokens)

    # ---- For pieces as they are captured

    def place_of(self, qkv: torch.Tensor) -> torch.Tensor:
        assert self._buffers is not None
        return self._buffers.qkv[: len(qkv)]

    def hand_over(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Copy attention's inputs to where it reads them, unless they are there already. Return the memory for its output."""
        buffers = self._buffers
        assert buffers is not None
        if q.data_ptr() != buffers.qkv.data_ptr():
            torch.cat((q, k, v), dim=-1, out=buffers.qkv[: len(q)])
        return buffers.attended[: len(q)]

    def place_of_attended(self, num_tokens: int) -> torch.Tensor:
        assert self._buffers is not None
        return self._buffers.attended[:num_tokens]

    def _allocate_buffers(self) -> _Buffers:
        spec, most = self._spec, self._sizes[-1]
        num_outputs = most if self._returns_all else len(self._inputs.output_tokens)

        def zeros(rows: int, columns: int) -> torch.Tensor:
            return torch.zeros((rows, columns), dtype=spec.dtype, device=self._device)

        return _Buffers(
            zeros(most, spec.packed_width), zeros(most, spec.result_width), zeros(num_outputs, self._hidden_size)
        )

    # ---- Runs of padding alone

    def _populate_padding(self, size: int) -> None:
        self._buffers = self._buffers or self._allocate_buffers()
        self._inputs.populate_padding(size)

    def _padding_batch(self, size: int, attention: LayerAttention) -> ForwardBatch:
        inputs = self._inputs
        return replace(
            self._no_rows,
            forward_mode=ForwardMode.EXTEND,
            num_extend_tokens=size,
            input_ids=inputs.input_ids[:size],
            positions=inputs.positions[:size],
            out_cache_loc=inputs.out_cache_loc[:size],
            window_locations=tuple(locations[:size] for locations in inputs.window_locations),
            attn_backend=attention,
            output_tokens=None if self._returns_all else inputs.output_tokens[:size],
            stage_input=None if inputs.stage_input is None else inputs.stage_input[:size],
            is_captured=True,
        )


def worthwhile_tokens(num_layers: int, num_weights: int, launch_s: float = LAUNCH_S) -> int:
    """Return the number of tokens above which the device takes longer than the host's launches, so that a graph would only add padding."""
    return _tokens_done_in(launch_s * num_layers, num_weights)


def most_whole_tokens(num_layers: int, num_weights: int) -> int:
    """Return the number of tokens above which the device takes longer than launching pieces and the attentions between them."""
    return min(_tokens_done_in(ATTENTION_LAUNCH_S * num_layers, num_weights), MOST_WHOLE_TOKENS)


def _tokens_done_in(seconds: float, num_weights: int) -> int:
    return int(seconds * FLOPS / (2 * num_weights))


def piece_sizes(most_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture. From 64 on, each is followed by one that is at most 50 % larger."""
    sizes = [32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048]
    sizes += range(2560, most_tokens, 512)
    return tuple(sorted({size for size in sizes if size <= most_tokens} | ({most_tokens} if most_tokens else set())))

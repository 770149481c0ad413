"""Run steps in which every row decodes, in fixed buffers: kernel by kernel, or by replaying graphs of the same work.

`cuda_graph_runner.py` decides which size of graph serves a number of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from srt.distributed.parallel_state import SharedExperts
from srt.kernels.cpu.decode_step import MOST_ROWS, CpuDecodeStep
from srt.layers.adapters import DecodeAdapters
from srt.layers.attention.base import AttentionBackend, HostPlans, Reading
from srt.layers.logits_processor import LogitsProcessor
from srt.layers.sampler import Draws, Sampler
from srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from srt.model_executor.graphs.compiled_forward import CompiledForward
from srt.model_executor.graphs.cuda_graph_runner import (
    Capture,
    CudaGraphRunner,
    Work,
    graph_sizes,
    sharing_sizes,
)
from srt.model_executor.memory.memory_profile import most_graph_rows
from srt.model_executor.step.draw_store import DrawStore
from srt.model_executor.step.input_buffers import GraphInputBuffers
from srt.model_executor.step.slot_mirror import Ints
from srt.model_executor.step.step_planner import LEAST_SHARING_ROWS, DecodeStep
from srt.sampling.sampling_batch_info import SamplingArrays, SamplingBatchInfo, SamplingKind
from srt.utils.pipeline_stage import Stage

if TYPE_CHECKING:
    from srt.kernels.decoder.resident_layers import ResidentLayers
    from srt.model_executor.loaded_model import LoadedModel
    from srt.model_executor.memory.device_state import DeviceState
    from srt.models.any_model import AnyModel

NO_ROWS = np.zeros(0, np.int64)
HIDDEN = "hidden_states"  # among the tensors from the stage before; the residual is already added to them
FORWARD = 0  # index of the forward pass among a size's graphs
FIRST_SAMPLE = 1  # index of the first sampling graph; there is one for each SamplingKind, in its order
MOST_LT_ROWS = 112  # up to this many rows, products are done by cuBLASLt


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """The objects that decode steps use."""

    model: AnyModel
    logits_processor: LogitsProcessor
    sampler: Sampler
    attn_backend: AttentionBackend
    tables: ReqToTokenPool
    kv_pool: MHATokenToKVPool
    draw_store: DrawStore
    stage: Stage
    hidden_size: int
    dtype: torch.dtype
    compiled: CompiledForward | None = None  # replaces the model in steps of few rows
    cpu_step: CpuDecodeStep | None = None  # likewise, on a CPU
    resident: Mapping[int, ResidentLayers] = field(
        default_factory=dict
    )  # replace it in short steps, by their number of rows
    adapters: DecodeAdapters | None = None  # None: no row of a decode step has an adapter
    exchange: SharedExperts | None = None  # with other attention groups, which replay graphs of the same size


class _Chosen(NamedTuple):
    """The way in which a step is launched, kept for later steps of the same rows."""

    slots: Ints  # the choice holds while steps bring this same array
    asked: Reading  # the reading that these steps ask for
    reading: Reading  # the reading that they get
    size: int  # rows, padding included
    graph: Work | None  # the graph of the forward pass
    samples: Sequence[Work] | None  # graphs of sampling, in the order of SamplingKind
    logits: torch.Tensor


class DecodeRunner:
    """Runs decode steps. For each step call `forward`, then either `sample`, or draw from the logits and call `store`.

    All state of the rows is in the device's tables. If a step has the same slots as the one before, the host sends only the new pages.
    """

    def __init__(
        self,
        parts: DecodeParts,
        max_rows: int,
        most_in_flight: int,
        device: torch.device,
        sizes: tuple[int, ...] = (),
        pads: bool = True,
        capture: Capture | None = None,
    ) -> None:
        """`sizes` are the numbers of rows to capture, if `capture` is given."""
        self.compiled = parts.compiled
        self._parts = parts
        self._device = device
        hidden = max_rows, parts.hidden_size
        proxies = None if parts.stage.is_first else {HIDDEN: torch.zeros(hidden, dtype=parts.dtype, device=device)}
        self.buffers = GraphInputBuffers(parts.tables, max_rows, device, most_in_flight, parts.draw_store, proxies)
        self._no_rows = ForwardBatch.empty(parts.tables, parts.kv_pool, parts.attn_backend)
        self._batches: dict[int, ForwardBatch] = {}
        self.logits = self._new_outputs(max_rows)
        self._logits_of_rows: dict[int, torch.Tensor] = {}  # cached: a slice costs the host as much as a launch
        self._sizes = tuple(sorted(sizes))
        self._chosen: _Chosen | None = None  # for the current step
        self.graph_rows: int | None = None
        """Rows of the graph to replay, as attention groups agree before each step; 0: no graph. None: there are no groups."""
        self._has_stored = True
        """Whether the last step's draws were stored: pages are addressed by the number of the next store."""
        self._host_plans = parts.attn_backend.host_plans
        self._readings = parts.attn_backend.decode_readings
        self._backend_graphs = parts.attn_backend.decode_graphs
        self._captured_last: CudaGraphRunner | None = None
        self._sizes_of = self._graph_sizes(pads)
        self.graphs: dict[
            Reading, CudaGraphRunner
        ] = {}  # BY_ROW comes first, and serves when other readings have no size
        if capture is not None and self._backend_graphs is not None and sizes:
            self._backend_graphs.init_cuda_graph_state(max(sizes))
            for reading, some in self._sizes_of.items():
                self.graphs[reading] = CudaGraphRunner(some, pads, partial(self._works, reading=reading), capture)

    @classmethod
    def of(
        cls, loaded: LoadedModel, state: DeviceState, capture: Capture | None, compiled: CompiledForward | None
    ) -> DecodeRunner:
        """Create the runner for a worker's model and memory, as its options say."""
        args = loaded.args
        parts = DecodeParts(
            loaded.model,
            loaded.logits_processor,
            state.sampler,
            loaded.attn_backend,
            state.req_to_token_pool,
            state.token_to_kv_pool,
            loaded.draw_store,
            loaded.stage,
            loaded.config.hidden_size,
            loaded.dtype,
            compiled,
            cpu_step_of(loaded, state, compiled),
            resident_layers_of(loaded, state, compiled),
            None if loaded.adapters is None else loaded.adapters.step.of_decodes,
            loaded.tp.exchange,
        )
        return cls(
            parts,
            state.num_slots,
            loaded.most_in_flight,
            loaded.device,
            sizes=args.cuda_graph_bs or graph_sizes(most_graph_rows(args)),
            pads=not args.disable_cuda_graph_padding,
            capture=capture,
        )

    def _new_outputs(self, max_rows: int) -> torch.Tensor:
        """Allocate what a step computes: logits, or hidden states in a stage before the last."""
        parts, device = self._parts, self._device
        if not parts.stage.is_last:
            return torch.zeros((max_rows, parts.hidden_size), dtype=parts.dtype, device=device)
        head = parts.model.lm_head
        return torch.empty((max_rows, head.shard_size), dtype=head.weight.dtype, device=device)

    @property
    def cpu_step(self) -> CpuDecodeStep | None:
        """The compiled step of a CPU, for up to MOST_ROWS tokens."""
        return self._parts.cpu_step

    def _graph_sizes(self, pads: bool) -> dict[Reading, tuple[int, ...]]:
        sizes = self._sizes
        wanted = {Reading.BY_ROW: sizes}
        if self._parts.exchange is not None:  # each size takes time before the start is done
            return {Reading.BY_ROW: sharing_sizes(sizes, 1)}
        if pads:
            wanted |= {Reading.SHARED: sharing_sizes(sizes, LEAST_SHARING_ROWS), Reading.EVEN: sizes}
        found = {
            reading: tuple(size for size in some if self._can_read(reading, size))
            for reading, some in (wanted | {Reading.RESIDENT: sizes, Reading.ADAPTED: sizes}).items()
        }
        return {reading: some for reading, some in found.items() if some}

    def forward(self, step: DecodeStep) -> torch.Tensor:
        """Return the logits [rows, this rank's columns] in the model's dtype. The next step overwrites them.

        A stage before the last returns hidden states [rows, hidden size]. Behind the first one, the buffers must hold those of the stage
        before.
        """
        assert self._has_stored, "the draws of the previous step were not stored"
        self._has_stored = False
        chosen = self._chosen if self.graph_rows is None else None
        if chosen is None or chosen.slots is not step.slots or chosen.asked is not step.reading:
            chosen = self._chosen = self._choose(step)
        self.buffers.stage(step.slots, step.new_pages)
        if self._host_plans is not None and step.new_pages is not None:
            self.buffers.enter_pages(step.slots, step.seq_lens, step.new_pages)
        if chosen.graph is None:
            batch = self._batch(chosen.size)
            batch.req_pool_indices_cpu, batch.seq_lens_cpu = step.slots, step.seq_lens
            self._parts.attn_backend.init_forward_metadata(batch)
            self._run_forward(chosen.size, chosen.reading)
        else:
            if self._host_plans is not None:
                self.replay_prepare(step, chosen.size, self._host_plans)
            chosen.graph()
        return chosen.logits

    def common_size(self, num_rows: int) -> int:
        """Return the rows of the smallest graph with room for `num_rows`; 0 if there is none. With the most rows that an attention group
        has, this is the size that all groups replay.
        """
        by_row = self.graphs.get(Reading.BY_ROW)
        return 0 if by_row is None else by_row.size_for(num_rows) or 0

    def replay_padding(self, size: int) -> None:
        """Replay the graph of `size` rows with padding alone, which leaves the tables unchanged."""
        self.buffers.stage_padding()
        if self._host_plans is not None:
            batch = self._batch(size)
            self._pad_host_rows(batch, NO_ROWS, NO_ROWS)
            self._host_plans.init_forward_metadata_replay_cuda_graph(batch)
        self.graphs[Reading.BY_ROW].replays_of(size)[FORWARD]()

    def replay_prepare(self, step: DecodeStep, size: int, host_plans: HostPlans) -> None:
        """Plan the replay of a graph of `size` rows, for backends that plan on the host."""
        batch = self._batch(size)
        self._pad_host_rows(batch, step.slots, step.seq_lens)
        host_plans.init_forward_metadata_replay_cuda_graph(batch)

    def _choose(self, step: DecodeStep) -> _Chosen:
        """Choose how to launch this step. The choice holds for later steps of the same rows, unless captures are left or rows are short."""
        num_rows, reading = len(step.slots), self._reading_of(step)
        if self.graph_rows is None:
            found = find_graph(self.graphs, reading, num_rows)
        else:
            found = (self.graphs[Reading.BY_ROW], self.graph_rows) if self.graph_rows else None
        graph, samples, size = None, None, num_rows
        if found is not None:
            graphs, size = found
            graph = graphs.replays_of(size)[FORWARD]
            by_row = self.graphs.get(Reading.BY_ROW)
            if by_row is not None and by_row.can_run(size):
                samples = by_row.replays_of(size)[FIRST_SAMPLE:]
        if num_rows not in self._logits_of_rows:
            self._logits_of_rows[num_rows] = self.logits[:num_rows]
        lasts = not self.num_left and reading is not Reading.RESIDENT
        slots = step.slots if lasts else NO_ROWS
        return _Chosen(slots, step.reading, reading, size, graph, samples, self._logits_of_rows[num_rows])

    def _reading_of(self, step: DecodeStep) -> Reading:
        if step.reading is Reading.ADAPTED:
            return step.reading
        resident = self._parts.resident.get(len(step.slots))
        if resident is not None and step.longest <= resident.most_positions:
            return Reading.RESIDENT
        return step.reading if self._can_read(step.reading, len(step.slots)) else Reading.BY_ROW

    def _can_read(self, reading: Reading, num_rows: int) -> bool:
        if reading is Reading.RESIDENT:
            return num_rows in self._parts.resident
        if reading is Reading.ADAPTED:
            return self._parts.adapters is not None
        if reading is Reading.BY_ROW:
            return True
        if self._parts.exchange is not None:
            return False  # without a graph another group computes a prompt, which takes longer: these kernels are not precompiled
        return self._readings is not None and self._readings.can_read(reading, num_rows)

    def sample(self, step: DecodeStep) -> None:
        """Draw the rows' next ids from the logits, and store them."""
        chosen = self._chosen
        assert chosen is not None, "`sample` was called before `forward`"
        if chosen.samples is not None:
            self._has_stored = True
            self._parts.draw_store.replay(chosen.samples[step.kind])
        else:
            self._samplers[step.kind](chosen.size)

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Pad `rows` with zeros to the next size of decode steps."""
        place = bisect_left(self._sizes, len(rows))
        return pad(rows, (0, self._sizes[place] - len(rows))) if place < len(self._sizes) else rows

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of another step's hidden states, in the memory of the decodes' logits."""
        parts = self._parts
        parts.logits_processor.logits_into(hidden, parts.model.lm_head, self.logits[: len(hidden)])
        return self.logits[: len(hidden)]

    def store(self, draws: Draws) -> None:
        """Store the draws of the first `len(draws.ids)` rows."""
        self._has_stored = True
        parts, buffers, rows = self._parts, self.buffers, slice(0, len(draws.ids))
        parts.draw_store.store(draws, buffers.row_slots[rows], buffers.seq_lens[rows], parts.tables.token_table)

    def store_nothing(self) -> None:
        """Count a step as drawn in a stage that draws nothing: new pages are addressed by the number of the next store."""
        self._has_stored = True
        parts, (ids, values, slots, positions) = self._parts, self._nothing
        parts.draw_store.store(Draws(ids, values), slots, positions, parts.tables.token_table)

    @cached_property
    def _nothing(self) -> tuple[torch.Tensor, ...]:
        """The draw of token 0 for the dummy slot: id, value, slot and position."""
        ids, values = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        slots = torch.full((1,), self._parts.tables.dummy_slot)
        return tuple(one.to(self._device) for one in (ids, values, slots, ids))

    def sampling_info(self, step: DecodeStep, arrays: SamplingArrays[torch.Tensor]) -> SamplingBatchInfo:
        num_rows = len(step.slots)
        return SamplingBatchInfo(
            num_rows=num_rows,
            slots=self.buffers.row_slots[:num_rows],
            positions=self.buffers.seq_lens[:num_rows],
            arrays=arrays,
        )

    def run_padding(self, num_rows: int) -> None:
        """Compute the logits of `num_rows` rows of padding, which leaves the tables unchanged."""
        self._stage_padding(num_rows, self._parts.attn_backend.init_forward_metadata)
        self._run_forward(num_rows)

    def precompile(self) -> Iterator[tuple[Reading, int]]:
        """Run the work of each graph, then yield its name; in the order in which graphs are captured."""
        for reading, sizes in self._sizes_of.items():
            for size in reversed(sizes):
                self._stage_padding(size, self._parts.attn_backend.init_forward_metadata)
                with quick_products(size, self._device):
                    for work in self._works(size, reading):
                        work()
                yield reading, size

    @property
    def num_left(self) -> int:
        return sum(graphs.num_left for graphs in self.graphs.values())

    @property
    def next_size(self) -> int:
        return self._next_graphs.next_size

    @property
    def next_graph(self) -> tuple[Reading, int]:
        """The name of the graph to capture next, as yielded by `precompile`."""
        chosen = self._next_graphs
        return next(reading for reading, graphs in self.graphs.items() if graphs is chosen), chosen.next_size

    @property
    def is_missing_one(self) -> bool:
        return any(graphs.is_missing_one for graphs in self.graphs.values())

    def forget_missed(self) -> None:
        for graphs in self.graphs.values():
            graphs.forget_missed()

    @property
    def _next_graphs(self) -> CudaGraphRunner:
        """The graphs to capture from next: those that recent steps missed, else the first that are incomplete."""
        left = [graphs for graphs in self.graphs.values() if graphs.num_left]
        return next((graphs for graphs in left if graphs.is_missing_one), left[0])

    def give_up(self, size: int) -> None:
        """Capture no more graphs, and drop this size if it was the last one captured."""
        for graphs in self.graphs.values():
            graphs.give_up(size if graphs is self._captured_last else 0)

    def capture_next(self) -> int:
        """Capture graphs of one more size, and return it. Only padding runs, so the tables do not change."""
        assert self._backend_graphs is not None, "this attention backend cannot capture decode steps"
        graphs = self._captured_last = self._next_graphs
        size = graphs.next_size
        self._stage_padding(size, self._backend_graphs.init_forward_metadata_capture_cuda_graph)
        with quick_products(size, self._device):
            graphs.capture_one_batch_size(size)
        return size

    def _stage_padding(self, size: int, init_attention: Callable[[ForwardBatch], None]) -> None:
        """Prepare a run of `size` rows of padding, which leaves the tables unchanged."""
        self.buffers.stage_padding()
        if self._parts.exchange is not None:
            self._parts.exchange.pad(size)
        batch = self._batch(size)
        self._pad_host_rows(batch, NO_ROWS, NO_ROWS)
        init_attention(batch)

    # ---- The work, as it is captured

    def _works(self, size: int, reading: Reading) -> list[Work]:
        """Return the parts of a step of `size` rows. Sampling does not depend on the reading, so it is captured once, with BY_ROW."""
        samplers = self._samplers.values() if reading is Reading.BY_ROW and self._parts.stage.is_last else ()
        return [partial(self._run_forward, size, reading), *(partial(sample, size) for sample in samplers)]

    def _run_forward(self, size: int, reading: Reading = Reading.BY_ROW) -> None:
        parts, batch = self._parts, self._batch(size)
        self.buffers.gather(size)
        if parts.cpu_step is not None and size <= MOST_ROWS and reading is Reading.BY_ROW:
            parts.cpu_step.logits_into(batch, self.logits[:size])
            return
        with self._adapters_of(size, reading):
            hidden = self._forward_of(batch, reading)(batch.input_ids, batch.positions, batch)
        if not parts.stage.is_last:
            self.logits[:size].copy_(hidden)
            return
        parts.logits_processor.logits_into(hidden, parts.model.lm_head, self.logits[:size])

    def _forward_of(self, batch: ForwardBatch, reading: Reading) -> Callable[..., torch.Tensor]:
        """Launch what precedes the first layer, and return what runs the layers."""
        parts, size = self._parts, batch.batch_size
        if reading is Reading.RESIDENT:
            return parts.resident[size]
        if self._readings is not None:
            self._readings.begin_decodes(batch, Reading.BY_ROW if reading is Reading.ADAPTED else reading)
        if self.compiled is not None and size <= self.compiled.max_tokens and reading is not Reading.SHARED:
            return self.compiled
        return parts.model

    def _adapters_of(self, size: int, reading: Reading) -> AbstractContextManager[None]:
        if reading is not Reading.ADAPTED:
            return nullcontext()
        assert self._parts.adapters is not None, "rows have adapters, which this runner does not know"
        return self._parts.adapters.applied_to_slots(self.buffers.row_slots[:size])

    @property
    def _samplers(self) -> dict[SamplingKind, Callable[[int], None]]:
        """The samplers in the order of SamplingKind. Not cached: a reference cycle would keep the runner's memory for a while."""
        return {
            SamplingKind.PLAIN: self._run_sample,
            SamplingKind.FILTERED: self._run_filtered_sample,
            SamplingKind.ADJUSTED: self._run_adjusted_sample,
        }

    def _run_sample(self, size: int) -> None:
        rows, positions = self.buffers.draws.first(size), self.buffers.seq_lens[:size]
        draws = self._parts.sampler.draw_plain(self.logits[:size], rows.temperatures, rows.seeds, positions)
        self.store(draws)

    def _run_filtered_sample(self, size: int) -> None:
        rows, positions = self.buffers.draws.first(size), self.buffers.seq_lens[:size]
        draws = self._parts.sampler.draw_filtered(self.logits[:size], rows, positions)
        self.store(draws)

    def _run_adjusted_sample(self, size: int) -> None:
        slots, positions = self.buffers.row_slots[:size], self.buffers.seq_lens[:size]
        draws = self._parts.sampler.draw_adjusted(self.logits[:size], slots, self.buffers.draws.first(size), positions)
        self.store(draws)

    def _pad_host_rows(self, batch: ForwardBatch, slots: Ints, seq_lens: Ints) -> None:
        """Fill in the host's arrays for attention that plans on the host. A padding row has one position of the dummy slot."""
        num_padding = batch.batch_size - len(slots)
        dummies = np.full(num_padding, self._parts.tables.dummy_slot)
        batch.req_pool_indices_cpu = np.concatenate((slots, dummies))
        batch.seq_lens_cpu = np.concatenate((seq_lens, np.ones(num_padding, np.int64)))

    def _batch(self, size: int) -> ForwardBatch:
        """Return the batch of the first `size` rows of the buffers. Its tensors stay the same; each step gathers their contents."""
        if size not in self._batches:
            self._batches[size] = self._make_batch(size)
        return self._batches[size]

    def _make_batch(self, size: int) -> ForwardBatch:
        buffers = self.buffers
        return replace(
            self._no_rows,
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            input_ids=buffers.input_ids[:size],
            positions=buffers.positions[:size],
            out_cache_loc=buffers.out_cache_loc[:size],
            window_locations=tuple(locations[:size] for locations in buffers.window_locations),
            req_pool_indices=buffers.row_slots[:size],
            seq_lens=buffers.seq_lens[:size],
            stage_input=None if self._parts.stage.is_first else buffers.pp_proxy_tensors[HIDDEN][:size],
        )


def resident_layers_of(
    loaded: LoadedModel, state: DeviceState, compiled: CompiledForward | None
) -> dict[int, ResidentLayers]:
    """Return the kernels that run all layers at once, by number of rows.

    They work on one rank with all layers, and replace only our own decode kernels, for layers whose family declares them. With
    --enable-torch-compile there are none, because compiled code runs these steps.
    """
    if "resident" not in loaded.config.fast_paths:
        return {}
    if loaded.head is not None:  # it reads hidden states between layers
        return {}
    if loaded.device.type != "cuda" or loaded.attention.decode != "triton" or loaded.tp.size > 1 or compiled:
        return {}
    if loaded.stage.num_stages > 1:
        return {}
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.kernels.decoder.resident_layers import ROWS, ResidentLayers

    parts = loaded.our_model, state.token_to_kv_pool, state.req_to_token_pool, loaded.device
    made = {rows: ResidentLayers.of(*parts, rows) for rows in ROWS if rows <= state.num_slots}
    return {rows: layers for rows, layers in made.items() if layers is not None}


def cpu_step_of(loaded: LoadedModel, state: DeviceState, compiled: CompiledForward | None) -> CpuDecodeStep | None:
    """Return the compiled step for a CPU; None if it cannot run this model here, or if PyTorch's compiler was asked for."""
    if "fused" not in loaded.config.fast_paths or loaded.device.type != "cpu" or loaded.tp.size > 1 or compiled:
        return None
    if loaded.stage.num_stages > 1 or loaded.tp.exchange is not None:
        return None
    if loaded.args.enable_deterministic_inference:
        return None  # steps with prompts could not give the same bits
    return CpuDecodeStep.of(loaded.our_model, loaded.config, state.token_to_kv_pool)


def find_graph(
    graphs: Mapping[Reading, CudaGraphRunner], reading: Reading, num_rows: int
) -> tuple[CudaGraphRunner, int] | None:
    """Return the graphs that serve `num_rows` rows, and the size to use; None if there are none.

    Sharing prefixes is worth more padding than reading by row needs; reading evenly is not. Graphs that are not consulted record no miss.
    """
    found = _serving(graphs, reading, num_rows)
    if reading in (Reading.BY_ROW, Reading.ADAPTED) or (reading is Reading.SHARED and found is not None):
        return found
    by_row = _serving(graphs, Reading.BY_ROW, num_rows)
    if found is None or by_row is None:
        return found or by_row
    return found if found[1] <= by_row[1] else by_row


def _serving(
    graphs: Mapping[Reading, CudaGraphRunner], reading: Reading, num_rows: int
) -> tuple[CudaGraphRunner, int] | None:
    one = graphs.get(reading)
    size = None if one is None else one.size_for(num_rows)
    return None if one is None or size is None else (one, size)


@contextmanager
def quick_products(size: int, device: torch.device) -> Iterator[None]:
    """Use cuBLASLt for products of few rows inside the block: its kernels are up to 5 % faster than cuBLAS's (measured on an H200)."""
    if device.type != "cuda" or size > MOST_LT_ROWS:
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)

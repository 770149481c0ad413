"""One rank's model with all its device state: weights, KV memory, tables. It runs the steps that plans describe."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from srt.distributed.errors import CollectiveError
from srt.distributed.parallel_state import TensorParallel
from srt.kernels.build.graph_fills import compile_fill
from srt.layers.attention.attention_spec import AttentionSpec
from srt.layers.attention.backend_choice import choose_backends, make_backend
from srt.layers.attention.base import Reading
from srt.layers.logits_processor import LogitsProcessor, LogprobArrays, Logprobs, pick_logprobs
from srt.layers.sampler import Draws, Sampler
from srt.mem_cache.memory_pool import DrawTables, MHATokenToKVPool, ReqToTokenPool
from srt.mem_cache.tables_hash import tables_hash
from srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, HostRows
from srt.model_executor.graphs.compiled_forward import CompiledForward
from srt.model_executor.graphs.cuda_graph_runner import Capture, GraphCapture, graph_sizes
from srt.model_executor.graphs.decode_runner import DecodeParts, DecodeRunner
from srt.model_executor.graphs.piecewise_cuda_graph_runner import (
    PiecewiseCudaGraphRunner,
    most_whole_tokens,
    piece_sizes,
    worthwhile_tokens,
)
from srt.model_executor.memory.device_memory import DeviceMemory
from srt.model_executor.memory.memory_profile import (
    FIRST_USE_BYTES,
    admission_bytes,
    check_pages,
    check_tables,
    check_weights,
    graph_bytes,
    mlp_bytes,
    most_graph_rows,
    out_of_step_memory,
    profile_max_num_token,
    table_bytes,
)
from srt.model_executor.startup.peak_step import peak_section
from srt.model_executor.startup.warm_up import batches, num_distinct_layers, warm_up_requests
from srt.model_executor.step.draw_store import DrawStore
from srt.model_executor.step.logprob_plan import LogprobPlan, LogprobSegment
from srt.model_executor.step.plan_arrays import PlanArrays, Staging
from srt.model_executor.step.step_output import StepOutput
from srt.model_executor.step.step_planner import DecodeStep, HostStep, StepPlanner
from srt.model_loader.kv_scales import read_kv_scales
from srt.model_loader.loader import LoadConfig, get_model_loader
from srt.models.decoder import CausalLM
from srt.protocol.messages import PlanSection, Scalar
from srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingKind
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from srt.utils.host import usable_cores
from srt.utils.model_config import ModelConfig

if TYPE_CHECKING:
    from srt.kernels.build.precompile import Compilers
    from srt.kernels.decoder.resident_layers import ResidentLayers
    from srt.model_executor.startup.kernel_record import KernelRecord

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
Graph = tuple[Reading, int] | int  # of so many decodes, or of so many tokens
# While requests come: each that waits for Python's lock makes the thread that launches steps wait longer.
MOST_COMPILERS = 8
MOST_PIECE_TOKENS = 8192  # of prompts; decodes come beside them


class DecodeOutput(NamedTuple):
    """A step in which every row decodes, executed and not yet sampled."""

    step: DecodeStep
    logits: torch.Tensor  # [rows, this rank's columns] in the model's dtype; the next step overwrites them


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Any other step that was executed and not yet sampled."""

    sampling_info: SamplingBatchInfo
    host: HostStep
    plan: PlanArrays[torch.Tensor]
    logits: torch.Tensor | None  # [R, this rank's columns], overwritten by the next step; None where no row samples
    prompt_logprobs: Logprobs | None


class ModelRunner:
    """Ranks of a replica make the same calls in the same order: `launch`, or `execute` and `sample`, for every step."""

    def __init__(
        self,
        args: ServerArgs,
        config: ModelConfig,
        folder: str,
        tp: TensorParallel,
        device: torch.device,
        report_weights: Progress = lambda done, total: None,
        report_phase: Callable[[str], None] = lambda name: None,
        capture: Capture | None = None,
        num_tokens: int = 0,
    ) -> None:
        """Loads the weights, reporting bytes done and in all; then compiles kernels and takes the KV memory, reporting these phases.

        `capture` makes graphs of decode steps; CUDA's own on a GPU, unless another is given. `num_tokens` that the memory must hold, as it
        has held them before; 0: as the options say.
        """
        torch.set_float32_matmul_precision("highest")  # whatever the environment says: float32 is not TF32
        self.config = config
        self.device = device
        self.page_size = args.page_size
        self.dtype = resolve_dtype(args, config)
        self._args = args
        self._tp = tp
        self._kv_dtype = self.dtype if args.kv_cache_dtype == "auto" else torch.float8_e4m3fn
        self.num_slots = args.max_running_requests
        self.memory = DeviceMemory(device)
        # First: what attention cannot do is refused before weights are read.
        spec = self._attention_spec()
        self.attention = choose_backends(args, spec, device)
        with self.memory.region("buffers"):
            self._attn_backend = make_backend(self.attention, spec, device)
            self._staging = Staging(device, args.window)
            self._draw_store = DrawStore.take(device, self.num_slots, args.window)
        if self.attention.reason:
            logger.warning("%s", self.attention.reason)
        # Whether its kernels run is found by trying, on each rank by itself; but all take graphs of the same sizes.
        self._captures_whole = bool(tp.min_int(int(self._attn_backend.prompt_graphs is not None)))
        self._kv_scales = self._read_kv_scales(folder)
        self._logits_processor = LogitsProcessor(tp, config.vocab_size)
        self._pieces: PiecewiseCudaGraphRunner | None = None
        self._compilers: Compilers | None = None  # of kernels that steps to come may need
        self._kernels_of: dict[Graph, frozenset[Future[Any]]] = {}  # which graphs need them
        self._draws_by_row = False  # not while memory is measured
        with torch.inference_mode():
            with self.memory.region("weights"):
                self._model = self._load_model(folder, report_weights)
            self._compiled: CompiledForward | None = None
            if device.type == "cuda":
                report_phase("kernels")
                with self.memory.region("buffers"):  # of attention's kernels, which are kept
                    self._precompile()
            report_phase("memory")
            if args.enable_torch_compile:
                self._compiled = CompiledForward(self._model, args.torch_compile_max_bs)
            num_pages = self._profile_num_pages(num_tokens)
            with self.memory.region("kv_cache"):
                self._init_memory(num_pages, min(config.context_length, num_pages * self.page_size))
        self.max_total_num_tokens = self.num_pages * self.page_size
        if capture is None and device.type == "cuda" and not args.disable_cuda_graph:
            capture = GraphCapture(device)
        # Noise for greedy rows too: nothing on a GPU, but not on a CPU.
        self._draws_by_row = device.type == "cuda" or capture is not None
        with torch.inference_mode(), self.memory.region("buffers"):
            self._decode_runner = self._init_decode_runner(capture)
            self._sampler.prepare(self._decode_runner.logits)
            self._pieces = None if capture is None else self._new_pieces(capture)
        self._num_graphs_left = self._count_graphs_left()

    def _load_model(self, folder: str, report_weights: Progress) -> CausalLM:
        loader = get_model_loader(LoadConfig(load_format=self._args.load_format))  # type: ignore[arg-type]  # a checked choice
        return loader.load_model(
            self.config,
            folder,
            self._tp,
            self.dtype,
            self.device,
            report_weights,
            check_size=lambda num_bytes: check_weights(num_bytes, self.device),
        )

    def naming_lost_peer(self) -> AbstractContextManager[None]:
        """As the ranks' own."""
        return self._tp.naming_lost_peer()

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._model.parameters())

    @property
    def kv_bytes(self) -> int:
        pool = self._token_to_kv_pool
        return sum(memory.nbytes for memory in (*pool.k_buffer, *pool.v_buffer))

    def _read_kv_scales(self, folder: str) -> tuple[list[float], list[float]] | None:
        if self._kv_dtype == self.dtype:
            return None
        scales = None
        if self._args.load_format != "dummy":
            scales = read_kv_scales(folder, self.config.num_layers)
        if scales is None:
            logger.warning(
                "The checkpoint has no scales for --kv-cache-dtype fp8_e4m3: keys and values are stored as they are."
            )
            return None
        return scales.k, scales.v

    def _profile_num_pages(self, num_tokens: int) -> int:
        """The pages that all ranks can keep beside the largest step; StartError where there is no room for it or for a page."""
        config, page_size = self.config, self.page_size
        heads = config.num_kv_heads_per_rank(self._tp.size)
        token_bytes = MHATokenToKVPool.bytes_per_token(config.num_layers, heads, config.head_dim, self._kv_dtype)
        with self.memory.region("buffers"):
            other_bytes = self._measure_other_bytes() if self.device.type == "cuda" else 0
        most_tokens = profile_max_num_token(self._args, self.device, token_bytes, other_bytes, num_tokens)
        num_pages = self._tp.min_int(most_tokens // page_size)
        check_pages(num_pages, self._args, token_bytes, other_bytes)
        check_tables(self.num_slots, min(config.context_length, num_pages * page_size), page_size, self.device)
        return num_pages

    def _measure_other_bytes(self) -> int:
        """What has to be kept free beside the KV memory."""
        longest = self.config.context_length
        head = self._model.lm_head
        return (
            self._measure_largest_step()
            + self.num_slots * head.shard_size * head.weight.itemsize  # the decodes' logits
            + table_bytes(self.num_slots, longest, self.page_size)
            + admission_bytes(self.num_slots, longest)
            + graph_bytes(self._args, self.config)
        )

    def _precompile(self) -> None:
        """Go through steps of all kinds without launching our kernels, which are compiled meanwhile, all at the same time.

        The first steps' are waited for. What later ones need is compiled while the start goes on and requests come, unless it was here
        before. Only so many layers take part as have all kernels among them, and no other rank. What fails here is tried again in
        earnest.
        """
        # Triton is not there on every host; with PyTorch for CUDA it is.
        from srt.kernels.build.precompile import Compilers, precompiling
        from srt.model_executor.startup.kernel_record import KernelRecord

        model = self._model.model
        layers = model.layers
        num_threads = max(1, usable_cores() // self._tp.size)  # the other ranks of the host compile too
        first, are_first_done = Compilers(num_threads), Event()
        shape = self.config.config_hash(), self.config.context_length, self.dtype, self.attention
        record = KernelRecord(self._args, shape, self._tp.rank, self.device)
        try:
            with self._tp.alone():
                model.layers = layers[: num_distinct_layers(self.config.layer_windows)]
                self._init_memory(1, self.config.context_length)
                with precompiling(first):
                    self._run_to_the_end(self._largest_step()[0])
                    self.reset()
                    self._draws_by_row = True
                    self._decode_runner = self._init_decode_runner(None)
                    self._warm_up()
                if not record.is_complete:
                    self._compilers = Compilers(min(max(1, num_threads // 2), MOST_COMPILERS), are_first_done)
                    self._precompile_later_steps(self._compilers, record)
                first.wait(first.take_asked())
        except Exception as error:
            logger.warning("Kernels are compiled one after the other, because of %s: %s", type(error).__name__, error)
        finally:
            model.layers = layers
            self._draws_by_row = False
            self._drop_memory()
            are_first_done.set()

    def _precompile_later_steps(self, compilers: Compilers, record: KernelRecord) -> None:
        from srt.kernels.build.precompile import precompiling

        try:
            with precompiling(compilers):
                self._precompile_graphs(compilers)
                self._run_requests(batches(self.num_slots, self.max_request_tokens, self.page_size))
            compilers.no_more(record.note_complete)
        except Exception as error:
            logger.warning("Not all kernels are compiled ahead, because of %s: %s", type(error).__name__, error)

    def _precompile_graphs(self, compilers: Compilers) -> None:
        if self._args.disable_cuda_graph:
            return
        if self.device.type == "cuda":
            compilers.compile(compile_fill, partial(compile_fill, self.device))  # for the graph that comes first
        pieces = self._new_pieces(None)
        decodes = self._decode_runner.precompile() if self._attn_backend.decode_graphs is not None else ()
        graphs: Iterator[Graph] = chain(decodes, () if pieces is None else pieces.precompile())
        for graph in graphs:
            self._kernels_of[graph] = compilers.take_asked()

    def _largest_step(self) -> tuple[PlanSection, int]:
        """And how many tokens of prompts it has."""
        longest = max(1, self.config.context_length - 1)
        prompt_tokens = longest if self._args.prefill_chunk == -1 else min(self._args.prefill_chunk, longest)
        section = peak_section(self.num_slots, prompt_tokens, longest, self.page_size, self.config.vocab_size)
        return section, prompt_tokens

    def _measure_largest_step(self) -> int:
        """Bytes that it takes, found by running it on tables of full size and a memory of one page."""
        section, prompt_tokens = self._largest_step()
        try:
            self._init_memory(1, self.config.context_length)
            peak = self.memory.peak_of(lambda: self._run_to_the_end(section))
            # Of some numbers of tokens that are smaller, products do not take in the activation: those steps need more.
            most_tokens = prompt_tokens + self.num_slots - 1
            peak = max(peak, mlp_bytes(self.config, self._tp.size, most_tokens, self.dtype.itemsize)) + FIRST_USE_BYTES
            self.memory.num_bytes["activations"] = peak
            return peak
        except torch.OutOfMemoryError as error:
            raise out_of_step_memory(prompt_tokens, self.num_slots, self.device) from error
        finally:
            self._drop_memory()

    def _run_to_the_end(self, section: PlanSection) -> None:
        self.sample(self.execute(section)).result()

    def _init_memory(self, num_pages: int, max_request_tokens: int) -> None:
        """The tables and the KV memory, and who works on them."""
        config, device = self.config, self.device
        self.num_pages, self.max_request_tokens = num_pages, max_request_tokens
        self._req_to_token_pool = ReqToTokenPool(self.num_slots, max_request_tokens, num_pages, self.page_size, device)
        heads = config.num_kv_heads_per_rank(self._tp.size)
        self._token_to_kv_pool = MHATokenToKVPool(
            num_pages,
            self.page_size,
            config.num_layers,
            heads,
            config.head_dim,
            self._kv_dtype,
            device,
            self._kv_scales,
        )
        shard_start = self._model.lm_head.shard_start
        self._sampler = Sampler(self._tp, config.vocab_size, shard_start, self._req_to_token_pool)
        self._planner = self._new_planner()

    def _drop_memory(self) -> None:
        for name in ("_req_to_token_pool", "_token_to_kv_pool", "_sampler", "_planner", "_decode_runner"):
            vars(self).pop(name, None)  # what came first may have found no room itself
        torch.cuda.empty_cache()

    def _attention_spec(self) -> AttentionSpec:
        config, size = self.config, self._tp.size
        return AttentionSpec(
            num_heads=config.num_heads // size,
            num_kv_heads=config.num_kv_heads_per_rank(size),
            head_dim=config.head_dim,
            dtype=self.dtype,
            kv_dtype=self._kv_dtype,
            page_size=self.page_size,
            max_context=config.context_length,
            windows=tuple(dict.fromkeys(config.layer_windows)),
        )

    def _init_decode_runner(self, capture: Capture | None) -> DecodeRunner:
        args = self._args
        return DecodeRunner(
            DecodeParts(
                self._model,
                self._logits_processor,
                self._sampler,
                self._attn_backend,
                self._req_to_token_pool,
                self._token_to_kv_pool,
                self._draw_store,
                self._compiled,
                self._new_resident_layers(),
            ),
            self.num_slots,
            args.window,
            self.device,
            sizes=args.cuda_graph_bs or graph_sizes(most_graph_rows(args)),
            pads=not args.disable_cuda_graph_padding,
            capture=capture,
        )

    def _new_resident_layers(self) -> dict[int, ResidentLayers]:
        """By numbers of rows. They attend as our own decode kernels do, and know no other ranks; where PyTorch's compiler was asked for, it
        has these steps."""
        if self.device.type != "cuda" or self.attention.decode != "triton" or self._tp.size > 1 or self._compiled:
            return {}
        # Triton is not there on every host; with PyTorch for CUDA it is.
        from srt.kernels.decoder.resident_layers import ROWS, ResidentLayers

        state = self._model, self._token_to_kv_pool, self._req_to_token_pool, self.device
        made = {rows: ResidentLayers.of(*state, rows) for rows in ROWS if rows <= self.num_slots}
        return {rows: layers for rows, layers in made.items() if layers is not None}

    def _new_pieces(self, capture: Capture | None) -> PiecewiseCudaGraphRunner | None:
        most = self._args.piecewise_cuda_graph_max_tokens
        num_layers = self.config.num_layers
        num_weights = num_layers * sum(weight.numel() for weight in self._model.model.layers[0].parameters())
        if most is None:
            chunk = MOST_PIECE_TOKENS if self._args.prefill_chunk == -1 else self._args.prefill_chunk
            largest = min(chunk, MOST_PIECE_TOKENS) + self.num_slots
            most = min(worthwhile_tokens(num_layers, num_weights), largest)
        if not most:
            return None
        return PiecewiseCudaGraphRunner(
            piece_sizes(most),
            self._model,
            self._attn_backend,
            self._req_to_token_pool,
            self._token_to_kv_pool,
            self.device,
            capture,
            most_whole_tokens(num_layers, num_weights) if self._captures_whole else 0,
        )

    def _new_planner(self) -> StepPlanner:
        return StepPlanner(self.num_slots, self.num_pages, self.page_size)

    # ---- A step

    def launch(self, section: PlanSection) -> StepOutput:
        """`execute` and `sample`, for who is in inference mode: to enter it takes as long as planning a step of decodes."""
        return self._sample(self._execute(section), None)

    @torch.inference_mode()
    def execute(self, section: PlanSection) -> ModelRunnerOutput | DecodeOutput:
        """Apply the delta, run the model, and compute logits of the rows that sample."""
        return self._execute(section)

    @torch.inference_mode()
    def sample(self, step: ModelRunnerOutput | DecodeOutput, masks: torch.Tensor | None = None) -> StepOutput:
        """Draw an id for every row that samples, and store it: in the token table the next step reads it.

        `masks` [R, this rank's columns] bool, if given, says which tokens a row may draw at all.
        """
        return self._sample(step, masks)

    def _execute(self, section: PlanSection) -> ModelRunnerOutput | DecodeOutput:
        decodes = self._planner.plan_decodes(section)
        if decodes is not None:
            return DecodeOutput(decodes, self._decode_runner.forward(decodes))
        host = self._planner.plan(section)
        plan = self._staging.copy(host.arrays)
        self._write_tables(plan)
        batch = ForwardBatch.init_new(
            host.rows, plan, self._req_to_token_pool, self._token_to_kv_pool, self._attn_backend
        )
        info = _sampling_info(host.rows, plan, batch)
        samplers = self._padded(plan.sample_tokens)
        if not len(plan.prompt_logprobs.rows):
            batch.output_tokens = samplers
        hidden = self.forward(batch)
        logits = None
        if info.num_rows:
            outputs = hidden[samplers] if batch.output_tokens is None else hidden
            logits = self._logits_of(outputs)[: info.num_rows]
        return ModelRunnerOutput(info, host, plan, logits, self._prompt_logprobs(hidden, batch, host, plan))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [tokens that are wanted, hidden size] of the batch."""
        match batch.forward_mode:
            case ForwardMode.IDLE:
                return torch.empty((0, self.config.hidden_size), dtype=self.dtype, device=self.device)
            case ForwardMode.EXTEND | ForwardMode.DECODE | ForwardMode.MIXED:
                if self._pieces is not None and self._pieces.can_run(batch):
                    return self._pieces.replay(batch)
                self._attn_backend.init_forward_metadata(batch)
                hidden: torch.Tensor = self._model(batch.input_ids, batch.positions, batch)
                return hidden
            case _:
                raise AssertionError(f"no plan leads to {batch.forward_mode.name}")

    def _sample(self, step: ModelRunnerOutput | DecodeOutput, masks: torch.Tensor | None) -> StepOutput:
        if isinstance(step, DecodeOutput):
            return self._sample_decodes(step, masks)
        parts = []
        if step.prompt_logprobs is not None or step.host.prompt_logprobs.segments:
            empty = _no_logprobs(self.device)
            parts.append((step.prompt_logprobs or empty, step.host.prompt_logprobs.segments))
        ids = None
        if step.logits is not None:
            info, wanted = step.sampling_info, step.host.output_logprobs
            if masks is None and self._draws_by_row and step.host.kind is not SamplingKind.OTHER:
                draws = self._draw_by_row(step.logits, info, step.host.kind)
            else:
                logits = step.logits.to(torch.float32)
                draws, logprobs = self._draw(logits, info, masks, wanted, step.plan.output_logprobs)
                parts += logprobs
            self._draw_store.store(draws, info.slots, info.positions, self._req_to_token_pool.token_table)
            ids = self._draw_store.latest(info.num_rows)
        return StepOutput(ids, parts, self.device)

    def _draw_by_row(self, logits: torch.Tensor, info: SamplingBatchInfo, kind: SamplingKind) -> Draws:
        """By what the device's tables say of the rows."""
        rows = self._req_to_token_pool.draws.of(info.slots)
        if kind is SamplingKind.ADJUSTED:
            return self._sampler.draw_adjusted(logits, info.slots, rows, info.positions)
        if kind is SamplingKind.FILTERED:
            return self._sampler.draw_filtered(logits, rows, info.positions)
        return self._sampler.draw_plain(logits, rows.temperatures, rows.seeds, info.positions)

    def _sample_decodes(self, output: DecodeOutput, masks: torch.Tensor | None) -> StepOutput:
        runner, step = self._decode_runner, output.step
        num_rows = len(step.slots)
        if masks is None and self._draws_by_row and step.kind is not SamplingKind.OTHER:
            runner.sample(step)
            return StepOutput(self._draw_store.latest(num_rows), [], self.device)
        arrays = self._staging.copy_sampling(self._planner.sampling_of(step))
        info = runner.sampling_info(step, arrays.sampling)
        logits = output.logits.to(torch.float32)
        draws, logprobs = self._draw(logits, info, masks, step.output_logprobs, arrays.output_logprobs)
        runner.store(draws)
        return StepOutput(self._draw_store.latest(num_rows), logprobs, self.device)

    def _draw(
        self,
        logits: torch.Tensor,
        info: SamplingBatchInfo,
        masks: torch.Tensor | None,
        wanted: LogprobPlan,
        arrays: LogprobArrays[torch.Tensor],
    ) -> tuple[Draws, list[tuple[Logprobs, list[LogprobSegment]]]]:
        """The rows' draws, and what is wanted of their logprobs."""
        if not wanted.segments:
            return self._sampler.draw(logits, info, masks), []
        # Drawing overwrites the logits, and logprobs are the model's own.
        log_probs = self._logits_processor.log_softmax(logits[arrays.rows])
        draws = self._sampler.draw(logits, info, masks)
        logprobs = pick_logprobs(log_probs, draws.ids[arrays.rows], arrays.of_ids, wanted.top)
        return draws, [(logprobs, wanted.segments)]

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """As many as decodes have, on a GPU: for others libraries would load another kernel now and then, which waits for the device."""
        return self._decode_runner.padded(rows) if self._draws_by_row and len(rows) else rows

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """On a GPU where decodes have theirs: new memory would wait for the device."""
        if not self._draws_by_row:
            return self._logits_processor.logits(hidden, self._model.lm_head)
        return self._decode_runner.logits_of(hidden)

    def _write_tables(self, plan: PlanArrays[torch.Tensor]) -> None:
        tables = self._req_to_token_pool
        if len(plan.admitted_slots):
            tables.write_tokens(plan.id_slots, plan.id_positions, plan.ids)
            draws = plan.admitted_draws
            values = (draws.temperatures, draws.seeds, draws.top_ks, draws.top_ps, draws.min_ps)
            tables.admit(plan.admitted_slots, plan.admitted_lens, DrawTables(*values))
        if len(plan.adjustments.slots):
            tables.adjustments.admit(plan.adjustments)
        if len(plan.pages):
            tables.write_pages(plan.page_slots, plan.page_columns, plan.pages)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, batch: ForwardBatch, host: HostStep, plan: PlanArrays[torch.Tensor]
    ) -> Logprobs | None:
        arrays = plan.prompt_logprobs
        if not len(arrays.rows):
            return None
        # Rows are of extend tokens, which come first. Each tells the token behind it.
        targets = self._req_to_token_pool.tokens(plan.token_slots[arrays.rows], batch.positions[arrays.rows] + 1)
        return self._logits_processor.prompt_logprobs(
            hidden, self._model.lm_head, arrays, targets, host.prompt_logprobs.top
        )

    # ---- Work between steps

    def warm_up(self) -> None:
        """Requests through the whole model, prompt and next token, so that what is made at first use is made now."""
        with self.memory.region("buffers"):
            self._warm_up()

    def _warm_up(self) -> None:
        self._run_requests(warm_up_requests(self.device.type, self.max_request_tokens, self.page_size))
        for graphs in self._graphs:
            graphs.forget_missed()

    def _run_requests(self, requests: Iterator[list[PlanSection]]) -> None:
        for sections in requests:
            for section in sections:
                self._run_to_the_end(section)
            self.reset()

    @torch.inference_mode()
    def compile(self) -> None:
        """All that --enable-torch-compile compiles, before the first step."""
        self._decode_runner.compile()

    @property
    def num_compiled_steps(self) -> int:
        """Forward passes of compiled code, captures included; a graph that is replayed is not counted."""
        return 0 if self._compiled is None else self._compiled.num_steps

    @torch.inference_mode()
    def reset(self) -> None:
        """Empty all tables, here and on the device. The KV memory keeps its bytes: no page refers to them."""
        self._req_to_token_pool.clear()
        self._planner = self._new_planner()

    @property
    def num_graphs_left(self) -> int:
        """How often `capture_graph` has something to capture."""
        return self._num_graphs_left

    def _count_graphs_left(self) -> int:
        return sum(graphs.num_left for graphs in self._graphs)

    @property
    def is_missing_graph(self) -> bool:
        """Whether steps miss one that is worth its capture even while requests run, and nothing has to be compiled for it."""
        if not self._num_graphs_left or not any(graphs.is_missing_one for graphs in self._graphs):
            return False
        return self._has_kernels(self._next_graphs.next_graph)

    @property
    def _next_graphs(self) -> DecodeRunner | PiecewiseCudaGraphRunner:
        """Those that steps have missed first, and decodes before prompts."""
        left = [graphs for graphs in self._graphs if graphs.num_left]
        return next((graphs for graphs in left if graphs.is_missing_one), left[0])

    def _has_kernels(self, graph: Graph) -> bool:
        """Whether the graph's kernels lie compiled in the caches, or failed to be, as far as was precompiled."""
        return all(kernel.done() for kernel in self._kernels_of.get(graph, ()))

    @property
    def _graphs(self) -> list[DecodeRunner | PiecewiseCudaGraphRunner]:
        return [self._decode_runner] if self._pieces is None else [self._decode_runner, self._pieces]

    @torch.inference_mode()
    def capture_graph(self) -> int:
        """Capture steps of one more size; returns how many rows or tokens, or 0 if a rank is still compiling what that one needs.

        All that was launched is done. What fails on all ranks alike is a warning, and ends the captures: steps without a graph are
        launched kernel by kernel. If it fails on one alone, the others wait for it in the middle of the size, until the watchdog ends
        the server.
        """
        chosen = self._next_graphs
        graph, size = chosen.next_graph, chosen.next_size
        if not self._tp.min_int(int(self._has_kernels(graph))):
            return 0
        self._kernels_of.pop(graph, None)
        if not self._tp.min_int(int(self._tries(chosen.capture_next, size))):
            for graphs in self._graphs:
                graphs.give_up(size if graphs is chosen else 0)
            self._kernels_of.clear()
            self._compilers = None
        self._num_graphs_left = self._count_graphs_left()
        return size

    def capture_graphs(self) -> None:
        """All that are left, for who has nothing else to do meanwhile."""
        while self.num_graphs_left:
            wait(self._kernels_of.get(self._next_graphs.next_graph, ()))
            self.capture_graph()

    def _tries(self, capture: Callable[[], int], size: int) -> bool:
        """Whether it could be captured. A GPU that cannot go on afterwards raises."""
        try:
            with self.memory.region("cuda_graph"):
                capture()
            return True
        except CollectiveError:
            raise
        except Exception as error:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            logger.warning(
                "A graph of steps of %d rows or tokens could not be captured, so no more are: %s: %s",
                size,
                type(error).__name__,
                error,
            )
            return False

    def inspect(self) -> dict[str, Scalar]:
        """What the tables hold, as WorkDone describes it."""
        table = self._req_to_token_pool.page_table.cpu().numpy()
        pages = {slot: table[slot, :count] for slot, count in self._planner.slots.num_pages_of_admitted().items()}
        return {"tables_hash": tables_hash(pages), "num_slots_seen": len(pages)}


def _sampling_info(rows: HostRows, plan: PlanArrays[torch.Tensor], batch: ForwardBatch) -> SamplingBatchInfo:
    return SamplingBatchInfo(
        num_rows=len(rows.sample_rows),
        slots=plan.row_slots[plan.sample_rows],
        positions=batch.seq_lens[plan.sample_rows],
        arrays=plan.sampling,
    )


def resolve_dtype(args: ServerArgs, config: ModelConfig) -> torch.dtype:
    name = config.torch_dtype if args.dtype == "auto" else args.dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def resolve_device(args: ServerArgs, rank: int) -> torch.device:
    """This rank's device; StartError for one that is not there."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = args.base_gpu_id + rank
    if index >= count:
        raise StartError(
            f"--tp {args.tp_size} from --base-gpu-id {args.base_gpu_id} on needs CUDA device {index}, and there are {count}."
        )
    return torch.device("cuda", index)


def _no_logprobs(device: torch.device) -> Logprobs:
    floats = torch.empty((0, 0), device=device)
    return Logprobs(floats.view(0), torch.empty((0, 0), dtype=torch.int32, device=device), floats, floats)

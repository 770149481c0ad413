"""Start a worker's model: load weights, compile kernels, size the KV memory, then allocate everything that depends on its size."""

from __future__ import annotations

from collections.abc import Callable

import torch

from srt.distributed.parallel_state import TensorParallel
from srt.distributed.pipeline import Pipeline
from srt.model_executor.graphs.compiled_forward import CompiledForward
from srt.model_executor.graphs.cuda_graph_runner import Capture, GraphCapture
from srt.model_executor.graphs.decode_runner import DecodeRunner
from srt.model_executor.graphs.graph_kernels import GraphKernels
from srt.model_executor.graphs.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.loaded_model import LoadedModel, Progress, load_model
from srt.model_executor.memory.device_state import DeviceState, init_memory_pool
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.stage_runner import new_runner
from srt.model_executor.startup.precompile import precompile
from srt.model_executor.startup.profile_pages import profile_num_pages
from srt.model_executor.startup.start_drafter import (
    graph_speculating_runner,
    load_drafter,
    speculating_runner,
)
from srt.model_executor.step.step_pooler import StepPooler
from srt.model_executor.step.step_sampler import RowSampler, StepSampler
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig


def start_runner(
    args: ServerArgs,
    config: ModelConfig,
    folder: str,
    tp: TensorParallel,
    device: torch.device,
    report_weights: Progress = lambda done, total: None,
    report_phase: Callable[[str], None] = lambda name: None,
    capture: Capture | None = None,
    num_tokens: int = 0,
    pipeline: Pipeline | None = None,
) -> ModelRunner:
    """Load the weights, compile kernels and allocate the KV memory.

    `report_weights` receives bytes done and in total, `report_phase` the name of each later phase. `capture` captures graphs; on a GPU it
    defaults to CUDA's. `num_tokens`, unless 0, is the number of tokens that the KV memory must hold, else the options decide.
    A `pipeline` of several stages says which part of the model this is.
    """
    loaded, small = load_drafter(load_model(args, config, folder, tp, device, report_weights, pipeline))
    kernels = GraphKernels()
    if device.type == "cuda" and not config.is_encoder:
        report_phase("kernels")
        with loaded.memory.region("buffers"):  # attention keeps the buffers that it allocates here
            kernels = precompile(loaded, small)
    report_phase("memory")
    runner = build_runner(loaded, kernels, capture, num_tokens, small)
    decodes = runner.graphs.decodes
    if decodes is not None and decodes.compiled is not None:
        report_phase("compile")
        decodes.compiled.compile(decodes.run_padding)
    return runner


@torch.inference_mode()
def build_runner(
    loaded: LoadedModel,
    kernels: GraphKernels,
    capture: Capture | None = None,
    num_tokens: int = 0,
    small: LoadedModel | None = None,
) -> ModelRunner:
    """Allocate the KV memory, as large as the options and the device allow, and create everything that depends on its size.

    `small` is the smaller model that drafts, if there is one.
    """
    args, device = loaded.args, loaded.device
    max_compiled = min(args.torch_compile_max_bs, args.max_running_requests) if args.enable_torch_compile else 0
    compiled = CompiledForward(loaded.our_model, max_compiled) if max_compiled else None
    nums_pages = profile_num_pages(loaded, num_tokens)
    with loaded.memory.region("kv_cache"):
        state = init_memory_pool(loaded, nums_pages, min(loaded.config.context_length, nums_pages[0] * args.page_size))
    if capture is None and device.type == "cuda" and not args.disable_cuda_graph:
        capture = GraphCapture(device, loaded.memory.graph_pool())
    if loaded.stage.num_stages > 1 and device.type == "cpu" and capture is None:
        # Stages on a CPU have no fixed buffers, which would save them nothing.
        return new_runner(loaded, state, StepSampler(loaded, state), StepGraphs(loaded))
    if loaded.config.pooling is not None:
        return _build_pooling_runner(loaded, state, kernels, capture)
    with loaded.memory.region("buffers"):
        decodes = DecodeRunner.of(loaded, state, capture, compiled)
        if loaded.stage.is_last:
            state.sampler.prepare(decodes.logits)
        pieces = None if capture is None else PiecewiseCudaGraphRunner.of(loaded, state, capture)
        adapted = None if capture is None else PiecewiseCudaGraphRunner.of_adapted(loaded, state, capture)
    draws_by_row = device.type == "cuda" or capture is not None
    sampler = RowSampler(loaded, state, decodes) if draws_by_row else StepSampler(loaded, state)
    step_graphs = StepGraphs(loaded, decodes, pieces, kernels, adapted)
    if args.speculative_algorithm is not None:
        if draws_by_row:
            with loaded.memory.region("buffers"):
                return graph_speculating_runner(loaded, state, sampler, step_graphs, small, capture)
        return speculating_runner(loaded, state, sampler, step_graphs, small)
    if loaded.tp.exchange is not None:  # later, groups would capture at different times
        step_graphs.capture_all()
    return new_runner(loaded, state, sampler, step_graphs)


def _build_pooling_runner(
    loaded: LoadedModel, state: DeviceState, kernels: GraphKernels, capture: Capture | None
) -> ModelRunner:
    """Create the runner of a model that pools. It decodes nothing but warm-ups, so it has no graphs of decode steps."""
    with loaded.memory.region("buffers"):
        sampler, pieces = StepPooler(loaded, state), None
        is_captured = capture is not None and not loaded.config.is_encoder
        if is_captured and not sampler.reads_all_tokens:  # graphs hold the states of one token per text
            pieces = PiecewiseCudaGraphRunner.of(loaded, state, capture)
    return ModelRunner(loaded, state, sampler, StepGraphs(loaded, None, pieces, kernels))

"""Kernels are compiled before the first step: those of the first steps at once, those of graphs and later steps while the start goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from threading import Event
from typing import TYPE_CHECKING

import torch

from srt.kernels.build.graph_fills import compile_fill
from srt.model_executor.graphs.decode_runner import DecodeRunner
from srt.model_executor.graphs.graph_kernels import Graph, GraphKernels
from srt.model_executor.graphs.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup.peak_step import largest_step
from srt.model_executor.startup.trial_runner import trial_runner
from srt.model_executor.startup.warm_up import (
    batches,
    num_distinct_layers,
    run_requests,
    run_to_the_end,
    warm_up_requests,
)
from srt.model_executor.step.step_sampler import RowSampler
from srt.utils.host import usable_cores

if TYPE_CHECKING:
    from srt.kernels.build.precompile import Compilers
    from srt.model_executor.startup.kernel_record import KernelRecord

logger = logging.getLogger(__name__)
MOST_COMPILERS = 8
"""While requests come: each thread that waits for the GIL makes the thread that launches steps wait longer."""


@torch.inference_mode()
def precompile(loaded: LoadedModel) -> GraphKernels:
    """Go through steps of all kinds without launching our kernels, which threads compile meanwhile, all at the same time.

    The first steps' kernels are waited for. What later steps need is compiled while the start goes on and requests come, unless an earlier
    start has compiled it. Only as many layers take part as have all kernels among them, and no other rank. What fails here is a warning,
    and is tried again when it is needed.
    """
    # Triton is not there on every host; with PyTorch for CUDA it is.
    from srt.kernels.build.precompile import Compilers
    from srt.model_executor.startup.kernel_record import KernelRecord

    num_threads = max(1, usable_cores() // loaded.tp.size)  # the other ranks of the host compile too
    first, are_first_done = Compilers(num_threads), Event()
    shape = loaded.config.config_hash(), loaded.config.context_length, loaded.dtype, loaded.attention
    record = KernelRecord(loaded.args, shape, loaded.tp.rank, loaded.device)
    kernels, layers = GraphKernels(), loaded.model.model.layers
    begin_later = partial(Compilers, min(max(1, num_threads // 2), MOST_COMPILERS), are_first_done)
    try:
        with loaded.tp.alone():
            loaded.model.model.layers = layers[: num_distinct_layers(loaded.config.layer_windows)]
            _go_through_steps(loaded, first, record, kernels, begin_later)
    except Exception as error:
        logger.warning("Kernels are compiled one after the other, because of %s: %s", type(error).__name__, error)
    finally:
        loaded.model.model.layers = layers
        torch.cuda.empty_cache()
        are_first_done.set()
    return kernels


def _go_through_steps(
    loaded: LoadedModel,
    first: Compilers,
    record: KernelRecord,
    kernels: GraphKernels,
    begin_later: Callable[[], Compilers],
) -> None:
    """The first steps, then the later ones; the memory that they run on is dropped at the end."""
    from srt.kernels.build.precompile import precompiling

    trial = trial_runner(loaded)
    state = trial.state
    with precompiling(first):
        run_to_the_end(trial, largest_step(loaded)[0])
        trial.reset()
        decodes = DecodeRunner.of(loaded, state, None, None)
        runner = ModelRunner(loaded, state, RowSampler(loaded, state, decodes), StepGraphs(loaded, decodes))
        run_requests(runner, warm_up_requests(loaded.device.type, state.max_request_tokens, state.page_size))
    if not record.is_complete:
        later = begin_later()
        kernels.begin(later)
        _precompile_later_steps(runner, decodes, later, kernels, record)
    first.wait(first.pop_asked())


def _precompile_later_steps(
    runner: ModelRunner, decodes: DecodeRunner, compilers: Compilers, kernels: GraphKernels, record: KernelRecord
) -> None:
    from srt.kernels.build.precompile import precompiling

    state = runner.state
    try:
        with precompiling(compilers):
            _precompile_graphs(runner, decodes, compilers, kernels)
            run_requests(runner, batches(state.num_slots, state.max_request_tokens, state.page_size))
        compilers.no_more(record.record_complete)
    except Exception as error:
        logger.warning("Not all kernels are compiled ahead, because of %s: %s", type(error).__name__, error)


def _precompile_graphs(runner: ModelRunner, decodes: DecodeRunner, compilers: Compilers, kernels: GraphKernels) -> None:
    loaded = runner.loaded
    if loaded.args.disable_cuda_graph:
        return
    if loaded.device.type == "cuda":
        compilers.compile(compile_fill, partial(compile_fill, loaded.device))  # for the graph that comes first
    pieces = PiecewiseCudaGraphRunner.of(loaded, runner.state, None)
    of_decodes = decodes.precompile() if loaded.attn_backend.decode_graphs is not None else ()
    graphs: Iterator[Graph] = chain(of_decodes, () if pieces is None else pieces.precompile())
    for graph in graphs:
        kernels.add(graph, compilers.pop_asked())

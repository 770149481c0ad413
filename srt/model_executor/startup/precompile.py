"""Compile kernels ahead: those of the first steps before the start goes on, those of graphs and later steps in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from threading import Event
from typing import TYPE_CHECKING

import torch

from srt.kernels.build.graph_fills import compile_fill
from srt.model_executor.graph_speculation import GraphSpeculatingRunner
from srt.model_executor.graphs.decode_runner import DecodeRunner
from srt.model_executor.graphs.graph_kernels import Graph, GraphKernels
from srt.model_executor.graphs.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.stage_runner import new_runner
from srt.model_executor.startup.peak_step import largest_step
from srt.model_executor.startup.start_drafter import graph_speculating_runner
from srt.model_executor.startup.trial_runner import trial_runner
from srt.model_executor.startup.warm_up import (
    adapted_requests,
    batches,
    mask_something,
    run_requests,
    run_to_the_end,
    short_chunks,
    warm_up_requests,
)
from srt.model_executor.step.step_sampler import RowSampler
from srt.utils.host import usable_cores

if TYPE_CHECKING:
    from srt.kernels.build.precompile import Compilers
    from srt.model_executor.startup.kernel_record import KernelRecord

logger = logging.getLogger(__name__)
MOST_COMPILERS = 8
"""Limit of threads that compile while requests arrive: each thread that waits for the GIL delays the thread that launches steps."""


@torch.inference_mode()
def precompile(loaded: LoadedModel, small: LoadedModel | None = None) -> GraphKernels:
    """Run steps of all kinds without launching our kernels; threads compile these in parallel instead.

    These include the steps of what drafts: of `small`, or of the head beside the model. Waits for the kernels of the first steps. Those of
    later steps are compiled while the start goes on and requests arrive, unless an earlier start has compiled them. Runs only as many
    layers as together use all kernels, and involves no other rank. A failure is logged as a warning, and the kernel is compiled when it is
    needed.
    """
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.kernels.build.precompile import Compilers
    from srt.model_executor.startup.kernel_record import KernelRecord

    num_threads = max(1, usable_cores() // (loaded.tp.size * loaded.stage.num_stages))  # the other ranks compile too
    first, are_first_done = Compilers(num_threads), Event()
    shape = loaded.config.config_hash(), loaded.config.context_length, loaded.dtype, loaded.attention
    place = loaded.stage.index * loaded.tp.size + loaded.tp.rank
    record = KernelRecord(loaded.args, (*shape, drafter_key(loaded, small)), place, loaded.device)
    kernels = GraphKernels()
    begin_later = partial(Compilers, min(max(1, num_threads // 2), MOST_COMPILERS), are_first_done)
    try:
        with _shortened(loaded, small) as shortened:
            _go_through_steps(shortened, small, first, record, kernels, begin_later)
    except Exception as error:
        logger.warning(
            "Kernels could not be compiled ahead (%s: %s). They are compiled at first use, so the first requests are slow.",
            type(error).__name__,
            error,
        )
    finally:
        torch.cuda.empty_cache()
        are_first_done.set()
    return kernels


@contextmanager
def _shortened(loaded: LoadedModel, small: LoadedModel | None) -> Iterator[LoadedModel]:
    """Inside, run without other ranks, and only as many layers as together use all kernels. Yield the model as it is then."""
    num_layers = loaded.num_distinct_layers
    head = None if loaded.head is None else loaded.head.of_shortened(num_layers)
    with ExitStack() as stack:
        stack.enter_context(loaded.alone())
        stack.enter_context(loaded.model.shortened(num_layers))
        if small is not None:
            stack.enter_context(small.model.shortened(small.num_distinct_layers))
        yield replace(loaded, head=head)


def drafter_key(loaded: LoadedModel, small: LoadedModel | None) -> object:
    """Return what the kernels of the drafter depend on, beside the options."""
    head = None if loaded.head is None else loaded.head.config
    return head, None if small is None else (small.config.config_hash(), small.dtype, small.attention)


def _go_through_steps(
    loaded: LoadedModel,
    small: LoadedModel | None,
    first: Compilers,
    record: KernelRecord,
    kernels: GraphKernels,
    begin_later: Callable[[], Compilers],
) -> None:
    """Run the first steps, then the later ones. The memory that they use is freed at the end."""
    from srt.kernels.build.precompile import precompiling

    trial = trial_runner(loaded)
    state = trial.state
    with precompiling(first):
        run_to_the_end(trial, largest_step(loaded)[0])
        trial.reset()
        if loaded.tp.size == 2:  # ranks may divide the rows of a step that reports nothing of prompts
            run_to_the_end(trial, largest_step(loaded, reports=False)[0])
            trial.reset()
        decodes = DecodeRunner.of(loaded, state, None, None)
        parts = loaded, state, RowSampler(loaded, state, decodes), StepGraphs(loaded, decodes)
        is_drafted = loaded.args.speculative_algorithm is not None
        runner = graph_speculating_runner(*parts, small, None) if is_drafted else new_runner(*parts)
        short = short_chunks(loaded.attention.prefill)
        run_requests(runner, warm_up_requests(loaded.device.type, state.max_request_tokens, state.page_size, short))
        mask_something(runner)
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
            if isinstance(runner, GraphSpeculatingRunner):  # what drafts reads long prompts too
                run_requests(runner, iter([[largest_step(runner.loaded)[0]]]))
            run_requests(runner, batches(state.num_slots, state.max_request_tokens, state.page_size))
            _precompile_adapted_steps(runner)
        compilers.no_more(record.record_complete)
    except Exception as error:
        logger.warning(
            "Some kernels could not be compiled ahead (%s: %s). They are compiled at first use, which delays the requests of that step.",
            type(error).__name__,
            error,
        )


def _precompile_adapted_steps(runner: ModelRunner) -> None:
    adapters, state = runner.loaded.adapters, runner.state
    placeholder = None if adapters is None else adapters.step.placeholder
    if placeholder is not None:
        run_requests(runner, adapted_requests(state.max_request_tokens, state.page_size, placeholder))


def _precompile_graphs(runner: ModelRunner, decodes: DecodeRunner, compilers: Compilers, kernels: GraphKernels) -> None:
    loaded = runner.loaded
    if loaded.args.disable_cuda_graph:
        return
    if loaded.device.type == "cuda":
        compilers.compile(compile_fill, partial(compile_fill, loaded.device))  # the first graph needs it
    runners = [
        of(loaded, runner.state, None) for of in (PiecewiseCudaGraphRunner.of, PiecewiseCudaGraphRunner.of_adapted)
    ]
    of_decodes = decodes.precompile() if loaded.attn_backend.decode_graphs is not None else ()
    of_prompts = [pieces.precompile() for pieces in runners if pieces is not None]
    graphs: Iterator[Graph] = chain(runner.graphs.precompile_added(), of_decodes, *of_prompts)
    for graph in graphs:
        kernels.add(graph, compilers.pop_asked())

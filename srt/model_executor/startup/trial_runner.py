"""A runner for steps that a start goes through before the size of the KV memory is known."""

from __future__ import annotations

from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.device_state import init_memory_pool
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.step.step_sampler import StepSampler


def trial_runner(loaded: LoadedModel) -> ModelRunner:
    """Make a runner over tables of full size and a memory of one page, without graphs. It is dropped with its memory after its steps."""
    state = init_memory_pool(loaded, 1, loaded.config.context_length)
    return ModelRunner(loaded, state, StepSampler(loaded, state), StepGraphs(loaded))

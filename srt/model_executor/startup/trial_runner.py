"""A runner for the steps that a start runs before it knows the size of the KV memory."""

from __future__ import annotations

from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.device_state import init_memory_pool
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.stage_runner import new_runner
from srt.model_executor.step.step_sampler import StepSampler


def trial_runner(loaded: LoadedModel) -> ModelRunner:
    """Create a runner with tables of full size, one page in each group, and no graphs. The caller drops it after a few steps.

    With several stages, it runs `loaded.alone`.
    """
    state = init_memory_pool(loaded, [1] * loaded.page_groups.num, loaded.config.context_length)
    return new_runner(loaded, state, StepSampler(loaded, state), StepGraphs(loaded))

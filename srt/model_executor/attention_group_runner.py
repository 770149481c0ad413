"""The runner of a rank whose attention group shares the experts of the model with other groups (--enable-dp-attention).

Every step of a group is a step of all ranks (expert_exchange.py). A rank that has no plan joins the steps of the others when they call:
it computes its part of the experts in each layer, for their tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from srt.distributed.expert_exchange import ExpertExchange
from srt.layers.moe.mixture import Mixture
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.step.executed_step import DecodeOutput
from srt.model_executor.step.step_planner import DecodeStep
from srt.model_executor.step.step_sampler import StepSampler


class AttentionGroupRunner(ModelRunner):
    """Runs the steps of its own group, and joins those of the others."""

    def __init__(
        self,
        loaded: LoadedModel,
        state: DeviceState,
        sampler: StepSampler,
        graphs: StepGraphs,
        exchange: ExpertExchange,
    ) -> None:
        super().__init__(loaded, state, sampler, graphs)
        self._exchange = exchange
        self._mixtures = [module for module in loaded.our_model.modules() if isinstance(module, Mixture)]

    @property
    def is_called(self) -> bool:
        return self._exchange.is_called

    def when_called(self, notify: Callable[[], None]) -> None:
        self._exchange.notify(notify)

    @torch.inference_mode()
    def join(self) -> None:
        self._exchange.meet(0)
        self._run_without_tokens()

    def forward_extend(self, batch: ForwardBatch) -> torch.Tensor:
        # All layers have the same tokens: the counts that the groups exchange hold for the whole step.
        batch.output_tokens = None
        self._enter(len(batch.input_ids))
        return super().forward_extend(batch)

    def forward_decode(self, step: DecodeStep) -> DecodeOutput:
        self._enter(len(step.slots))
        return super().forward_decode(step)

    def _enter(self, num_tokens: int) -> None:
        """Begin a step with the group's tokens, or take part in steps of others until all ranks of the group have their plan."""
        while not self._exchange.meet(num_tokens):
            self._run_without_tokens()

    def _run_without_tokens(self) -> None:
        if any(self._exchange.global_num_tokens):
            for mixture in self._mixtures:
                mixture.join()

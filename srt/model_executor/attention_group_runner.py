"""The runner of a rank whose attention group shares the experts of the model with other groups (--enable-dp-attention).

Every step of a group is a step of all ranks (expert_exchange.py). A rank that has no plan joins the steps of the others when they call:
it computes its part of the experts in each layer, for their tokens. If no group has tokens of prompts, all ranks replay the graph of one
number of rows, which those without tokens fill with padding.
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
        self._enter(len(step.slots), is_decode=True)
        assert self._decode_runner is not None, "a runner without graphs.decodes has no fixed buffers for decode steps"
        self._decode_runner.graph_rows = self._choose_graph()
        return super().forward_decode(step)

    def _enter(self, num_tokens: int, is_decode: bool = False) -> None:
        """Begin a step with the group's tokens, or take part in steps of others until all ranks of the group have their plan."""
        while not self._exchange.meet(num_tokens, is_decode):
            self._run_without_tokens()

    def _choose_graph(self) -> int:
        """Return the rows of the graph that all ranks replay in this step; 0 if they launch it kernel by kernel."""
        exchange, decodes = self._exchange, self._decode_runner
        if decodes is None or not exchange.all_decode:
            return 0
        size = decodes.common_size(max(exchange.global_num_tokens))
        if size:
            exchange.pad(size)
        return size

    def _run_without_tokens(self) -> None:
        if not any(self._exchange.global_num_tokens):
            return
        size = self._choose_graph()
        if size and self._decode_runner is not None:
            self._decode_runner.replay_padding(size)
        else:
            for mixture in self._mixtures:
                mixture.join()

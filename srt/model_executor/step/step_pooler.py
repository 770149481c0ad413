"""The steps of models that pool: a vector takes the place of logits, and travels to the host as the logprobs of other models do.

Each text still draws one token, so that its row ends as a generated one does. The token is always 0, and nobody sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from srt.layers.logits_processor import Logprobs
from srt.layers.pooler import make_pooler
from srt.layers.sampler import Draws
from srt.layers.token_masks import TokenMasks
from srt.model_executor.step.executed_step import ModelRunnerOutput
from srt.model_executor.step.step_sampler import LogprobParts, StepSampler
from srt.models.library.encoder import LibraryEncoder
from srt.models.library.library_model import LibraryCausalLM
from srt.utils.pooling_config import PoolingSpec

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch
    from srt.model_executor.loaded_model import LoadedModel
    from srt.model_executor.memory.device_state import DeviceState


class StepPooler(StepSampler):
    """Pools the hidden states of rows whose prompts end, and scores the labels of a classifier."""

    def __init__(self, loaded: LoadedModel, state: DeviceState) -> None:
        super().__init__(loaded, state)
        spec, model = loaded.config.pooling, loaded.model
        assert spec is not None, "a model that generates text is not pooled"
        assert not isinstance(model, LibraryCausalLM), "the library's decoders generate text"
        pooling = PoolingSpec() if isinstance(model, LibraryEncoder) else spec  # it pools by itself
        self._pooler = make_pooler(pooling, state.num_slots, loaded.config.hidden_size, loaded.device)
        self._score = None if isinstance(model, LibraryEncoder) else model.score
        self._dtype = loaded.dtype

    @property
    def reads_all_tokens(self) -> bool:
        return self._pooler.reads_all_tokens

    def outputs_of(
        self, hidden: torch.Tensor, batch: ForwardBatch, sample_tokens: torch.Tensor, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        if not batch.batch_size:
            return hidden
        if not self.reads_all_tokens:
            hidden = super().outputs_of(hidden, batch, sample_tokens, sample_rows)
        return self._pooler.pool(hidden, batch, sample_rows)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the vectors themselves, or the scores of a classifier's labels."""
        return hidden if self._score is None else self._score(hidden.to(self._dtype)).float()

    def draws_of(
        self, step: ModelRunnerOutput, logits: torch.Tensor, masks: TokenMasks | None
    ) -> tuple[Draws, LogprobParts]:
        """Draw the token 0 for each row, and report the vectors that requests want. A vector that is not finite fails its request."""
        ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        draws = Draws(ids, logits.sum(dim=1))
        segments = step.host.output_logprobs.segments
        if not segments:
            return draws, []
        vectors = logits[step.plan.output_logprobs.rows]
        zeros = vectors.new_zeros((len(vectors), 1))
        none = zeros[:, :0]
        return draws, [(Logprobs(zeros.squeeze(1), none.to(torch.int32), none, none, vectors), segments)]

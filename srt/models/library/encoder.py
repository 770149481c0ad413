"""An encoder of the library transformers. It keeps no keys and values: each text is computed whole, in the step that has its last token.

The tokens of a text that arrive in earlier steps wait in the token table. So the scheduler treats an encoder's texts like prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.weights import WeightPiece
from srt.models.library.architecture import build_encoder, compute_buffers
from srt.models.library.weights import NamedWeights
from srt.utils.families.encoders import encoder_of
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from srt.utils.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch

MOST_TOKENS = 8192
"""Limit of the tokens, padding included, that are computed at once. A longer text is computed alone."""
COMPUTED = r"(^|\.)(position_ids|token_type_ids)$"
HEADS = r"^(cls|lm_head|pooler|classifier|decoder|head|vocab_[a-z_]+|predictions|discriminator_predictions)\."
"""Tensors for other tasks than embedding a text, which checkpoints of encoders often hold."""


class LibraryEncoder(nn.Module):
    """Makes vectors of texts, or a classifier's scores. Build one with `build`, on the meta device; a loader fills it."""

    def __init__(self, config: ModelConfig, library: Any, tp: TensorParallel, separator: int | None) -> None:
        """`separator`, unless None, is the token between the two texts of a pair, which the library tells apart."""
        super().__init__()
        assert config.pooling is not None, "an encoder pools"
        self.config = config
        self.lm_head = NoHead()
        self._pooling = config.pooling
        self._separator = separator
        self._padding: int = library.config.pad_token_id or 0
        self._weights = NamedWeights(library, tp)
        self._library = library

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        folder: str | Path,
        overrides: Mapping[str, Any],
        tp: TensorParallel,
        dtype: torch.dtype,
    ) -> LibraryEncoder:
        encoder, pooling = encoder_of(config.architecture), config.pooling
        assert encoder is not None and pooling is not None, f"{config.architecture} is no encoder that is served"
        if tp.size > 1:
            raise ModelError(f"{config.architecture} is an encoder, which is not split over ranks: use --tp 1.")
        library = build_encoder(config.architecture, folder, overrides, dtype, is_classifier=pooling.is_classifier)
        compute_buffers(library, dtype)
        separator = None
        if pooling.is_classifier and encoder.tells_texts_apart and library.config.type_vocab_size > 1:
            separator = load_tokenizer(folder).encode("")[-1]
        return cls(config, library, tp, separator)

    def check(self) -> None:
        """Accept the model: nothing is left to be checked once the weights are loaded."""

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """Return a float32 vector, or a score for each label, of each text that ends with this step."""
        assert batch.output_tokens is not None, "only texts that end have results"
        return self.encode(_ended_texts(batch, positions))

    def encode(self, texts: list[Tensor]) -> Tensor:
        """Return the results of texts given by their token ids [texts, hidden size or labels]."""
        results: dict[int, Tensor] = {}
        for numbers in _batches([len(text) for text in texts]):
            results |= zip(numbers, self._encode([texts[number] for number in numbers]), strict=True)
        width = len(self._pooling.labels) or self.config.hidden_size
        if not results:
            return torch.empty((0, width))
        return torch.stack([results[number] for number in range(len(texts))])

    def _encode(self, texts: list[Tensor]) -> Tensor:
        lengths = torch.tensor([len(text) for text in texts], device=texts[0].device)
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=self._padding)
        is_real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        given = {} if self._separator is None else {"token_type_ids": _text_numbers(ids, self._separator) * is_real}
        output = self._library(input_ids=ids, attention_mask=is_real.long(), **given)
        if self._pooling.is_classifier:
            scores: Tensor = output.logits.float()
            return scores
        hidden: Tensor = output.last_hidden_state.float()
        match self._pooling.pooling:
            case "cls":
                return hidden[:, 0]
            case "mean":
                return hidden.masked_fill(~is_real[:, :, None], 0.0).sum(dim=1) / lengths[:, None]
            case "last":
                return hidden[torch.arange(len(texts), device=ids.device), lengths - 1]

    def weight_pieces(self, stored: Collection[str] | None) -> list[WeightPiece]:
        """Return the pieces of all parameters; `stored` are the names in the checkpoint, None if there is none."""
        return self._weights.pieces(stored)

    def unused_weights(self, stored: Collection[str]) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the stored tensors that the model ignores, and pairs of which the second is used, and the first must be a copy."""
        others = COMPUTED if self._pooling.is_classifier else f"{COMPUTED}|{HEADS}"
        return self._weights.unused(stored, others)

    @property
    def weights_per_layer(self) -> int:
        """The number of weights of a layer, on average."""
        num_weights: int = sum(weight.numel() for weight in self._library.parameters())
        return num_weights // int(self._library.config.num_hidden_layers)

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Run all layers, because the library's model cannot be shortened."""
        yield


class NoHead:
    """The output layer of a model that has none: no rank has a column of logits."""

    shard_start, shard_size = 0, 0

    def __init__(self) -> None:
        self.weight = torch.empty((0, 0))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros((len(hidden), 0), dtype=torch.float32)

    def logits_into(self, hidden: Tensor, out: Tensor) -> None:
        """Write nothing: there are no columns."""


def _ended_texts(batch: ForwardBatch, positions: Tensor) -> list[Tensor]:
    """Return the ids of each text whose last token is among the batch's output tokens."""
    assert batch.output_tokens is not None
    first_of_decodes = torch.arange(batch.num_decode_rows, device=positions.device) + batch.num_extend_tokens
    starts = torch.cat((batch.extend_start_loc, first_of_decodes))
    rows = torch.searchsorted(starts, batch.output_tokens, right=True) - 1
    slots, ends = batch.req_pool_indices[rows].tolist(), positions[batch.output_tokens].tolist()
    table = batch.req_to_token_pool.token_table
    return [table[slot, : end + 1].long() for slot, end in zip(slots, ends, strict=True)]


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Yield the numbers of texts that are computed together: such as have similar lengths, the longest first."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > MOST_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _text_numbers(ids: Tensor, separator: int) -> Tensor:
    """Return 0 for the tokens of a first text and its separator, and 1 for those behind."""
    is_separator = (ids == separator).long()
    return ((is_separator.cumsum(dim=1) - is_separator) > 0).long()

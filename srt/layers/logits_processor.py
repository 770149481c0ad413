"""Compute logits from hidden states, and the logprobs that requests asked for. The vocabulary may be split over ranks.

Logprobs are the model's own: `step_sampler.py` takes them before penalties, masks, temperature and filters change the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from srt.distributed.parallel_state import TensorParallel

A = TypeVar("A")
BLOCK_ELEMENTS = 1 << 22  # largest number of logits that exist at once if there are many rows


class LMHead(Protocol):
    """The output layer: this rank's shard of a vocabulary that is padded to equal shards."""

    @property
    def shard_start(self) -> int: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def logits_into(self, hidden: torch.Tensor, out: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class LogprobArrays(Generic[A]):
    """The rows whose logprobs to report, as numpy arrays or as tensors."""

    rows: A  # [N] int64: rows of the hidden states, or of the logits
    of_ids: A  # [N, m] int64: token ids to report as well; m is the most that a row asks for, the rest is 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The model's own logprobs of N rows: float32 log-softmax of its logits."""

    chosen: torch.Tensor  # [N] float32
    top_ids: torch.Tensor  # [N, k] int32, best first; k is the most that a row asks for
    top: torch.Tensor  # [N, k] float32
    of_ids: torch.Tensor  # [N, m] float32
    vectors: torch.Tensor | None = None  # [N, width] float32: what a model that pools gives instead of logprobs

    def tensors(self) -> list[torch.Tensor]:
        """Return all of them, the vectors last."""
        logprobs = [self.chosen, self.top_ids, self.top, self.of_ids]
        return logprobs if self.vectors is None else [*logprobs, self.vectors]


@dataclass(frozen=True, slots=True)
class LogitsProcessorOutput:
    """The logits and prompt logprobs of a step."""

    next_token_logits: torch.Tensor | None
    """[R, this rank's columns], overwritten by the next step; None where no row samples. A model that pools gives vectors here."""
    prompt_logprobs: Logprobs | None


def gather_vocabulary(tp: TensorParallel, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return [rows, vocab_size] on every rank from each rank's [rows, columns]. The padding after the last token is cut off."""
    return tp.all_gather(logits, dim=-1)[:, :vocab_size]


class LogitsProcessor:
    """Computes logits and logprobs. Every rank must call the same methods with the same rows, because they may gather."""

    def __init__(self, tp: TensorParallel, vocab_size: int) -> None:
        self._tp = tp
        self._vocab_size = vocab_size

    def logits(self, hidden: torch.Tensor, lm_head: LMHead) -> torch.Tensor:
        """Return this rank's columns [R, columns] float32 of the logits; -inf for padding."""
        logits = lm_head.logits(hidden).to(torch.float32)
        self._mask_padding(logits, lm_head)
        return logits

    def logits_into(self, hidden: torch.Tensor, lm_head: LMHead, out: torch.Tensor) -> None:
        """Write the logits of all rows to `out` [rows, columns] in the model's dtype. They are exact: `logits` computes in it too."""
        lm_head.logits_into(hidden, out)
        self._mask_padding(out, lm_head)

    def _mask_padding(self, logits: torch.Tensor, lm_head: LMHead) -> None:
        num_real = self._vocab_size - lm_head.shard_start
        if num_real < logits.shape[1]:
            logits[:, max(0, num_real) :] = float("-inf")

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logprobs [rows, vocabulary] float32 from this rank's columns."""
        return gather_vocabulary(self._tp, logits, self._vocab_size).log_softmax(dim=-1)

    def largest(self, log_probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids [rows, count] int32 of the largest logprobs of each row, and their values."""
        best = log_probs.topk(count, dim=-1)
        return best.indices.to(torch.int32), best.values

    def pick_logprobs(self, log_probs: torch.Tensor, chosen: torch.Tensor, of_ids: torch.Tensor, top: int) -> Logprobs:
        """Return the logprobs of the `chosen` ids, of the `top` best ids and of `of_ids`, from [N, vocabulary] logprobs."""
        top_ids, best = self.largest(log_probs, min(top, log_probs.shape[1]))
        return Logprobs(
            chosen=log_probs.gather(1, chosen.unsqueeze(1)).squeeze(1),
            top_ids=top_ids,
            top=best,
            of_ids=log_probs.gather(1, of_ids),
        )

    def prompt_logprobs(
        self,
        hidden: torch.Tensor,
        lm_head: LMHead,
        wanted: LogprobArrays[torch.Tensor],
        targets: torch.Tensor,
        top: int,
    ) -> Logprobs:
        """Return the logprobs of `targets` [N] and of the `top` best ids of each row, one block of rows at a time."""
        rows_at_once = max(1, BLOCK_ELEMENTS // self._vocab_size)
        parts = []
        for begin in range(0, len(targets), rows_at_once):
            block = slice(begin, begin + rows_at_once)
            log_probs = self.log_softmax(self.logits(hidden[wanted.rows[block]], lm_head))
            parts.append(self.pick_logprobs(log_probs, targets[block], wanted.of_ids[block], top))
        return Logprobs(
            chosen=torch.cat([part.chosen for part in parts]),
            top_ids=torch.cat([part.top_ids for part in parts]),
            top=torch.cat([part.top for part in parts]),
            of_ids=torch.cat([part.of_ids for part in parts]),
        )

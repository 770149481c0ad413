"""Results of executed steps whose tokens are not drawn yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from srt.layers.logits_processor import LogitsProcessorOutput
from srt.model_executor.step.plan_arrays import PlanArrays
from srt.model_executor.step.slot_mirror import Ints
from srt.model_executor.step.step_planner import DecodeStep, HostStep, VerifyStep
from srt.sampling.sampling_batch_info import SamplingBatchInfo


class DecodeOutput(NamedTuple):
    """The result of a step in which every row decodes."""

    step: DecodeStep
    logits: torch.Tensor  # [rows, this rank's columns] in the model's dtype; the next step overwrites them


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of any other step."""

    sampling_info: SamplingBatchInfo
    host: HostStep
    plan: PlanArrays[torch.Tensor]
    logits_output: LogitsProcessorOutput


class VerifiedTokens(NamedTuple):
    """The result of a step that verified drafts and drew behind each token as it ran. Tokens of a row follow each other."""

    ids: Ints  # drawn behind each token
    values: NDArray[np.float32]  # that won
    slots: Ints
    positions: Ints  # of the draws
    num_draws: Ints  # of each row


class VerifyOutput(NamedTuple):
    """The result of a step on a GPU in which every row decodes and some bring drafts."""

    step: VerifyStep
    logits: torch.Tensor  # [tokens, this rank's columns] in the model's dtype; the next step overwrites them


ExecutedStep = ModelRunnerOutput | DecodeOutput | VerifiedTokens | VerifyOutput

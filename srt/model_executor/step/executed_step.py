"""Results of executed steps whose tokens are not drawn yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from srt.layers.logits_processor import LogitsProcessorOutput
from srt.model_executor.step.plan_arrays import PlanArrays
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


class VerifiedRows(NamedTuple):
    """The result of a step that verified drafts, drew, and kept what counts as it ran."""

    ids: NDArray[np.int32]  # of the draws that count, row after row
    counts: NDArray[np.int32]  # of each row, or -1


class VerifyOutput(NamedTuple):
    """The result of a step on a GPU in which every row decodes and some bring drafts."""

    step: VerifyStep
    logits: torch.Tensor  # [tokens, this rank's columns] in the model's dtype; the next step overwrites them


ExecutedStep = ModelRunnerOutput | DecodeOutput | VerifiedRows | VerifyOutput

"""ModelRunners in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from srt.distributed.parallel_state import TensorParallel
from srt.distributed.pipeline import Pipeline
from srt.model_executor.graphs.cuda_graph_runner import Capture
from srt.model_executor.graphs.decode_runner import DecodeRunner
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.startup.start_runner import start_runner
from srt.model_executor.step.executed_step import DecodeOutput, ExecutedStep, VerifiedRows, VerifyOutput
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig
from tests.support.ranks import CPU, single_rank


def make_runner(
    folder: Path,
    page_size: int,
    tp: TensorParallel | None = None,
    device: torch.device = CPU,
    capture: Capture | None = None,
    pipeline: Pipeline | None = None,
    **options: Any,
) -> ModelRunner:
    """A runner with room for a few dozen requests; `options` are those of ServerArgs."""
    defaults = {"max_total_tokens": 8192, "max_running_requests": 24}
    args = ServerArgs(model_path=str(folder), device=device.type, page_size=page_size, **{**defaults, **options})
    config = ModelConfig.from_folder(
        folder, args.model_overrides(), quantization=args.quantization, model_impl=args.model_impl
    )
    return start_runner(args, config, str(folder), tp or single_rank(), device, capture=capture, pipeline=pipeline)


def decodes_of(runner: ModelRunner) -> DecodeRunner:
    """Its runner of decodes, which every runner but a trial has."""
    assert runner.graphs.decodes is not None
    return runner.graphs.decodes


def logits_in(output: ExecutedStep) -> torch.Tensor:
    """The logits of an executed step's rows; the next step overwrites them."""
    assert not isinstance(output, VerifiedRows), "it drew as it ran"
    if isinstance(output, DecodeOutput | VerifyOutput):
        return output.logits
    logits = output.logits_output.next_token_logits
    assert logits is not None
    return logits

"""ModelRunners in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from srt.distributed.parallel_state import TensorParallel
from srt.model_executor.graphs.cuda_graph_runner import Capture
from srt.model_executor.model_runner import ModelRunner
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig
from tests.support.ranks import CPU, single_rank


def make_runner(
    folder: Path,
    page_size: int,
    tp: TensorParallel | None = None,
    device: torch.device = CPU,
    capture: Capture | None = None,
    **options: Any,
) -> ModelRunner:
    """A runner with room for a few dozen requests; `options` are those of ServerArgs."""
    defaults = {"max_total_tokens": 8192, "max_running_requests": 24}
    args = ServerArgs(model_path=str(folder), device=device.type, page_size=page_size, **{**defaults, **options})
    config = ModelConfig.from_folder(folder)
    return ModelRunner(args, config, str(folder), tp or single_rank(), device, capture=capture)

"""Models with windows on a GPU: pages are given back behind them, and every backend and graph finds those of its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srt.server_args import ServerArgs
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import token_ids
from tests.support.runners import make_runner
from tests.support.whole_engine import WholeEngine
from tests.unit.model_executor.test_page_groups import MISTRAL
from tests.unit.model_executor.test_windows_and_fp8 import changed

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
PAGE_SIZE, ANSWER = 16, 24
ROOMY: dict[str, Any] = {"max_total_tokens": 8192, "max_running_requests": 8, "chunked_prefill_size": 4096}
REFERENCE: dict[str, Any] = {"attention_backend": "torch_native", "dtype": "float32", "disable_cuda_graph": True}
GRAPHS: dict[str, Any] = {"cuda_graph_bs": (1, 2, 4, 8), "piecewise_cuda_graph_max_tokens": 64}
TIGHT: dict[str, Any] = {"max_total_tokens": 2048, "max_running_requests": 8, "chunked_prefill_size": 64}
"""With TIGHT the window group has a few pages only, so that pages of windows are given to others all the time."""


def answers(folder: str, prompts: list[list[int]], options: dict[str, Any]) -> tuple[list[list[int]], WholeEngine]:
    """Return the greedy answers, to the prompts and again to what continues them."""
    runner = make_runner(Path(folder), PAGE_SIZE, device=CUDA, **options)
    while runner.graphs.num_left:
        runner.graphs.capture_next()
    engine = WholeEngine(ServerArgs(model_path=folder, page_size=PAGE_SIZE, **options), runner)
    first = engine.run(prompts, ANSWER)
    return first + engine.run([a + b for a, b in zip(prompts, first, strict=True)], ANSWER), engine


@pytest.mark.parametrize("family", ["olmo3", "mistral"])
@pytest.mark.parametrize("backend", ["triton", "torch_native"])
@pytest.mark.parametrize("disable_cuda_graph", [False, True])
def test_little_room_for_windows_changes_no_answer(
    family: str, backend: str, disable_cuda_graph: bool, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    if family == "mistral":  # all of its layers have a window
        folder = str(changed(checkpoint("llama", num_layers=4), tmp_path / "mistral", MISTRAL))
    else:
        folder = str(checkpoint("olmo3", num_layers=4))
    rng = np.random.default_rng(5)
    prompts = [token_ids(rng, length, 512) for length in (5, 40, 130, 200)]
    given = {"attention_backend": backend, "disable_cuda_graph": disable_cuda_graph, "dtype": "float32", **GRAPHS}
    expected, _ = answers(folder, prompts, {**ROOMY, **REFERENCE})
    found, engine = answers(folder, prompts, {**TIGHT, **given})
    (pages,) = engine.core.memory.windows
    assert pages.num_pages < engine.core.memory.num_pages // 4
    assert found == expected

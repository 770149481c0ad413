"""Models with windows give pages back behind them, and still compute what transformers does."""

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
from tests.unit.model_executor.test_windows_and_fp8 import changed

PAGE_SIZE = 4
OPTIONS: dict[str, Any] = {
    "max_total_tokens": 400,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "schedule_conservativeness": 0.01,
}
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20}


def transformers_outputs(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(count):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            outputs.append(ids[len(prompt) :])
    return outputs


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo3", "cohere2", "mistral"])
def test_chunked_cached_and_preempted_requests_match_transformers(
    family: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """The window's pages suffice for one request and a chunk, and several requests run at a time. All of Mistral's layers have a window."""
    if family == "mistral":
        folder = changed(checkpoint("llama", num_layers=4), tmp_path / "mistral", MISTRAL)
    else:
        folder = checkpoint(family, num_layers=4)
    rng = np.random.default_rng(3)
    first = token_ids(rng, 90, 512)
    runner = make_runner(folder, PAGE_SIZE, **OPTIONS)
    args = ServerArgs(model_path=str(folder), device="cpu", page_size=PAGE_SIZE, **OPTIONS)
    (window,) = runner.state.windows
    assert runner.state.window_pages[0] < runner.state.num_pages // 4
    engine = WholeEngine(args, runner)

    outputs = engine.run([first], 10)
    continued = first + outputs[0] + token_ids(rng, 9, 512)
    prompts = [continued, first[:60] + token_ids(rng, 30, 512), token_ids(rng, 5, 512), continued]
    found = outputs + engine.run(prompts, 10)
    growing = [token_ids(rng, count, 512) for count in (5, 6, 7)]
    grown = engine.run(growing, 30)

    counters, pages = engine.core.counters, engine.core.memory.windows[0]
    assert found == transformers_outputs(folder, [first, *prompts], 10)
    assert grown == transformers_outputs(folder, growing, 30)
    assert counters.num_cached_tokens > len(first) - window, "what follows a cached prompt begins in the cache"
    assert counters.num_preempted > 0, "the window's pages suffice for three requests that grow"
    assert pages.num_available == pages.num_pages

"""Drafts on a GPU change no answer of models with windows, experts and latents. Servers do not offer it yet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from srt.model_executor.graphs import verify_runner
from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_engine import MOST_DRAFTS, VOCAB, ToldDrafter, engine_of
from tests.support.plan_driver import token_ids

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "device": torch.device("cuda", 0), "max_running_requests": 6, "cuda_graph_bs": (1, 2, 4, 6),
}  # fmt: skip
NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1 + MOST_DRAFTS}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_layers": 4},
    "gpt_oss": {},
    "qwen3_moe": {},
    "deepseek_v3": {"num_layers": 3, "tied": False},
}


@pytest.mark.parametrize("together", [2, 48])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_answer_of_any_family(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, family: str, together: int
) -> None:
    monkeypatch.setattr(verify_runner, "LEAST_TOGETHER", together)
    folder, rng = checkpoint(family, **FAMILIES[family]), np.random.default_rng(1)
    prompts = [token_ids(rng, length, VOCAB) for length in (60, 3, 17)]
    options: dict[str, Any] = {"max_total_tokens": 600, "chunked_prefill_size": 16, **SMALL}
    plain, _ = engine_of(folder, 16, **options)
    outputs = plain.run(prompts, 30)
    engine, runner = engine_of(folder, 16, **options, **NGRAM)
    runner.graphs.capture_all()
    told = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    drafter = runner._drafter = ToldDrafter(runner, told)
    assert engine.run(prompts, 30) == outputs
    assert min(drafter.num_right[:3]) >= 1, drafter.num_right

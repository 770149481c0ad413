"""Drafts change no answer of models with windows, experts, latents and quantised weights, by the runners of a CPU and of a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_engine import MOST_DRAFTS, VOCAB, ToldDrafter, engine_of
from tests.support.plan_driver import token_ids
from tests.support.recorder import Recorder

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_layers": 4},
    "gpt_oss": {},
    "qwen3_moe": {},
    "deepseek_v3": {"num_layers": 3, "tied": False},
}


@pytest.mark.parametrize("graphs", [None, Recorder()], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_answer_of_any_family(
    checkpoint: CheckpointFactory, family: str, graphs: Recorder | None
) -> None:
    folder, rng = checkpoint(family, **FAMILIES[family]), np.random.default_rng(1)
    prompts = [token_ids(rng, length, VOCAB) for length in (60, 3, 17)]
    options: dict[str, Any] = {"max_total_tokens": 400, "max_running_requests": 4, "chunked_prefill_size": 16}
    plain, _ = engine_of(folder, 4, **options)
    outputs = plain.run(prompts, 30)
    drafts: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1 + MOST_DRAFTS}
    engine, runner = engine_of(folder, 4, capture=graphs, **drafts, **options)
    if graphs is not None:
        runner.graphs.capture_all()
    told = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    drafter = runner._drafter = ToldDrafter(runner, told)
    assert engine.run(prompts, 30) == outputs
    assert min(drafter.num_right[:3]) >= 1, drafter.num_right

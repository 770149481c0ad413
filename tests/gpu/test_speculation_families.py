"""Drafts on a GPU change no answer of models with windows, experts, latents, and quantised weights, keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srt.model_executor.graphs import verify_runner
from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_engine import (
    MOST_DRAFTS,
    VOCAB,
    ToldDrafter,
    answers_of,
    check_equal,
    engine_of,
    requests_of,
)
from tests.support.drafted_server import SERVED, check_server
from tests.support.eagle3_heads import make_head
from tests.support.plan_driver import token_ids

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "device": torch.device("cuda", 0), "max_running_requests": 6, "cuda_graph_bs": (1, 2, 4, 6),
}  # fmt: skip
NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1 + MOST_DRAFTS}


@pytest.mark.parametrize("together", [2, 48])
@pytest.mark.parametrize("kind", SERVED)
def test_drafts_change_no_answer_of_any_family(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, kind: str, together: int
) -> None:
    monkeypatch.setattr(verify_runner, "LEAST_TOGETHER", together)
    served, rng = SERVED[kind], np.random.default_rng(1)
    folder = checkpoint(served.family, **served.fields)
    prompts = [token_ids(rng, length, VOCAB) for length in (60, 3, 17)]
    options: dict[str, Any] = {"max_total_tokens": 600, "chunked_prefill_size": 16, **SMALL, **served.options}
    plain, _ = engine_of(folder, 16, **options)
    outputs = plain.run(prompts, 30)
    engine, runner = engine_of(folder, 16, **options, **NGRAM)
    runner.graphs.capture_all()
    told = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    drafter = runner._drafter = ToldDrafter(runner, told)
    assert engine.run(prompts, 30) == outputs
    assert min(drafter.num_right[:3]) >= 1, drafter.num_right


@pytest.mark.parametrize("kind", ["windows and sinks", "experts", "latents"])
def test_a_head_drafts_for_any_family(checkpoint: CheckpointFactory, tmp_path: Path, kind: str) -> None:
    """Its drafts are mostly wrong, because its weights are random."""
    served = SERVED[kind]
    folder = checkpoint(served.family, **served.fields)
    plain, _ = engine_of(folder, 16, **SMALL)
    expected = answers_of(plain, requests_of(7, 12))
    head = make_head(folder, tmp_path / "head", draft_vocab=300, taps=[0, 1, 1])
    given: dict[str, Any] = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(head),
        "speculative_num_steps": 3,
    }
    engine, runner = engine_of(folder, 16, **SMALL, **given)
    runner.graphs.capture_all()
    check_equal(answers_of(engine, requests_of(7, 12)), expected)


@pytest.mark.parametrize("kind", SERVED)
def test_servers_of_all_kinds_of_models_answer_as_without_drafts(checkpoint: CheckpointFactory, kind: str) -> None:
    check_server(checkpoint, kind, "cuda")

"""A layer of DeepSeek V3 that predicts the token after the next: its drafts are those of a plain implementation and change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from srt.model_executor.step.step_output import VerifiedOnDevice
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from srt.utils.mtp_config import served_mtp
from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_engine import Answers, answers_of, check_equal, engine_of, requests_of
from tests.support.eagle3_heads import WatchedDrafts
from tests.support.mtp_checkpoint import ReferenceMtp, add_mtp_layer
from tests.support.recorder import Recorder


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_mtp_layer(checkpoint("deepseek_v3", num_layers=3, tied=False), tmp_path_factory.mktemp("mtp") / "model")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    engine, _ = engine_of(folder, 16)
    return answers_of(engine, requests_of(7, 24))


def nextn(folder: Path) -> dict[str, Any]:
    """The options, with the folder that the preflight adds."""
    return {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": str(folder), "speculative_num_steps": 3}


@pytest.mark.parametrize(
    ("page_size", "options"),
    [
        (16, {}),
        (1, {"chunked_prefill_size": 7, "max_total_tokens": 100}),
        (4, {"chunked_prefill_size": 7, "max_total_tokens": 100, "capture": Recorder()}),
    ],
    ids=["all at once", "with preemption", "as on a GPU"],
)
def test_drafts_are_those_of_a_plain_implementation_and_change_no_answer(
    folder: Path, expected: Answers, page_size: int, options: dict[str, Any]
) -> None:
    given = {**options, "max_running_requests": 6, "schedule_conservativeness": 0.01}
    engine, runner = engine_of(folder, page_size, **given, **nextn(folder))
    if "capture" in given:
        runner.graphs.capture_all()
    watched, aborted = WatchedDrafts(runner, ReferenceMtp(folder)), (3, 6)
    check_equal(answers_of(engine, requests_of(7, 24), aborted), expected, aborted)
    assert watched.num_compared > 5
    assert watched.num_different == 0
    assert engine.core.counters.num_cached_tokens > 0
    engine.core.memory.check([])


def test_drafts_ahead_of_results_rest_on_the_accepted_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VerifiedOnDevice, "is_ready", lambda output: False)
    engine, runner = engine_of(folder, 16, hears_late=True, capture=Recorder(), **nextn(folder))
    watched = WatchedDrafts(runner, ReferenceMtp(folder))
    engine.run([list(range(3, 20)), list(range(40, 60))], 50)
    assert watched.num_ahead > 5
    assert watched.num_different == 0


def test_a_model_without_such_a_layer_is_refused(checkpoint: CheckpointFactory) -> None:
    plain = checkpoint("deepseek_v3", config={"num_nextn_predict_layers": 0})
    for folder in (checkpoint("qwen3"), plain):
        with pytest.raises(ModelError, match="NEXTN needs a checkpoint of DeepseekV3ForCausalLM"):
            served_mtp(ModelConfig.from_folder(folder))
    with pytest.raises(ModelError, match="NEXTN does not support the layers of the library transformers"):
        served_mtp(ModelConfig.from_folder(checkpoint("deepseek_v3"), model_impl="transformers"))
    lacking = checkpoint("deepseek_v3", num_layers=3, tied=False)  # its configuration names one
    with pytest.raises(ModelError, match=r"it lacks model\.layers\.3\."):
        engine_of(lacking, 16, **nextn(lacking))

"""A head that drafts from hidden states: its drafts are those of a plain implementation, and they change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from srt.kernels.cpu import decode_step
from srt.model_executor.step.step_output import VerifiedOnDevice
from srt.protocol.messages import GenerateRequest, LogprobSpec, int32_array
from srt.sampling.sampling_params import SamplingParams
from srt.speculative.drafter import Ints
from srt.utils.checkpoint import resolve_model_path
from srt.utils.model_error import ModelError
from srt.utils.tokenizer import load_tokenizer
from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_engine import Answers, answers_of, check_equal, engine_of, requests_of
from tests.support.eagle3_heads import ReferenceHead, WatchedDrafts, make_head
from tests.support.recorder import Recorder

NUM_STEPS = 3
TAPS = [1, 2, 3]
PROMPT = "<|im_start|>user\nTell me a story about a blue owl.<|im_end|>\n<|im_start|>assistant\n"
NONE = int32_array([0])


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3", num_layers=4)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    engine, _ = engine_of(folder, 16)
    return answers_of(engine, requests_of(7, 24))


def eagle3(head: Path, **options: Any) -> dict[str, Any]:
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(head),
        "speculative_num_steps": NUM_STEPS,
        **options,
    }


@pytest.mark.parametrize(
    ("is_speculators", "options", "flags"),
    [
        (False, {"page_size": 16}, {}),
        (False, {"page_size": 16, "chunked_prefill_size": 7, "is_plain": True}, {"norm_before_residual": True}),
        (False, {"page_size": 1, "chunked_prefill_size": 7, "max_total_tokens": 100}, {"norm_before_fc": True}),
        (True, {"page_size": 16, "chunked_prefill_size": 1}, {"norm_before_residual": True, "norm_output": True}),
        (True, {"page_size": 4, "chunked_prefill_size": 7, "max_total_tokens": 100, "capture": Recorder()}, {}),
    ],
    ids=["all at once", "with PyTorch alone", "with preemption", "token by token", "as on a GPU"],
)
def test_drafts_are_those_of_a_plain_implementation_and_change_no_answer(
    folder: Path,
    expected: Answers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_speculators: bool,
    options: dict[str, Any],
    flags: dict[str, Any],
) -> None:
    draft_vocab = None if flags else 300
    head = make_head(
        folder, tmp_path / "head", is_speculators=is_speculators, draft_vocab=draft_vocab, taps=TAPS, **flags
    )
    given = {**options, "max_running_requests": 6, "schedule_conservativeness": 0.01}
    page_size = given.pop("page_size")
    if given.pop("is_plain", False):
        monkeypatch.setattr(decode_step, "load_library", lambda: None)
    engine, runner = engine_of(folder, page_size, **given, **eagle3(head))
    if "capture" in given:
        runner.graphs.capture_all()
    else:
        assert (runner._drafter._compiled is None) == options.get("is_plain", False)
    watched = WatchedDrafts(runner, ReferenceHead(folder, head, TAPS, **flags))
    aborted = (3, 6)
    found = answers_of(engine, requests_of(7, 24), aborted)
    check_equal(found, expected, aborted)
    assert watched.num_compared > 5
    assert watched.num_different == 0
    assert engine.core.counters.num_cached_tokens > 0
    assert (engine.core.counters.num_preempted > 0) == (given.get("max_total_tokens", 8192) < 1000)
    engine.core.memory.check([])


def test_a_cached_prefix_brings_its_entries(folder: Path, tmp_path: Path) -> None:
    """The second request computes the entries of its last tokens alone, and drafts what it would without the cache."""
    head = make_head(folder, tmp_path / "head", taps=TAPS)
    engine, runner = engine_of(folder, 4, **eagle3(head))
    lengths: list[int] = []
    extend = runner._drafter._steps.extend

    def counted(slots: Ints, starts: Ints, ends: Ints, has_outputs: bool) -> torch.Tensor:
        lengths.extend((ends - starts).tolist())
        hidden: torch.Tensor = extend(slots, starts, ends, has_outputs)
        return hidden

    runner._drafter._steps.extend = counted
    prompt = list(range(3, 83))
    engine.run([prompt], 1)
    watched = WatchedDrafts(runner, ReferenceHead(folder, head, TAPS))
    engine.run([[*prompt[:60], 7, 8, 9]], 12)
    assert lengths[:2] == [79, 3]
    assert watched.num_compared > 0
    assert watched.num_different == 0


@pytest.mark.parametrize("way", ["compiled", "with PyTorch alone", "as on a GPU"])
def test_the_shipped_head_draws_with_the_noise_of_the_request(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """At this temperature chance decides: drafts of the same noise are right in 22 % of the cases, of another one in 4 %."""
    if way == "with PyTorch alone":
        monkeypatch.setattr(decode_step, "load_library", lambda: None)
    head, capture = resolve_model_path("tiny-eagle3"), Recorder() if way == "as on a GPU" else None
    engine, runner = engine_of(resolve_model_path("tiny"), 16, dtype="float32", capture=capture, **eagle3(head))
    rights: list[int] = []
    runner._limits.note = lambda slots, num_drafts, num_right: rights.extend((num_right > 0).tolist())
    sampling = SamplingParams.from_dict({"temperature": 2.5, "max_new_tokens": 60}).spec(60, ())
    ids = load_tokenizer(resolve_model_path("tiny")).encode(PROMPT)
    requests = [
        GenerateRequest(rid, str(rid), int32_array(ids), NONE, [int32_array()], sampling, LogprobSpec(), 50 + rid)
        for rid in range(4)
    ]
    answers_of(engine, requests)
    assert len(rights) > 60
    assert np.mean(rights) > 0.15, np.mean(rights)


def test_drafts_ahead_of_results_rest_on_the_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host does not know yet how many drafts were right, the device computes the entries of just these."""
    monkeypatch.setattr(VerifiedOnDevice, "is_ready", lambda output: False)
    target, head = resolve_model_path("tiny"), resolve_model_path("tiny-eagle3")
    engine, runner = engine_of(target, 16, hears_late=True, dtype="float32", capture=Recorder(), **eagle3(head))
    watched = WatchedDrafts(runner, ReferenceHead(target, head, [2, 4, 7]))
    engine.run([load_tokenizer(target).encode(PROMPT), list(range(40, 60))], 50)
    assert watched.num_ahead > 5
    assert watched.num_compared > 20
    assert watched.num_different == 0


def test_a_head_for_tokens_that_the_model_lacks_is_refused(folder: Path, tmp_path: Path) -> None:
    head = make_head(folder, tmp_path / "head", draft_vocab=300, taps=TAPS)
    weights = load_file(head / "model.safetensors")
    weights["d2t"][-1] = 10**6
    save_file(weights, head / "model.safetensors")
    with pytest.raises(ModelError, match="d2t names tokens outside the model's vocabulary of 512"):
        engine_of(folder, 16, **eagle3(head))

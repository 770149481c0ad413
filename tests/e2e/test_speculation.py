"""The shipped model with drafts, on two ranks: answers and usage are those of one rank without drafts, whatever the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import srt
from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_server import SERVED, check_server, most_tokens_a_step
from tests.support.mtp_checkpoint import add_mtp_layer

pytestmark = pytest.mark.e2e

QUICK = ("windows and sinks", "experts", "latents", "fp8 weights", "fp8 memory of windows")
OPTIONS: dict[str, Any] = {"model_path": "tiny", "device": "cpu", "dtype": "float32", "max_total_tokens": 8192}
PROMPTS = [
    "Repeat after me: The blue owl likes the blue lamp.",
    "Tell me a story about a blue owl.",
    "one two one two one",
]
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "sampling_seed": 1, "n": 2},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5, "min_new_tokens": 20, "sampling_seed": 2},
    {"temperature": 0.9, "sampling_seed": 3, "stop": [" the", "e l"]},
    {"temperature": 0.7, "sampling_seed": 4, "json_schema": '{"type": "array", "items": {"enum": ["owl", "lamp"]}}'},
]
DRAFTERS = [
    pytest.param(("STANDALONE", "tiny-draft"), id="model", marks=pytest.mark.full),
    pytest.param(("EAGLE3", "tiny-eagle3"), id="head"),
]


@pytest.fixture(scope="module", params=DRAFTERS)
def drafting(request: pytest.FixtureRequest) -> Iterator[srt.Runtime]:
    algorithm, checkpoint = request.param
    options = {
        **OPTIONS,
        "tp_size": 2,
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": checkpoint,
        "speculative_num_draft_tokens": 5,
    }
    with srt.Runtime(**options) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def plain() -> Iterator[srt.Runtime]:
    with srt.Runtime(**OPTIONS) as runtime:
        yield runtime


def answers_of(runtime: srt.Runtime) -> list[Any]:
    """For each set of parameters one batch of all prompts."""
    return [
        runtime.generate(PROMPTS, {"max_new_tokens": 40, **given}, return_logprob=True, top_logprobs_num=2)
        for given in PARAMETERS
    ]


def told(answer: dict[str, Any]) -> tuple[Any, ...]:
    meta = answer["meta_info"]
    return answer["text"], answer["output_ids"], meta["finish_reason"], meta["completion_tokens"]


def test_the_server_tells_how_many_drafts_were_right(drafting: srt.Runtime) -> None:
    """Stands before all other tests of its server: the first steps surely bring drafts; later ones do if their measured times let them."""
    answer = drafting.generate(PROMPTS[0], {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True})
    meta = answer["meta_info"]
    assert 0 < meta["spec_verify_ct"] < 599
    assert 1 <= meta["spec_accept_length"] <= 5
    assert 0 <= meta["spec_accept_rate"] <= 1
    state = drafting.get_server_info()["internal_states"][0]
    assert 1 < state["avg_spec_accept_length"] <= 5
    assert state["row_tokens"] in (1, 3, 5)


def test_answers_are_those_without_drafts(drafting: srt.Runtime, plain: srt.Runtime) -> None:
    for found, expected in zip(answers_of(drafting), answers_of(plain), strict=True):
        assert [told(answer) for answer in found] == [told(answer) for answer in expected]
        for mine, other in zip(found, expected, strict=True):
            for name in ("output_token_logprobs", "output_top_logprobs"):
                values, wanted = _numbers(mine["meta_info"][name]), _numbers(other["meta_info"][name])
                assert values == pytest.approx(wanted, abs=1e-4)


def _numbers(entry: Any) -> list[float]:
    if isinstance(entry, list):
        return [number for part in entry for number in _numbers(part)]
    return [entry] if isinstance(entry, float) else []


def test_a_stream_goes_on_after_its_worker_was_killed(drafting: srt.Runtime, plain: srt.Runtime) -> None:
    given = {"temperature": 0.9, "sampling_seed": 5, "max_new_tokens": 120, "ignore_eos": True}
    expected = plain.generate(PROMPTS[2], given)
    chunks = []
    for chunk in drafting.generate(PROMPTS[2], given, stream=True):
        chunks.append(chunk)
        if len(chunks) == 5:
            workers = [
                child
                for child in psutil.Process(drafting.pid).children(recursive=True)
                if child.cmdline()[-1] == "srt.managers.tp_worker"
            ]
            assert len(workers) == 2
            workers[1].kill()
    assert told(chunks[-1]) == told(expected)


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.full) for kind in SERVED]
)
def test_servers_of_all_kinds_of_models_answer_as_without_drafts(checkpoint: CheckpointFactory, kind: str) -> None:
    check_server(checkpoint, kind, "cpu")


@pytest.mark.parametrize("groups", [pytest.param({}, marks=pytest.mark.full), {"ep_size": 2}], ids=str)
def test_a_layer_of_the_checkpoint_drafts_on_two_ranks(
    groups: dict[str, int], checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """Its weights are random, so most drafts are wrong."""
    folder = add_mtp_layer(checkpoint("deepseek_v3", num_layers=3, tied=False), tmp_path / "model")
    drafts = {"tp_size": 2, **groups, "speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
    assert most_tokens_a_step(folder, "cpu", {}, drafts) >= 1

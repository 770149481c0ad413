"""Drafts on a GPU change no answer: tokens, logprobs, ends and usage are those of the same engine without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import srt
from srt.model_executor.graphs import verify_runner
from srt.model_executor.step.step_output import VerifiedOnDevice
from srt.protocol.messages import GenerateRequest, LogprobSpec, int32_array
from srt.sampling.sampling_params import SamplingParams
from srt.speculative.drafter import DraftRows, Ints
from srt.utils.checkpoint import resolve_model_path
from srt.utils.tokenizer import load_tokenizer
from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_engine import (
    MOST_DRAFTS,
    NOISE,
    Answers,
    ToldDrafter,
    answers_of,
    check_equal,
    engine_of,
    noisy,
    requests_of,
)
from tests.support.eagle3_heads import make_head
from tests.support.plan_driver import token_ids
from tests.support.whole_engine import WholeEngine

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
REAL_CONFIG = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3-0.6b.json"
SMALL: dict[str, Any] = {"device": CUDA, "max_running_requests": 6, "cuda_graph_bs": (1, 2, 4, 6)}
TIGHT: dict[str, Any] = {
    "chunked_prefill_size": 7, "max_total_tokens": 150, "schedule_conservativeness": 0.01, **SMALL,
}  # fmt: skip
DRAFTS: dict[str, Any] = {"speculative_num_draft_tokens": 1 + MOST_DRAFTS}
NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM", **DRAFTS}
PROMPTS = [
    "Tell me a story about a blue owl.",
    "Tell me a story about a red fox.",
    "Repeat after me: The blue owl likes the blue lamp. The blue owl likes the blue lamp.",
]


@pytest.fixture(scope="module")
def expected(checkpoint: CheckpointFactory) -> Answers:
    engine, _ = engine_of(checkpoint("qwen3"), 16, **SMALL)
    return answers_of(engine, requests_of(7, 24))


@pytest.mark.parametrize(
    ("page_size", "options", "captures", "together"),
    [(16, SMALL, True, 48), (1, TIGHT, True, 2), (16, SMALL, False, 2), (1, TIGHT, False, 48)],
    ids=["all at once", "with preemption", "all at once, no graphs", "with preemption, no graphs"],
)
def test_drafts_right_and_wrong_at_each_place_change_no_answer(
    checkpoint: CheckpointFactory,
    monkeypatch: pytest.MonkeyPatch,
    expected: Answers,
    page_size: int,
    options: dict[str, Any],
    captures: bool,
    together: int,
) -> None:
    monkeypatch.setattr(verify_runner, "LEAST_TOGETHER", together)
    aborted, requests = (3, 6), requests_of(7, 24)
    engine, runner = engine_of(checkpoint("qwen3"), page_size, **options, **NGRAM)
    if captures:
        runner.graphs.capture_all()
    sequences = [requests[rid].prompt_ids.tolist() + answer.ids for (rid, _), answer in expected.items()]
    drafter = runner._drafter = ToldDrafter(runner, sequences)
    check_equal(answers_of(engine, requests, aborted), expected, aborted)
    assert min(drafter.num_right) >= 1, drafter.num_right
    assert engine.core.counters.num_cached_tokens > 0
    engine.core.memory.check([])


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 0.95, 1.0), (NOISE, 0.2, 0.8)])
def test_a_model_that_draws_alike_is_right_as_often(
    checkpoint: CheckpointFactory, expected: Answers, tmp_path: Path, noise: float, least: float, most: float
) -> None:
    folder = checkpoint("qwen3")
    draft = str(noisy(folder, tmp_path / "noisy", noise))
    model = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": draft, **DRAFTS}
    engine, runner = engine_of(folder, 4, True, **{**TIGHT, "max_total_tokens": 200}, **model)
    runner.graphs.capture_all()
    rights: list[int] = []  # of each first draft, whether it was right
    note = runner._limits.note

    def noted(slots: Ints, num_drafts: Ints, num_right: Ints) -> None:
        rights.extend((num_right > 0).tolist())
        note(slots, num_drafts, num_right)

    runner._limits.note = noted
    check_equal(answers_of(engine, requests_of(7, 24)), expected)
    assert len(rights) > 40
    assert least <= np.mean(rights) <= most


def story_requests() -> list[GenerateRequest]:
    """What the shipped model is asked, greedy and seeded in turn."""
    tokenizer = load_tokenizer(resolve_model_path("tiny"))
    requests = []
    for rid, prompt in enumerate([*PROMPTS, *PROMPTS]):
        ids = tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
        given = {"temperature": 0.0} if rid < len(PROMPTS) else {"temperature": 0.4, "top_p": 0.9}
        sampling = SamplingParams.from_dict({**given, "max_new_tokens": 60}).spec(60, ())
        requests.append(
            GenerateRequest(
                rid, str(rid), int32_array(ids), int32_array([0]), [int32_array()], sampling, LogprobSpec(), 7 + rid
            )
        )
    return requests


def count_ahead(runner: Any) -> list[int]:
    """Return a list that gets the number of rows of each step that is launched before their lengths are known."""
    found: list[int] = []
    draft_ahead = runner._drafter.draft_ahead

    def counted(rows: DraftRows) -> Ints:
        if runner._launched:
            found.append(len(rows.slots))
        drafts: Ints = draft_ahead(rows)
        return drafts

    runner._drafter.draft_ahead = counted
    return found


def test_the_shipped_models_answer_alike_in_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is always launched before the host has heard of the last one's draws."""
    monkeypatch.setattr(VerifiedOnDevice, "is_ready", lambda output: False)
    folder, options = resolve_model_path("tiny"), {**SMALL, "dtype": "float32"}
    draft = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(resolve_model_path("tiny-draft")),
    }
    plain, _ = engine_of(folder, 16, **options)
    expected = answers_of(plain, story_requests())
    num_steps = {}
    for name, given in (("STANDALONE", draft), ("NGRAM", {"speculative_algorithm": "NGRAM"})):
        engine, runner = engine_of(folder, 16, True, **options, **given)
        runner.graphs.capture_all()
        num_ahead = count_ahead(runner)
        check_equal(answers_of(engine, story_requests()), expected)
        print(f"{name}: {len(num_ahead)} steps launched before lengths were known")
        assert num_ahead
        num_steps[name] = engine.core.counters.num_steps
    before = plain.core.counters.num_steps
    print(f"steps of 6 answers of 60 tokens: {before} without drafts, {num_steps}")
    assert num_steps["STANDALONE"] < before


QUANTISED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8 weights": ({"quantization": "fp8"}, {}),
    "int8 weights": ({"quantization": "int8"}, {}),
    "fp8 blocks": ({}, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    "4 bits": ({}, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}),
}
"""Options, and the `quantization_config` of the checkpoint."""
KINDS = {"all in bfloat16": ({}, {}), "fp8 memory": ({"kv_cache_dtype": "fp8_e4m3"}, {}), **QUANTISED}
MOST_DIFFERENT = {"all in bfloat16": 0.1, "fp8 memory": 0.3}
MOST_OF_ROUNDED_INPUTS = 0.4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [2, 48])
def test_answers_in_bfloat16_are_those_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int, kind: str
) -> None:
    """Rounding depends on the number of rows. So an answer with drafts is read again, and its tokens must be as likely as was told.

    One row is multiplied by fp8 weights as it is, several are rounded to fp8.
    """
    monkeypatch.setattr(verify_runner, "LEAST_TOGETHER", together)
    options = write_real_layers(tmp_path, *KINDS[kind])
    plain, _ = engine_of(tmp_path, 16, **options)
    first = answers_of(plain, long_requests())
    engine, runner = engine_of(tmp_path, 16, **options, **NGRAM)
    runner.graphs.capture_all()
    told = [long_prompts()[rid] + answer.ids for (rid, _), answer in first.items()]
    drafter = runner._drafter = ToldDrafter(runner, told)
    found = answers_of(engine, long_requests())
    assert min(drafter.num_right) >= 1, drafter.num_right
    check_as_likely(plain, found, MOST_DIFFERENT.get(kind, MOST_OF_ROUNDED_INPUTS))


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_head_drafts_beside_quantised_weights(tmp_path: Path, kind: str) -> None:
    """Its weights are random, so most of its drafts are wrong."""
    options = write_real_layers(tmp_path / "model", *KINDS[kind])
    head = make_head(tmp_path / "model", tmp_path / "head", taps=[1, 2, 3])
    given: dict[str, Any] = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head)}
    given["speculative_num_steps"] = 3
    engine, runner = engine_of(tmp_path / "model", 16, **options, **given)
    runner.graphs.capture_all()
    found = answers_of(engine, long_requests())
    assert engine.core.counters.num_verified_rows > 10
    plain, _ = engine_of(tmp_path / "model", 16, **options)
    check_as_likely(plain, found, MOST_OF_ROUNDED_INPUTS)


def write_real_layers(folder: Path, options: dict[str, Any], quantisation: dict[str, Any]) -> dict[str, Any]:
    """Write the configuration of four layers of a real shape, whose weights are made up. Return the options of engines."""
    config = {**json.loads(REAL_CONFIG.read_text()), "num_hidden_layers": 4, "vocab_size": 512}
    if quantisation:
        config["quantization_config"] = quantisation
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return {**SMALL, "dtype": "bfloat16", "load_format": "dummy", "max_total_tokens": 4096, **options}


def long_prompts() -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [token_ids(rng, 50 + 30 * rid, 512) for rid in range(6)]


def long_requests() -> list[GenerateRequest]:
    return [_request(rid, prompt, LogprobSpec(True)) for rid, prompt in enumerate(long_prompts())]


def _request(rid: int, ids: list[int], logprobs: LogprobSpec) -> GenerateRequest:
    sampling = SamplingParams.from_dict({"temperature": 1.0, "max_new_tokens": 40}).spec(40, ())
    return GenerateRequest(
        rid, str(rid), int32_array(ids), int32_array([0]), [int32_array()], sampling, logprobs, 5 + rid
    )


def check_as_likely(plain: WholeEngine, found: Answers, most: float) -> None:
    """Let an engine without drafts read the answers to the long requests: it must find their tokens as likely as was told."""
    prompts, reading = long_prompts(), LogprobSpec(False, 1)
    again = [_request(rid + 6, prompt + found[rid, 0].ids, reading) for rid, prompt in enumerate(prompts)]
    reread = answers_of(plain, again)
    for rid, prompt in enumerate(prompts):
        told = dict(_chosen(found[rid, 0], is_prompt=False))
        read = dict(_chosen(reread[rid + 6, 0], is_prompt=True))
        differences = [abs(told[place] - read[len(prompt) + place]) for place in range(len(found[rid, 0].ids))]
        print(f"differs by up to {max(differences):.3f}")
        assert max(differences) < most, differences


def _chosen(answer: Any, is_prompt: bool) -> list[tuple[int, float]]:
    """The logprobs of the tokens by place; of those that were reported twice, the later."""
    parts = [part for part in answer.logprobs if part.is_prompt is is_prompt]
    return [(part.first + i, value) for part in parts for i, value in enumerate(part.chosen.tolist())]


@pytest.mark.parametrize("algorithm", ["STANDALONE", "NGRAM"])
def test_a_server_with_drafts_answers_as_one_without(algorithm: str) -> None:
    """Through all processes: graphs are captured between requests, and steps are launched ahead of results."""
    options: dict[str, Any] = {"model_path": "tiny", "dtype": "float32", "max_total_tokens": 8192}
    draft: dict[str, Any] = {"speculative_draft_model_path": "tiny-draft"} if algorithm == "STANDALONE" else {}
    answers, rates = [], []
    drafts: dict[str, Any] = {"speculative_algorithm": algorithm, **draft}
    for given in ({}, drafts):
        with srt.Runtime(**options, **given) as runtime:
            for parameters in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5}):
                asked = {"max_new_tokens": 60, "sampling_seed": 5, **parameters}
                found = [runtime.generate(PROMPTS, asked) for _ in range(3)]
                answers.append([answer["output_ids"] for batch in found for answer in batch])
                rates += [answer["meta_info"].get("spec_accept_length", 0.0) for batch in found for answer in batch]
    print(f"{algorithm}: {max(rates):.2f} tokens a step at most")
    assert answers[:2] == answers[2:]
    assert max(rates) > 1

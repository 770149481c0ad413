"""Drafts change no answer: tokens, logprobs, ends and usage are those of the same engine without drafts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from srt.model_executor.speculating_runner import SpeculatingRunner
from srt.protocol.messages import GenerateRequest, LogprobSpec, PlanSection, int32_array
from srt.sampling.sampling_params import SamplingParams
from srt.speculative.drafter import DraftRows, Ints
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import token_ids
from tests.support.runners import make_runner
from tests.support.whole_engine import Answer, WholeEngine

VOCAB = 512
MOST_DRAFTS = 4
NOISE = 0.15
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.8, "frequency_penalty": 0.7},
    {"temperature": 0.8, "top_k": 20, "presence_penalty": 1.1, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.02, "logit_bias": {"17": 5.0, "300": -100}},
    {"temperature": 1.0, "min_new_tokens": 12, "stop_token_ids": list(range(100, 160))},
    {"temperature": 0.0, "stop_token_ids": list(range(0, 512, 9))},
]
Answers = dict[tuple[int, int], Answer]


class ToldDrafter:
    """Knows the answers, and gives every row each number of right drafts in turn: none, one, … all."""

    def __init__(self, runner: SpeculatingRunner, sequences: list[list[int]]) -> None:
        self._tokens = runner.state.req_to_token_pool.token_table.numpy()
        self._sequences = sequences
        self._num_calls = 0
        self.num_right = [0] * (
            MOST_DRAFTS + 1
        )  # rows by the number of drafts that are right before the first wrong one

    def reset(self) -> None:
        pass

    def enter_changes(self, changes: PlanSection) -> None:
        pass

    def read_prompts(self, section: PlanSection) -> None:
        pass

    def draft(self, rows: DraftRows) -> Ints:
        counts = np.zeros(len(rows.slots), np.int64)
        self._num_calls += 1
        for row, (slot, length) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            known, most = self._tokens[slot, : length + 1].tolist(), int(rows.most[row])
            told = next((ids for ids in self._sequences if ids[: length + 1] == known), known)
            drafts = (told[length + 1 :] + [0] * most)[:most]
            right = (self._num_calls + row) % (most + 1)
            self.num_right[right] += most > 0
            self._tokens[slot, length + 1 : length + 1 + most] = [
                token if place < right else (token + 1) % VOCAB for place, token in enumerate(drafts)
            ]
            counts[row] = most
        return counts

    def note_lengths(self, slots: Ints, lengths: Ints) -> None:
        pass


def requests_of(seed: int, count: int) -> list[GenerateRequest]:
    """Requests of all kinds; some share their prompts' beginnings, some have two choices, some want logprobs."""
    rng = np.random.default_rng(seed)
    shared = token_ids(rng, 20, VOCAB)
    requests = []
    for rid in range(count):
        prompt = shared[: int(rng.integers(0, 20))] + token_ids(rng, int(rng.integers(1, 12)), VOCAB)
        length = int(rng.integers(1, 28)) if rid % 7 != 5 else 24
        num_choices = 1 + (rid % 5 == 4)
        logprobs = LogprobSpec(True, int(rng.integers(-1, 2)), 2, int32_array([3])) if rid % 3 == 0 else LogprobSpec()
        given = PARAMETERS[rid % len(PARAMETERS)] | {"max_new_tokens": length}
        requests.append(
            GenerateRequest(
                rid=rid,
                label=str(rid),
                prompt_ids=int32_array(prompt),
                choices=int32_array(range(num_choices)),
                output_ids=[int32_array()] * num_choices,
                sampling=SamplingParams.from_dict(given).spec(length, ()),
                logprobs=logprobs,
                seed=int(rng.integers(1 << 62)),
            )
        )
    return requests


def answers_of(engine: WholeEngine, requests: list[GenerateRequest], aborted: tuple[int, ...] = ()) -> Answers:
    for request in requests:
        engine.submit(request)
    left = list(aborted)
    while any(answer.done is None for answer in engine.answers.values()):
        engine.step()
        for rid in [rid for rid in left if len(engine.answers[rid, 0].ids) >= 3]:
            engine.abort(rid)
            left.remove(rid)
    return engine.answers


def check_equal(found: Answers, expected: Answers, aborted: tuple[int, ...] = ()) -> None:
    assert found.keys() == expected.keys()
    for key, answer in found.items():
        other = expected[key]
        assert answer.done is not None and other.done is not None
        if key[0] in aborted and answer.done.reason == "abort":
            assert answer.ids == other.ids[: len(answer.ids)]
            continue
        assert answer.ids == other.ids, key
        ends = [(done.reason, done.matched, done.num_output, done.status) for done in (answer.done, other.done)]
        assert ends[0] == ends[1], key
        assert np.allclose(_logprobs(answer), _logprobs(other), atol=1e-4, equal_nan=True), key


def _logprobs(answer: Answer) -> list[float]:
    """All of them, by position. Those behind the last token of the answer are nobody's."""
    values: list[float] = []
    for is_prompt in (True, False):
        by_place: dict[int, list[float]] = {}
        for part in answer.logprobs:
            if part.is_prompt is not is_prompt:
                continue
            for i, chosen in enumerate(part.chosen.tolist()):
                place = part.first + i
                if is_prompt or place < len(answer.ids):
                    by_place[place] = [chosen, *part.top[2 * i : 2 * i + 2].tolist(), float(part.of_ids[i])]
        assert is_prompt or not by_place or sorted(by_place) == list(range(len(answer.ids)))
        values += [value for place in sorted(by_place) for value in by_place[place]]
    return values


def engine_of(folder: Path, page_size: int, **options: Any) -> tuple[WholeEngine, Any]:
    runner = make_runner(folder, page_size, **options)
    return WholeEngine(runner.loaded.args, runner), runner


@pytest.fixture(scope="module")
def expected(checkpoint: CheckpointFactory) -> Answers:
    engine, _ = engine_of(checkpoint("qwen3"), 16)
    return answers_of(engine, requests_of(7, 24))


@pytest.mark.parametrize(
    ("page_size", "chunk", "num_tokens", "count"),
    [(16, 64, 8192, 24), (1, 7, 150, 24), (16, 1, 8192, 8)],
    ids=["all at once", "with preemption", "token by token"],
)
def test_drafts_right_and_wrong_at_each_place_change_no_answer(
    checkpoint: CheckpointFactory, expected: Answers, page_size: int, chunk: int, num_tokens: int, count: int
) -> None:
    aborted, requests = (3, 6), requests_of(7, 24)[:count]
    expected = {key: answer for key, answer in expected.items() if key[0] < count}
    engine, runner = engine_of(
        checkpoint("qwen3"),
        page_size,
        chunked_prefill_size=chunk,
        max_total_tokens=num_tokens,
        max_running_requests=6,
        schedule_conservativeness=0.01,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=1 + MOST_DRAFTS,
    )
    sequences = [requests[rid].prompt_ids.tolist() + answer.ids for (rid, _), answer in expected.items()]
    drafter = runner._drafter = ToldDrafter(runner, sequences)
    found = answers_of(engine, requests, aborted)
    check_equal(found, expected, aborted)
    assert min(drafter.num_right) >= (3 if count == 24 else 0), drafter.num_right
    counters = engine.core.counters
    assert (counters.num_preempted > 0) == (num_tokens < 1000)
    assert counters.num_cached_tokens > 0
    engine.core.memory.check([])


def noisy(folder: Path, target: Path, noise: float) -> Path:
    """The checkpoint with random numbers added to its weights, in proportion to their size."""
    shutil.copytree(folder, target)
    generator = torch.Generator().manual_seed(3)
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 0.99, 1.0), (NOISE, 0.2, 0.8)])
def test_a_model_that_draws_alike_is_right_as_often(
    checkpoint: CheckpointFactory, expected: Answers, tmp_path: Path, noise: float, least: float, most: float
) -> None:
    """The model drafts for itself: each draft is right, whatever the parameters, behind cached prefixes too."""
    folder = checkpoint("qwen3")
    engine, runner = engine_of(
        folder,
        4,
        chunked_prefill_size=7,
        max_total_tokens=200,
        max_running_requests=6,
        schedule_conservativeness=0.01,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(noisy(folder, tmp_path / "noisy", noise)),
        speculative_num_draft_tokens=1 + MOST_DRAFTS,
    )
    rights: list[int] = []  # of each first draft, whether it was right
    note = runner._limits.note

    def noted(slots: Ints, num_drafts: Ints, num_right: Ints) -> None:
        rights.extend((num_right > 0).tolist())
        note(slots, num_drafts, num_right)

    runner._limits.note = noted
    check_equal(answers_of(engine, requests_of(7, 24)), expected)
    assert len(rights) > 40
    assert least <= np.mean(rights) <= most
    assert engine.core.counters.num_cached_tokens > 0


def test_layers_with_windows_verify_drafts_too(checkpoint: CheckpointFactory) -> None:
    folder, prompts = checkpoint("gemma3_text", num_layers=4), [token_ids(np.random.default_rng(1), 60, VOCAB)]
    options: dict[str, Any] = {"max_total_tokens": 400, "max_running_requests": 4, "chunked_prefill_size": 16}
    plain, runner = engine_of(folder, 4, **options)
    assert runner.state.windows
    outputs = plain.run(prompts, 40)
    engine, runner = engine_of(folder, 4, speculative_algorithm="NGRAM", speculative_num_draft_tokens=5, **options)
    drafter = runner._drafter = ToldDrafter(runner, [prompts[0] + outputs[0]])
    assert engine.run(prompts, 40) == outputs
    assert sum(drafter.num_right) > 5


def test_repetitions_are_drafted(checkpoint: CheckpointFactory) -> None:
    """Where a bias leaves one token, the answer repeats itself, and each step brings as many tokens as it may."""
    engine, _ = engine_of(checkpoint("qwen3"), 16, speculative_algorithm="NGRAM", speculative_num_draft_tokens=5)
    (request,) = requests_of(1, 1)
    sampling = SamplingParams.from_dict({"logit_bias": {"9": 100.0}, "max_new_tokens": 41}).spec(41, ())
    repeating = GenerateRequest(
        0, "0", request.prompt_ids, request.choices, request.output_ids, sampling, LogprobSpec(), 5
    )
    assert answers_of(engine, [repeating])[0, 0].ids == [9] * 41
    assert engine.core.counters.num_steps <= 1 + 2 + 38 // 5 + 1

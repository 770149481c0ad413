"""Engines that verify drafts, requests of all kinds for them, and what two engines must answer alike."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from srt.protocol.messages import GenerateRequest, LogprobSpec, PlanSection, int32_array
from srt.sampling.sampling_params import SamplingParams
from srt.speculative.drafter import DraftRows, Ints
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

    def __init__(self, runner: Any, sequences: list[list[int]]) -> None:
        self._table = runner.state.req_to_token_pool.token_table
        self._sequences = sequences
        self._num_drafted = 0
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
        counts, table = np.zeros(len(rows.slots), np.int64), self._table.cpu().numpy()
        for row, (slot, length) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            known, most = table[slot, : length + 1].tolist(), int(rows.most[row])
            told = next((ids for ids in self._sequences if ids[: length + 1] == known), known)
            drafts = (told[length + 1 :] + [0] * most)[:most]
            right = min(self._num_drafted % (MOST_DRAFTS + 1), most)
            self._num_drafted += most > 0
            self.num_right[right] += most > 0
            table[slot, length + 1 : length + 1 + most] = [
                token if place < right else (token + 1) % VOCAB for place, token in enumerate(drafts)
            ]
            counts[row] = most
        self._table.copy_(torch.from_numpy(table))
        return counts

    def enter_pages(self, changes: PlanSection) -> None:
        pass

    def can_draft_ahead(self, slots: Ints) -> bool:
        return False

    def draft_ahead(self, rows: DraftRows) -> Ints:
        return self.draft(rows)

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


def engine_of(folder: Path, page_size: int, hears_late: bool = False, **options: Any) -> tuple[WholeEngine, Any]:
    runner = make_runner(folder, page_size, **options)
    return WholeEngine(runner.loaded.args, runner, hears_late), runner


def noisy(folder: Path, target: Path, noise: float) -> Path:
    """The checkpoint with random numbers added to its weights, in proportion to their size."""
    shutil.copytree(folder, target)
    generator = torch.Generator().manual_seed(3)
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target

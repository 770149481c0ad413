"""Simulated worlds whose worker runs a real model: what requests get among preemptions and deaths is compared with what they get alone.

The answers that the simulation expects are those of the model, each computed alone. The worker checks plans as that of every world
does, runs them, and compares ids and logprobs to the bit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any, Final

import numpy as np
import pytest
from msgspec.structs import replace

from srt.model_executor.model_runner import ModelRunner
from srt.protocol.messages import Admission, Int32Array, LogprobSpec, RowLogprobs, SamplingSpec, StepPlan, StepResult
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.reference import Answer
from tests.scheduler.settings import Settings
from tests.scheduler.traffic import Choice
from tests.scheduler.world import World
from tests.support.invariance import WAYS
from tests.support.plan_driver import Job, PlanDriver, run_section

LOGPROBS: Final = LogprobSpec(output=True, top=2)
VOCABULARY: Final = 509
CROWDED: Final = Settings(
    page_size=4,
    num_pages=45,
    num_slots=12,
    max_request_tokens=100,
    chunk=7,
    conservativeness=0.01,
    num_requests=24,
    longest_prompt=60,
    longest_answer=20,
    vocab_size=VOCABULARY,
    arrival_gap=0.002,
    abort_share=0.1,
    num_deaths=3,
    num_retracts=1,
)
WORLDS: Final = (
    CROWDED,
    with_fields(CROWDED, page_size=1, num_pages=250, chunk=64, policy="lpm"),
    with_fields(CROWDED, page_size=16, num_pages=12, chunk=-1, window=1),
    with_fields(CROWDED, page_size=16, num_pages=10, chunk=512, num_slots=24, policy="priority"),
)
Key = tuple[bytes, int, int, int, bytes]  # prompt, number of the choice, most and fewest new tokens, stop ids


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What a choice gets that runs alone."""

    sampling: SamplingSpec
    seed: int
    ids: list[int]
    bits: list[tuple[bytes, bytes, bytes]]  # of each output: its logprob, the best tokens and their logprobs


class RealModel:
    """Two runners of one model: one computes answers alone, the other is the worker of worlds."""

    def __init__(self, alone: ModelRunner, worker: ModelRunner, page_size: int) -> None:
        self._alone, self._page_size = alone, page_size
        self.worker = worker
        self.answers: dict[Key, Undisturbed] = {}
        self.num_compared = 0
        self.statistics: Counter[str] = Counter()

    def run(self, seed: int, settings: Settings) -> None:
        """Run a world; AssertionError if a request gets something else than alone."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.scheduler.traffic.answer", self._answer)
            patch.setattr("tests.scheduler.server.FakeWorker", lambda *parts: _Worker(self, *parts))
            world = World(seed, settings)
            world.run()
        self.statistics.update(world.statistics)

    def alone(self, choice: Choice) -> Undisturbed:
        return self.answers[key_of(choice.request.prompt_ids, choice.choice, choice.request.sampling)]

    def _answer(
        self, prompt: Int32Array, _: np.uint64, choice: int, sampling: SamplingSpec, vocab_size: int, breaks_down: bool
    ) -> Answer:
        """Compute the answer alone, and end it as the scheduler would."""
        assert not breaks_down
        key = key_of(prompt, choice, sampling)
        alone = self.answers.get(key)
        if alone is None:
            number = len(self.answers)
            drawn: dict[str, Any] = {**WAYS[number % len(WAYS)], "stop_ids": sampling.stop_ids}
            job = Job(prompt.tolist(), replace(sampling, **drawn), number, LOGPROBS)
            self._alone.reset()
            PlanDriver(self._alone, self._page_size).run([job])
            bits = [one for row in job.output_logprobs for one in bits_of(row)]
            alone = self.answers[key] = Undisturbed(job.sampling, job.seed, job.outputs, bits)
        whole, stop_ids = np.concatenate((prompt, np.array(alone.ids, np.int32))), set(sampling.stop_ids.tolist())
        stop = next((index for index, token in enumerate(alone.ids) if token in stop_ids), None)
        if stop is None:
            return Answer(whole, alone.ids, "length", -1, -1)
        return Answer(whole, alone.ids[: stop + 1], "stop", alone.ids[stop], -1)


class _Worker(FakeWorker):
    """Runs the plans that it has checked."""

    def __init__(self, model: RealModel, settings: Settings, by_seed: dict[int, Choice], *others: Any) -> None:
        super().__init__(settings, by_seed, *others)
        self._model = model
        model.worker.reset()

    def execute(self, plan: StepPlan, step_us: int, answered: int, is_trial: bool = False) -> StepResult:
        (section,) = plan.sections
        admissions = [self._admission(view) for view in section.admissions]
        result = super().execute(plan, step_us, answered, is_trial)
        found = run_section(self._model.worker, replace(section, admissions=admissions))
        assert found.ids.tolist() == result.ids.tolist(), "a request gets other ids than alone"
        for row in found.logprobs:
            for index, bits in enumerate(bits_of(row), row.first):
                choice = self._choices[row.slot]
                assert choice is not None
                assert bits == self._model.alone(choice).bits[index], "a request gets other logprobs than alone"
                self._model.num_compared += 1
        return result

    def _admission(self, view: Any) -> Admission:
        alone = self._model.alone(self._by_seed[view.seed])
        ids = np.frombuffer(view.ids, np.int32)
        return Admission(view.slot, ids, view.prompt_len, view.cached, alone.seed, alone.sampling, LOGPROBS)


def key_of(prompt: Int32Array, choice: int, sampling: SamplingSpec) -> Key:
    return prompt.tobytes(), choice, sampling.max_new_tokens, sampling.min_new_tokens, sampling.stop_ids.tobytes()


def bits_of(row: RowLogprobs) -> list[tuple[bytes, bytes, bytes]]:
    """Return the bits of each token's logprob, of the best tokens' ids and of theirs."""
    count = len(row.chosen)
    top_ids, top = row.top_ids.reshape(count, -1), row.top.reshape(count, -1)
    return [(row.chosen[i].tobytes(), top_ids[i].tobytes(), top[i].tobytes()) for i in range(count)]

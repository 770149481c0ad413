"""Made-up requests whose answers are known: shared prefixes, conversations that go on, several choices, resumptions."""

from __future__ import annotations

import random
from dataclasses import dataclass

from srt.protocol.messages import GenerateRequest, LogprobSpec, SamplingSpec, int32_array
from srt.sampling.sampling_params import choice_seed
from tests.scheduler.reference import Answer, answer
from tests.scheduler.settings import Settings


@dataclass(frozen=True, slots=True)
class Planted:
    """A request, and what each of its choices must be answered."""

    request: GenerateRequest
    answers: dict[int, Answer]
    seeds: dict[int, int]


class Traffic:
    """Draws one request after another."""

    def __init__(self, settings: Settings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._texts = [self._ids(settings.longest_prompt) for _ in range(3)]  # what prompts begin with
        self._num_requests = 0

    def next_request(self, rid: int, *, may_resume: bool) -> Planted:
        s, rng = self._settings, self._rng
        self._num_requests += 1
        seed = rng.getrandbits(63) * 2 % (1 << 64) + self._num_requests % 2
        prompt, sampling = self._prompt(), self._sampling()
        choices = list(range(rng.choice((1, 1, 1, 2, 5))))
        if len(choices) > 1 and rng.random() < 0.2:
            choices = choices[1:]  # the others are elsewhere, or have ended
        seeds = {choice: choice_seed(seed, choice) for choice in choices}
        answers = {c: answer(prompt, sampling, seeds[c], s.vocab_size, s.breaks_down) for c in choices}
        is_resumed = rng.random() < s.resumed_share and may_resume
        outputs = [self._part(answers[c].ids) if is_resumed else [] for c in choices]
        request = GenerateRequest(
            rid=rid,
            label=f"request {self._num_requests}",
            prompt_ids=int32_array(prompt),
            choices=int32_array(choices),
            output_ids=[int32_array(ids) for ids in outputs],
            sampling=sampling,
            logprobs=self._logprobs(len(prompt)),
            seed=seed,
            cache_salt=rng.choice(("", "", "", "pepper")),
        )
        self._texts.append([*prompt, *answers[choices[0]].ids])
        return Planted(request, answers, seeds)

    def _prompt(self) -> list[int]:
        s, rng = self._settings, self._rng
        shared = rng.choice(self._texts[:3] + self._texts[-4:])
        keep = rng.choice((0, rng.randint(0, len(shared)), len(shared)))
        prompt = [*shared[:keep], *self._ids(rng.choice((0, 1, rng.randint(1, s.longest_prompt))))]
        return prompt[: s.longest_prompt] or self._ids(1)

    def _sampling(self) -> SamplingSpec:
        s, rng = self._settings, self._rng
        max_new = rng.choice((1, 2, rng.randint(1, s.longest_answer), s.longest_answer))
        num_stops = rng.choice((0, 0, 1, 2, 5, 12))
        stops = rng.sample(range(s.vocab_size), min(num_stops, s.vocab_size - 1))
        return SamplingSpec(
            max_new_tokens=max_new,
            min_new_tokens=rng.choice((0, 0, rng.randint(0, max_new))),
            stop_ids=int32_array(sorted(stops)),
        )

    def _logprobs(self, prompt_len: int) -> LogprobSpec:
        rng = self._rng
        start = rng.choice((-1, -1, -1, 0, rng.randint(0, prompt_len)))
        return LogprobSpec(output=rng.random() < 0.2, prompt_start=start)

    def _part(self, ids: list[int]) -> list[int]:
        """Some of the answer, at times all of it."""
        return ids[: self._rng.randint(0, len(ids))]

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._settings.vocab_size) for _ in range(count)]

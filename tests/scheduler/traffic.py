"""Made-up requests whose answers are known: shared prefixes, conversations that go on, several choices, priorities."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from srt.protocol.messages import GenerateRequest, Int32Array, LogprobSpec, Resource, SamplingSpec, int32_array
from srt.sampling.sampling_params import choice_seed
from tests.scheduler.reference import Answer, UInt64Array, answer, prefix_hashes
from tests.scheduler.resource_rules import NUM_WANTED_OFTEN, draw_resources
from tests.scheduler.settings import Settings


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a request: what it must become, how far it has come, and what the scheduler knows of it."""

    request: GenerateRequest
    choice: int
    seed: int
    answer: Answer
    hashes: UInt64Array  # of all_ids
    # At its frontend:
    num_delivered: int = 0
    leave_at: int = -1  # with this token its frontend aborts it, as with a stop string; -1: never
    may_abort: bool = False  # an abort is on its way, or somebody else may send one
    is_aborted: bool = False  # somebody else has, as its frontend was told
    has_asked: bool = False  # for tokens that were lost
    cached_told: int = (
        -1
    )  # its prompt tokens that came from the cache, as was said with the first tokens; -1: nothing yet
    has_namesake: bool = False  # another request had the same name when one of them was sent
    poison_at: int = -1  # workers die of the step that samples behind so many of its tokens; -1: of none
    was_in_flight: bool = False  # by the last word of a scheduler
    num_deaths: int = 0  # of servers that may have died of it, and at most four tokens further again
    num_lone_deaths: int = 0
    died_at: int = 0  # tokens that were delivered at the last of these
    # In the present server:
    is_over: bool = False  # the scheduler knows that it has ended: no plan may have it any more
    is_done: bool = False  # and said so
    num_sent: int = -1  # tokens that it has sent, its own and those that the request came with; -1: none yet
    slot: int = -1  # that it was admitted to last
    num_cached: int = -1  # tokens that the cache had of it when it was admitted first; -1: it never was
    num_held: int = -1  # ids that a worker held when it was admitted elsewhere; -1: was never admitted

    @property
    def name(self) -> str:
        return f"choice {self.choice} of request {self.request.rid} ({self.request.label})"

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def cached_prompt_tokens(self) -> int:
        """The tokens that it comes with may be cached, too."""
        return min(max(self.num_cached, 0), self.prompt_len)

    def begin_anew(self) -> None:
        """A new server knows nothing of it."""
        self.is_over = self.is_done = False
        self.slot = self.num_held = self.num_sent = self.num_cached = -1


@dataclass(frozen=True, slots=True)
class _Template:
    """What requests have in common that ask the same."""

    request: GenerateRequest
    answers: list[tuple[Answer, UInt64Array]]


class Traffic:
    """Draws one request after another."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self._settings = settings
        self._rng = random.Random(seed)
        self._ids_rng = np.random.Generator(np.random.PCG64(seed))
        self._texts = [self._ids(settings.longest_prompt) for _ in range(3)]  # what prompts begin with
        self._recent: list[_Template] = []
        self._num_requests = 0
        self._urgent_rng = random.Random(f"urgent of {seed}")
        self._urgent_share = self._urgent_rng.choice((0.0, 0.0, 0.05))
        if settings.urgent_share is not None:
            self._urgent_share = settings.urgent_share
        self._poison_rng = random.Random(f"poison of {seed}")
        self.num_poisons = settings.num_poisons
        self._resources_rng = resources_rng = random.Random(f"resources of {seed}")
        self.resources = draw_resources(settings.num_resources, resources_rng)
        self._beside_rng = random.Random(f"tokens beside those of {seed}")

    def next_request(self, rid: int) -> list[Choice]:
        """Its choices; the message is in each of them."""
        s, rng = self._settings, self._rng
        self._num_requests += 1
        if self._recent and rng.random() < 0.4:
            template = rng.choice(self._recent)  # somebody asked the same before
        else:
            template = self._new_template()
            self._recent[self._num_requests % 6 :] = [template]
        request = replace(
            template.request,
            rid=rid,
            label=self._label(),
            logprobs=self._logprobs(len(template.request.prompt_ids)),
            seed=rng.getrandbits(64),
            priority=rng.choice((0, 0, 1, 2, 5, 7)) if s.policy == "priority" else 0,
            stream=rng.random() < s.stream_share,
            urgent=self._urgent_rng.random() < self._urgent_share,
        )
        request = _with_resource(request, self._resource())
        choices = [
            Choice(request, index, choice_seed(request.seed, index), known, hashes)
            for index, (known, hashes) in enumerate(template.answers)
        ]
        if self.num_poisons and self._poison_rng.random() < s.poison_share:
            self.num_poisons -= 1
            poisoned = self._poison_rng.choice(choices)
            poisoned.poison_at = self._poison_rng.randrange(max(1, len(poisoned.answer.ids)))
        return choices

    def _resource(self) -> Resource | None:
        """Half of them ask for one of the first few."""
        rng, resources = self._resources_rng, self.resources
        if not resources or rng.random() >= self._settings.resource_share:
            return None
        return rng.choice(resources[:NUM_WANTED_OFTEN] if rng.random() < 0.5 else resources)

    def _label(self) -> str:
        """Some are numbered as parts of a batch, whose name is also that of another request."""
        batch, part = divmod(self._num_requests, 5)
        return f"label {batch}_{part}" if part < 3 else f"label {self._num_requests}"

    def _new_template(self) -> _Template:
        s, rng = self._settings, self._rng
        prompt, sampling, salt = self._prompt(), self._sampling(), rng.choice(("", "", "", "pepper"))
        num_choices = rng.choice((1, 1, 1, 2, 5)) if s.has_choices else 1
        request = GenerateRequest(
            rid=0,
            label="",
            prompt_ids=prompt,
            choices=np.arange(num_choices, dtype=np.int32),
            output_ids=[int32_array()] * num_choices,
            sampling=sampling,
            logprobs=LogprobSpec(),
            seed=0,
            cache_salt=salt,
        )
        prompt_hash = prefix_hashes(prompt)[-1]
        answers = []
        for index in range(num_choices):
            known = answer(prompt, prompt_hash, index, sampling, s.vocab_size, s.breaks_down)
            answers.append((known, prefix_hashes(known.all_ids, salt)))
        if rng.random() < 0.5:
            first, _ = answers[0]
            self._texts[3 + self._num_requests % 4 :] = [first.all_ids[: len(prompt) + len(first.ids)]]
        return _Template(request, answers)

    def _prompt(self) -> Int32Array:
        s, rng = self._settings, self._rng
        shared = rng.choice(self._texts)
        keep = rng.choice((0, rng.randint(0, len(shared)), len(shared)))
        if keep == 0 and s.rarely_new:
            keep = rng.choice((0, len(shared), len(shared), len(shared), len(shared)))
        prompt = np.concatenate((shared[:keep], self._ids(rng.choice((0, 1, rng.randint(1, s.longest_prompt))))))
        return prompt[: s.longest_prompt] if len(prompt) else self._ids(1)

    def _sampling(self) -> SamplingSpec:
        s, rng = self._settings, self._rng
        max_new = rng.choice((1, rng.randint(1, s.longest_answer), *(s.longest_answer,) * 4))
        num_stops = rng.choice((0, 0, 0, 0, 0, 1, 2, 12))
        if s.grows_short:
            num_stops = s.vocab_size * 2 * self._num_requests // (3 * s.num_requests)
        stops = rng.sample(range(s.vocab_size), min(num_stops, s.vocab_size - 1))
        return SamplingSpec(
            max_new_tokens=max_new,
            min_new_tokens=rng.choice((0, 0, rng.randint(0, max_new))),
            stop_ids=int32_array(sorted(stops)),
        )

    def _logprobs(self, prompt_len: int) -> LogprobSpec:
        rng = self._rng
        if rng.random() >= self._settings.logprob_share:
            return LogprobSpec()
        output, prompt_start = rng.random() < 0.7, rng.choice((-1, 0, rng.randint(0, prompt_len)))
        top, num_ids = self._beside_rng.choice((0, 1, 3)), self._beside_rng.choice((0, 0, 2))
        ids = int32_array(self._beside_rng.sample(range(self._settings.vocab_size), num_ids))
        return LogprobSpec(output=output, prompt_start=prompt_start, top=top, ids=ids)

    def _ids(self, count: int) -> Int32Array:
        return self._ids_rng.integers(0, self._settings.vocab_size, count, np.int32)


def _with_resource(request: GenerateRequest, resource: Resource | None) -> GenerateRequest:
    if resource is None:
        return request
    return replace(request, adapter=resource) if resource.kind == "adapter" else replace(request, resource=resource)

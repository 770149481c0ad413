"""What only an outsider sees: who is in a plan that he should not be in, or more often than he may."""

from __future__ import annotations

from dataclasses import dataclass

from srt.protocol.messages import PlanSection, StepPlan
from tests.scheduler.settings import Settings
from tests.scheduler.traffic import Planted


@dataclass(slots=True)
class _Watched:
    name: str
    most_samples: int
    max_tokens: int
    salt: str
    num_samples: int = 0
    num_pages: int = 0
    is_over: bool = False


class PlanWatcher:
    """Knows requests by their seeds, which admissions carry."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._by_seed: dict[int, _Watched] = {}
        self._by_key: dict[tuple[int, int, int], _Watched] = {}
        self._in_slot: dict[int, _Watched] = {}
        self._salt_of_page: dict[int, str] = {}  # of the request that was the last to get the page as its own
        self.num_in_flight = 0

    def add(self, frontend: int, planted: Planted) -> None:
        request = planted.request
        for choice, given in zip(request.choices.tolist(), request.output_ids, strict=True):
            answer = planted.answers[choice]
            late = 0 if answer.reason == "length" else self._settings.window - 1
            samples = len(answer.ids) - len(given) + (answer.reason == "error") + late
            samples = min(samples, request.sampling.max_new_tokens - len(given))
            max_tokens = len(request.prompt_ids) + request.sampling.max_new_tokens
            name = f"choice {choice} of request {request.rid} of frontend {frontend}"
            watched = _Watched(name, samples, max_tokens, request.cache_salt)
            self._by_seed[planted.seeds[choice]] = self._by_key[frontend, request.rid, choice] = watched

    def end(self, frontend: int, rid: int, choice: int) -> None:
        """The scheduler knows that this choice is over: no plan may have it from now on."""
        for key, watched in self._by_key.items():
            if key[:2] == (frontend, rid) and choice in (-1, key[2]):
                watched.is_over = True

    def see_result(self) -> None:
        self.num_in_flight -= 1

    def see(self, plan: StepPlan) -> None:
        self.num_in_flight += 1
        assert self.num_in_flight <= self._settings.window, f"{self.num_in_flight} plans are in flight"
        (section,) = plan.sections
        self._check_budget(section)
        for admission in section.admissions:
            watched = self._in_slot[admission.slot] = self._by_seed[admission.seed]
            watched.num_pages = 0  # it may have been preempted; what it sampled before still counts
        cached = {admission.slot: admission.cached // self._settings.page_size for admission in section.admissions}
        for delta in section.pages:
            pages = delta.pages.tolist()
            for slot, count in zip(delta.slots.tolist(), delta.counts.tolist(), strict=True):
                self._check_pages(self._in_slot[slot], pages[:count], cached.get(slot, 0))
                del pages[:count]
        for slot in [*section.extend_slots.tolist(), *section.decode_slots.tolist()]:
            assert not self._in_slot[slot].is_over, f"{self._in_slot[slot].name} is in a plan made after its end"
        for slot in [*section.extend_slots[section.extend_samples == 1].tolist(), *section.decode_slots.tolist()]:
            watched = self._in_slot[slot]
            watched.num_samples += 1
            assert watched.num_samples <= watched.most_samples, f"{watched.name} is sampled more often than needed"

    def _check_budget(self, section: PlanSection) -> None:
        chunk, planned = self._settings.chunk, int(section.extend_counts.sum())
        assert chunk < 0 or planned <= chunk, f"{planned} prompt tokens in a plan, {chunk} are allowed"

    def _check_pages(self, watched: _Watched, pages: list[int], num_cached: int) -> None:
        watched.num_pages += len(pages)
        most = -(-watched.max_tokens // self._settings.page_size)
        assert watched.num_pages <= most, f"{watched.name} has {watched.num_pages} pages, {most} were promised"
        for page in pages[:num_cached]:
            assert self._salt_of_page[page] == watched.salt, f"{watched.name} shares page {page} across a cache salt"
        self._salt_of_page |= dict.fromkeys(pages[num_cached:], watched.salt)

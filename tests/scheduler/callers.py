"""Clients of the control calls, and of what no client should send: how often they come is another matter in each world."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace as changed
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from srt.protocol.messages import (
    Abort,
    AbortLabel,
    AckBatch,
    ContinueGeneration,
    ControlReply,
    FlushCache,
    FromFrontend,
    GenerateRequest,
    GetState,
    PauseGeneration,
    PinResources,
    Resource,
)
from srt.sampling.sampling_params import choice_seed
from tests.scheduler.hostile import HostileRequests
from tests.scheduler.ledger_frontend import LedgerFrontend
from tests.scheduler.resource_rules import NUM_WANTED_OFTEN
from tests.scheduler.settings import Settings
from tests.scheduler.traffic import Choice

if TYPE_CHECKING:
    from tests.scheduler.server import Server
    from tests.scheduler.world import World

# What follows a name makes it another, or the part of a batch: none that the traffic itself has.
NO_NUMBERS = ("_7", "_0_1", "_", "_x", "x", "_1x", "_-1")
MODES = ("retract",) * 5 + ("in_place",) * 5 + ("abort", "now")
THEMES: dict[str, tuple[str, ...]] = {
    "quiet": (),
    "mixed": ("look", "deep look", "pause", "flush", "abort", "hostile", "same name", "stranger"),
    "pauses": ("pause", "pause", "pause", "flush", "deep look", "look"),
    "names": ("abort", "abort", "same name", "same name", "hostile"),
    "poison": ("pause", "same name", "abort", "hostile"),
    "hostile": ("hostile", "hostile", "hostile", "stranger", "same name"),
}


def draw_callers(settings: Settings, rng: random.Random) -> Settings:
    """And more ranks and frontends, where there is one, that may contradict each other or forget each other."""
    theme = rng.choice(tuple(THEMES))
    tp_size, num_frontends = settings.tp_size, settings.num_frontends
    if theme != "quiet":
        tp_size = max(tp_size, rng.choice((1, 1, 2, 3)))
        num_frontends = max(num_frontends, rng.choice((1, 2, 3)))
    return changed(settings, callers=theme, tp_size=tp_size, num_frontends=num_frontends)


class Callers:
    """All that they do is drawn from a stream of their own, but for how long messages travel on the way back."""

    def __init__(self, world: World, seed: int) -> None:
        self.rng = rng = random.Random(f"calls of {seed}")
        self._world = world
        theme = world.settings.callers
        self._kinds = THEMES[theme]
        self._num_calls = rng.choice((12, 25, 60)) if self._kinds else 0
        self.num_poisons = rng.choice((3, 6)) if theme == "poison" else 0
        self._num_second_tries = 4
        self._num_for_all = 2  # aborts of all that there is
        self._hostile = HostileRequests(world.settings, rng)
        self._pins = random.Random(f"pins of {seed}")
        self.extra_drain = bool(self._kinds) and rng.random() < 0.2
        self._num_trial_pauses = rng.choice((3, 6, 9))
        self._deaths = random.Random(f"deaths in pauses of {seed}")
        self._num_deaths = (
            6 if "pause" in self._kinds and world.settings.num_deaths else 0
        )  # while generation is paused

    def begin(self, end: float) -> None:
        for _ in range(self._num_calls):
            self._world.at(self.rng.random() * end, partial(self._do, self.rng.choice(self._kinds)))
        for _ in range(self._world.settings.num_retracts):
            self._world.at(self.rng.random() * end, self._retract)
        adapters = [one for one in self._world.resources if one.kind == "adapter"]
        for _ in range(self._pins.choice((10, 40)) if adapters else 0):
            self._world.at(self._pins.random() * end, partial(self._pin, adapters))
        if self.extra_drain:
            self._world.at((0.5 + 0.5 * self.rng.random()) * end, self._drain)

    def _pin(self, adapters: list[Resource]) -> None:
        """A client has pinned some, and no others, by one of the frontends, and all that are greeted later say so too."""
        rng, world = self._pins, self._world
        some = adapters if rng.random() < 0.5 else adapters[: 2 * NUM_WANTED_OFTEN]
        count = rng.randint(0, min(len(some), world.settings.most_resources + 1))
        world.pins = PinResources(world.pins.version + 1, rng.sample(some, count))
        self._send(rng.choice(world.frontends), [world.pins], rng.random() * 2 * world.settings.delay)

    def _drain(self) -> None:
        """Now and then just as somebody has paused it."""
        delay = 0.0
        if self.rng.random() < 0.7:
            self._pause(self.rng.choice(self._world.frontends), self.rng.choice(MODES), 0.0)
            delay = self.rng.choice((0.0, 0.001, 0.05))
        self._world.at(self._world.now + delay, self._world.drain)

    def _do(self, kind: str) -> None:
        rng = self.rng
        frontend = rng.choice(self._world.frontends)
        if kind == "look" or kind == "deep look":
            self._call(frontend, partial(_look, deep=kind == "deep look"))
        elif kind == "flush":
            self._call(frontend, FlushCache)
        elif kind == "pause":
            self._pause(frontend, rng.choice(MODES))
        elif kind == "abort":
            self._abort(frontend)
        elif kind == "hostile":
            self._send_hostile(frontend)
        elif kind == "same name":
            self._ask_by_the_same_name(frontend)
        else:
            words = (AckBatch(0), PauseGeneration(0, "abort"), AbortLabel(0, ""), GetState(0, True), Abort(1, -1))
            self._world.server.hear_stranger(rng.choice((*words, self._hostile.good())))

    # ---- Calls

    def _call(self, frontend: LedgerFrontend, make: Callable[[int], FromFrontend], within: float | None = None) -> None:
        self._send(frontend, [frontend.call(make)], within)

    def _send(self, frontend: LedgerFrontend, messages: list[FromFrontend], within: float | None = None) -> None:
        delay = self.rng.random() * 2 * self._world.settings.delay if within is None else within
        self._world.send(frontend, messages, delay)

    def call_again(self, frontend: LedgerFrontend) -> None:
        """What has no answer the next scheduler is asked."""
        self._send(frontend, list(frontend.open_calls.values()))

    def _pause(self, frontend: LedgerFrontend, mode: str, within: float | None = None) -> None:
        rng, at = self.rng, self._world.at
        now = self._world.now
        self._world.statistics["pauses"] += 1
        self._call(frontend, lambda call: PauseGeneration(call, mode), within)
        for _ in range(2 if mode == "in_place" else 0):
            at(now + rng.random() * 0.05, partial(self._do, "look"))
        if rng.random() < 0.3:  # somebody does not wait for the answer
            at(now + rng.random() * 0.02, partial(self.go_on, rng.choice(self._world.frontends).number))
        if rng.random() < 0.5:
            at(now + rng.random() * 0.1, partial(self._flush, frontend.number))

    def _retract(self) -> None:
        """All lose their slots, wherever they are."""
        frontend = self.rng.choice(self._world.frontends)
        self._call(frontend, lambda call: PauseGeneration(call, "retract"), 0.0)
        self._world.at(self._world.now + 0.02 * self.rng.random(), partial(self.go_on, frontend.number))

    def _flush(self, number: int) -> None:
        self._call(self._world.frontends[number], FlushCache)

    def note_reply(self, frontend: LedgerFrontend, asked: FromFrontend, reply: ControlReply) -> None:
        """Whoever has paused lets it go on, or somebody else does earlier."""
        if isinstance(asked, PauseGeneration) and reply.ok:
            now, rng = self._world.now, self.rng
            if self._num_deaths and self._deaths.random() < 0.8:
                self._num_deaths -= 1
                self._world.at(now, self._world.die)
            self._world.at(now + rng.random(), partial(self.go_on, frontend.number))
            if rng.random() < 0.5:
                self._world.at(now + rng.random() * 0.2, partial(self.go_on, rng.choice(self._world.frontends).number))

    def go_on(self, number: int) -> None:
        self._call(self._world.frontends[number], ContinueGeneration)

    def note_trial(self, server: Server) -> None:
        """A suspect is tried: pauses must not make it forgotten."""
        if self._num_trial_pauses and self.rng.random() < 0.5 and server.is_ready:
            self._num_trial_pauses -= 1
            self._pause(
                self.rng.choice(self._world.frontends), self.rng.choice(("retract", "retract", "in_place")), 0.0
            )

    # ---- Names

    def _abort(self, frontend: LedgerFrontend) -> None:
        rng = self.rng
        live = [choice for f in self._world.frontends for choice in f.live_choices()]
        name = f"nobody {rng.random()}"
        if live and rng.random() < 0.9:
            label = rng.choice(live).request.label
            batch = label.rpartition("_")[0]
            name = rng.choice(
                (label, label[:-2] or label, batch or label, batch or label, label[:-1] or label, f"{batch}_")
            )
        elif rng.random() < 0.5 and self._num_for_all:
            self._num_for_all -= 1
            name = ""
        self._call(frontend, lambda call: AbortLabel(call, name))

    def _ask_by_the_same_name(self, frontend: LedgerFrontend) -> None:
        """A client of another frontend has the same idea; or of this one, when the first is over."""
        live = [choice.request for f in self._world.frontends for choice in f.live_choices()]
        if not live:
            return
        like = self.rng.choice(live)
        label = like.label + (self.rng.choice(NO_NUMBERS) if self.rng.random() < 0.6 else "")
        if not frontend.has_label(label):
            self._ask_like(frontend, like, label)

    def _ask_like(
        self, frontend: LedgerFrontend, like: GenerateRequest, label: str, *, is_harmless: bool = True
    ) -> None:
        rid = self._world.new_rid()
        request = replace(like, rid=rid, label=label, seed=self.rng.getrandbits(64))
        known = self._world.by_rid[like.rid]
        choices = [Choice(request, c.choice, choice_seed(request.seed, c.choice), c.answer, c.hashes) for c in known]
        for choice, before in zip(choices, known, strict=True):
            if not is_harmless:
                choice.poison_at = before.poison_at
        self._world.enter(rid, choices)
        self._send(frontend, frontend.add(choices))

    def note_conviction(self, frontend: LedgerFrontend, convicted: GenerateRequest) -> None:
        """Its client tries again, once at least in vain; and others ask for as much, with other prompts."""
        for delay in (0.0, 0.3):
            if self._num_second_tries:
                self._num_second_tries -= 1
                again = partial(self._try_again, frontend, convicted, is_harmless=self.rng.random() < 0.5)
                self._world.at(self._world.now + delay, again)

    def _try_again(self, frontend: LedgerFrontend, convicted: GenerateRequest, *, is_harmless: bool) -> None:
        if self._world.frontends[frontend.number] is not frontend:
            return
        self._ask_like(frontend, convicted, f"again {self.rng.getrandbits(64)}", is_harmless=is_harmless)
        requests = [choices[0].request for choices in self._world.by_rid.values()]
        max_new = convicted.sampling.max_new_tokens
        others = [request for request in requests if request.sampling.max_new_tokens == max_new]
        for other in self.rng.choices(others, k=3):
            self._ask_like(frontend, other, f"as much {self.rng.getrandbits(64)}")

    def note_leaving(self, frontend: LedgerFrontend) -> None:
        """What it asks for last has no answer yet when its successor comes."""
        if self.rng.random() < 0.7:
            self._call(frontend, partial(_look, deep=True), 0.0)
        if self.rng.random() < 0.3:
            self._call(frontend, lambda call: PauseGeneration(call, "in_place"), 0.0)

    # ---- What nobody should send

    def _send_hostile(self, frontend: LedgerFrontend) -> None:
        # Before the workers are ready, nobody knows yet which of two requests of one number will be accepted.
        live = frontend.live_choices() if self._world.server.is_ready else []
        hostile = self._hostile.draw([choice.request for choice in live])
        delay = self.rng.random() * 2 * self._world.settings.delay
        self._world.send(frontend, [hostile], delay)
        if hostile.answer == "Refused later" and not hostile.is_duplicate and self.rng.random() < 0.4:
            others = [index for index in hostile.choices if index != hostile.culprit]
            self._world.send(frontend, [Abort(hostile.rid, self.rng.choice((-1, *others)))], delay)


def _look(call: int, deep: bool) -> GetState:
    return GetState(call, deep)

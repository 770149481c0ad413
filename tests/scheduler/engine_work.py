"""Worlds of updated weights, lent memory and loaded adapters while requests run, in which schedulers die between any two effects.

    python -m tests.scheduler.engine_work --worlds 1000 [--first 0]

The scheduler is the real one; workers and the frontend are simple. What a call has answered must hold in the ledger of the next
generation, no step may run while anything is released or exchanged, and nothing that was cached of old weights or with another adapter may
be used. Workers load adapters at any time, also meanwhile; a row runs with one that all of them have, and none waits for it for ever.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

from msgspec.structs import replace

from srt.lora.resource import with_adapter
from srt.managers.scheduler.effects import Effect, Record, ToFrontend, ToWorkers
from srt.protocol.engine_work import (
    MEMORY_TAGS,
    EngineLedger,
    EngineWork,
    InspectWeights,
    LoadWeights,
    ReceiveWeights,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateWeights,
    WeightsSource,
    Work,
)
from srt.protocol.messages import (
    ContinueGeneration,
    ControlReply,
    GenerateRequest,
    PauseGeneration,
    PlanSection,
    Prepare,
    Prepared,
    Refused,
    Release,
    Resource,
    StepPlan,
    WorkPlan,
    int32_array,
)
from tests.unit.managers.scheduler.scheduler_host import Host, expected_ids, request

MODES = ("abort", "retract", "in_place")
NUM_ACTIONS = 150
CUT = 0.01  # of the effects are the last ones of their scheduler
PROMPTS = 5  # few, so that prefixes are shared
ADAPTERS = ("red", "blue", "green")  # more than there are places
WITHOUT_WEIGHTS = (ReleaseMemory, ResumeMemory)


def _forgets_cache(work: Work) -> bool:
    return isinstance(work, LoadWeights | ReceiveWeights) or (
        isinstance(work, ReleaseMemory) and "kv_cache" in work.tags
    )


class SchedulerDied(Exception):
    """Raised between two effects."""


class WatchedHost(Host):
    """A scheduler's host that shows its world each effect, and may die after any."""

    def __init__(self, world: EngineWorld, ledger: EngineLedger | None) -> None:
        self.world = world
        super().__init__(world.num_ranks, ledger=ledger, max_loras_per_batch=world.num_places)

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if not (isinstance(effect, ToWorkers) and isinstance(effect.message, Prepare | Release)):
                super()._apply([effect])
            self.world.note(self, effect)


class EngineWorld:
    """One server and its client. A broken promise is an AssertionError."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"engine work {seed}")
        self.statistics: Counter[str] = Counter()
        self.num_ranks = self.rng.choice((1, 2))
        self.num_places = self.rng.choice((1, 2))  # for adapters
        self.held: dict[str, set[int]] = {}  # by adapter that the workers were told to load, the ranks that have it
        self.loading: list[tuple[str, int]] = []  # adapters, and ranks that have not answered
        self.adapter_of_slot: dict[int, str] = {}
        self.ledger = EngineLedger()  # as it was recorded last
        self.asked: UpdateWeights | None = None  # the call under way
        self.expected: EngineLedger | None = None  # the ledger that its answer promises
        self.fails = False  # the change under way
        self.paused = False
        self.live: dict[int, GenerateRequest] = {}
        self.came: dict[int, list[int]] = {}  # of generations before this one
        self.computed: list[tuple[str, list[int]]] = []
        """Adapters and tokens of the rows that were admitted since weights or memory were exchanged."""
        self.num_calls = 0
        self.num_in_flight = 0
        self.may_die = False
        self.made: dict[int, GenerateRequest] = {}
        self.names = {"default"}  # of all weights that there were
        self.pause_calls: set[int] = set()  # that are not answered
        self.host = WatchedHost(self, None)

    def run(self) -> None:
        self.may_die = True
        for _ in range(NUM_ACTIONS):
            try:
                self.act()
            except SchedulerDied:
                self.replace_scheduler()
        self.may_die = False
        self.end()

    # ---- What happens

    def act(self) -> None:
        kinds = {
            self.step: 24,
            self.arrive: 8,
            self.load: 6,
            self.change: 3,
            self.pause: 1,
            self.go_on: 3,
            self.rename: 1,
            self.die: 1,
        }
        self.rng.choices(list(kinds), list(kinds.values()))[0]()

    def step(self) -> None:
        self.host.now += self.rng.random() / 5
        self.host.tick()
        for _ in range(self.rng.randrange(4)):
            if self.host.plans:
                self.answer()
            self.host.acknowledge()
            self.host.tick()

    def answer(self) -> None:
        work = self.host.plans[0]
        if isinstance(work, StepPlan):
            self.host.answer()
            self.num_in_flight -= 1
            self.gather()
            return
        self.host.plans.popleft()
        done = self.host.worker.do(work)
        if self.fails:
            done = replace(done, error="It cannot be done.")
        elif isinstance(work.work, ReleaseMemory) and "kv_cache" in work.work.tags:
            self.host.worker.forget_kv()
        if not self.fails and _forgets_cache(work.work):
            self.computed.clear()
        for rank in range(self.num_ranks):
            self.host.from_worker(replace(done, rank=rank), rank)

    def load(self) -> None:
        """A rank has loaded an adapter, whatever else is under way."""
        if not self.loading:
            return
        key, rank = self.loading.pop(self.rng.randrange(len(self.loading)))
        self.held[key].add(rank)
        if len(self.held[key]) == self.num_ranks:
            self.statistics["adapters loaded"] += 1
            self.statistics["adapters loaded in a change"] += self.asked is not None
            self.statistics["adapters loaded while memory is released"] += bool(self.ledger.released)
        self.host.from_worker(Prepared(key, ""), rank)

    def arrive(self) -> None:
        rid = self.num_calls = self.num_calls + 1
        prompt = [self.rng.randrange(PROMPTS), *range(10, 10 + self.rng.randrange(3, 14))]
        adapter = self.rng.choice(("", "", *ADAPTERS))
        made = with_adapter(
            request(rid, prompt, self.rng.randrange(1, 12)), Resource("adapter", adapter, b"") if adapter else None
        )
        self.live[rid], self.came[rid], self.made[rid] = made, [], made
        self.host.say(made)
        refused = any(one.rid == rid for one in self.host.of_type(Refused))
        must = bool(self.ledger.released) and self.ledger.refuses_requests
        self.statistics["requests refused while memory is released"] += must
        assert refused == must, f"is request {rid} refused? {refused}; must it be? {must}"
        if refused:
            del self.live[rid]

    def change(self) -> None:
        self.ask(self.draw_work())

    def draw_work(self) -> EngineWork:
        tags = [tag for tag in MEMORY_TAGS if self.rng.random() < 0.6] or ["kv_cache"]
        name = f"folder {self.num_calls}"
        works: list[EngineWork] = [LoadWeights(name), LoadWeights(name, is_partial=True), InspectWeights()]
        works += [ReceiveWeights("group", [], [], [], False)]
        works += [ReleaseMemory(tags, refuses_requests=self.rng.random() < 0.3), ResumeMemory(tags)]
        weights = [3, 1, 1, 1, 2, 5]
        return self.rng.choices(works, weights)[0]

    def ask(self, work: EngineWork) -> None:
        self.num_calls += 1
        is_update = isinstance(work, LoadWeights | ReceiveWeights)
        version = f"version {self.num_calls}" if is_update and self.rng.random() < 0.7 else ""
        self.say_change(UpdateWeights(self.num_calls, work, version, is_update and self.rng.random() < 0.3))

    def say_change(self, asked: UpdateWeights) -> None:
        is_whole = isinstance(asked.work, LoadWeights) and not asked.work.is_partial
        lacks = "weights" in self.ledger.released and not (is_whole or isinstance(asked.work, WITHOUT_WEIGHTS))
        must_refuse = self.asked is not None or lacks
        if not must_refuse:
            self.asked, self.fails = asked, self.rng.random() < 0.15
            self.expected = self.after(asked)
            if asked.aborts:
                self.aborted()
        self.host.say(asked)
        if must_refuse:
            (reply,) = [one for one in self.host.of_type(ControlReply) if one.call == asked.call]
            self.statistics["calls refused"] += 1
            assert not reply.ok and reply.message, f"{asked} is taken"

    def after(self, asked: UpdateWeights) -> EngineLedger:
        """The ledger once this is done."""
        before, work = self.ledger, asked.work
        if isinstance(work, ReleaseMemory):
            released = [*before.released, *(tag for tag in work.tags if tag not in before.released)]
            refuses = before.refuses_requests or work.refuses_requests
            return replace(before, released=released, refuses_requests=refuses)
        gone = work.tags if isinstance(work, ResumeMemory) else ["weights"]
        left = [tag for tag in before.released if tag not in gone]
        resumed = replace(before, released=left, refuses_requests=bool(left) and before.refuses_requests)
        if isinstance(work, ResumeMemory):
            return resumed
        if isinstance(work, InspectWeights):
            return before
        source = WeightsSource("", "")
        if isinstance(work, LoadWeights) and not work.is_partial:
            source = WeightsSource(work.folder, f"those of {work.folder}")
        return replace(resumed, weights=source, weight_version=asked.version or before.weight_version)

    def pause(self) -> None:
        self.num_calls += 1
        mode = self.rng.choice(MODES)
        self.paused = True
        if mode == "abort":
            self.aborted()
        self.pause_calls.add(self.num_calls)
        self.host.say(PauseGeneration(self.num_calls, mode))
        self.statistics[f"pauses {mode}"] += 1

    def go_on(self) -> None:
        self.num_calls += 1
        self.paused = False
        self.host.say(ContinueGeneration(self.num_calls))
        assert not self.ledger.pauses, "generation goes on, and the ledger has a pause"

    def rename(self) -> None:
        self.num_calls += 1
        name = f"name {self.num_calls}"
        if self.expected is not None and not (self.asked and self.asked.version):
            self.expected = replace(self.expected, weight_version=name)
        self.host.say(SetWeightVersion(self.num_calls, name))
        assert self.ledger.weight_version == name

    def die(self) -> None:
        raise SchedulerDied

    def aborted(self) -> None:
        self.live.clear()

    def replace_scheduler(self) -> None:
        """The next generation gets the ledger, and the client says again what it has no answer to."""
        self.statistics["deaths"] += 1
        self.statistics["deaths in a change"] += self.asked is not None
        self.statistics["deaths with memory released"] += bool(self.ledger.released)
        asked, self.asked, self.expected, self.num_in_flight = self.asked, None, None, 0
        self.gather()
        for rid in self.live:
            self.came[rid] += self.host.ids(rid)
        self.computed.clear()
        self.held, self.loading, self.adapter_of_slot = {}, [], {}  # the workers are new too
        self.pause_calls.clear()
        may_die, self.may_die = self.may_die, False
        self.paused = bool(self.ledger.pauses)
        self.host = WatchedHost(self, self.ledger)
        for rid, made in list(self.live.items()):
            ids = self.came[rid]
            self.host.say(replace(made, output_ids=[int32_array(ids)], resumed=True))
        if asked is not None and self.rng.random() < 0.7:
            self.say_change(asked)
        self.may_die = may_die

    # ---- What must be

    def note(self, host: WatchedHost, effect: Effect) -> None:
        match effect:
            case Record(ledger):
                self.ledger = ledger
                self.names.add(ledger.weight_version)
                self.statistics["ledgers"] += 1
            case ToWorkers(Prepare(resource)):
                assert resource.key not in self.held, f"{resource.key} is to be loaded again"
                assert len(self.held) < self.num_places, f"{resource.key} beside {list(self.held)}"
                self.held[resource.key] = set()
                self.loading += [(resource.key, rank) for rank in range(self.num_ranks)]
            case ToWorkers(Release(key)):
                self.statistics["adapters released"] += 1
                assert len(self.held.pop(key)) == self.num_ranks, f"{key} is to be released while it is loaded"
            case ToWorkers():
                sent = host.plans[-1]
                if isinstance(sent, WorkPlan):
                    self.check_work(sent)
                else:
                    self.check_step(host, sent)
            case ToFrontend(_, ControlReply() as reply):
                self.check_reply(reply)
        if self.may_die and self.rng.random() < CUT:
            raise SchedulerDied

    def check_work(self, sent: WorkPlan) -> None:
        self.statistics["works"] += 1
        assert not self.num_in_flight, f"{sent.work} beside {self.num_in_flight} steps"
        assert self.asked is not None and type(sent.work) is type(self.asked.work), f"{sent.work} for {self.asked}"
        if isinstance(sent.work, ReleaseMemory):
            assert not set(sent.work.tags) & set(self.ledger.released), f"{sent.work} of {self.ledger}"
        if isinstance(sent.work, ResumeMemory):
            assert set(sent.work.tags) <= set(self.ledger.released), f"{sent.work} of {self.ledger}"
        if isinstance(sent.work, WITHOUT_WEIGHTS):
            assert sent.work.weights == self.ledger.weights, f"{sent.work} of {self.ledger}"

    def check_step(self, host: WatchedHost, sent: StepPlan) -> None:
        self.num_in_flight += 1
        self.statistics["steps"] += 1
        assert self.asked is None, f"a step is planned beside {self.asked}"
        assert not self.ledger.released, f"a step is planned while {self.ledger.released} are released"
        assert not self.paused, "a step is planned in a pause"
        for admission in host.all_plans[-1].admissions:
            ids = admission.ids.tolist()
            cached = ids[: admission.cached]
            self.statistics["cached prefixes"] += bool(cached)
            rows = [row for adapter, row in self.computed if adapter == admission.adapter]
            is_new = not cached or any(row[: len(cached)] == cached for row in rows)
            assert is_new, f"{cached} is cached of what was exchanged since, or of another adapter"
            made = self.made[admission.seed]
            self.computed.append((admission.adapter, [*made.prompt_ids.tolist(), *expected_ids(made)]))
            assert admission.adapter == (made.adapter.key if made.adapter else ""), f"{made}: {admission}"
            self.adapter_of_slot[admission.slot] = admission.adapter
        self.check_adapters(host.all_plans[-1])

    def check_adapters(self, section: PlanSection) -> None:
        """All ranks have the adapters of the rows."""
        for slot in (*section.extend_slots.tolist(), *section.decode_slots.tolist()):
            if key := self.adapter_of_slot[slot]:
                self.statistics["rows with an adapter"] += 1
                assert len(self.held.get(key, ())) == self.num_ranks, f"a row runs with {key}; loaded are {self.held}"

    def check_reply(self, reply: ControlReply) -> None:
        if reply.call in self.pause_calls:
            self.pause_calls.remove(reply.call)
            assert reply.ok == bool(self.ledger.pauses), f"{reply} with {self.ledger}"
        if self.asked is None or reply.call != self.asked.call:
            return
        asked, self.asked = self.asked, None
        expected, self.expected = self.expected, None
        self.statistics[f"{type(asked.work).__name__} {'done' if reply.ok else 'failed'}"] += 1
        assert reply.ok != self.fails and bool(reply.message) == self.fails, f"{asked}: {reply}"
        if reply.ok and expected is not None:
            assert replace(self.ledger, pauses=[]) == replace(expected, pauses=[]), f"{self.ledger} behind {asked}"

    def gather(self) -> None:
        """The tokens and ends that came are those of the requests, whatever was exchanged meanwhile."""
        ends = self.host.ends()
        for rid, made in list(self.live.items()):
            ids, expected = self.came[rid] + self.host.ids(rid), expected_ids(made)
            assert ids == expected[: len(ids)], f"request {rid}: {ids} are no beginning of {expected}"
            if (done := ends.get((rid, 0))) is not None:
                self.statistics["ends"] += 1
                assert (done.reason, ids) == ("length", expected), f"request {rid}: {done} behind {ids}"
                assert done.weight_version in self.names, f"{done} names weights that never were"
                del self.live[rid]

    def end(self) -> None:
        """Everything comes back, and all that is live ends."""
        self.finish_work()
        assert self.asked is None, f"{self.asked} was never answered"
        if self.ledger.released:
            self.num_calls += 1
            self.say_change(UpdateWeights(self.num_calls, ResumeMemory(list(MEMORY_TAGS)), "", aborts=False))
            self.fails = False
        self.go_on()
        self.finish_work()
        assert not self.ledger.released and not self.ledger.pauses, f"{self.ledger}"
        assert not self.live, f"{list(self.live)} never ended"

    def finish_work(self) -> None:
        self.host.tick()
        while self.host.plans or self.loading:
            self.load()
            if self.host.plans:
                self.answer()
            self.host.acknowledge()
            self.host.tick()
        self.gather()


def tell_all(worlds: range = range(60)) -> Counter[str]:
    """Run these worlds, and return how often each thing happened. AssertionError names the first world that breaks."""
    statistics: Counter[str] = Counter()
    for seed in worlds:
        world = EngineWorld(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"world {seed} of engine work broke: {type(error).__name__}: {error}") from error
        statistics.update(world.statistics)
    return statistics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    for name, count in sorted(tell_all(range(options.first, options.first + options.worlds)).items()):
        print(f"{count:10,} {name}")


if __name__ == "__main__":
    main()

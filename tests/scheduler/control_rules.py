"""What a scheduler owes to every message of a frontend: which answer, when, with which content. Judged by what was said alone."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from srt.protocol.engine_work import EngineLedger
from srt.protocol.messages import (
    Abort,
    AbortLabel,
    AckBatch,
    AskRange,
    ContinueGeneration,
    ControlReply,
    FlushCache,
    FromFrontend,
    GenerateRequest,
    GetState,
    Load,
    PauseGeneration,
    PinResources,
    Refused,
    Rejected,
    RequestDone,
    Scalar,
    SchedulerHello,
    ToFrontend,
    TokenBatch,
    WorkDone,
)
from tests.scheduler.books import ALL, Books, Entry
from tests.scheduler.counts import StepCounts
from tests.scheduler.hostile import Hostile
from tests.scheduler.ledger_frontend import LedgerFrontend
from tests.scheduler.settings import Settings
from tests.scheduler.traffic import Choice

Said = list[tuple[int, ToFrontend]]  # by the scheduler, with the frontend's number
Heard = FromFrontend | Hostile
MODES = ("abort", "retract", "in_place")


@dataclass(slots=True, eq=False)
class _Look:
    """At the workers' tables, on its way through the ranks."""

    frontend: LedgerFrontend
    call: int
    num_answers: int = 0
    liars: list[int] = field(default_factory=list)  # ranks


class ControlRules:
    """One scheduler's books and what they say it owes. The server shows it each message with what the scheduler said at once."""

    def __init__(
        self,
        settings: Settings,
        rng: random.Random,
        statistics: Counter[str],
        choices_of: Callable[[GenerateRequest], list[Choice]],
        note_end: Callable[[Choice], None],
        ledger: EngineLedger,
    ) -> None:
        self.books = Books()
        self.counts = StepCounts()
        self.ledger = ledger  # as the scheduler has recorded it
        self.paused_by = {pause.frontend: pause.process for pause in ledger.pauses}
        self.is_draining = False
        self.lies = True  # now and then, a rank about its tables
        self._settings = settings
        self._rng = rng
        self._statistics = statistics
        self._choices_of = choices_of
        self._note_end = note_end
        # Else it is not known at once who ends by itself.
        self._is_sure = settings.waiting_timeout is None and settings.running_timeout is None
        self._is_sure &= not settings.num_resources
        self._there: dict[int, LedgerFrontend] = {}
        self._is_ready = False
        self._early: list[tuple[LedgerFrontend, Heard]] = []
        self._pauses: list[tuple[LedgerFrontend, int]] = []  # that are not answered
        self._asked_deep: list[_Look] = []  # since the last tick
        self._looks: dict[int, _Look] = {}  # by step
        self._unknown: list[tuple[LedgerFrontend, int]] = []  # requests since the last tick with ids that nobody knows
        self._nobody_runs = True  # for sure
        self._last_rows: list[Choice] = []  # of the last plan
        self._was_paused = False  # since the last plan
        self._acknowledged: dict[int, int] = {}
        self._batches: dict[int, int] = {}  # sent
        self.has_flushed = False  # with the last message: what was cached may not be used any more

    # ---- Frontends come and go

    def meet(self, frontend: LedgerFrontend) -> None:
        if frontend.number in self._there:
            self.lose(frontend.number)
        self._there[frontend.number] = frontend
        if (process := self.paused_by.get(frontend.number)) is not None:
            self._statistics["rule: a pause outlives its scheduler, but not its frontend"] += 1
            if process != frontend.process:
                del self.paused_by[frontend.number]
        self._acknowledged[frontend.number], self._batches[frontend.number] = -1, 0

    def lose(self, number: int) -> None:
        """What it asked for is owed to nobody: least of all to its successor."""
        frontend = self._there.pop(number, None)
        asked = [*self._pauses, *((look.frontend, 0) for look in (*self._asked_deep, *self._looks.values()))]
        num_open = sum(asker is frontend for asker, _ in asked)
        self._statistics["rule: a successor gets no reply of its predecessor"] += num_open
        entries = self.books.of_frontend(number)
        self._end(self.books.abort(entries), by_frontend=True)
        for entry in entries:
            self.books.forget(entry)
        self.paused_by.pop(number, None)
        self._early = [(f, m) for f, m in self._early if f is not frontend]
        self._pauses = [(f, call) for f, call in self._pauses if f is not frontend]
        self._asked_deep = [look for look in self._asked_deep if look.frontend is not frontend]

    def drain(self) -> None:
        self.is_draining = True
        self.paused_by.clear()

    def is_there(self, frontend: LedgerFrontend) -> bool:
        return self._there.get(frontend.number) is frontend

    # ---- What a frontend says

    def heard(self, frontend: LedgerFrontend, message: Heard, said: Said) -> None:
        """And what was said at once: nothing that was not asked for."""
        self.has_flushed = False
        assert self.is_there(frontend)
        if not self._is_ready and not (isinstance(message, Hostile) and message.answer == "Rejected"):
            assert not said, f"{said[0]} is said before the workers are ready"
            self._early.append((frontend, message))
            return
        said = list(said)
        self._take(frontend, message, said)
        assert not said, (
            f"frontend {said[0][0]} is told {said[0][1]}, and {message} of {frontend.number} asks for no such"
        )

    def began(self, said: Said) -> None:
        """The workers are ready: what was said before counts now."""
        self.has_flushed, self._is_ready = False, True
        said = [(n, message) for n, message in said if not isinstance(message, SchedulerHello | Load)]
        early, self._early = self._early, []
        for frontend, message in early:
            self._take(frontend, message, said)
        assert not said, f"frontend {said[0][0]} is told {said[0][1]}, and asked for no such"

    def _take(self, frontend: LedgerFrontend, message: Heard, said: Said) -> None:
        number, books = frontend.number, self.books
        match message:
            case Hostile():
                self._take_hostile(frontend, message, said)
            case GenerateRequest():
                self._take_request(frontend, message, said)
            case Abort(rid, index):
                entries = books.of_request(number, rid)
                self._end(books.abort(e for e in entries if index in (ALL, e.index)), by_frontend=True)
            case AbortLabel():
                self._take_abort(frontend, message, said)
            case AckBatch(batch):
                self._acknowledged[number] = batch
                books.acknowledge(number, batch)
            case AskRange(rid, index):
                entry = books.entries.get((number, rid, index))
                if entry is not None and not entry.is_live:
                    entry.batch = -1
            case FlushCache(call):
                self._check_flush(_reply(said, number, call))
            case PauseGeneration():
                self._take_pause(frontend, message, said)
            case ContinueGeneration(call):
                self._was_paused |= bool(self.paused_by)
                self.paused_by.clear()
                reply = _reply(said, number, call)
                assert (reply.ok, reply.message, reply.values) == (True, "", {}), f"{reply}"
                self._check_recorded()
            case GetState(call, deep):
                if deep:
                    self._asked_deep.append(_Look(frontend, call))
                else:
                    self._check_state(_reply(said, number, call))
            case PinResources():
                pass  # resource_rules.py says what follows
            case _:
                raise AssertionError(f"{message}")

    def _take_request(self, frontend: LedgerFrontend, request: GenerateRequest, said: Said) -> None:
        number = frontend.number
        choices = self._choices_of(request)
        refused = _pop(said, lambda n, m: n == number and isinstance(m, Refused) and m.rid == request.rid)
        must, may = self._reasons_to_refuse(request)
        assert refused is not None or not must, f"request {request.rid} is taken, against {must}"
        if refused is not None:
            assert isinstance(refused, Refused)
            self._statistics["rule: taken or refused, as it must be"] += 1
            assert refused.status in must | may, f"request {request.rid} is refused, though {must} and {may}: {refused}"
            assert bool(refused.retry_after_s) == (refused.status == 429) and refused.message
            self.books.totals.num_refused += 1
            return
        self._statistics["rule: taken or refused, as it must be"] += bool(may)
        for choice, ids in zip(choices, request.output_ids, strict=True):
            self.books.enter(Entry(frontend, request.rid, choice.choice, request.label, choice, len(ids)))
            if not self.books.by_choice[choice].is_live:
                self._note_end(choice)

    def _reasons_to_refuse(self, request: GenerateRequest) -> tuple[set[int], set[int]]:
        """The statuses for which it must be refused, and those for which it may be."""
        s, must, may = self._settings, set[int](), set[int]()
        num_tokens = len(request.prompt_ids) + request.sampling.max_new_tokens
        if self.is_draining and not request.resumed:
            must.add(503)
        if request.label in self.books.by_label and not request.resumed:
            self._statistics["rule: one live request of a name"] += 1
            (must if self._is_sure else may).add(400)
        if num_tokens > min(s.max_request_tokens, s.num_pages * s.page_size):
            must.add(400)
        elif not s.can_fit(num_tokens):
            may.add(400)
        if request.priority and s.policy != "priority":
            must.add(400)
        if self.books.num_live - s.num_slots >= s.max_queued and not (request.resumed or request.urgent):
            (must if self._is_sure else may).add(429)
        return must, may

    def _take_hostile(self, frontend: LedgerFrontend, hostile: Hostile, said: Said) -> None:
        number, answer = frontend.number, hostile.answer
        self._statistics["rule: what is malformed is refused once"] += 1
        is_known = hostile.is_duplicate and bool(self.books.of_request(number, hostile.rid))
        if answer == "nothing":
            return
        if answer == "Rejected" or is_known:
            rejected = _pop(said, lambda n, m: n == number and isinstance(m, Rejected))
            assert isinstance(rejected, Rejected) and rejected.reason, f"{hostile} is not rejected"
            return
        refused = _pop(said, lambda n, m: n == number and isinstance(m, Refused) and m.rid == hostile.rid)
        is_name_taken = hostile.label in self.books.by_label
        self._statistics["rule: one live request of a name"] += is_name_taken
        must = self.is_draining or answer == "Refused" or (is_name_taken and self._is_sure)
        if refused is None:
            assert not must, f"{hostile} is taken"
            self._unknown.append((frontend, hostile.rid))
            for index in hostile.choices:
                self.books.enter(Entry(frontend, hostile.rid, index, hostile.label, None, 0))
            return
        assert isinstance(refused, Refused) and refused.message
        self.books.totals.num_refused += 1
        is_full = self.books.num_live - self._settings.num_slots >= self._settings.max_queued
        statuses = {400} | ({503} if self.is_draining else set()) | ({429} if is_full else set())
        assert refused.status in statuses, f"{hostile}: {refused}"

    def _take_abort(self, frontend: LedgerFrontend, message: AbortLabel, said: Said) -> None:
        aborted = self.books.abort(self.books.named(message.label))
        reply = _reply(said, frontend.number, message.call)
        count = reply.values.get("num_aborted")
        self._statistics["rule: aborts by name are counted"] += bool(aborted)
        is_right = count == len(aborted) if self._is_sure else isinstance(count, int) and count <= len(aborted)
        assert reply.ok and is_right, f"{len(aborted)} were called {message.label!r}, and {reply}"
        for number in self._there.keys() - {frontend.number}:
            told = _pop(said, partial(_is, number, message))
            self._statistics["rule: aborts by name reach all frontends"] += 1
            assert told is not None, f"frontend {frontend.number} aborts {message.label!r}; {number} is not told"
        self._end(aborted)

    def _take_pause(self, frontend: LedgerFrontend, message: PauseGeneration, said: Said) -> None:
        if message.mode not in MODES:
            reply = _reply(said, frontend.number, message.call)
            assert not reply.ok and all(mode in reply.message for mode in MODES), f"{reply}"
            return
        if not self.is_draining:
            self.paused_by[frontend.number] = frontend.process
        if message.mode == "abort":
            self._end(self.books.abort(self.books.named("")))
        self._nobody_runs |= message.mode != "in_place"
        self._pauses.append((frontend, message.call))

    def _end(self, entries: list[Entry], *, by_frontend: bool = False) -> None:
        for entry in entries:
            if entry.choice is not None:
                entry.choice.may_abort |= not by_frontend
                self._note_end(entry.choice)

    def _check_flush(self, reply: ControlReply) -> None:
        """Done if nobody runs, and nobody waits or all wait for the end of a pause."""
        num_live = self.books.num_live
        is_running = not self._nobody_runs and any(
            choice in self.books.by_choice and self.books.by_choice[choice].is_live for choice in self._last_rows
        )
        if not num_live or (self.paused_by and self._nobody_runs):
            self._statistics["rule: flushes are done when nobody runs"] += 1
            self._statistics["rule: flushes are done in a pause"] += bool(num_live)
            assert reply.ok, f"nobody runs, and all that wait are paused: {reply}"
        elif self._is_sure and (is_running or not self.paused_by):
            self._statistics["rule: flushes are refused while some run"] += 1
            numbers = [int(number) for number in re.findall(r"\d+", reply.message)]
            assert not reply.ok and sum(numbers) == num_live, f"{num_live} run or wait: {reply}"
        self.has_flushed |= reply.ok

    # ---- What a tick says

    def ticked(self, said: Said, num_in_flight: int, is_all_answered: bool) -> None:
        """`is_all_answered`: workers have nothing to do, behind what this tick has planned."""
        assert not self._asked_deep, "no worker was asked for its tables"
        for frontend, rid in self._unknown:
            if self.is_there(frontend):
                self._check_unknown(frontend.number, rid, said)
        self._unknown.clear()
        self._check_loads(said)
        replies = {(n, m.call): m for n, m in said if isinstance(m, ControlReply)}
        if self._pauses and (not num_in_flight or not self.paused_by):
            for frontend, call in self._pauses:
                reply = replies.pop((frontend.number, call), None)
                assert reply is not None, f"pause {call} of frontend {frontend.number} is not answered"
                self._check_pause(reply)
            self._pauses.clear()
        assert not replies, f"a call is answered that is not due: {replies}"
        if is_all_answered and not self.paused_by and self._is_sure:
            assert not self.books.num_live, (
                f"{self.books.num_live} live, no pause is on, and workers have nothing to do"
            )
        if not self.paused_by:
            self._statistics["rule: generation goes on after a pause"] += self._was_paused and bool(self.books.num_live)
            self._was_paused = False

    def _check_unknown(self, number: int, rid: int, said: Said) -> None:
        """Of a request with ids that the model does not know: what lives of it is refused, at once, and with one word."""
        refusals = [m for n, m in said if n == number and isinstance(m, Refused) and m.rid == rid]
        live = [entry for entry in self.books.of_request(number, rid) if entry.is_live]
        self._statistics["rule: unknown ids are refused once"] += bool(live)
        assert len(refusals) == bool(live), f"request {rid} of frontend {number} has unknown ids: {refusals}"
        for refusal in refusals:
            assert refusal.status == 400 and refusal.message
            self.books.totals.num_refused += 1
        for entry in live:
            self.books.forget(entry)
        self.books.totals.num_taken -= len(live)

    def _check_loads(self, said: Said) -> None:
        """All are told the same: what is there now."""
        loads = {number: message for number, message in said if isinstance(message, Load)}
        if loads:
            self._statistics["rule: all are told the same load"] += len(loads)
            (load, *others), num_steps = loads.values(), self.counts.values()["num_steps"]
            assert loads.keys() == self._there.keys() and all(other == load for other in others), f"{loads}"
            assert load.num_steps == num_steps, f"{load}, and there were {num_steps} steps"
            if self._is_sure:
                num_live = self.books.num_live
                assert load.num_running + load.num_waiting == num_live, f"{load}, and {num_live} are there"

    def _check_pause(self, reply: ControlReply) -> None:
        """Done, or why not."""
        self._statistics["rule: pauses are answered in time"] += 1
        self._check_recorded()
        assert reply.ok == bool(self.paused_by) and reply.ok == (not reply.message), f"{self.paused_by}: {reply}"

    def _check_recorded(self) -> None:
        """What is answered now must hold after the scheduler's death, too."""
        self._statistics["rule: what is answered is in the ledger"] += 1
        recorded = {pause.frontend: pause.process for pause in self.ledger.pauses}
        assert recorded == self.paused_by, f"{recorded} is recorded where {self.paused_by} is answered"

    def planned(self, choices: list[Choice]) -> None:
        self._last_rows, self._nobody_runs = choices, False

    def sent_end(self, number: int, done: RequestDone, batch: int) -> None:
        entry = self.books.entries.get((number, done.rid, done.choice))
        assert entry is not None and entry.batch < 0, f"{done} is said to frontend {number}, and was said before"
        entry.batch = batch
        self.books.end(entry)

    def sent_batch(self, number: int) -> None:
        self._batches[number] += 1

    def check_drained(self, is_drained: bool, num_in_flight: int) -> None:
        """A server that ends may end now if the scheduler says so: nothing may be owed to anybody then."""
        if not self._is_ready:
            assert is_drained == (not self._early), (
                f"{len(self._early)} wait for the workers. Is it drained? {is_drained}"
            )
            return
        if self.books.num_live:
            assert not (is_drained and self._is_sure), f"{self.books.num_live} live, and it is drained"
            return
        num_unsaid = self.books.num_unsaid
        self._statistics["rule: drained only when all ends are said"] += bool(num_unsaid)
        wanted = not num_unsaid and not num_in_flight
        assert is_drained == wanted, (
            f"{num_unsaid} ends are not sent, {num_in_flight} steps are in flight, and is it drained? {is_drained}"
        )

    def ended_grace(self, said: Said) -> None:
        """Of a stop: what has not ended is aborted, and that is said to all."""
        batches = [(number, message) for number, message in said if isinstance(message, TokenBatch)]
        told = {(number, done.rid, done.choice) for number, batch in batches for done in batch.done}
        owed = {key for key, entry in self.books.entries.items() if entry.batch < 0}
        self._statistics["rule: the end of a grace is said to all"] += len(owed)
        assert told == owed, f"as the grace is over {owed - told} are not told that they end"

    # ---- Looks at the state

    def asked_tables(self, step: int) -> None:
        """The workers are, in the order in which frontends have asked."""
        assert self._asked_deep, "workers are asked for their tables, for nobody"
        self._looks[step] = self._asked_deep.pop(0)

    def answer_of_rank(self, rank: int, answer: WorkDone) -> WorkDone:
        """Now and then it has other tables than it should."""
        look = self._looks.get(answer.step)
        if look is None or not self.lies or self._rng.random() < 0.5:
            return WorkDone(answer.step, rank, answer.values)
        look.liars.append(rank)
        wrong = self._rng.choice(("", "0" * 16, str(answer.values["tables_hash"])[::-1] + "x"))
        return WorkDone(answer.step, rank, answer.values | {"tables_hash": wrong})

    def heard_done(self, done: WorkDone, said: Said, num_ranks: int) -> None:
        look = self._looks.get(done.step)
        replies = [(n, m) for n, m in said if isinstance(m, ControlReply)]
        if look is not None:
            look.num_answers += 1
        if look is None or look.num_answers < num_ranks or not self.is_there(look.frontend):
            assert not replies, f"{replies} is due to nobody"
            return
        del self._looks[done.step]
        assert [(n, m.call) for n, m in replies] == [(look.frontend.number, look.call)], f"{replies}"
        self._check_state(replies[0][1], look)

    def _check_state(self, reply: ControlReply, look: _Look | None = None) -> None:
        values, books, s = reply.values, self.books, self._settings
        liars = look.liars if look is not None else []
        self._statistics["rule: states are right"] += 1
        self._statistics["rule: ranks with other tables are named"] += bool(liars)
        named = [int(rank) for rank in re.findall(r"[Ww]orker (\d+)", reply.message)]
        assert (reply.ok, sorted(named)) == (not liars, sorted(liars)), f"{liars} have other tables: {reply}"
        if look is not None:
            assert values["worker_num_slots_seen"] == 1000, f"worker 0 said 1000, not {values}"
        running, waiting = values["num_running"], values["num_waiting"]
        assert isinstance(running, int) and isinstance(waiting, int)
        wanted: dict[str, int | bool] = {
            "is_paused": bool(self.paused_by),
            "is_draining": self.is_draining,
            "num_slots": s.num_slots,
            "num_free_slots": s.num_slots - running,
            "num_total_pages": s.num_pages,
            "page_size": s.page_size,
            "num_refused": books.totals.num_refused,
            **self.counts.values(),
        }
        if self._is_sure:
            wanted |= {
                "num_waiting": books.num_live - running,
                "num_finished": books.totals.num_finished,
                "num_failed": books.totals.num_failed,
                "num_aborted": books.totals.num_aborted,
                "num_generated_tokens": books.totals.num_generated_tokens,
                "num_timed_out": 0,
            }
            if s.row_tokens == 1:
                wanted["num_dropped_rows"] = books.totals.num_dropped_rows
        for number in self._there:
            known = books.of_frontend(number)
            wanted[f"live_requests_of_frontend_{number}"] = len(known)
            sent = self._batches[number] - 1 - self._acknowledged[number]
            wanted[f"unacknowledged_batches_of_frontend_{number}"] = sent
        for name, value in wanted.items():
            assert values[name] == value, f"{name} is {values[name]}, and should be {value}"
        others = {name for name in values if "_of_frontend_" in name} - wanted.keys()
        assert not others, f"{others} is said of a frontend that is not there"
        ends = [cast("int", values[f"num_{name}"]) for name in ("finished", "failed", "aborted", "timed_out")]
        assert sum(ends) + running + waiting == books.totals.num_taken, f"{books.totals.num_taken} came, and {values}"
        aborted = [cast("int", values[f"num_aborted_{name}"]) for name in ("waiting", "prefill", "decode")]
        assert sum(aborted) == values["num_aborted"], f"{aborted} were aborted, {values['num_aborted']} in all"
        assert running <= s.num_slots and running + waiting <= books.num_live
        free, cached = values["num_free_pages"], values["num_cached_pages"]
        assert isinstance(free, int) and isinstance(cached, int)
        assert free + cached == s.num_pages if not running else free + cached <= s.num_pages
        assert not running or not self._nobody_runs, f"{running} run, and nobody should"
        if self.paused_by and not self._nobody_runs and self._is_sure:
            entries = [books.by_choice.get(choice) for choice in self._last_rows]
            least = sum(entry is not None and entry.is_live for entry in entries)
            self._statistics["rule: a pause in place takes no slots"] += least > 0
            assert running >= least, f"{running} run, and {least} live that were in the last plan"


def check_facts(settings: Settings, facts: dict[str, Scalar]) -> None:
    """That a scheduler tells at the start-up."""
    s = settings
    num_tokens = s.num_pages * s.page_size
    assert facts == {
        "max_total_num_tokens": num_tokens,
        "max_request_tokens": min(s.max_request_tokens, num_tokens),
        "max_running_requests": s.num_slots,
        "num_pages": s.num_pages,
        "page_size": s.page_size,
        "dtype": "float32",
        "vocab_size": s.vocab_size,
    }


def _pop(said: Said, is_it: Callable[[int, ToFrontend], bool]) -> ToFrontend | None:
    """The first such, taken out."""
    for place, (number, message) in enumerate(said):
        if is_it(number, message):
            del said[place]
            return message
    return None


def _is(number: int, message: ToFrontend, to: int, said: ToFrontend) -> bool:
    return (number, message) == (to, said)


def _reply(said: Said, number: int, call: int) -> ControlReply:
    """To a call that is answered at once."""
    reply = _pop(said, lambda n, m: n == number and isinstance(m, ControlReply) and m.call == call)
    assert isinstance(reply, ControlReply), f"call {call} of frontend {number} is not answered"
    return reply

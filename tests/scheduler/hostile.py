"""What no frontend and no worker should send: what is malformed, twice there, out of range, or contradicts other ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from msgspec.msgpack import Ext
from msgspec.structs import replace as changed

from srt.managers.scheduler.effects import Effect, Fatal, Worker
from srt.managers.scheduler.scheduler import Scheduler
from srt.protocol.messages import (
    Abort,
    AckBatch,
    AskRange,
    FrontendHello,
    GenerateRequest,
    LogprobSpec,
    Message,
    RowLogprobs,
    SamplingSpec,
    StepAck,
    StepPlan,
    StepResult,
    WorkDone,
    WorkerFault,
    WorkerHello,
    int32_array,
)
from srt.protocol.views import RequestView
from tests.scheduler.settings import Settings
from tests.support.wire import request_at_scheduler

HOSTILE_RIDS: Final = 1 << 40  # from here on
COMPARED = (
    "config_hash dtype page_size num_pages num_slots max_request_tokens vocab_size max_row_tokens num_stages num_graphs"
)


@dataclass(frozen=True, slots=True)
class Hostile:
    """A message and what must become of it: Refused, Refused later (with the next tick), Rejected or nothing."""

    kind: str
    message: Message | RequestView
    rid: int
    answer: str
    choices: tuple[int, ...] = (0,)
    label: str = ""
    is_duplicate: bool = False  # of a request that may be there
    culprit: int = -1  # the choice for which alone it is refused; -1: all are to blame


class HostileRequests:
    """Draws them, each with one thing wrong."""

    def __init__(self, settings: Settings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._next_rid = HOSTILE_RIDS

    def draw(self, live: Sequence[GenerateRequest]) -> Hostile:
        """`live` are requests of the same frontend."""
        self._next_rid += 1
        rng, rid = self._rng, self._next_rid
        kind = rng.choice(("unknown id", "unknown id", "shape", "shape", "limits", "bytes", "name", "rid", "message"))
        if kind == "message":
            return self._message(rid)
        good = self.good(rid)
        if kind == "shape":
            return self._refused(kind, request_at_scheduler(self._misshapen(good)))
        if kind == "bytes":
            return self._refused(kind, self._torn(request_at_scheduler(good)))
        if kind == "limits":
            return self._refused(kind, request_at_scheduler(self._beyond_limits(good)))
        good, culprit = self._with_unknown_id(good)
        if live and kind == "name":
            good = changed(good, label=rng.choice(live).label)
        if live and kind == "rid":
            good = changed(good, rid=rng.choice(live).rid)
        indices = tuple(good.choices.tolist())
        view, is_duplicate = request_at_scheduler(good), good.rid != rid
        return Hostile(kind, view, good.rid, "Refused later", indices, good.label, is_duplicate, culprit)

    def good(self, rid: int = 0) -> GenerateRequest:
        """But for what is done to it."""
        s, rng = self._settings, self._rng
        prompt = [rng.randrange(s.vocab_size) for _ in range(rng.randint(1, 3))]
        num_choices = rng.choice((1, 1, 2, 3))
        return GenerateRequest(
            rid=rid,
            label=f"hostile {rid}",
            prompt_ids=int32_array(prompt),
            choices=int32_array(range(num_choices)),
            output_ids=[int32_array()] * num_choices,
            sampling=SamplingSpec(max_new_tokens=4),
            logprobs=LogprobSpec(),
            seed=rng.getrandbits(64),
            urgent=rng.random() < 0.2,
        )

    @staticmethod
    def _refused(kind: str, view: RequestView) -> Hostile:
        return Hostile(kind, view, view.rid, "Refused")

    def _misshapen(self, good: GenerateRequest) -> GenerateRequest:
        none, two = int32_array(), [int32_array()] * 2
        changes: tuple[dict[str, Any], ...] = (
            {"choices": none},
            {"choices": none, "output_ids": []},
            {"choices": int32_array((0, 0)), "output_ids": two},
            {"choices": int32_array((1, 0, 1)), "output_ids": [none] * 3},
            {"choices": int32_array((0, 1, 2, 3))},
            {"choices": int32_array((-1,)), "output_ids": [none]},
            {"choices": int32_array((0, -7)), "output_ids": two},
            {"prompt_ids": none},
            {"seed": -1},
            {"seed": -(2**63), "choices": int32_array((0, 1)), "output_ids": two},
        )
        return changed(good, **self._rng.choice(changes))

    def _torn(self, view: RequestView) -> RequestView:
        """An array that ends within an item, or is of another type."""
        sampling = view.sampling
        changes: tuple[dict[str, Any], ...] = (
            {"prompt_ids": view.prompt_ids + b"\1"},
            {"output_ids": [*view.output_ids[:-1], b"\0\0\0"]},
            {"sampling": changed(sampling, stop_ids=b"\1\2\3\4\5")},
            {"sampling": changed(sampling, bias_ids=b"\1")},
            {"sampling": changed(sampling, bias_values=Ext(sampling.bias_values.code, b"\1\2"))},
            {"sampling": changed(sampling, bias_values=Ext(sampling.bias_values.code + 1, b""))},
            {"logprobs": changed(view.logprobs, ids=b"\1\2")},
        )
        return changed(view, **self._rng.choice(changes))

    def _beyond_limits(self, good: GenerateRequest) -> GenerateRequest:
        s = self._settings
        most = min(s.max_request_tokens, s.num_pages * s.page_size) - len(good.prompt_ids)
        lengths = (0, -1, most + 1, most + 1000)
        longer = {"sampling": SamplingSpec(max_new_tokens=self._rng.choice(lengths))}
        more_important = {"priority": self._rng.choice((-3, 1, 9))}
        is_priority = s.policy != "priority" and self._rng.random() < 0.4
        return changed(good, **(more_important if is_priority else longer))

    def _with_unknown_id(self, good: GenerateRequest) -> tuple[GenerateRequest, int]:
        """The first that the model does not know, any other, or a negative one: in the prompt, or in the answer so far of that choice."""
        rng, size = self._rng, self._settings.vocab_size
        unknown = rng.choice((size, size, size + 1, 2**31 - 1, -1, -(2**31)))
        if rng.random() < 0.7:
            ids = good.prompt_ids.tolist()
            ids.insert(rng.randint(0, len(ids)), unknown)
            return changed(good, prompt_ids=int32_array(ids)), -1
        outputs, culprit = list(good.output_ids), rng.randrange(len(good.output_ids))
        outputs[culprit] = int32_array([0, unknown])
        return changed(good, output_ids=outputs), culprit

    def _message(self, rid: int) -> Hostile:
        kind = self._rng.choice(("abort", "ask", "plan", "hello", "ack"))
        if kind == "abort":
            return Hostile(kind, Abort(rid, self._rng.choice((-1, 0, 7))), rid, "nothing")
        if kind == "ask":
            return Hostile(kind, AskRange(rid, 0, self._rng.choice((-1, 0, 7))), rid, "nothing")
        if kind == "ack":
            return Hostile(kind, AckBatch(-1), rid, "nothing")
        message = StepPlan(1, []) if kind == "plan" else FrontendHello(0, "of another version")
        return Hostile(kind, message, rid, "Rejected")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the ranks are with the stream of steps and other work."""

    next_answer: list[int]  # of each rank
    last_sent: int
    result: StepResult | None  # that rank 0 owes next, if that is one
    ids_hash: int | None  # of the step that the last rank owes next, where another rank has said it


def break_off(scheduler: Scheduler, progress: Progress, settings: Settings, rng: random.Random, now: float) -> int:
    """Workers that say what they must not: each such word is the end, and it is told whose it was. Returns how many there were."""
    words = _words_out_of_turn(progress)
    rng.shuffle(words)
    last = [*_last_words(progress, settings), (0, WorkerFault(0, 3, "it broke"), "Worker 0 failed at step 3: it broke")]
    words = [*words[:2], rng.choice(last)]
    for rank, message, named in words:
        _check_fatal(scheduler.handle(Worker(rank), message, now), message, named)
    return len(words)


def _words_out_of_turn(progress: Progress) -> list[tuple[int, Message, str]]:
    """Nothing changes by these."""
    rank, first = len(progress.next_answer) - 1, progress.next_answer[0]
    empty = int32_array()
    words: list[tuple[int, Message, str]] = [
        (0, FrontendHello(0, ""), "Worker 0"),
        (0, StepResult(first + 1, empty, empty, 0, [], 0), "Worker 0"),
        (0, StepResult(first - 1, empty, empty, 0, [], 0), "Worker 0"),
        (0, WorkDone(first + 3, 0, {}), "Worker 0"),
        (0, StepAck(first, 0, 0, 0), "Worker 0"),
    ]
    if progress.next_answer[rank] > progress.last_sent:
        words.append((rank, WorkDone(progress.next_answer[rank], rank, {}), f"Worker {rank}"))
    if rank:
        words.append((rank, StepResult(progress.next_answer[rank], empty, empty, 0, [], 0), f"Worker {rank}"))
        words.append((rank, StepAck(progress.next_answer[rank] + 1, rank, 0, 0), f"Worker {rank}"))
    return words


def _last_words(progress: Progress, settings: Settings) -> list[tuple[int, Message, str]]:
    """Behind these a scheduler has no more to say."""
    rank, words = len(progress.next_answer) - 1, list[tuple[int, Message, str]]()
    if rank and progress.ids_hash is not None:
        step = progress.next_answer[rank]
        words += [(rank, StepAck(step, rank, progress.ids_hash + 1, 0), f"step {step}")] * 6
    result = progress.result
    if result is not None:
        counts, ids = result.counts, result.ids
        named = f"{result.step}"
        longer = changed(result, counts=np.append(counts, np.int32(1)), ids=np.append(ids, np.int32(0)))
        words += [(0, longer, named), (0, changed(result, ids=np.append(ids, np.int32(0))), named)]
        words.append((0, WorkDone(result.step, 0, {}), named))
        log = RowLogprobs(settings.num_slots + 3, False, 0, *[np.zeros(0, np.float32)] * 4)  # type: ignore[arg-type]
        words.append((0, changed(result, logprobs=[log]), named))
        if len(counts):
            for count, more in ((settings.row_tokens + 1, settings.row_tokens), (-2, -1)):
                wrong = counts.clip(1, 1)
                wrong[-1] = count
                words.append((0, changed(result, counts=wrong, ids=np.zeros(len(counts) + more, np.int32)), named))
    return words


def _check_fatal(effects: list[Effect], message: Message, named: str) -> None:
    assert len(effects) == 1 and isinstance(effects[0], Fatal), f"{message} is not taken seriously: {effects}"
    assert named in effects[0].reason, f"{message} is explained by {effects[0].reason!r}, without {named!r}"


def check_handshake(settings: Settings, rng: random.Random, hello: WorkerHello) -> None:
    """Two ranks that differ in one thing are no core, and it is told in what."""
    scheduler = Scheduler(replace(settings.server_args(), tp_size=2, pp_size=1), hello.protocol_hash)
    assert not scheduler.handle(Worker(0), changed(hello, rank=0), 0.0)
    field_name = rng.choice((*COMPARED.split(), "protocol_hash", "rank", "again"))
    value = getattr(hello, field_name, None)
    if field_name == "again":
        wrong, named = changed(hello, rank=0), "Worker 0"
    elif field_name == "rank":
        wrong, named = changed(hello, rank=2), "2"
    else:
        other = f"{value} or so" if isinstance(value, str) else int(value or 0) + 1
        wrong, named = changed(hello, rank=1, **{field_name: other}), field_name.removesuffix("_hash")
    _check_fatal(scheduler.handle(Worker(1), wrong, 0.0), wrong, named)

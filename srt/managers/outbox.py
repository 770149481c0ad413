"""What a frontend is still to be sent. Tokens travel as ranges read from the requests themselves, so nothing piles up here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from srt.managers.request import Request, Status
from srt.managers.slots import SlotTable
from srt.protocol.messages import Int32Array, Int64Array, RequestDone, TokenBatch, TokenLogprobs

MAX_UNACKNOWLEDGED = 8


@dataclass(frozen=True, slots=True)
class _Sent:
    """What is forgotten when this batch is acknowledged."""

    number: int
    ended: list[Request]
    logged: list[tuple[Request, int]]  # with the number of logprob chunks that were sent by then


class Outbox:
    """One frontend's numbered batches. While 8 are unacknowledged it sends none; the next one then catches up."""

    def __init__(self) -> None:
        self._next_number = 0
        self._unacknowledged: deque[_Sent] = deque()
        self._ended: dict[tuple[int, int], Request] = {}  # their RequestDone is to be sent
        self._logged: dict[tuple[int, int], Request] = {}  # have logprobs to be sent
        self._waiting: dict[tuple[int, int], Request] = {}  # lost their slots, with tokens that are to be sent

    @property
    def is_open(self) -> bool:
        return len(self._unacknowledged) < MAX_UNACKNOWLEDGED

    @property
    def is_sent(self) -> bool:
        """All ends were sent, if not acknowledged."""
        return not self._ended

    @property
    def num_unacknowledged(self) -> int:
        return len(self._unacknowledged)

    @property
    def has_more_than_tokens(self) -> bool:
        return bool(self._ended or self._logged or self._waiting)

    def add_end(self, request: Request) -> None:
        """The request has ended: its last tokens and its `done` are to be sent."""
        self._ended[request.key] = request

    def add_waiting(self, request: Request) -> None:
        """It was preempted: tokens that are not sent yet are no longer in the slot table."""
        if request.sent < len(request.outputs):
            self._waiting[request.key] = request

    def add_logs(self, request: Request) -> None:
        self._logged[request.key] = request

    def send_end_again(self, request: Request) -> None:
        request.done_batch = -1
        self.add_end(request)

    def acknowledge(self, number: int) -> list[Request]:
        """Batches up to this one have arrived. Returns the requests of which the frontend now knows the end."""
        known = []
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            sent = self._unacknowledged.popleft()
            for request, logs_sent in sent.logged:
                request.forget_logs(min(logs_sent, request.logs_sent))
            known += [request for request in sent.ended if request.done_batch == sent.number]
        return known

    def make_batch(self, slots: SlotTable, rows: Int64Array) -> TokenBatch:
        """All that is not sent yet: the tokens of this frontend's running requests in `rows`, then those of requests without a slot,
        and the ends, in order of arrival."""
        ended = sorted(self._ended.values(), key=_serial)
        number = self._next_number
        self._next_number += 1
        logs, logged = self._take_logs()
        without_slot = [*ended, *self._take_waiting()]
        rids, columns, ids = _ranges(slots, rows, [r for r in without_slot if r.sent < len(r.outputs)])
        slots.sent[rows] = slots.num_output[rows]
        for request in without_slot:
            request.sent = len(request.outputs)
        for request in ended:
            request.done_batch = number
        self._unacknowledged.append(_Sent(number, ended, logged))
        self._ended.clear()
        return TokenBatch(
            number=number,
            rids=rids,
            choices=columns[0],
            first=columns[1],
            counts=columns[2],
            cached=columns[3],
            ids=ids,
            logprobs=logs,
            done=[_done(request) for request in ended],
        )

    def _take_waiting(self) -> list[Request]:
        if not self._waiting:
            return []
        waiting = [request for request in self._waiting.values() if request.status is Status.WAITING]
        self._waiting.clear()
        return waiting

    def _take_logs(self) -> tuple[list[TokenLogprobs], list[tuple[Request, int]]]:
        if not self._logged:
            return [], []
        requests = sorted(self._logged.values(), key=_serial)
        self._logged.clear()
        chunks = [chunk for request in requests for chunk in request.take_unsent_logs()]
        return chunks, [(request, request.logs_sent) for request in requests]


def _serial(request: Request) -> int:
    return request.serial


def _done(request: Request) -> RequestDone:
    assert request.done is not None
    return request.done


def _ranges(slots: SlotTable, rows: Int64Array, others: list[Request]) -> tuple[Int64Array, Int32Array, Int32Array]:
    """Of all ranges the rids, the columns (choice, first, count, cached), and the ids end to end."""
    first = slots.sent[rows]
    counts = slots.num_output[rows] - first
    rids, columns = slots.rid[rows], np.array((slots.choice[rows], first, counts, slots.cached[rows]), np.int32)
    ids = _outputs(slots, rows, first, counts)
    if not others:
        return rids, columns, ids
    more = [(r.choice, r.sent, len(r.outputs) - r.sent, r.cached_tokens) for r in others]
    rids = np.concatenate((rids, np.array([r.rid for r in others], np.int64)))
    columns = np.concatenate((columns, np.array(more, np.int32).T), axis=1)
    return rids, columns, np.concatenate((ids, *[r.outputs[r.sent :] for r in others]))


def _outputs(slots: SlotTable, rows: Int64Array, first: Int64Array, counts: Int64Array) -> Int32Array:
    if len(rows) == 0 or counts.max() == 1:
        return slots.outputs[rows, first]
    ranges = zip(rows.tolist(), first.tolist(), counts.tolist(), strict=True)
    return np.concatenate([slots.outputs[slot, start : start + count] for slot, start, count in ranges])

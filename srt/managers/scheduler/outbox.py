"""Everything still to be sent to a frontend. Tokens are sent as ranges read from the requests themselves, so none pile up here."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from srt.managers.scheduler.request import Delivery, Request, Status
from srt.managers.scheduler.slots import SlotTable
from srt.mem_cache.radix_cache import ITEM
from srt.protocol.arrays import INT32, int32_bytes
from srt.protocol.messages import Int32Array, Int64Array, RequestDone, TokenBatch, TokenLogprobs

MAX_UNACKNOWLEDGED: Final = 8
End = tuple[str, int, int, str, int]  # reason, matched, status, message, retry_after_s: as in RequestDone


class _Sent:
    """A sent batch: the requests and logprobs to forget once it is acknowledged."""

    def __init__(self, number: int, ended: list[Request], logged: list[tuple[Delivery, int]]) -> None:
        self.number = number
        self.ended = ended
        self.logged = logged  # with the number of logprob chunks sent by then


def end_of(request: Request, end: End, queue_s: float, weight_version: str) -> RequestDone:
    """Return what its frontend is told of a choice that has ended."""
    reason, matched, status, message, retry_after_s = end
    return RequestDone(
        request.rid,
        request.choice,
        reason,
        matched,
        request.progress.num_output,
        request.hold.cached_tokens,
        status,
        message,
        request.progress.num_preempted,
        retry_after_s,
        queue_s,
        *request.progress.verified,
        weight_version,
    )


class Outbox:
    """A frontend's numbered batches. While 8 are unacknowledged none is sent; the next one carries all that came meanwhile."""

    def __init__(self) -> None:
        self._next_number = 0
        self._unacknowledged: deque[_Sent] = deque()
        # Requests by serial:
        self._ended: dict[int, Request] = {}  # with a RequestDone to be sent
        self._logged: dict[int, Delivery] = {}  # of requests with logprobs to be sent
        self._waiting: dict[int, Request] = {}  # without a slot, with tokens to be sent

    @property
    def is_open(self) -> bool:
        return len(self._unacknowledged) < MAX_UNACKNOWLEDGED

    @property
    def is_sent(self) -> bool:
        """True if all ends were sent; they may be unacknowledged."""
        return not self._ended

    @property
    def num_unacknowledged(self) -> int:
        return len(self._unacknowledged)

    @property
    def has_more_than_tokens(self) -> bool:
        return bool(self._ended or self._logged or self._waiting)

    def add_end(self, request: Request, done: RequestDone) -> None:
        """Add an ended request: its last tokens and `done` are to be sent."""
        request.delivery.done = done
        self._ended[request.serial] = request

    def add_waiting(self, request: Request) -> None:
        """Add a request without a slot if it has unsent tokens, since these are not in the slot table."""
        if request.delivery.sent < request.progress.num_output:
            self._waiting[request.serial] = request

    def add_logs(self, request: Request, chunk: TokenLogprobs) -> None:
        request.delivery.add_logs(chunk)
        self._logged[request.serial] = request.delivery

    def send_again(self, slots: SlotTable, request: Request, first: int) -> None:
        """Send tokens and logprobs from output index `first` on again, and the end if the request has ended."""
        delivery, progress = request.delivery, request.progress
        delivery.send_logs_again(first)
        if delivery.has_unsent_logs:
            self._logged[request.serial] = delivery
        if progress.status is Status.RUNNING:
            slots.sent_at[progress.slot] = min(first, slots.sent_at[progress.slot])
            return
        delivery.sent = min(first, delivery.sent)
        if progress.status is Status.WAITING:
            self.add_waiting(request)
        else:
            delivery.done_batch = -1
            self._ended[request.serial] = request

    def acknowledge(self, number: int) -> list[Request]:
        """Note that batches up to this one have arrived, and return the requests whose end the frontend now knows."""
        known = []
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            sent = self._unacknowledged.popleft()
            for delivery, logs_sent in sent.logged:
                delivery.forget_logs(min(logs_sent, delivery.logs_sent))
            known += [request for request in sent.ended if request.delivery.done_batch == sent.number]
        return known

    def make_batch(self, slots: SlotTable, rows: Int64Array) -> TokenBatch:
        """Return a batch with everything unsent, and count it as sent.

        It has the tokens of this frontend's running requests in `rows`, then those of requests without a slot, and the ends, in order
        of arrival.
        """
        ended = [self._ended[serial] for serial in sorted(self._ended)]
        number = self._next_number
        self._next_number += 1
        logs, logged = self._take_logs()
        ranges = _Ranges(slots, rows)
        for request in [*ended, *self._take_waiting()]:
            ranges.add(request)
        for request in ended:
            request.delivery.done_batch = number
        self._unacknowledged.append(_Sent(number, ended, logged))
        self._ended.clear()
        return ranges.batch(number, logs, [_done(request) for request in ended])

    def _take_waiting(self) -> list[Request]:
        if not self._waiting:
            return []
        waiting = [request for request in self._waiting.values() if request.progress.status is Status.WAITING]
        self._waiting.clear()
        return waiting

    def _take_logs(self) -> tuple[list[TokenLogprobs], list[tuple[Delivery, int]]]:
        if not self._logged:
            return [], []
        deliveries = [self._logged[serial] for serial in sorted(self._logged)]
        self._logged.clear()
        chunks = [chunk for delivery in deliveries for chunk in delivery.take_unsent_logs()]
        return chunks, [(delivery, delivery.logs_sent) for delivery in deliveries]


def _done(request: Request) -> RequestDone:
    done = request.delivery.done
    assert done is not None
    return done


class _Ranges:
    """The tokens of a batch: those of the slots in `rows`, then those of requests without a slot. Tokens added here count as sent."""

    def __init__(self, slots: SlotTable, rows: Int64Array) -> None:
        first = slots.sent[rows]
        end = slots.num_output[rows]
        slots.sent[rows] = end
        counts = end - first
        self._rids = slots.rid[rows]
        self._columns = [slots.choice[rows], first, counts, slots.cached[rows]]
        self._ids = slots.outputs_from(rows, first, counts)
        self._more_rids: list[int] = []
        self._more_choices: list[int] = []
        self._more_first: list[int] = []
        self._more_counts: list[int] = []
        self._more_cached: list[int] = []
        self._more_ids: list[bytes] = []

    def add(self, request: Request) -> None:
        end, sent = request.progress.num_output, request.delivery.sent
        if sent < end:
            self._more_rids.append(request.rid)
            self._more_choices.append(request.choice)
            self._more_first.append(sent)
            self._more_counts.append(end - sent)
            self._more_cached.append(request.hold.cached_tokens)
            self._more_ids.append(request.progress.outputs[sent * ITEM :])
            request.delivery.sent = end

    def batch(self, number: int, logs: list[TokenLogprobs], ends: list[RequestDone]) -> TokenBatch:
        rids, columns, ids = self._rids, self._columns, self._ids
        if self._more_ids:
            rids = np.concatenate((rids, np.array(self._more_rids, np.int64)))
            more = self._more_choices, self._more_first, self._more_counts, self._more_cached
            columns = [_joined(columns[i], int32_bytes(more[i])) for i in range(4)]
            ids = _joined(ids, b"".join(self._more_ids))
        return TokenBatch(number, rids, columns[0], columns[1], columns[2], columns[3], ids, logs, ends)


def _joined(numbers: Int32Array, more: bytes) -> Int32Array:
    return np.frombuffer(numbers.tobytes() + more, INT32)

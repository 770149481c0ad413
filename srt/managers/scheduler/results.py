"""Application of a step's result to its requests: new tokens, logprobs, and ends. `worker_stream.py` has compared the ranks' answers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from srt.managers.scheduler.counters import Counters
from srt.managers.scheduler.plan_draft import Planned
from srt.managers.scheduler.planner import Planner
from srt.managers.scheduler.request import Request, id_at
from srt.managers.scheduler.slots import SlotTable
from srt.managers.scheduler.worker_stream import BrokenReplica
from srt.mem_cache.radix_cache import ITEM
from srt.protocol.messages import Int32Array, Int64Array, RowLogprobs, StepResult, TokenLogprobs

ONE = np.ones(1, np.int32).tobytes()
NOT_FINITE = "The model produced no finite logits for this request."
NO_TOKEN = (
    "No token could be drawn: the answer's form exceeded a limit of the grammar library, or the logits were not finite."
)


Logged = tuple[Request, TokenLogprobs]  # a request and new logprobs of it


class End:
    """The end of a request by a result."""

    def __init__(self, request: Request, reason: str, matched: int = -1, status: int = 0, message: str = "") -> None:
        self.request = request
        self.reason = reason  # stop, length or error
        self.matched = matched
        self.status = status
        self.message = message


class Outcome:
    def __init__(self, ends: list[End], logged: list[Logged], late: list[Request]) -> None:
        self.ends = ends
        self.logged = logged
        self.late = late  # preempted requests that still got a token


class ResultReader:
    """Applies results to the slot table. A row is dropped if its request has ended, and goes to the request if that was preempted."""

    def __init__(self, slots: SlotTable, planner: Planner, counters: Counters) -> None:
        self._slots = slots
        self._planner = planner
        self._counters = counters

    def apply(self, planned: Planned, result: StepResult) -> Outcome:
        """Append the tokens, and return the requests that they end. BrokenReplica if the result does not fit the plan."""
        rows, ids = planned.sampling_slots, result.ids
        has_one_each = len(ids) == len(rows) and result.counts.tobytes() == ONE * len(rows)
        if not has_one_each:
            self._check(planned, result)
        self._counters.step_us += result.step_us
        if result.distinct_experts:
            self._counters.distinct_experts, self._counters.peak_loads = result.distinct_experts, result.peak_loads
        logged = [self._log(planned, row) for row in result.logprobs]
        alive = self._slots.incarnation[rows] == planned.sampling_incarnations
        num_dropped = alive.tobytes().count(0)
        self._counters.num_dropped_rows += num_dropped
        if has_one_each and planned.row_tokens == 1:
            ends = self._append(rows[alive], ids[alive]) if num_dropped else self._append(rows, ids)
        else:
            ends = self._append_any(planned, result, alive) + self._failed(rows[alive & (result.counts < 0)])
        late, late_ends = self._append_late(planned, result)
        return Outcome(ends + late_ends, [one for one in logged if one is not None], late)

    def _failed(self, slots: Int64Array) -> list[End]:
        requests = [self._planner.request_in(slot) for slot in slots.tolist()]
        return [End(request, "error", status=500, message=_why_nothing_was_drawn(request)) for request in requests]

    def _check(self, planned: Planned, result: StepResult) -> None:
        counts, num_rows = result.counts, len(planned.sampling_slots)
        if len(counts) != num_rows or int(counts.clip(0).sum()) != len(result.ids):
            raise BrokenReplica(
                f"The result of step {result.step} has {len(counts)} rows and {len(result.ids)} ids, but {num_rows} rows sample."
            )
        one_each = counts if planned.row_tokens == 1 else counts[: planned.num_prompt_ends]
        most = counts.max(initial=1)
        if most > planned.row_tokens or int(counts.min(initial=0)) < -1 or not bool((abs(one_each) == 1).all()):
            raise BrokenReplica(f"The result of step {result.step} has wrong counts of ids: {counts.tolist()}.")

    def _append_any(self, planned: Planned, result: StepResult, alive: NDArray[np.bool_]) -> list[End]:
        """Append any number of ids per row: first the first id of each row, then the second of each row that has not ended, and so on."""
        rows, counts = planned.sampling_slots, result.counts.clip(0)
        places = np.cumsum(counts) - counts
        decoding = alive.copy()
        decoding[: planned.num_prompt_ends] = False
        missing = planned.row_tokens - counts[decoding]
        self._slots.computed[rows[decoding]] -= missing
        if planned.row_tokens > 1:
            self._count_verified(rows[decoding], counts[decoding])
        ends: list[End] = []
        for round_ in range(int(counts.max(initial=0))):
            going = np.flatnonzero(alive & (counts > round_))
            news = self._append(rows[going], result.ids[places[going] + round_])
            ended = {end.request.progress.slot for end in news}
            alive[going] = [slot not in ended for slot in rows[going].tolist()]
            ends += news
        return ends

    def _count_verified(self, slots: Int64Array, counts: Int32Array) -> None:
        self._counters.num_verified_rows += len(slots)
        self._counters.num_verified_ids += int(counts.sum())
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            self._planner.request_in(slot).progress.count_verified(count)

    def _append_late(self, planned: Planned, result: StepResult) -> tuple[list[Request], list[End]]:
        """Append the tokens of requests that were preempted while this step was in flight."""
        if not self._planner.preempted.are_some_away:
            return [], []
        late, ends = [], []
        places = np.cumsum(result.counts.clip(0)) - result.counts
        for row, incarnation in enumerate(planned.sampling_incarnations.tolist()):
            request = self._planner.preempted.find(incarnation)
            if request is None:
                continue
            if result.counts[row] < 0:
                ends.append(End(request, "error", status=500, message=_why_nothing_was_drawn(request)))
                continue
            late.append(request)
            for token in result.ids[places[row] : places[row] + result.counts[row]].tolist():
                self._planner.preempted.append(request, token)
                self._counters.num_generated_tokens += 1
                if is_stop(request, token):
                    ends.append(End(request, "stop", token))
                    break
                if request.progress.num_output >= request.max_new:
                    ends.append(End(request, "length"))
                    break
        self._counters.num_dropped_rows -= len(late) + sum(end.reason == "error" for end in ends)
        return late, ends

    def _append(self, rows: Int64Array, ids: Int32Array) -> list[End]:
        if not len(rows):
            return []
        slots = self._slots
        lengths = slots.append_outputs(rows, ids)
        self._counters.num_generated_tokens += len(rows)
        stopped = slots.stops[0][rows] == ids
        for column in range(1, slots.most_stops):
            stopped |= slots.stops[column][rows] == ids
        if slots.has_many_stops:
            for i in np.flatnonzero(slots.many_stops[rows]).tolist():
                stopped[i] = is_stop(self._planner.request_in(int(rows[i])), int(ids[i]))
        stopped_or_full = stopped | (lengths >= slots.max_new[rows])
        places = stopped_or_full.nonzero()[0]
        if not len(places):
            return []
        columns = zip(rows[places].tolist(), stopped[places].tolist(), ids[places].tolist(), strict=True)
        return [self._end(slot, has_stopped, token) for slot, has_stopped, token in columns]

    def _end(self, slot: int, has_stopped: bool, token: int) -> End:
        request = self._planner.request_in(slot)
        return End(request, "stop", token) if has_stopped else End(request, "length")

    def _log(self, planned: Planned, row: RowLogprobs) -> Logged | None:
        """Return the row's logprobs with its request, or None if that has ended. Call this before the row's token is appended."""
        slot = row.slot
        incarnation = planned.extends.get(slot)
        if incarnation is None:
            at = np.flatnonzero(planned.sampling_slots == slot)
            if not len(at):
                raise BrokenReplica(f"Step {planned.plan.step} has logprobs for slot {slot}, which was not in it.")
            incarnation = int(planned.sampling_incarnations[at[0]])
        if self._slots.incarnation[slot] == incarnation:
            request, num_output = self._planner.request_in(slot), self._slots.num_output_at[slot]
        else:
            away = self._planner.preempted.find(incarnation)
            if away is None:
                return None
            request, num_output = away, away.progress.num_output
        first = row.first if row.is_prompt else num_output
        chunk = TokenLogprobs(
            request.rid, request.choice, row.is_prompt, first, row.chosen, row.top_ids, row.top, row.of_ids, row.vector
        )
        return request, chunk


def is_stop(request: Request, token: int) -> bool:
    """Return whether the request stops at this id."""
    stops = request.stop_ids
    return any(id_at(stops, i) == token for i in range(len(stops) // ITEM))


def _why_nothing_was_drawn(request: Request) -> str:
    return NOT_FINITE if request.resource is None else NO_TOKEN

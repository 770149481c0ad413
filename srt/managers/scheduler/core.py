"""Parts of a scheduler that are built once its workers have reported their capacity: slots, memory, planner, and stream of work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

import numpy as np

from srt.managers.scheduler.counters import Counters
from srt.managers.scheduler.effects import Effect, ToFrontend
from srt.managers.scheduler.forecast import OutputForecast
from srt.managers.scheduler.kv_memory import KvMemory
from srt.managers.scheduler.needs import Needs
from srt.managers.scheduler.planner import Planner
from srt.managers.scheduler.ranking import Ranking
from srt.managers.scheduler.request import Request
from srt.managers.scheduler.results import ResultReader
from srt.managers.scheduler.slots import SlotTable
from srt.managers.scheduler.step_times import StepTimes
from srt.managers.scheduler.waiting import LongestPrefixQueue, WaitingQueue
from srt.managers.scheduler.worker_stream import WorkerStream
from srt.mem_cache.radix_cache import ITEM
from srt.mem_cache.window_pages import WindowPages
from srt.protocol.arrays import CODES, FLOAT32
from srt.protocol.messages import ControlReply, LastWord, Load, Scalar, SchedulerHello, WorkerHello, int32_array
from srt.protocol.views import RequestView
from srt.server_args import ServerArgs

FLOAT32_CODE: Final = CODES[FLOAT32]


class SchedulerCore:
    """The scheduler's parts, built from values that all ranks agree on.

    It refuses requests that exceed their limits, such as the length of the queue, and reports their state.
    """

    def __init__(self, args: ServerArgs, hello: WorkerHello) -> None:
        self._hello = hello
        self._max_queued: int = args.max_queued_requests
        self._has_priorities: bool = args.uses_priorities
        self.counters = Counters()
        self.window = args.window + hello.num_stages - 1  # plans that may be in flight
        self.slots = SlotTable(hello.num_slots)
        self._step_times = StepTimes(1000.0 * args.decode_stall)
        self._forecast = OutputForecast(args.schedule_conservativeness)
        self.memory = KvMemory(
            hello.num_pages,
            hello.page_size,
            self.slots,
            prefix_cache=not args.disable_radix_cache,
            by_frequency=args.radix_eviction_policy == "lfu",
            windows=_windows(hello),
        )
        is_lpm = args.schedule_policy == "lpm"
        self._queue = LongestPrefixQueue(self.memory.num_cached) if is_lpm else WaitingQueue()
        self.planner = Planner(
            self.slots,
            self.memory,
            self.counters,
            self._forecast,
            Ranking(args),
            self._queue,
            self._step_times,
            args.prefill_chunk,
            max_row_tokens=hello.max_row_tokens,
            num_stages=hello.num_stages,
        )
        self.results = ResultReader(self.slots, self.planner, self.counters)
        self.stream = WorkerStream(args.num_ranks, hello.num_graphs)
        self.resources = Needs(args.num_ranks, hello.most_resources, args.max_loras_per_batch)
        self.max_total_num_tokens = hello.num_pages * hello.page_size
        self.max_request_tokens = min(hello.max_request_tokens, self.max_total_num_tokens)

    def facts(self) -> dict[str, Scalar]:
        """Return facts for the start-up report and /server_info."""
        return {
            "max_total_num_tokens": self.max_total_num_tokens,
            "max_request_tokens": self.max_request_tokens,
            "max_running_requests": self._hello.num_slots,
            "num_pages": self._hello.num_pages,
            "page_size": self._hello.page_size,
            "dtype": self._hello.dtype,
            "vocab_size": self._hello.vocab_size,
        }

    def greeting(self, frontend: int, weight_version: str) -> list[Effect]:
        sizes = self.max_total_num_tokens, self.max_request_tokens, self._hello.page_size
        hello = SchedulerHello(*sizes, weight_version)
        return [ToFrontend(frontend, hello), ToFrontend(frontend, self.load())]

    @property
    def is_idle(self) -> bool:
        """True if nothing waits or runs, and no step is in flight."""
        return not (self.stream.num_in_flight or self.slots.num_used or self.planner.num_waiting)

    def last_words(self, frontends: Iterable[int]) -> list[Effect]:
        """Return what each frontend is told of an engine that ends early: which of its requests were in unanswered steps."""
        incarnations = self.stream.incarnations_in_flight()
        suspects = [r for r in self.planner.started() if r.progress.incarnation in incarnations]
        words: list[Effect] = []
        for number in frontends:
            own = [request for request in suspects if request.frontend == number]
            rids = np.array([request.rid for request in own], np.int64)
            choices = int32_array([request.choice for request in own])
            words.append(ToFrontend(number, LastWord(rids, choices, len(incarnations) == 1)))
        return words

    def load(self) -> Load:
        return Load(self.slots.num_used, self.planner.num_waiting, self.memory.num_free, self.counters.num_steps)

    def reason_to_refuse(self, message: RequestView, requests: list[Request]) -> tuple[int, str] | None:
        """Return the status and sentence of a refusal, for now or for ever, or None to accept. `requests` are the message's choices."""
        broken = _what_is_broken(message, requests)
        if broken is not None:
            return 400, broken
        request = requests[0]
        if request.priority and not self._has_priorities:
            return 400, "priority needs the server option --enable-priority-scheduling or --schedule-policy priority."
        if request.max_tokens > self.max_request_tokens:
            return 400, (
                f"The prompt has {request.prompt_len} tokens and asks for up to {request.max_new} more: {request.max_tokens} in all,"
                f" but a request may have at most {self.max_request_tokens}. Shorten the prompt or ask for fewer tokens."
            )
        is_full = self.planner.num_waiting >= self._max_queued + self.slots.num_free
        if is_full and not (message.resumed or message.urgent):
            return 429, f"The queue is full: {self.planner.num_waiting} requests wait, at most {self._max_queued} may."
        return None

    def reason_to_refuse_ids(self, ids: bytes) -> str | None:
        """Return a sentence if one of these ids is outside the model's vocabulary, else None. The ids may be those of several requests."""
        unsigned = np.frombuffer(ids, np.uint32)  # so that negative ids are too large as well
        if int(unsigned[unsigned.argmax()]) < self._hello.vocab_size:
            return None
        return f"A token id is outside the vocabulary of {self._hello.vocab_size}."

    def flush(self, call: int, *, is_paused: bool) -> ControlReply:
        """Empty the prefix cache, unless a request uses it now or will at once. Workers need not be told."""
        num_running, num_waiting = self.slots.num_used, self.planner.num_waiting
        if num_running or (num_waiting and not is_paused):
            reason = f"The cache cannot be flushed: {num_running} requests run and {num_waiting} wait. Flush it after they have ended."
            return ControlReply(call, False, reason, {})
        self.memory.flush()
        return ControlReply(call, True, "", {})

    def state(self) -> dict[str, Scalar]:
        memory, tree = self.memory, self.memory.tree
        values: dict[str, Scalar] = {
            "num_running": self.slots.num_used,
            "num_waiting": self.planner.num_waiting,
            "num_waiting_for_resources": self._queue.num_held,
            "num_resources": self.resources.num_held,
            "num_slots": self.slots.num_slots,
            "num_free_slots": self.slots.num_free,
            "num_total_pages": memory.num_pages,
            "num_free_pages": memory.num_free,
            "num_cached_pages": tree.num_pages,
            "num_pinned": tree.num_pinned,
            "num_evicted_pages": tree.num_evicted,
            "page_size": memory.page_size,
            "num_promised_pages": memory.num_promised,
            "num_in_flight": self.stream.num_in_flight,
            "num_graphs_left": self.stream.num_graphs_left,
            "row_tokens": self.planner.row_tokens,
            "expected_share_of_max_new_tokens": self._forecast.latest_share,
            "decode_step_us": round(self._step_times.decode_us),
            "prompt_token_ns": round(1000 * self._step_times.per_token),
        }
        return values | self.counters.values()


def _windows(hello: WorkerHello) -> list[WindowPages]:
    groups = zip(hello.windows, hello.window_pages, strict=True)
    return [WindowPages(size, num, hello.page_size, hello.num_pages, hello.num_slots) for size, num in groups]


def _what_is_broken(message: RequestView, requests: list[Request]) -> str | None:
    """Return what is wrong with a malformed request, which no frontend should send, or None."""
    num_choices = len(message.choices) // ITEM
    if num_choices == 0 or num_choices != len(requests):
        return f"The request has {num_choices} choices but {len(requests)} lists of output ids."
    if num_choices > 1 and len({request.choice for request in requests}) != num_choices:
        return "The request has a choice twice."
    for request in requests:
        if request.choice < 0:
            return f"The request has choice {request.choice}; choices begin with 0."
        if len(request.progress.id_bytes) % ITEM or len(request.progress.outputs) % ITEM:
            return "The request has a list of ids that is no array of int32."
    request = requests[0]
    if not _can_workers_decode(request):
        return "sampling or logprobs: expected arrays of int32, and of float32 for bias values."
    if request.seed < 0:
        return f"The seed must not be negative, as {request.seed} is."
    if not request.prompt_len:
        return "The prompt is empty."
    if request.max_new < 1:
        return f"max_new_tokens must be at least 1, not {request.max_new}."
    return None


def _can_workers_decode(request: Request) -> bool:
    """Return whether arrays that are passed on undecoded hold whole ids: a part of one would end the engine."""
    sampling = request.sampling
    values = sampling.bias_values
    biases: bytes = sampling.bias_ids
    asked_for: bytes = request.logprobs.ids
    code: int = values.code
    lengths = len(request.stop_ids) | len(biases) | len(asked_for) | len(cast("bytes", values.data))
    return lengths % ITEM == 0 and code == FLOAT32_CODE

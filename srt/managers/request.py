"""A request in the scheduler: what the frontend asked for, and one `Request` for each choice of it that is to run."""

from __future__ import annotations

from enum import Enum

import numpy as np
from msgspec.structs import replace

from srt.mem_cache.radix_cache import ITEM, NO_PAGES, RadixNode
from srt.protocol.messages import (
    GenerateRequest,
    Int32Array,
    LogprobSpec,
    RequestDone,
    SamplingSpec,
    TokenLogprobs,
)
from srt.sampling.sampling_params import choice_seed


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Request:
    """One choice. What changes at every step lies in the SlotTable while it runs."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "choice",
        "done",
        "done_batch",
        "frontend",
        "id_bytes",
        "incarnation",
        "known_ids",
        "label",
        "logprobs",
        "logs",
        "logs_acked",
        "logs_sent",
        "node",
        "num_chunks",
        "num_in_tree",
        "num_preempted",
        "order",
        "outputs",
        "own_copies",
        "priority",
        "prompt_done",
        "prompt_len",
        "rid",
        "salt",
        "sampling",
        "seed",
        "sent",
        "serial",
        "slot",
        "started_s",
        "status",
        "stream",
        "urgent",
    )

    def __init__(self, frontend: int, message: GenerateRequest, index: int, serial: int, now: float = 0.0) -> None:
        self.frontend = frontend
        self.rid = message.rid
        self.label = message.label
        self.choice = int(message.choices[index])
        self.serial = serial  # order of arrival
        self.arrived_s = now
        self.started_s: float | None = None  # first admission
        self.priority = message.priority
        self.urgent = message.urgent
        self.stream = message.stream
        self.seed = choice_seed(message.seed, self.choice)
        self.salt = message.cache_salt
        self.sampling: SamplingSpec = message.sampling
        self.logprobs: LogprobSpec = message.logprobs
        self.prompt_len = len(message.prompt_ids)
        self.outputs: Int32Array = message.output_ids[index]  # while waiting: what it comes with; when ended: all
        self.known_ids = np.concatenate((message.prompt_ids, self.outputs)) if len(self.outputs) else message.prompt_ids
        self.id_bytes = self.known_ids.tobytes()
        self.status = Status.WAITING
        self.sent = len(self.outputs)  # while it runs, the SlotTable counts
        self.done: RequestDone | None = None
        self.done_batch = -1  # number of the batch that carried `done` last
        self.logs: list[TokenLogprobs] = []  # not acknowledged yet; the first is number `logs_acked`
        self.logs_acked = 0
        self.logs_sent = 0
        self.cached_tokens = 0
        self.num_chunks = 0
        self.prompt_done = False  # all ids that it came with were planned: from the next step on it decodes
        self.slot = -1
        self.incarnation = 0
        self.node: RadixNode | None = None  # the pinned end of its prefix in the tree, `num_in_tree` pages deep
        self.num_in_tree = 0
        self.num_preempted = 0
        self.order: tuple[float, int] = (0.0, serial)  # by the Ranking
        self.own_copies = NO_PAGES  # of its first `num_in_tree` pages, those that the tree has twice

    @property
    def key(self) -> tuple[int, int]:
        """Unique among a frontend's choices."""
        return self.rid, self.choice

    @property
    def max_tokens(self) -> int:
        return self.prompt_len + self.sampling.max_new_tokens

    @property
    def num_known(self) -> int:
        """Ids that were known when it was admitted."""
        return len(self.known_ids)

    def cacheable_pages(self, page_size: int) -> int:
        """At most so many pages can come from the cache: the last known position is computed in any case, and those whose
        logprobs are asked for."""
        tokens = self.num_known - 1
        if self.logprobs.prompt_start >= 0:
            tokens = min(tokens, max(self.logprobs.prompt_start - 1, 0))
        return tokens // page_size

    def lose_slot(self, outputs: Int32Array, sent: int, computed: int) -> None:
        """Preempted: it waits again, with what it has. Prompt logprobs that workers have been told to send are not asked for twice."""
        self.status = Status.WAITING
        self.outputs, self.sent = outputs, sent
        self.slot = -1
        self.num_chunks = 0
        self.prompt_done = False
        self.num_preempted += 1
        if self.logprobs.prompt_start >= 0:
            told = computed + 1  # a position tells of the token behind it
            start = max(self.logprobs.prompt_start, told) if told < self.prompt_len else -1
            self.logprobs = replace(self.logprobs, prompt_start=start)

    def append(self, token: int) -> None:
        """A token that was in flight when it was preempted."""
        self.outputs = np.append(self.outputs, np.int32(token))

    def know_all(self) -> None:
        """Nothing of it is in flight: it may be admitted again, with all its tokens."""
        self.known_ids = np.concatenate((self.known_ids[: self.prompt_len], self.outputs))
        self.id_bytes = self.known_ids.tobytes()

    def bytes_with_outputs(self) -> bytes:
        """The prompt and all outputs so far, which it has again when it runs no more."""
        return self.id_bytes[: self.prompt_len * ITEM] + self.outputs.tobytes()

    def log(self, chunk: TokenLogprobs) -> None:
        self.logs.append(chunk)

    @property
    def has_unsent_logs(self) -> bool:
        return self.logs_sent < self.logs_acked + len(self.logs)

    def take_unsent_logs(self) -> list[TokenLogprobs]:
        chunks = self.logs[self.logs_sent - self.logs_acked :]
        self.logs_sent = self.logs_acked + len(self.logs)
        return chunks

    def forget_logs(self, number: int) -> None:
        """The frontend has all chunks before this number."""
        if number > self.logs_acked:
            del self.logs[: number - self.logs_acked]
            self.logs_acked = number

    def send_logs_again(self, first: int) -> None:
        """From output index `first` on; prompt logprobs too if they are still here."""
        self.logs_sent = self.logs_acked
        for chunk in self.logs:
            if chunk.is_prompt or chunk.first >= first:
                break
            self.logs_sent += 1


def expand(frontend: int, message: GenerateRequest, next_serial: int, now: float = 0.0) -> list[Request]:
    """One Request for each choice, in order."""
    return [Request(frontend, message, index, next_serial + index, now) for index in range(len(message.choices))]

"""A request in the scheduler: what the frontend asked for, and one `Request` for each choice of it that is to run."""

from __future__ import annotations

from enum import Enum
from typing import Final

from msgspec.structs import astuple, replace

from srt.mem_cache.radix_cache import ITEM, NO_PAGES, RadixNode
from srt.protocol.messages import TRIAL_TOKENS, RequestDone, TokenLogprobs
from srt.protocol.views import LogprobView, RequestView, SamplingView
from srt.sampling.sampling_params import choice_seed

FIRST_CHOICE: Final = b"\0\0\0\0"


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Request:
    """One choice. What changes at every step lies in the SlotTable while it runs. Ids are bytes, int32 values end to end."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "choice",
        "done",
        "done_batch",
        "frontend",
        "id_bytes",
        "incarnation",
        "label",
        "logprobs",
        "logs",
        "logs_acked",
        "logs_sent",
        "max_new",
        "node",
        "num_chunks",
        "num_in_tree",
        "num_known",
        "num_matched",
        "num_passed",
        "num_preempted",
        "order",
        "outputs",
        "own_copies",
        "priority",
        "prompt_done",
        "prompt_len",
        "prompt_start",
        "rid",
        "salt",
        "sampling",
        "seed",
        "sent",
        "serial",
        "slot",
        "started_s",
        "status",
        "stop_ids",
        "stream",
        "suspect",
        "trial_end",
        "urgent",
    )

    def __init__(self, frontend: int, message: RequestView, index: int, serial: int, now: float = 0.0) -> None:
        # At once: one by one they cost a third of all that is done here.
        (
            rid,
            label,
            prompt_ids,
            choices,
            outputs,
            sampling,
            logprobs,
            seed,
            priority,
            salt,
            _,
            urgent,
            stream,
            suspect,
        ) = astuple(message)
        self.frontend = frontend
        self.rid: int = rid
        self.label: str = label
        self.choice = 0 if choices == FIRST_CHOICE else id_at(choices, index)
        self.serial = serial  # order of arrival
        self.arrived_s = now
        self.started_s: float | None = None  # first admission
        self.priority: int = priority
        self.urgent: bool = urgent
        self.stream: bool = stream
        self.suspect: bool = suspect  # still to be tried
        # Neither may be negative, which is found when it is looked at as a whole.
        self.seed: int = choice_seed(seed, self.choice) if self.choice > 0 and seed >= 0 else seed
        self.salt: str = salt
        self.sampling: SamplingView = sampling
        self.max_new: int = self.sampling.max_new_tokens
        self.stop_ids: bytes = self.sampling.stop_ids
        self.logprobs: LogprobView = logprobs
        self.prompt_start: int = self.logprobs.prompt_start  # the first whose logprob is asked for; -1: none is
        prompt: bytes = prompt_ids
        self.prompt_len = len(prompt) // ITEM
        self.outputs: bytes = outputs[index]  # while waiting: what it comes with; when ended: all
        self.id_bytes: bytes = prompt + self.outputs  # known when it was admitted last, or is to be
        self.num_known = len(self.id_bytes) // ITEM
        self.status = Status.WAITING
        self.trial_end = len(self.outputs) // ITEM + TRIAL_TOKENS  # so many outputs, and it has done no harm
        self.sent = len(self.outputs) // ITEM  # while it runs, the SlotTable counts
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
        self.num_matched = 0  # tokens that the cache had of it when it waited and was looked at last
        self.num_passed = 0  # so many went before it that came after it; counted by lpm alone
        self.num_preempted = 0
        self.order: tuple[float, int] = (0.0, serial)  # by the Ranking
        self.own_copies = NO_PAGES  # of its first `num_in_tree` pages, those that the tree has twice

    @property
    def key(self) -> tuple[int, int]:
        """Unique among a frontend's choices."""
        return self.rid, self.choice

    @property
    def max_tokens(self) -> int:
        return self.prompt_len + self.max_new

    @property
    def num_output(self) -> int:
        return len(self.outputs) // ITEM

    def cacheable_pages(self, page_size: int) -> int:
        """At most so many pages can come from the cache: the last known position is computed in any case, and those whose
        logprobs are asked for."""
        tokens = self.num_known - 1
        if self.prompt_start >= 0:
            tokens = min(tokens, max(self.prompt_start - 1, 0))
        return tokens // page_size

    def lose_slot(self, outputs: bytes, sent: int, computed: int) -> None:
        """Preempted: it waits again, with what it has. Prompt logprobs that workers have been told to send are not asked for twice."""
        self.status = Status.WAITING
        self.outputs, self.sent = outputs, sent
        self.slot = -1
        self.num_chunks = 0
        self.prompt_done = False
        self.num_preempted += 1
        if self.prompt_start >= 0:
            told = computed + 1  # a position tells of the token behind it
            self.prompt_start = max(self.prompt_start, told) if told < self.prompt_len else -1
            self.logprobs = replace(self.logprobs, prompt_start=self.prompt_start)

    def append(self, token: int) -> None:
        """A token that was in flight when it was preempted."""
        self.outputs += token.to_bytes(ITEM, "little", signed=True)

    def know_all(self) -> None:
        """Nothing of it is in flight: it may be admitted again, with all its tokens."""
        self.id_bytes = self.bytes_with_outputs()
        self.num_known = len(self.id_bytes) // ITEM

    def bytes_with_outputs(self) -> bytes:
        """The prompt and all outputs so far, which it has again when it runs no more."""
        return self.id_bytes[: self.prompt_len * ITEM] + self.outputs

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


def expand(frontend: int, message: RequestView, next_serial: int, now: float = 0.0) -> list[Request]:
    """One Request for each choice, in order."""
    return [Request(frontend, message, index, next_serial + index, now) for index in range(len(message.output_ids))]


def id_at(ids: bytes, index: int) -> int:
    return int.from_bytes(ids[index * ITEM : (index + 1) * ITEM], "little", signed=True)

"""The scheduler's requests: one `Request` for each choice that a frontend's message asks for.

A Request is what the client asked for: nothing changes it after its arrival. What changes is in its parts, and each has one writer:

    part                what it says                             written by
    request.progress    how far it has come                      Planner, with its SlotTable and PreemptedRequests
    request.place       where it stands among waiting requests   WaitingQueue
    request.hold        what it holds of the prefix cache        KvMemory
    request.delivery    what its frontend was sent               Outbox

One number changes hands: the SlotTable counts the outputs sent while a request runs, and gives the count back to `delivery` then.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from msgspec.structs import astuple, replace

from srt.mem_cache.radix_cache import ITEM, NO_PAGES, RadixNode
from srt.protocol.messages import TRIAL_TOKENS, RequestDone, Resource, TokenLogprobs
from srt.protocol.views import LogprobView, RequestView, SamplingView
from srt.sampling.sampling_params import choice_seed

FIRST_CHOICE: Final = b"\0\0\0\0"


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Progress:
    """How far a request has come. While it runs, the values that change at every step are in the SlotTable."""

    __slots__ = (
        "id_bytes",
        "incarnation",
        "logprobs",
        "num_chunks",
        "num_known",
        "num_preempted",
        "outputs",
        "prompt_done",
        "prompt_start",
        "slot",
        "started_s",
        "status",
        "verified",
    )

    def __init__(self, id_bytes: bytes, outputs: bytes, logprobs: LogprobView) -> None:
        self.status = Status.WAITING
        self.id_bytes = id_bytes  # ids known at its last admission, or for its next one
        self.num_known = len(id_bytes) // ITEM
        self.outputs = outputs  # while waiting: those so far; when ended: all
        self.logprobs = logprobs  # those that are still to be computed
        self.prompt_start: int = logprobs.prompt_start  # first prompt token whose logprob is still wanted; -1: none
        self.num_chunks = 0
        self.prompt_done = False  # all known ids are planned: it decodes from the next step on
        self.slot = -1
        self.incarnation = 0
        self.num_preempted = 0
        self.verified = (0, 0)  # steps that verified drafts of it, if the engine drafts, and the ids that they brought
        self.started_s: float | None = None  # first admission

    @property
    def num_output(self) -> int:
        return len(self.outputs) // ITEM

    def cacheable_pages(self, page_size: int) -> int:
        """Return the largest number of pages that the cache may supply.

        The last known position is always computed, and so are positions that give requested logprobs.
        """
        tokens = self.num_known - 1
        if self.prompt_start >= 0:
            tokens = min(tokens, max(self.prompt_start - 1, 0))
        return tokens // page_size

    def count_verified(self, num_ids: int) -> None:
        num_steps, num_all = self.verified
        self.verified = num_steps + 1, num_all + num_ids

    def lose_slot(self, computed: int, prompt_len: int) -> None:
        """Wait again after a preemption. Prompt logprobs that the workers already owe are not requested again."""
        self.status = Status.WAITING
        self.slot = -1
        self.num_chunks = 0
        self.prompt_done = False
        self.num_preempted += 1
        if self.prompt_start >= 0:
            told = computed + 1  # a position gives the logprob of the next token
            self.prompt_start = max(self.prompt_start, told) if told < prompt_len else -1
            self.logprobs = replace(self.logprobs, prompt_start=self.prompt_start)

    def know(self, id_bytes: bytes) -> None:
        """Make these the known ids, so that the request can be admitted again. None of its rows may be in flight."""
        self.id_bytes = id_bytes
        self.num_known = len(id_bytes) // ITEM


class Place:
    """A request's place among the waiting ones."""

    __slots__ = ("num_matched", "num_passed", "order")

    def __init__(self, serial: int) -> None:
        self.order: tuple[float, int] = (0.0, serial)  # by the Ranking; the smallest is admitted first
        self.num_matched = 0  # cached tokens found at its last lookup
        self.num_passed = 0  # later requests admitted before it; counted by lpm only


class CacheHold:
    """What a request holds of the prefix cache, and what the cache has saved it."""

    __slots__ = ("cached_tokens", "is_stale", "node", "num_in_tree", "own_copies")

    def __init__(self) -> None:
        self.node: RadixNode | None = None  # the pinned end of its prefix in the tree, `num_in_tree` pages deep
        self.num_in_tree = 0
        self.own_copies = NO_PAGES  # its own pages among the first `num_in_tree`: the tree has others for the same ids
        self.is_stale = (
            False  # a part of its keys and values is of weights that were exchanged since, so nobody may share them
        )
        self.cached_tokens = 0  # prompt tokens that were in the cache at its first admission


class Delivery:
    """What the frontend was sent of an answer, and what of that it has not acknowledged yet."""

    __slots__ = ("done", "done_batch", "logs", "logs_acked", "logs_sent", "sent")

    def __init__(self, sent: int) -> None:
        self.sent = sent  # outputs sent; out of date while the request runs, as the SlotTable counts them
        self.done: RequestDone | None = None
        self.done_batch = -1  # number of the last batch that carried `done`
        self.logs: list[TokenLogprobs] = []  # not acknowledged yet; the first one has number `logs_acked`
        self.logs_acked = 0
        self.logs_sent = 0

    def add_logs(self, chunk: TokenLogprobs) -> None:
        self.logs.append(chunk)

    @property
    def has_unsent_logs(self) -> bool:
        return self.logs_sent < self.logs_acked + len(self.logs)

    def take_unsent_logs(self) -> list[TokenLogprobs]:
        chunks = self.logs[self.logs_sent - self.logs_acked :]
        self.logs_sent = self.logs_acked + len(self.logs)
        return chunks

    def forget_logs(self, number: int) -> None:
        """Drop the chunks before this number: the frontend has received them."""
        if number > self.logs_acked:
            del self.logs[: number - self.logs_acked]
            self.logs_acked = number

    def send_logs_again(self, first: int) -> None:
        """Mark logprobs from output index `first` on as unsent, and prompt logprobs too if they are still kept."""
        self.logs_sent = self.logs_acked
        for chunk in self.logs:
            if chunk.is_prompt or chunk.first >= first:
                break
            self.logs_sent += 1


class Request:
    """A choice of a request, as the client asked for it. Ids are bytes: int32 end to end."""

    __slots__ = (
        "adapter",
        "arrived_s",
        "choice",
        "delivery",
        "frontend",
        "hold",
        "label",
        "logprobs",
        "max_new",
        "place",
        "priority",
        "progress",
        "prompt",
        "prompt_len",
        "resource",
        "rid",
        "salt",
        "sampling",
        "seed",
        "serial",
        "stop_ids",
        "stream",
        "suspect",
        "trial_end",
        "urgent",
    )

    def __init__(self, frontend: int, message: RequestView, index: int, serial: int, now: float = 0.0) -> None:
        # Unpacked at once: reading the fields one by one would take a third of the time of this method.
        (
            rid,
            label,
            prompt_ids,
            choices,
            all_outputs,
            sampling,
            logprobs,
            seed,
            priority,
            salt,
            _,
            urgent,
            stream,
            suspect,
            resource,
            adapter,
        ) = astuple(message)
        prompt: bytes = prompt_ids
        outputs: bytes = all_outputs[index]  # those that it came with, as it was resumed
        num_output = len(outputs) // ITEM
        self.frontend: Final = frontend
        self.rid: Final[int] = rid
        self.label: Final[str] = label
        self.choice: Final = 0 if choices == FIRST_CHOICE else id_at(choices, index)
        self.serial: Final = serial  # order of arrival
        self.arrived_s: Final = now
        self.priority: Final[int] = priority
        self.urgent: Final[bool] = urgent
        self.stream: Final[bool] = stream
        self.suspect: Final[bool] = suspect  # workers may have died of it
        self.resource: Final[Resource | None] = (
            resource  # all workers must have prepared it before the request is admitted
        )
        self.adapter: Final[Resource | None] = adapter  # likewise, before the resource
        self.trial_end: Final = num_output + TRIAL_TOKENS  # number of outputs that ends its trial
        # Neither may be negative, which is found when it is looked at as a whole.
        self.seed: Final[int] = choice_seed(seed, self.choice) if self.choice > 0 and seed >= 0 else seed
        self.salt: Final[str] = salt
        self.sampling: Final[SamplingView] = sampling
        self.max_new: Final[int] = self.sampling.max_new_tokens
        self.stop_ids: Final[bytes] = self.sampling.stop_ids
        self.logprobs: Final[LogprobView] = logprobs
        self.prompt: Final = prompt
        self.prompt_len: Final = len(prompt) // ITEM
        self.progress: Final = Progress(prompt + outputs if outputs else prompt, outputs, logprobs)
        self.place: Final = Place(serial)
        self.hold: Final = CacheHold()
        self.delivery: Final = Delivery(num_output)

    @property
    def key(self) -> tuple[int, int]:
        """The choice's key, unique within its frontend."""
        return self.rid, self.choice

    @property
    def max_tokens(self) -> int:
        return self.prompt_len + self.max_new

    def bytes_with_outputs(self) -> bytes:
        """Return the ids of the prompt and all outputs. Invalid while the request runs: its outputs are in the SlotTable then."""
        return self.prompt + self.progress.outputs


def expand(frontend: int, message: RequestView, next_serial: int, now: float = 0.0) -> list[Request]:
    """Return one Request for each choice, in order."""
    return [Request(frontend, message, index, next_serial + index, now) for index in range(len(message.output_ids))]


def id_at(ids: bytes, index: int) -> int:
    return int.from_bytes(ids[index * ITEM : (index + 1) * ITEM], "little", signed=True)

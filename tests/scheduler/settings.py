"""What a simulated world is like."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from srt.managers.scheduler.step_times import LEAST_CHUNK
from srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class Window:
    """A page group of layers that see so many tokens."""

    tokens: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes, shares and times (in virtual seconds). `draw` makes up a world."""

    page_size: int = 16
    num_pages: int = 64
    num_slots: int = 8
    max_request_tokens: int = 512
    chunk: int = 64
    window: int = 2  # 1: a step is planned when the one before is back
    num_stages: int = 1  # of the pipeline: so many more steps are under way
    row_tokens: int = 1  # a decode may bring so many ids, or none
    tp_size: int = 1
    caches: bool = True
    num_frontends: int = 1
    max_queued: int = 4096
    conservativeness: float = 1.0
    policy: str = "fcfs"
    threshold: int = 10  # of priorities
    aging: float = 0.3  # seconds that count as a step of priority
    eviction: str = "lru"
    waiting_timeout: float | None = None
    running_timeout: float | None = None
    num_requests: int = 40
    longest_prompt: int = 100
    longest_answer: int = 30
    vocab_size: int = 40
    rarely_new: bool = False  # most prompts begin like others
    has_choices: bool = True
    breaks_down: bool = False
    logprob_share: float = 0.1
    stream_share: float = 1.0  # of the requests, whose tokens are watched as they come
    urgent_share: float | None = None  # of the requests; None: the traffic draws it
    read_share: float | None = None  # of the requests; None: the clients draw it
    arrival_gap: float = 0.01  # mean; many come together
    step_time: float = 0.01
    row_us: float = 0.0  # what a decode, and a prompt token, adds to a step
    draft_us: float = 0.0  # and what each further id adds that its rows may bring
    token_us: float = 0.0
    pair_us: float = 0.0  # and each position that a prompt token attends to
    stall: float = 0.01
    jitter: tuple[float, ...] = (0.5, 1.0, 1.0, 3.0)  # factors of the step time
    delay: float = 0.005
    ack_delay: float = 0.005
    tick_delay: float = 0.005  # so long may a host process gather acknowledgements before it ticks
    abort_share: float = 0.2
    lost_share: float = 0.0  # of the ranges in batches
    num_deaths: int = 0  # of the scheduler or a worker
    num_poisons: int = 0  # requests of which workers die
    poison_share: float = 0.1  # of the requests, until there are so many
    grows_short: bool = False  # most answers are stopped early, later ones earlier
    num_resources: int = 0  # that are asked for
    resource_share: float = 0.0  # of the requests, which need one
    most_resources: int = 256  # that the workers hold at a time
    num_returns: int = 0  # of frontends
    num_slow_steps: int = 0  # that take nearly as long as they may
    watchdog_timeout: float = 2.0
    num_retracts: int = 0  # pauses that take all slots, and soon end
    num_questions: int = 4  # and flushes, and aborts of what others sent
    callers: str = "quiet"  # what clients ask for beside answers: see callers.py
    is_alike: bool = False  # its requests are alike in one thing: see alike.py
    drains: bool = False  # at some time nothing new is taken any more
    num_graphs: int = 0
    missing_share: float = 0.0  # of the steps, which miss a graph
    windows: tuple[Window, ...] = ()  # of layers that see only the last tokens; none: all layers see everything

    @classmethod
    def draw(cls, rng: random.Random, graphs: random.Random) -> Settings:
        """`graphs` draws what is said of graphs: the same `rng` is the same world wherever it has none."""
        page_size = rng.choice((1, 4, 16, 16))
        num_slots = rng.choice((1, 4, 16, 24, 32, 112, 128, 160, 160, 160))
        if num_slots <= 4:
            longest_prompt, longest_answer = rng.choice(((12, 8), (60, 20)))
        else:
            longest_prompt, longest_answer = rng.choice(
                ((12, 8), (60, 160), (100, 240), (300, 100), (20, 240), (60, 320))
            )
        least_pages = -(-(longest_prompt + longest_answer) // page_size) + 2
        used_pages = num_slots * (longest_prompt + longest_answer) * 0.5 / page_size
        memory = rng.choice((0.0, 0.4, 0.6, 0.6, 0.8, 1.0, 3.0) if num_slots < 32 else (0.6, 0.8, 1.0, 1.5, 3.0))
        num_pages = max(least_pages, int(used_pages * memory))
        step_time = 0.01
        each = rng.choice((3, 4, 5)) if num_slots < 64 else rng.choice((2, 3))
        num_requests = 10 + int(num_slots * each * min(memory, 1.0))  # where few have room at a time, fewer come
        load = rng.choice((0.0, 0.1, 0.2, 0.4) if num_slots < 64 else (0.0, 0.05, 0.1))
        policy = rng.choice(("fcfs", "fcfs", "lpm", "priority"))
        if policy == "priority":  # the important come when the others run
            load = rng.choice((load, 0.3, 0.6))
        chunks = (32, 64, 256, -1) if longest_prompt > 60 or num_slots > 16 else (7, 32, 64, -1)
        return cls(
            page_size=page_size,
            num_pages=num_pages + rng.randint(0, 3),
            num_slots=num_slots,
            max_request_tokens=longest_prompt + longest_answer + rng.choice((0, 20)),
            chunk=rng.choice((1, 64) if longest_prompt < 20 and num_slots <= 16 else chunks),
            window=rng.choice((1, 2, 2, 2)),
            num_stages=rng.choice((1,) * 9 + (2, 2, 3, 4)),
            row_tokens=rng.choice((1,) * 8 + (2, 2, 5)),
            tp_size=rng.choice((1,) * 9 + (2,)),
            caches=rng.random() < 0.9,
            num_frontends=rng.choice((1, 1, 1, 2, 3)),
            max_queued=rng.choice((0, 3, *(4096,) * 10)),
            conservativeness=rng.choice((1.0, 0.3, 0.01, 0.01)),
            policy=policy,
            rarely_new=policy == "lpm" and num_slots % 32 == 0,
            threshold=rng.choice((1, 4)),
            aging=rng.choice((longest_answer * step_time, 100 * step_time, math.inf)),
            eviction=rng.choice(("lru", "lru", "lfu")),
            waiting_timeout=rng.choice((None,) * 5 + (2 * longest_answer * step_time,)),
            running_timeout=rng.choice((None,) * 5 + (longest_answer * step_time,)),
            num_requests=num_requests,
            longest_prompt=longest_prompt,
            longest_answer=longest_answer,
            vocab_size=rng.choice((8, 40, 1000, 1000)),
            has_choices=rng.random() < 0.7,
            breaks_down=rng.random() < 0.1,
            logprob_share=rng.choice((0.0, 0.0, 0.0, 0.2)),
            arrival_gap=load * step_time * longest_answer / num_slots,
            step_time=step_time,
            row_us=rng.choice((0.0, 20.0)),
            token_us=rng.choice((100.0, 0.0, 50.0, 300.0)),
            pair_us=rng.choice((0.0, 0.0, 0.3)),
            stall=rng.choice((0.0, 0.001, 0.01)),
            jitter=rng.choice(((1.0,), (0.5, 1.0, 1.0, 3.0))),
            delay=rng.choice((0.0001, 0.005, 0.03)),
            ack_delay=rng.choice((0.001, 0.02, 0.1, 0.5)),
            tick_delay=rng.choice((0.0, 0.005, 0.02, 0.02)),
            abort_share=rng.choice((0.0, 0.1, 0.2, 0.5)),
            lost_share=rng.choice((0.0, 0.0, 0.0, 0.03)),
            num_deaths=rng.choice((0, 1, 2, 3, 5)),
            num_returns=rng.choice((0, 0, 1, 1, 3)),
            num_questions=rng.choice((0, 4, 10)),
            drains=rng.random() < 0.05,
            stream_share=rng.choice((0.0, 0.1, 0.5, 1.0, 1.0)),
            num_slow_steps=rng.choice((0, 0, 1, 3)),
            num_graphs=graphs.choice((0, 0, 5, 50)),
            missing_share=graphs.choice((0.0, 0.1, 1.0)),
            num_poisons=graphs.choice((0, 0, 0, 3, 6)),
            draft_us=graphs.choice((0.0, 2000.0, 8000.0)),
        )

    def server_args(self) -> ServerArgs:
        return replace(
            ServerArgs(model_path="simulated"),
            chunked_prefill_size=self.chunk,
            disable_overlap_schedule=self.window == 1,
            tp_size=self.tp_size,
            pp_size=self.num_stages,
            disable_radix_cache=not self.caches,
            max_queued_requests=self.max_queued,
            schedule_conservativeness=self.conservativeness,
            schedule_policy=self.policy,
            priority_scheduling_preemption_threshold=self.threshold,
            priority_aging_time=self.aging,
            radix_eviction_policy=self.eviction,
            max_decode_stall=1000 * self.stall,
            request_waiting_timeout=self.waiting_timeout,
            request_running_timeout=self.running_timeout,
            watchdog_timeout=self.watchdog_timeout,
            max_loras_per_batch=self.most_resources,
        )

    @property
    def num_ranks(self) -> int:
        """Those of all stages."""
        return self.tp_size * self.num_stages

    @property
    def most_in_flight(self) -> int:
        return self.window + self.num_stages - 1

    def prompt_us(self, start: int, count: int) -> float:
        """What these tokens of a prompt add to a step."""
        return count * (self.token_us + self.pair_us * (start + count / 2))

    def decode_us(self, num_rows: int, factor: float, row_tokens: int = 1) -> float:
        """A step without prompts."""
        return 1e6 * self.step_time * factor + self.row_us * num_rows + self.draft_us * (row_tokens - 1)

    def most_prompt_us(self, num_rows: int) -> float:
        """The decode guarantee: what the prompts may add to a step of so many decodes.

        As much as the step takes without them, the stall, and the least chunk, twice: a short prompt's and a long one's. Where
        steps of the same kind differ in time, nobody can tell what is the prompts' share: four times the difference may be added.
        """
        least, most = (
            self.decode_us(0, min(self.jitter)),
            self.decode_us(self.num_slots, max(self.jitter), self.row_tokens),
        )
        kept = 2 * self.prompt_us(self.max_request_tokens, LEAST_CHUNK)
        return (
            self.decode_us(num_rows, max(self.jitter), self.row_tokens) + 1e6 * self.stall + kept + 4 * (most - least)
        )

    def can_fit(self, num_tokens: int) -> bool:
        """A request of so many tokens, prompt and answer, may not be refused for its size."""
        return num_tokens <= min(self.max_request_tokens, (self.num_pages - self.most_in_flight) * self.page_size)

"""What a simulated world is like."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes, shares and times (in virtual seconds). `draw` makes up a world."""

    page_size: int = 16
    num_pages: int = 64
    num_slots: int = 8
    max_request_tokens: int = 512
    chunk: int = 64
    window: int = 2
    tp_size: int = 1
    caches: bool = True
    num_frontends: int = 1
    max_queued: int = 4096
    conservativeness: float = 1.0
    num_requests: int = 40
    longest_prompt: int = 100
    longest_answer: int = 30
    vocab_size: int = 40
    arrival_gap: float = 0.01
    step_time: float = 0.01
    delay: float = 0.005
    ack_delay: float = 0.005
    abort_share: float = 0.2
    resumed_share: float = 0.1
    breaks_down: bool = False
    frontends_return: bool = False
    is_disturbed: bool = True  # by questions, flushes, and aborts of what others sent
    keeps_ledger: bool = False  # frontends are real RequestLedgers

    @classmethod
    def draw(cls, rng: random.Random) -> Settings:
        page_size = rng.choice((1, 1, 4, 4, 16))
        longest_prompt, longest_answer = rng.choice(((12, 8), (60, 30), (60, 30), (150, 40), (20, 120)))
        least_pages = -(-(longest_prompt + longest_answer) // page_size)
        return cls(
            page_size=page_size,
            num_pages=int(least_pages * rng.choice((1.0, 1.3, 2.0, 3.0, 8.0, 40.0))) + rng.randint(0, 3),
            num_slots=rng.choice((1, 2, 4, 16, 64)),
            max_request_tokens=longest_prompt + longest_answer + rng.choice((0, 100)),
            chunk=rng.choice((1, 7, 64, 64, -1)),
            window=rng.choice((1, 2, 2)),
            tp_size=rng.choice((1, 1, 2)),
            caches=rng.random() < 0.85,
            num_frontends=rng.choice((1, 1, 2, 3)),
            max_queued=rng.choice((0, 3, 4096, 4096)),
            conservativeness=rng.choice((1.0, 0.3, 0.01)),
            num_requests=rng.randint(10, 50),
            longest_prompt=longest_prompt,
            longest_answer=longest_answer,
            vocab_size=rng.choice((8, 40, 1000)),
            arrival_gap=rng.choice((0.0, 0.001, 0.02, 0.1)),
            delay=rng.choice((0.0001, 0.005, 0.03)),
            ack_delay=rng.choice((0.001, 0.05, 0.5)),
            abort_share=rng.choice((0.0, 0.3, 0.8)),
            resumed_share=rng.choice((0.0, 0.2)),
            breaks_down=rng.random() < 0.2,
            frontends_return=rng.random() < 0.2,
            keeps_ledger=rng.random() < 0.4,
        )

    def server_args(self) -> ServerArgs:
        return replace(
            ServerArgs(model_path="simulated"),
            chunked_prefill_size=self.chunk,
            disable_overlap_schedule=self.window == 1,
            tp_size=self.tp_size,
            disable_radix_cache=not self.caches,
            schedule_conservativeness=self.conservativeness,
            max_queued_requests=self.max_queued,
        )

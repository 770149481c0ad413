"""Tokens/s of one user on a CPU with drafts, beside plain decoding, in turns.

    python -m benchmarks.cpu_drafts [--dtype float32] [--rounds 20] [any option of the server]

One runtime for plain decoding and one for each way to draft answer the same prompts, one after the other, greedily. Other work on the
machine can only add time, so the least time of each answer counts; the median is printed beside it. Decoding is what an answer takes longer
than one that ends with its first token.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from srt.runtime import Runtime
from srt.server_args import parse_args

PLAIN = "plain"
DRAFTERS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "STANDALONE": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "tiny-draft"},
    "EAGLE3": {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "tiny-eagle3"},
}
QUESTIONS = (
    "Tell me a story.",
    "What is srt?",
    "What does the scheduler do?",
    "Write a poem about a cat.",
    "Count to 30.",
    "How do I start the server?",
    "Tell me a story about a blue owl and a red fox.",
)
TEXTS = ("Once upon a time there was", "The project is", "Explain how the prefix cache works.")
LENGTH = 200  # of a text; chats end by themselves, earlier
WARM_UP = 2  # rounds


@dataclass(slots=True)
class Answers:
    """The answers of one runtime to one prompt."""

    num_tokens: int = 0
    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)  # of answers of one token

    @property
    def decoding_s(self) -> float:
        return min(self.whole_s) - min(self.first_s)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens/s over all prompts of a kind."""

    least: float
    median: float
    decoding: float

    @classmethod
    def of(cls, answers: list[Answers]) -> Rates:
        num_tokens = sum(one.num_tokens for one in answers)
        return cls(
            num_tokens / sum(min(one.whole_s) for one in answers),
            num_tokens / sum(median(one.whole_s) for one in answers),
            (num_tokens - len(answers)) / sum(one.decoding_s for one in answers),
        )

    def text(self, plain: Rates) -> str:
        pairs = (self.decoding, plain.decoding), (self.least, plain.least), (self.median, plain.median)
        return "".join(f"{rate:10.0f}{rate / beside:7.2f} ×" for rate, beside in pairs)


def chats(runtime: Runtime) -> list[str]:
    template = runtime.get_tokenizer().apply_chat_template
    return [
        template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
        for question in QUESTIONS
    ]


def answer(runtime: Runtime, prompt: str, most: int, answers: Answers | None, **sampling: Any) -> None:
    """Generate twice, the second time only the first token, and note how long both took."""
    begin_s = time.perf_counter()
    parameters = {"temperature": 0, "max_new_tokens": most, **sampling}
    meta = runtime.generate(prompt, sampling_params=parameters)["meta_info"]
    whole_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    runtime.generate(prompt, sampling_params={**parameters, "max_new_tokens": 1})
    if answers is not None:
        answers.num_tokens = meta["completion_tokens"]
        answers.whole_s.append(whole_s)
        answers.first_s.append(time.perf_counter() - begin_s)


def measure(runtimes: dict[str, Runtime], prompts: list[str], rounds: int, **sampling: Any) -> dict[str, Rates]:
    found: dict[str, list[Answers]] = {name: [Answers() for _ in prompts] for name in runtimes}
    for turn in range(WARM_UP + rounds):
        for n, prompt in enumerate(prompts):
            for name, runtime in runtimes.items():
                answer(runtime, prompt, LENGTH, found[name][n] if turn >= WARM_UP else None, **sampling)
    return {name: Rates.of(answers) for name, answers in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options, server_options = parser.parse_known_args()
    if options.rounds < 1:
        parser.error("--rounds takes numbers from 1 on")
    args = parse_args(["--model-path", "tiny", "--device", "cpu", *server_options])
    given = {name: value for name, value in asdict(args).items() if value != getattr(type(args)(), name)}
    with ExitStack() as stack:
        runtimes = {name: stack.enter_context(Runtime(**{**given, **drafts})) for name, drafts in DRAFTERS.items()}
        kinds: list[tuple[str, list[str], dict[str, Any]]] = [
            ("chats", chats(runtimes[PLAIN]), {}),
            (f"texts of {LENGTH}", list(TEXTS), {"ignore_eos": True}),
        ]
        print(f"{'tokens/s':28}{'decoding':>19}{'whole answers':>19}{'medians':>19}")
        for kind, prompts, sampling in kinds:
            rates = measure(runtimes, prompts, options.rounds, **sampling)
            for name, rate in rates.items():
                print(f"{kind + ', ' + name:28}{rate.text(rates[PLAIN])}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Tokens/s of one user on a CPU with drafts, beside plain decoding, in turns.

    python -m benchmarks.cpu_drafts [--dtype float32] [--rounds 20] [any option of the server]
    python -m benchmarks.cpu_drafts --drafters NGRAM --prompts FILE --model-path DIR ...

`--prompts` takes what `python -m benchmarks.draft_prompts` prints.

One runtime for plain decoding and one for each way to draft answer the same prompts, one after the other, greedily. Other work on the
machine can only add time, so the least time of each answer counts; the median is printed beside it. Decoding is what an answer takes longer
than one that ends with its first token; tokens a step are those of all rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from srt.runtime import Runtime
from srt.server_args import parse_args

PLAIN = "plain"
DRAFTERS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "NGRAM": {"speculative_algorithm": "NGRAM"},
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to go on from, and the sampling parameters that differ from those of greedy answers."""

    text: str
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Answers:
    """The answers of one runtime to one prompt."""

    num_tokens: int = 0
    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)  # of answers of one token
    num_steps: list[int] = field(default_factory=list)  # behind the first token

    @property
    def decoding_s(self) -> float:
        return min(self.whole_s) - min(self.first_s)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens/s over all prompts of a kind."""

    least: float
    median: float
    decoding: float
    tokens_a_step: float

    @classmethod
    def of(cls, answers: list[Answers]) -> Rates:
        num_tokens = sum(one.num_tokens for one in answers)
        return cls(
            num_tokens / sum(min(one.whole_s) for one in answers),
            num_tokens / sum(median(one.whole_s) for one in answers),
            (num_tokens - len(answers)) / sum(one.decoding_s for one in answers),
            sum((one.num_tokens - 1) * len(one.num_steps) for one in answers)
            / sum(sum(one.num_steps) for one in answers),
        )

    def text(self, plain: Rates) -> str:
        pairs = (self.decoding, plain.decoding), (self.least, plain.least), (self.median, plain.median)
        return "".join(f"{rate:10.0f}{rate / beside:7.2f} ×" for rate, beside in pairs) + f"{self.tokens_a_step:9.2f}"


def chat(runtime: Runtime, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    text: str = runtime.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def prompts_of_tiny(runtime: Runtime, length: int) -> dict[str, list[Prompt]]:
    return {
        "chats": [Prompt(chat(runtime, question)) for question in QUESTIONS],
        f"texts of {length}": [Prompt(text, {"ignore_eos": True}) for text in TEXTS],
    }


def read_prompts(runtime: Runtime, file: Path) -> dict[str, list[Prompt]]:
    """Return the prompts of a file by kind, as chats."""
    found: dict[str, list[Prompt]] = {}
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        prompt = Prompt(chat(runtime, entry["prompt"]), entry.get("sampling_params", {}))
        found.setdefault(entry["kind"], []).append(prompt)
    return found


def answer(runtime: Runtime, prompt: Prompt, most: int, answers: Answers | None) -> None:
    """Generate twice, the second time only the first token, and note how long both took."""
    begin_s = time.perf_counter()
    parameters = {"temperature": 0, "max_new_tokens": most, **prompt.sampling}
    meta = runtime.generate(prompt.text, sampling_params=parameters)["meta_info"]
    whole_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    runtime.generate(prompt.text, sampling_params={**parameters, "max_new_tokens": 1})
    if answers is not None:
        answers.num_tokens = meta["completion_tokens"]
        answers.whole_s.append(whole_s)
        answers.first_s.append(time.perf_counter() - begin_s)
        answers.num_steps.append(num_decode_steps(meta))


def num_decode_steps(meta: dict[str, Any]) -> int:
    """Return the number of steps behind the first token: those that verified drafts, and those that brought a token each."""
    num_verified = meta.get("spec_verify_ct", 0)
    num_ids = round(num_verified * meta.get("spec_accept_length", 0))
    return int(num_verified + max(0, meta["completion_tokens"] - 1 - num_ids))


def measure(runtimes: dict[str, Runtime], prompts: list[Prompt], options: argparse.Namespace) -> dict[str, Rates]:
    found: dict[str, list[Answers]] = {name: [Answers() for _ in prompts] for name in runtimes}
    for turn in range(options.warm_up + options.rounds):
        for n, prompt in enumerate(prompts):
            for name, runtime in runtimes.items():
                answers = found[name][n] if turn >= options.warm_up else None
                answer(runtime, prompt, options.length, answers)
    return {name: Rates.of(answers) for name, answers in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before these, which do not count")
    parser.add_argument("--length", type=int, default=200, help="most tokens of an answer; chats may end earlier")
    parser.add_argument("--drafters", default="STANDALONE,EAGLE3", help=f"some of {', '.join(list(DRAFTERS)[1:])}")
    parser.add_argument("--prompts", type=Path, metavar="FILE")
    options, server_options = parser.parse_known_args()
    if options.rounds < 1:
        parser.error("--rounds takes numbers from 1 on")
    drafters = options.drafters.split(",")
    if not set(drafters) <= set(DRAFTERS):
        parser.error(f"--drafters takes {', '.join(list(DRAFTERS)[1:])}")
    args = parse_args(["--model-path", "tiny", "--device", "cpu", *server_options])
    given = {name: value for name, value in asdict(args).items() if value != getattr(type(args)(), name)}
    with ExitStack() as stack:
        runtimes = {
            name: stack.enter_context(Runtime(**{**given, **DRAFTERS[name]}))
            for name in dict.fromkeys([PLAIN, *drafters])
        }
        plain = runtimes[PLAIN]
        kinds = read_prompts(plain, options.prompts) if options.prompts else prompts_of_tiny(plain, options.length)
        print(f"{'tokens/s':28}{'decoding':>19}{'whole answers':>19}{'medians':>19}{'a step':>9}")
        for kind, prompts in kinds.items():
            rates = measure(runtimes, prompts, options)
            for name, rate in rates.items():
                print(f"{kind + ', ' + name:28}{rate.text(rates[PLAIN])}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Whether any mix of requests runs out of memory: the ones that need most, all at once, again and again.

    python -m benchmarks.worst_mix --model-path qwen3-8b --load-format dummy [--rounds 3] [any option of the server]

Each round has twice as many requests as may run at the same time. The first is the worst that can be asked for: every request has all
penalties, biases, filters and logprobs with the most alternatives, while prompts of the greatest length that want all of their own
logprobs go by. The others are drawn: prompts short and long, each with nothing, some or all of it. Fails if an answer is missing.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks import limits, models
from srt.runtime import Runtime
from srt.sampling.sampling_params import MAX_TOP_LOGPROBS
from srt.server_args import parse_args

NEW_TOKENS = 16
LONG_PROMPTS = 2
REPORTED_TOKENS = (
    512  # of each long prompt: answers with the logprobs of all would be gigabytes of JSON, not of the device's memory
)
FILTERS = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
OTHERS = {"min_new_tokens": 4, "logit_bias": {str(i): 0.5 for i in range(100)}, "stop_token_ids": [9]}


def worst(rng: np.random.Generator, count: int, longest: int, vocab_size: int) -> dict[str, Any]:
    """The arguments of `generate`."""
    lengths = [longest] * LONG_PROMPTS + [4] * (count - LONG_PROMPTS)
    return {
        "input_ids": [rng.integers(10, vocab_size, n).tolist() for n in lengths],
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **FILTERS, **PENALTIES, **OTHERS},
        "return_logprob": True,
        "logprob_start_len": [max(0, n - REPORTED_TOKENS) for n in lengths],
        "top_logprobs_num": MAX_TOP_LOGPROBS,
    }


def drawn(rng: np.random.Generator, count: int, longest: int, vocab_size: int) -> dict[str, Any]:
    choices: list[dict[str, Any]] = [{"temperature": 0}, FILTERS, PENALTIES, OTHERS, {**FILTERS, **PENALTIES, **OTHERS}]
    lengths = [min(int(n), longest) for n in rng.choice([1, 5, 100, 700, 4000], count)]
    sampling = [choices[i] for i in rng.integers(len(choices), size=count)]
    wants = rng.integers(3, size=count)  # no logprobs, those of the answer, those of the prompt too
    return {
        "input_ids": [rng.integers(10, vocab_size, n).tolist() for n in lengths],
        "sampling_params": [{"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **one} for one in sampling],
        "return_logprob": [bool(want) for want in wants],
        "logprob_start_len": [
            max(0, n - REPORTED_TOKENS) if want == 2 else -1 for n, want in zip(lengths, wants, strict=True)
        ],
        "top_logprobs_num": [int(rng.integers(MAX_TOP_LOGPROBS + 1)) if want else 0 for want in wants],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="qwen3-0.6b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=16_384, help="tokens of the longest prompts, if there is room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jsonl", help="append the result to this file")
    options, server_options = parser.parse_known_args()
    folder = models.folder_of(options.model_path)
    args = parse_args(["--model-path", folder, *server_options])
    given = {name: value for name, value in asdict(args).items() if value != getattr(type(args)(), name)}
    vocab_size = 150_000 if limits.Shape.of(folder).head_weights > 10**8 else 500
    rng, count = np.random.default_rng(options.seed), 2 * args.max_running_requests
    seconds = []
    with Runtime(**given) as runtime:
        facts = runtime.get_server_info()
        longest = min(options.longest, int(facts["max_request_tokens"]) - NEW_TOKENS - 1)
        for number in range(options.rounds):
            mix = (worst if number == 0 else drawn)(rng, count, longest, vocab_size)
            begin_s = time.perf_counter()
            answers = runtime.generate(**mix)
            seconds.append(time.perf_counter() - begin_s)
            assert all(answer["output_ids"] for answer in answers) and len(answers) == count
            print(f"round {number}: {count} requests in {seconds[-1]:.1f} s", flush=True)
    tokens = int(facts["max_total_num_tokens"])
    print(
        f"{options.model_path}: {options.rounds} rounds beside a KV memory of {tokens:,} tokens, and none ran out of memory"
    )
    record = {"benchmark": "worst_mix", "model": options.model_path, "options": server_options, "kv_tokens": tokens}
    limits.write_jsonl(options.jsonl, {**record, "versions": limits.versions(), "longest": longest, "seconds": seconds})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

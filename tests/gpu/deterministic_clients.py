"""The three modes of SGLang's test_deterministic client, against a server of this process on a GPU.

    python -m tests.gpu.deterministic_clients --model-path FOLDER [any option of the server]

`single` sends one prompt in batches of any size, `prefix` prompts that begin alike in random mixtures, and `radix` one prompt behind
longer and longer cached prefixes. The number of different answers of each prompt is printed; the exit code is 1 if one has several.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx

from tests.support.server_process import ServerProcess

SIZES: Final = (1, 2, 3, 5, 8, 13, 21, 34, 50)  # requests at once
LENGTHS: Final = (1, 511, 2048, 4097)
NUM_TOKENS: Final = 64
Answers = dict[int, set[str]]


class Client:
    """Sends requests that are equal but for the length of their prompt."""

    def __init__(self, url: str) -> None:
        rng = random.Random(0)
        self._url = url
        self._ids = [rng.randrange(10, 30_000) for _ in range(max(LENGTHS))]
        self._pool = ThreadPoolExecutor(max(SIZES))

    def flush(self) -> None:
        httpx.post(f"{self._url}/flush_cache", timeout=60).raise_for_status()

    def ask(self, lengths: Sequence[int], found: Answers) -> None:
        """Send a request of each length, all at once, and add the answers to `found`."""
        for length, answer in zip(lengths, self._pool.map(self._answer, lengths), strict=True):
            found[length].add(answer)

    def _answer(self, length: int) -> str:
        sampling = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": self._ids[:length], "sampling_params": sampling}
        body |= {"return_logprob": True, "top_logprobs_num": 2}
        answer = httpx.post(f"{self._url}/generate", json=body, timeout=300).raise_for_status().json()
        meta = answer["meta_info"]
        return json.dumps([answer["output_ids"], meta["output_token_logprobs"], meta["output_top_logprobs"]])


def single(client: Client) -> Answers:
    found: Answers = defaultdict(set)
    for size in SIZES:
        client.ask([200] * size, found)
    return found


def prefix(client: Client) -> Answers:
    rng, found = random.Random(0), defaultdict[int, set[str]](set)
    for size in SIZES:
        client.ask(rng.choices(LENGTHS, k=size), found)
    return found


def radix(client: Client) -> Answers:
    found: Answers = defaultdict(set)
    for cached in (0, 1, 64, 511, 1000, 2048, 3000):
        client.flush()
        if cached:
            client.ask([cached], defaultdict(set))
        client.ask([4097], found)
        client.ask([4097] * 3, found)
    return found


MODES: Final[tuple[Callable[[Client], Answers], ...]] = (single, prefix, radix)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, words = parser.parse_known_args()
    most = 1
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess("srt.launch_server", ["--port", "0", *words], Path(folder)) as process,
    ):
        client = Client(process.wait_ready())
        for mode in MODES:
            found = mode(client)
            print(
                f"{mode.__name__}: different answers by length of the prompt:",
                {n: len(found[n]) for n in found},
                flush=True,
            )
            most = max(most, *(len(answers) for answers in found.values()))
        process.send(signal.SIGTERM)
        process.wait()
    return int(most > 1)


if __name__ == "__main__":
    raise SystemExit(main())

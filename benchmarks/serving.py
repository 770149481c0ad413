"""A server under load over HTTP: requests arrive at random, and each stream's tokens are timed.

    python -m benchmarks.serving --model-path qwen3-8b --load-format dummy [--rate R] [any option of the server]
    python -m benchmarks.serving --url http://127.0.0.1:30000 --rate 20

Starts a server (or uses the one at --url), waits for its graphs, and sends --requests requests with 100 to 1,024 tokens in and out:
all at once (saturation, the default), or as a Poisson process of --rate requests a second. Clients are processes of their own that read
sockets and no more.
Prints output tokens/s, the percentiles of TTFT (time to first token), TPOT (mean time per token of a request after its first) and ITL (time
between chunks), and how long the server's device had a decode step. At saturation of a server that it started, beside the limit of the
hardware for the whole run (`benchmarks.offline_throughput` has the same).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np

from benchmarks import limits, models
from benchmarks.offline_throughput import shape_limit_s
from benchmarks.startup import wait_for_url
from srt.server_args import ServerArgs, parse_args


@dataclass(frozen=True, slots=True)
class Call:
    """One request: when it is sent, and its body."""

    at_s: float
    body: bytes
    new_tokens: int

    @classmethod
    def of(cls, at_s: float, prompt: list[int], new_tokens: int, temperature: float) -> Call:
        sampling = {"temperature": temperature, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": True}).encode()
        return cls(at_s, body, new_tokens)


@dataclass(slots=True)
class Timing:
    """What one stream's socket saw, in seconds of the monotonic clock."""

    sent_s: float
    chunks_s: list[float]
    tokens: int


class Stream(asyncio.Protocol):
    """Sends one request and notes when chunks come; the last one says how many tokens there were."""

    def __init__(self, request: bytes, done: asyncio.Future[Timing]) -> None:
        self._request = request
        self._done = done
        self._timing = Timing(0.0, [], 0)
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timing.sent_s = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if b"data: {" in data:
            self._timing.chunks_s.append(time.monotonic())
        self._tail = (self._tail + data)[-4096:]
        if b"data: [DONE]" in self._tail:
            counted = self._tail.rsplit(b'"completion_tokens":', 1)
            self._timing.tokens = int(counted[1].split(b",", 1)[0].rstrip(b"}")) if len(counted) == 2 else 0
            if not self._done.done():
                self._done.set_result(self._timing)
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            said = self._tail.decode(errors="replace")
            self._done.set_exception(RuntimeError(f"the server closed the stream: {error}; it said {said[-300:]!r}"))


def run_client(host: str, port: int, start_s: float, calls: list[Call]) -> list[Timing]:
    """All calls of one client process, each at its time after `start_s`."""
    return asyncio.run(_send_all(host, port, start_s, calls))


async def _send_all(host: str, port: int, start_s: float, calls: list[Call]) -> list[Timing]:
    async def send(call: Call) -> Timing:
        await asyncio.sleep(max(0.0, start_s + call.at_s - time.monotonic()))
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Timing] = loop.create_future()
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(call.body)}\r\n\r\n"
        await loop.create_connection(lambda: Stream(head.encode() + call.body, done), host, port)
        timing = await done
        if timing.tokens != call.new_tokens:
            raise RuntimeError(f"{timing.tokens} tokens came, and {call.new_tokens} were asked for")
        return timing

    return await asyncio.gather(*map(send, calls))


def lengths_of(requests: int, least: int, most: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """In and out."""
    return rng.integers(least, most + 1, requests), rng.integers(least, most + 1, requests)


def make_calls(requests: int, rate: float, least: int, most: int, temperature: float, seed: int) -> list[Call]:
    """Lengths and times of arrival by the seed; prompts are fresh each time, so that a server that runs on has none of them cached."""
    rng, fresh = np.random.default_rng(seed), np.random.default_rng()
    lengths_in, lengths_out = (lengths.tolist() for lengths in lengths_of(requests, least, most, rng))
    gaps = rng.exponential(1 / rate, requests).tolist() if rate else [0.0] * requests
    calls, at_s = [], 0.0
    for length_in, length_out, gap in zip(lengths_in, lengths_out, gaps, strict=True):
        at_s += gap
        calls.append(Call.of(at_s, fresh.integers(300, 1000, length_in).tolist(), length_out, temperature))
    return calls


def load(url: str, calls: list[Call], clients: int) -> tuple[list[Timing], float]:
    """The timings of all streams, and the seconds from the first request to the last token."""
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    with ProcessPoolExecutor(clients, mp_context=get_context("spawn")) as pool:
        list(pool.map(abs, range(clients)))  # so that processes are there before the clock starts
        start_s = time.monotonic() + 1.0
        shares = [
            pool.submit(run_client, address.hostname, address.port, start_s, calls[i::clients]) for i in range(clients)
        ]
        timings = [timing for share in shares for timing in share.result()]
    began_s = min(timing.sent_s for timing in timings)
    return timings, max(timing.chunks_s[-1] for timing in timings) - began_s


def report(timings: list[Timing], took_s: float) -> dict[str, float]:
    first = np.array([t.chunks_s[0] - t.sent_s for t in timings])
    per_token = np.array([(t.chunks_s[-1] - t.chunks_s[0]) / (t.tokens - 1) for t in timings if t.tokens > 1])
    between = np.concatenate([np.diff(t.chunks_s) for t in timings])
    tokens = sum(t.tokens for t in timings)
    figures = {"requests_s": len(timings) / took_s, "output_tokens_s": tokens / took_s}
    for name, values in (("ttft", first), ("tpot", per_token), ("itl", between)):
        for percent in (50, 90, 99):
            figures[f"{name}_p{percent}_ms"] = float(np.percentile(values, percent)) * 1e3
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="qwen3-0.6b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: all at once")
    parser.add_argument(
        "--runs", type=int, default=1, help="at saturation: the best is shown; prompts are fresh each time"
    )
    parser.add_argument("--least", type=int, default=100, help="tokens in and out, at least")
    parser.add_argument("--most", type=int, default=1024, help="tokens in and out, at most")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--clients", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="client processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jsonl", help="append the result to this file")
    options, server_options = parser.parse_known_args()
    if options.runs < 1 or (options.runs > 1 and options.rate):
        parser.error("--runs is at least 1, and 1 at a --rate.")
    if min(options.requests, options.least, options.clients) < 1 or options.most < options.least or options.rate < 0:
        parser.error(
            "--requests, --least and --clients are at least 1, --most is at least --least, and --rate at least 0."
        )
    if options.url is not None:
        figures = measure(options.url, options)
    else:
        words = ["--model-path", models.folder_of(options.model_path), *server_options]
        limit = None if options.rate else limit_of(parse_args(words), options)
        with running_server(words) as url:
            figures = measure(url, options)
        if limit is not None:
            figures |= {"limit_tokens_s": limit, "ratio": limit / figures["output_tokens_s"]}
    print(f"{options.model_path}, {options.requests} requests, {options.rate or 'all at once'}: {limits.versions()}")
    print("\n".join(f"{name:18} {value:12,.2f}" for name, value in figures.items()))
    chosen = {"requests": options.requests, "rate": options.rate, "runs": options.runs, "options": server_options}
    limits.write_jsonl(
        options.jsonl,
        {"benchmark": "serving", "model": options.model_path, **chosen, "versions": limits.versions(), **figures},
    )
    return 0


@contextmanager
def running_server(words: list[str]) -> Iterator[str]:
    """Run a server with these options inside the block, at the address that it yields."""
    command = [sys.executable, "-m", "srt.launch_server", "--port", "0", "--incremental-streaming-output", *words]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": folder})
        try:
            yield wait_for_url(server)
        finally:
            server.terminate()
            server.wait()


def limit_of(args: ServerArgs, options: argparse.Namespace) -> float:
    """Output tokens a second that the hardware allows."""
    device = limits.measured().of_ranks(args.tp_size)
    shape = limits.Shape.of(args.model_path, args.kv_cache_dtype)
    lengths_in, lengths_out = lengths_of(
        options.requests, options.least, options.most, np.random.default_rng(options.seed)
    )
    return float(lengths_out.sum() / shape_limit_s(shape, device, lengths_in, lengths_out))


def measure(url: str, options: argparse.Namespace) -> dict[str, float]:
    shape = (options.least, options.most, options.temperature)
    load(url, make_calls(min(options.requests, 64), 0.0, 16, 32, options.temperature, 1), options.clients)  # warm-up
    while (state_of(url) or {}).get("num_graphs_left"):
        time.sleep(0.1)
    step_ms(url)
    runs = []
    for _ in range(options.runs):
        figures = report(*load(url, make_calls(options.requests, options.rate, *shape, options.seed), options.clients))
        step = step_ms(url)
        runs.append(figures if step is None else {**figures, "step_p50_ms": step})
    return max(runs, key=lambda run: run["output_tokens_s"])


def step_ms(url: str) -> float | None:
    """How long the worker's device had a decode step, of those since the last call: the median. None where the server does not say."""
    state = state_of(url) or {}
    return float(state["worker_step_us_p50"]) / 1e3 if "worker_step_us_p50" in state else None


def state_of(url: str) -> dict[str, Any] | None:
    """What the server says of itself; None if it does not."""
    try:
        with urlopen(f"{url}/server_info?deep=true", timeout=60) as answer:
            (state,) = json.load(answer)["internal_states"]
            return dict(state)
    except (OSError, ValueError, KeyError):
        return None


if __name__ == "__main__":
    raise SystemExit(main())

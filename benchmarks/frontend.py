"""How many streams a frontend carries, what a chunk costs, and how late its event loop is beside long prompts.

    python -m benchmarks.frontend [--streams 1000] [--rate 50] [--seconds 8] [--ratio-rate 20]

An engine that only talks offers each stream `rate` tokens a second, over the real socket, into the real ledger and detokenizer; when
the frontend is behind, several tokens come as one chunk. A bare ASGI app on the same server library streams the same chunks in the
same run. Processor times are the server process's own from the first chunk
on, so that they count on a busy machine too. Goals: nothing lost or reordered,
ours ≥ 0.6 of the bare app's chunks per second of processor time, the event loop's delay p99 ≤ 20 ms beside prompts of 1 MB.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.frontend_load import Stream, read_all, text_of
from benchmarks.frontend_peers import PROBE_S, said
from srt.utils.tokenizer import Tokenizer, load_tokenizer

MODEL = Path(__file__).parent.parent / "srt" / "assets" / "models" / "tiny"
RATIO_GOAL, DELAY_GOAL_S = 0.6, 0.020
PATIENCE_S = 300.0
NUM_LONG_PROMPTS = 20
IDLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Load:
    """What one server did for one crowd of streams."""

    tokens_per_s: float  # in each stream, from the first byte of all to the last
    num_chunks: int  # in the first four fifths, in which no stream ends
    wall_s: float  # of these
    cpu_s: float  # of the server's processor in this time
    begin_ms: float  # and before it, for each stream
    gap_p99_s: float
    memory_mib: float

    @property
    def chunks_per_cpu_s(self) -> float:
        return self.num_chunks / self.cpu_s

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:5.1f} tokens/s in each stream, {self.num_chunks / self.wall_s:6.0f} chunks/s in all,"
            f" {self.chunks_per_cpu_s:6.0f} per s of processor ({1e6 / self.chunks_per_cpu_s:.1f} µs each),"
            f" {self.begin_ms:.2f} ms to begin a stream, gap p99 {self.gap_p99_s * 1e3:.0f} ms, {self.memory_mib:.0f} MiB"
        )


class Peer:
    """A process of benchmarks.frontend_peers that serves HTTP."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "benchmarks.frontend_peers", *words]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = psutil.Process(self.popen.pid)
        self.url = self._read()

    def order(self, word: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(word + "\n")
        self.popen.stdin.flush()

    def delays_s(self) -> list[float]:
        self.order("stop")
        delays: list[float] = json.loads(self._read())
        return delays

    @property
    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait(30)

    def _read(self) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer ended with {self.popen.wait()}")
        return line.strip()


@contextmanager
def ours(rate: float, num_tokens: int, num_streams: int) -> Iterator[Peer]:
    """The real frontend, with an engine that talks."""
    with tempfile.TemporaryDirectory() as run_dir:
        words = [run_dir, str(rate), str(num_tokens), str(num_streams)]
        engine = subprocess.Popen([sys.executable, "-m", "benchmarks.frontend_peers", "engine", *words])
        try:
            peer = Peer("server", run_dir, str(MODEL))
            yield peer
            peer.close()
        finally:
            engine.kill()
            engine.wait()


@contextmanager
def bare(chunks: list[bytes], rate: float) -> Iterator[Peer]:
    with tempfile.NamedTemporaryFile("w", suffix=".hex") as file:
        file.write("\n".join(chunk.hex() for chunk in chunks))
        file.flush()
        peer = Peer("bare", file.name, str(rate))
        yield peer
        peer.close()


def measure(peer: Peer, num_streams: int, num_tokens: int, rate: float) -> tuple[Load, list[Stream]]:
    bodies = [body(stream, num_tokens) for stream in range(num_streams)]
    marks = [(0.0, peer.cpu_s)]
    span_s = 0.8 * num_tokens / rate
    streams = read_all(
        peer.url, "/v1/completions", bodies, PATIENCE_S, span_s, lambda: marks.append((time.monotonic(), peer.cpu_s))
    )
    (_, first_cpu_s), (begun_s, begun_cpu_s), (later_s, later_cpu_s) = marks
    # The head of an answer may come long before its first chunk.
    gaps = np.array([gap for stream in streams for gap in stream.gaps_s()[1:]])
    load = Load(
        tokens_per_s=num_tokens / (max(stream.times_s[-1] for stream in streams) - begun_s),
        num_chunks=sum(stream.num_events_before(later_s) for stream in streams),
        wall_s=later_s - begun_s,
        cpu_s=later_cpu_s - begun_cpu_s,
        begin_ms=(begun_cpu_s - first_cpu_s) / num_streams * 1e3,
        gap_p99_s=float(np.percentile(gaps, 99)),
        memory_mib=peer.process.memory_info().rss / 2**20,
    )
    return load, streams


def compare(num_streams: int, rate: float, seconds: float) -> float:
    """Chunks per second of processor, ours over the bare app's, with as many streams but so few tokens that each is a chunk."""
    num_tokens = max(2, int(rate * seconds))
    print(f"{num_streams} streams, each offered {rate:g} tokens/s")
    with ours(rate, num_tokens, num_streams) as peer:
        crowd, streams = measure(peer, num_streams, num_tokens, rate)
        print(f"  ours  {crowd}")
    longest = max((stream.events() for stream in streams), key=len)
    del streams
    with bare([event + b"\n\n" for event in longest], rate) as peer:
        plain, _ = measure(peer, num_streams, len(longest), rate)
        print(f"  bare  {plain}")
    return crowd.chunks_per_cpu_s / plain.chunks_per_cpu_s


def first_id(stream: int) -> int:
    return 10 + stream % 1000


def body(stream: int, num_tokens: int) -> bytes:
    asked: dict[str, Any] = {"prompt": [first_id(stream)], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    return json.dumps(asked).encode()


def count_wrong(streams: list[Stream], num_tokens: int, tokenizer: Tokenizer) -> int:
    """Streams whose text is not, to the byte, the text of the tokens that were said."""
    wrong = 0
    for number, stream in enumerate(streams):
        ids = [said(first_id(number), at) for at in range(num_tokens)]
        wrong += text_of(stream.events()) != tokenizer.decode(ids)
    return wrong


def delays_beside_long_prompts(peer: Peer) -> tuple[list[float], int]:
    """Of the server's event loop, while one prompt of 1 MB after the other is tokenized; and the prompt's tokens."""
    text = ("The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer, 数百万, 🙂!\n" * 20_000).encode()[: 1 << 20]
    asked = json.dumps({"prompt": text.decode(errors="ignore"), "max_tokens": 1}).encode()
    parts = urlsplit(peer.url)
    num_tokens = 0

    def post() -> None:
        nonlocal num_tokens
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=PATIENCE_S)
        for _ in range(NUM_LONG_PROMPTS):
            connection.request("POST", "/v1/completions", asked, {"content-type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert response.status == 200, answer
            num_tokens = answer["usage"]["prompt_tokens"]
        connection.close()

    client = threading.Thread(target=post)
    peer.order("probe")
    client.start()
    client.join()
    return peer.delays_s(), num_tokens


def felt_s(delays_s: list[float], share: float) -> float:
    """A percentile over what whoever comes at any moment has to wait, not over the delays: a long one is met by many."""
    felt = [delay - at for delay in delays_s for at in np.arange(0.0, max(delay, PROBE_S / 2), PROBE_S)]
    return float(np.percentile(felt, share))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second that each stream is offered")
    parser.add_argument("--ratio-rate", type=float, default=20.0, help="the same where the cost of a chunk is compared")
    parser.add_argument("--ratio-seconds", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=8.0, help="of tokens in each stream")
    words = parser.parse_args()
    num_tokens = max(2, int(words.rate * words.seconds))
    tokenizer = load_tokenizer(MODEL)

    print(f"{words.streams} streams, each offered {words.rate:g} tokens/s for {words.seconds:g} s")
    with ours(words.rate, num_tokens, words.streams) as peer:
        crowd, streams = measure(peer, words.streams, num_tokens, words.rate)
        print(f"  ours  {crowd}")
        wrong = count_wrong(streams, num_tokens, tokenizer)
        print(f"  {wrong} streams lost or reordered something")
    del streams
    ratio = compare(words.streams, words.ratio_rate, words.ratio_seconds)
    print(f"  ours / bare: {ratio:.2f} (goal {RATIO_GOAL})")

    with ours(words.rate, num_tokens, words.streams) as peer:
        peer.order("probe")
        time.sleep(IDLE_S)
        idle_p99 = felt_s(peer.delays_s(), 99)
        delays, length = delays_beside_long_prompts(peer)
    p50, p99, most = (felt_s(delays, share) for share in (50, 99, 100))
    print(
        f"{NUM_LONG_PROMPTS} prompts of 1 MB ({length} tokens): event loop late by {p50 * 1e3:.1f} ms (p50),"
        f" {p99 * 1e3:.1f} ms (p99, goal {DELAY_GOAL_S * 1e3:g}), {most * 1e3:.1f} ms (most);"
        f" with nothing to do {idle_p99 * 1e3:.1f} ms (p99)"
    )
    return 0 if not wrong and ratio >= RATIO_GOAL and p99 <= DELAY_GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())

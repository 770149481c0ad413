"""Kill processes of a server with two replicas under load, again and again, and count the requests that are lost.

python -m tests.faults.kill_replicas --kills 100 [--seconds 3600] [--model MODEL] [--device cpu] [--seed 0]

Each kill (SIGKILL) hits a worker, a scheduler, a frontend or all processes of a replica, drawn by the seed. The next one comes when the
server is whole again. A request counts as lost if it ends otherwise than it would have undisturbed, unless its connection was that of
a killed frontend. The exit code is 0 if none was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.server_process import ServerProcess

NUM_PROMPTS = 8
NUM_STREAMS = 6
LENGTH = 80
TARGETS = ("worker", "scheduler", "frontend", "replica")
WHOLE_S = 240.0  # for a killed process to be replaced
QUIET_STREAMS = 12  # that end before the first kill, for the longest gap that is no fault's


@dataclass
class Tally:
    """What happened to the streams, and when processes were killed."""

    expected: dict[int, list[int]] = field(default_factory=dict)  # ids by prompt
    ends: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    kills: list[tuple[float, str, int]] = field(default_factory=list)  # when, what, and the replica's number or -1
    quiet_gap_s: float = 0.0
    surviving_gap_s: float = 0.0  # of streams whose replica lived while another was killed
    num_surviving: int = 0

    def end(self, prompt: int, ids: list[int] | None, error: str, began_s: float) -> None:
        killed_since = {what for when_s, what, _ in self.kills if when_s >= began_s}
        if ids is not None and not error and ids == self.expected.setdefault(prompt, ids):
            self.ends["answered"] += 1
        elif error.startswith("connection") and "frontend" in killed_since:
            self.ends["ended with a killed frontend"] += 1
        else:
            self.losses.append(f"prompt {prompt}: {error or 'other tokens'}, after kills of {sorted(killed_since)}")

    def note_gap(self, replica: int | None, began_s: float, gap_s: float) -> None:
        """Record the longest gap of a stream that has ended."""
        hit = [number for when_s, _, number in self.kills if when_s >= began_s]
        if not self.kills:
            self.quiet_gap_s = max(self.quiet_gap_s, gap_s)
        elif hit and replica is not None and replica not in hit and -1 not in hit:
            self.num_surviving += 1
            self.surviving_gap_s = max(self.surviving_gap_s, gap_s)


async def stream(client: httpx.AsyncClient, url: str, prompt: int, tally: Tally) -> None:
    began_s = last_s = time.monotonic()
    ids: list[int] | None = None
    error, replica, gap_s = "", None, 0.0
    params = {"temperature": 0.7, "sampling_seed": prompt, "max_new_tokens": LENGTH, "ignore_eos": True}
    body = {"text": f"Story {prompt} " * 8, "sampling_params": params, "stream": True}
    try:
        async with client.stream("POST", f"{url}/generate", json=body) as answer:
            if answer.status_code != 200:
                error = f"status {answer.status_code} {(await answer.aread()).decode()}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now_s = time.monotonic()
                gap_s = max(gap_s, now_s - last_s) if ids is not None else 0.0
                last_s, chunk = now_s, json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    error = f"error {chunk['error']}"
                    break
                ids = chunk["output_ids"]
                replica = chunk["meta_info"]["dp_rank"] if replica is None else replica
    except httpx.TransportError as fault:
        error = f"connection {type(fault).__name__}"
    if not error and (ids is None or len(ids) != LENGTH):
        error = "it ended early"
    tally.end(prompt, ids, error, began_s)
    tally.note_gap(replica, began_s, gap_s)


async def load(url: str, tally: Tally, until: asyncio.Event, draw: random.Random) -> None:
    async with httpx.AsyncClient(timeout=WHOLE_S, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        while not until.is_set():
            await stream(client, url, draw.randrange(NUM_PROMPTS), tally)


def pids_of(report: dict[str, Any], target: str, number: int) -> list[int]:
    names = [f"worker {number}", f"scheduler {number}"] if target == "replica" else [f"{target} {number}"]
    return [report["processes"][name]["pid"] for name in names]


async def whole_report(url: str, server: ServerProcess, num_replaced: int) -> dict[str, Any]:
    """Wait until so many times a replacement has got ready, and return /health's report."""
    async with asyncio.timeout(WHOLE_S), httpx.AsyncClient() as client:
        while len(server.lines_with("at work again")) < num_replaced:  # noqa: ASYNC110 - another process says it
            await asyncio.sleep(0.1)
        while True:
            try:
                report: dict[str, Any] = (await client.get(f"{url}/health")).json()
                return report
            except httpx.TransportError:
                await asyncio.sleep(0.1)


async def kill_often(
    url: str, server: ServerProcess, num_kills: int, end_s: float, tally: Tally, draw: random.Random
) -> None:
    for count in range(num_kills):
        report = await whole_report(url, server, count)
        if time.monotonic() > end_s:
            return
        await asyncio.sleep(1.0 + draw.random())
        target, number = draw.choice(TARGETS), draw.randrange(2)
        tally.kills.append((time.monotonic(), target, -1 if target == "frontend" else number))
        for pid in pids_of(report, target, number):
            os.kill(pid, signal.SIGKILL)
        print(f"kill {count + 1}: {target} {number}; lost so far: {len(tally.losses)}", flush=True)
    await whole_report(url, server, num_kills)


async def run(url: str, server: ServerProcess, num_kills: int, end_s: float, seed: int) -> Tally:
    draw, tally, over = random.Random(seed), Tally(), asyncio.Event()
    async with httpx.AsyncClient(timeout=WHOLE_S) as client:
        for prompt in range(NUM_PROMPTS):
            await stream(client, url, prompt, tally)
    tally.quiet_gap_s = 0.0
    streams = [asyncio.create_task(load(url, tally, over, random.Random(seed + n))) for n in range(NUM_STREAMS)]
    try:
        while sum(tally.ends.values()) < NUM_PROMPTS + QUIET_STREAMS:  # noqa: ASYNC110 - the streams say it
            await asyncio.sleep(0.1)
        await kill_often(url, server, num_kills, end_s, tally, draw)
    finally:
        over.set()
        await asyncio.gather(*streams)
    return tally


def kill_all(
    model: str, folder: Path, num_kills: int, seconds: float, seed: int = 0, device: str = "cpu"
) -> tuple[Tally, int]:
    """Serve this model in two replicas, and kill what the seed draws. Return what happened and the server's exit code."""
    words = ["--model-path", model, "--device", device, "--dtype", "float32", "--port", "0", "--dp-size", "2"]
    words += ["--tokenizer-worker-num", "2", "--max-total-tokens", "8192", "--max-replacements", "1000"]
    with ServerProcess("srt.launch_server", words, folder) as server:
        end_s = time.monotonic() + seconds
        tally = asyncio.run(run(server.wait_ready(), server, num_kills, end_s, seed))
        server.send(signal.SIGTERM)
        return tally, server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kill after so long")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu", help="cuda: each replica has a GPU")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally, code = kill_all(given.model, Path(folder), given.kills, given.seconds, given.seed, given.device)
    print(f"{len(tally.kills)} kills: {dict(Counter(what for _, what, _ in tally.kills))}")
    print(f"{sum(tally.ends.values()) + len(tally.losses)} requests: {dict(tally.ends)}, {len(tally.losses)} lost")
    print(
        f"longest gap: {tally.quiet_gap_s:.3f} s undisturbed, {tally.surviving_gap_s:.3f} s in {tally.num_surviving} streams of a replica"
    )
    print("of a replica that lived while a process of the other one was killed", *tally.losses, sep="\n")
    return 1 if tally.losses or code else 0


if __name__ == "__main__":
    sys.exit(main())

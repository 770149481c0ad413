"""Kill processes of a server with two replicas under load, again and again, and count the requests that are lost.

python -m tests.faults.kill_replicas --kills 100 [--seconds 3600] [--model MODEL] [--device cpu] [--seed 0]
                                     [--targets worker,scheduler] [--length 80] [any option of the server]

Each kill (SIGKILL) hits a worker, a scheduler, a frontend or all processes of a replica, drawn by the seed. The next one comes when the
server is whole again. The longest gap between two chunks of a stream is measured undisturbed, and at the other replica from a kill to the
end of the repair. A request counts as lost if it ends otherwise than it would have undisturbed, unless its connection was that of a killed
frontend. The exit code is 0 if none was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
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
# Options that are given come later, and count instead.
SERVER_OPTIONS = ("--dtype", "float32", "--max-total-tokens", "8192", "--incremental-streaming-output")
QUIET_STREAMS = 12  # that end before the first kill, for the longest gap that is no fault's


@dataclass
class Kill:
    """When a process was killed, of which replica, and when the server was whole again."""

    killed_s: float
    what: str
    replica: int  # -1: of none
    whole_s: float = math.inf


@dataclass
class Tally:
    """What happened to the streams, and when processes were killed."""

    expected: dict[int, list[int]] = field(default_factory=dict)  # ids by prompt
    ends: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    quiet_gap_s: float = 0.0
    surviving_gap_s: float = 0.0  # of streams whose replica lived while another was killed
    num_surviving: int = 0

    def end(self, prompt: int, ids: list[int] | None, error: str, began_s: float) -> None:
        killed_since = {kill.what for kill in self.kills if kill.killed_s >= began_s}
        if ids is not None and not error and ids == self.expected.setdefault(prompt, ids):
            self.ends["answered"] += 1
        elif error.startswith("connection") and "frontend" in killed_since:
            self.ends["ended with a killed frontend"] += 1
        else:
            self.losses.append(f"prompt {prompt}: {error or 'other tokens'}, after kills of {sorted(killed_since)}")

    def note_gap(self, replica: int | None, began_s: float, since_s: float, until_s: float) -> bool:
        """Record a gap between two chunks of a stream. Return whether the other replica was being repaired in it.

        The stream began at this replica, which has lived since then.
        """
        if not self.kills:
            self.quiet_gap_s = max(self.quiet_gap_s, until_s - since_s)
        hit = [kill.replica for kill in self.kills if kill.whole_s >= began_s]
        is_repaired = any(kill.whole_s >= since_s for kill in self.kills)
        if not is_repaired or replica is None or replica in hit or -1 in hit:
            return False
        self.surviving_gap_s = max(self.surviving_gap_s, until_s - since_s)
        return True


async def stream(client: httpx.AsyncClient, url: str, prompt: int, tally: Tally, length: int) -> None:
    began_s = last_s = time.monotonic()
    ids: list[int] | None = None
    error, replica, is_surviving = "", None, False
    params = {"temperature": 0.7, "sampling_seed": prompt, "max_new_tokens": length, "ignore_eos": True}
    body = {"text": f"Story {prompt} " * 8, "sampling_params": params, "stream": True}
    try:
        async with client.stream("POST", f"{url}/generate", json=body) as answer:
            if answer.status_code != 200:
                error = f"status {answer.status_code} {(await answer.aread()).decode()}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now_s = time.monotonic()
                if ids is not None:
                    is_surviving |= tally.note_gap(replica, began_s, last_s, now_s)
                last_s, chunk = now_s, json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    error = f"error {chunk['error']}"
                    break
                ids = ids or []
                ids += chunk["output_ids"]
                replica = chunk["meta_info"]["dp_rank"] if replica is None else replica
    except httpx.TransportError as fault:
        error = f"connection {type(fault).__name__}"
    if not error and (ids is None or len(ids) != length):
        error = "it ended early"
    tally.end(prompt, ids, error, began_s)
    tally.num_surviving += is_surviving


async def load(url: str, tally: Tally, until: asyncio.Event, draw: random.Random, length: int) -> None:
    async with httpx.AsyncClient(timeout=WHOLE_S, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        while not until.is_set():
            await stream(client, url, draw.randrange(NUM_PROMPTS), tally, length)


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


@dataclass(frozen=True)
class Trial:
    """What is killed, and what the streams are meanwhile."""

    num_kills: int
    end_s: float  # of time.monotonic(); no kill begins later
    seed: int = 0
    targets: Sequence[str] = TARGETS
    length: int = LENGTH


async def kill_often(url: str, server: ServerProcess, trial: Trial, tally: Tally, draw: random.Random) -> None:
    for count in range(trial.num_kills):
        report = await whole_report(url, server, count)
        for kill in tally.kills[-1:]:
            kill.whole_s = time.monotonic()
        print(gaps_text(tally), flush=True)
        if time.monotonic() > trial.end_s:
            return
        await asyncio.sleep(1.0 + draw.random())
        target, number = draw.choice(trial.targets), draw.randrange(2)
        tally.kills.append(Kill(time.monotonic(), target, -1 if target == "frontend" else number))
        for pid in pids_of(report, target, number):
            os.kill(pid, signal.SIGKILL)
        print(f"kill {count + 1}: {target} {number}; lost so far: {len(tally.losses)}", flush=True)
    await whole_report(url, server, trial.num_kills)
    for kill in tally.kills[-1:]:
        kill.whole_s = time.monotonic()


async def run(url: str, server: ServerProcess, trial: Trial) -> Tally:
    draw, tally, over = random.Random(trial.seed), Tally(), asyncio.Event()
    async with httpx.AsyncClient(timeout=WHOLE_S) as client:
        for prompt in range(NUM_PROMPTS):
            await stream(client, url, prompt, tally, trial.length)
    tally.quiet_gap_s = 0.0
    draws = [random.Random(trial.seed + n) for n in range(NUM_STREAMS)]
    streams = [asyncio.create_task(load(url, tally, over, one, trial.length)) for one in draws]
    try:
        while sum(tally.ends.values()) + len(tally.losses) < NUM_PROMPTS + QUIET_STREAMS:  # noqa: ASYNC110 - the streams say it
            await asyncio.sleep(0.1)
        await kill_often(url, server, trial, tally, draw)
    finally:
        over.set()
        await asyncio.gather(*streams)
    return tally


def kill_all(
    model: str, folder: Path, trial: Trial, device: str = "cpu", options: Sequence[str] = ()
) -> tuple[Tally, int]:
    """Serve this model in two replicas, and kill what the seed draws. Return what happened and the server's exit code."""
    words = ["--model-path", model, "--device", device, "--port", "0", "--dp-size", "2"]
    words += ["--tokenizer-worker-num", "2", "--max-replacements", "1000", *SERVER_OPTIONS, *options]
    with ServerProcess("srt.launch_server", words, folder) as server:
        tally = asyncio.run(run(server.wait_ready(), server, trial))
        server.send(signal.SIGTERM)
        return tally, server.wait()


def gaps_text(tally: Tally) -> str:
    return (
        f"longest gap: {tally.quiet_gap_s:.3f} s undisturbed, {tally.surviving_gap_s:.3f} s in {tally.num_surviving} streams of a"
        " replica that lived while the other one was repaired"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no kill later, from the start of this command"
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu", help="cuda: each replica has a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default=",".join(TARGETS), help="what is killed")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a stream")
    given, options = parser.parse_known_args()
    targets = given.targets.split(",")
    if not set(targets) <= set(TARGETS):
        parser.error(f"--targets are some of {', '.join(TARGETS)}.")
    trial = Trial(given.kills, time.monotonic() + given.seconds, given.seed, targets, given.length)
    with tempfile.TemporaryDirectory() as folder:
        tally, code = kill_all(given.model, Path(folder), trial, given.device, options)
    print(f"{len(tally.kills)} kills: {dict(Counter(kill.what for kill in tally.kills))}")
    print(f"{sum(tally.ends.values()) + len(tally.losses)} requests: {dict(tally.ends)}, {len(tally.losses)} lost")
    print(gaps_text(tally), *tally.losses, sep="\n")
    return 1 if tally.losses or code else 0


if __name__ == "__main__":
    sys.exit(main())

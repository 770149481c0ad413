"""Kill a supervisor of a server on two hosts under load, and print the seconds until everything has ended that must.

python -m tests.faults.kill_hosts [--rounds 5] [--model MODEL]

The killed one (SIGKILL) leads or does not, and the server has a replica on each host or one that spans both. A replica on the leading host
goes on when the other one is lost; all else ends. The exit code is 0 if nothing was left.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.support.server_process import END_S, ServerProcess
from tests.support.several_hosts import TwoHosts, words_for

NUM_STREAMS = 6
BUSY_CHUNKS = 200  # of all streams together, before the kill
LAYOUTS = {"a replica on each host": ("--dp-size", "2"), "a replica that spans both": ("--tp", "2")}
BODY = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "stream": True}


@dataclass(slots=True)
class Load:
    """Streams that begin again when they end, until `over` or until nobody listens any more."""

    url: str
    over: threading.Event
    busy: threading.Event
    num_chunks: int = 0

    def run(self) -> None:
        while not self.over.is_set():
            try:
                self._stream()
            except httpx.ConnectError:
                return
            except httpx.HTTPError:
                continue

    def _stream(self) -> None:
        with (
            httpx.Client(timeout=END_S) as client,
            client.stream("POST", f"{self.url}/generate", json=BODY) as answer,
        ):
            for _ in answer.iter_lines():
                self.num_chunks += 1  # racing threads may lose a few
                if self.num_chunks > BUSY_CHUNKS:
                    self.busy.set()
                if self.over.is_set():
                    return


def processes_of(server: ServerProcess) -> list[psutil.Process]:
    return [psutil.Process(server.pid), *server.children()]


def seconds_to_end(victim: ServerProcess, ending: list[psutil.Process]) -> float:
    """Kill the victim, and return the seconds until all processes in `ending` have ended; infinite if some have not within END_S."""
    began_s = time.monotonic()
    victim.popen.kill()
    while time.monotonic() - began_s < END_S:
        if not any(is_alive(process) for process in ending):
            return time.monotonic() - began_s
        time.sleep(0.01)
    return float("inf")


def is_alive(process: psutil.Process) -> bool:
    """Return whether this process still runs; those that this one has started stay zombies until they are waited for."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def measure(model: str, options: tuple[str, ...], folder: Path, *, leader_dies: bool) -> float:
    """Start a server on two hosts, kill one of its supervisors, and return the seconds until all has ended that must."""
    with TwoHosts(words_for(model, *options), folder).started() as (leader, other):
        load = Load(leader.wait_ready(), threading.Event(), threading.Event())
        with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = [pool.submit(load.run) for _ in range(NUM_STREAMS)]
            try:
                assert load.busy.wait(END_S), "the streams do not run"
                is_divided = "--tp" in options
                ending = processes_of(other) + (processes_of(leader) if leader_dies or is_divided else [])
                return seconds_to_end(leader if leader_dies else other, ending)
            finally:
                load.over.set()
                for stream in streams:
                    stream.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="tiny")
    given = parser.parse_args()
    longest = 0.0
    for layout, options in LAYOUTS.items():
        for leader_dies in (True, False):
            found = []
            for _ in range(given.rounds):
                with tempfile.TemporaryDirectory(prefix="srt-") as folder:
                    found.append(measure(given.model, options, Path(folder), leader_dies=leader_dies))
            longest = max(longest, *found)
            victim = "host 0" if leader_dies else "host 1"
            print(f"{layout}, {victim} killed: {', '.join(f'{seconds:.2f}' for seconds in found)} s", flush=True)
    print(f"longest: {longest:.2f} s")
    return 0 if longest < float("inf") else 1


if __name__ == "__main__":
    sys.exit(main())

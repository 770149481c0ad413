"""Weights are updated again and again under load, in all modes of pauses: no request is lost, and each token is of the right version."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.test_replacement import words_for
from tests.faults.test_weight_updates import post, update
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy
from tests.support.runners import make_runner
from tests.support.server_process import END_S, ServerProcess

pytestmark = pytest.mark.e2e

MODES = ("abort", "retract", "in_place")
NUM_CLIENTS, LENGTH = 3, 40
PREFIX = list(range(20, 52))
"""Two pages that all prompts share: what is cached of them must never be of an older version."""


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: list[int]
    ids: list[int]
    reason: str
    first_version: int  # of the weights when it was asked for, at the earliest
    last_version: int  # that it says itself


@pytest.fixture(scope="module")
def server(qwen3_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("srt.launch_server", words_for(qwen3_checkpoint), tmp_path_factory.mktemp("many")) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


class Load:
    """Clients that ask one request after the other until they are told to stop."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = f"{server.wait_ready()}/generate"
        self._numbers = itertools.count()
        self._stopped = threading.Event()
        self.version = 0  # of the last update that was answered
        self.answers: list[Answer] = []
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=2 * END_S) as client:
            while not self._stopped.is_set():
                prompt = [*PREFIX, 60 + next(self._numbers) % 200]
                first = self.version
                sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
                answer = client.post(self._url, json={"input_ids": prompt, "sampling_params": sampling})
                if answer.status_code != 200:
                    self.errors.append(answer.text)
                    return
                meta = answer.json()["meta_info"]
                reason, last = meta["finish_reason"]["type"], meta["weight_version"]
                self.answers.append(Answer(prompt, answer.json()["output_ids"], reason, first, int(last)))


def check_updates(server: ServerProcess, folders: list[Path], num_updates: int) -> None:
    assert update(server, folders[0], weight_version="0").status_code == 200
    with Load(server) as load:
        for number in range(1, num_updates + 1):
            begun = len(load.answers)
            while len(load.answers) < begun + 1 and not load.errors:
                threading.Event().wait(0.001)  # so that each version answers something
            mode = MODES[number % len(MODES)]
            assert post(server, "/pause_generation", {"mode": mode}).status_code == 200
            done = update(server, folders[number % 2], weight_version=str(number))
            assert done.status_code == 200, done.text
            load.version = number
            assert post(server, "/continue_generation", {}).status_code == 200
    assert not load.errors and len(load.answers) >= num_updates
    runners = [make_runner(folder, 16, dtype="float32") for folder in folders]

    @cache
    def tokens(which: int, ids: tuple[int, ...], count: int) -> tuple[int, ...]:
        """What this checkpoint says behind these ids."""
        runners[which].reset()
        job = Job(list(ids), greedy(count))
        PlanDriver(runners[which], 16).run([job])
        return tuple(job.outputs)

    judged = {mode: sum(check_answer(answer, mode, tokens) for answer in load.answers) for mode in MODES}
    assert all(judged.values()), f"each mode must have had a request under way: {judged}"


def check_answer(answer: Answer, mode: str, tokens: Any) -> bool:
    """Check an answer, and return whether an update of this mode may have met it.

    The versions follow each other. From where one ends, the next goes on as its checkpoint does behind what there is; only behind a switch
    that keeps keys and values nothing is known.
    """
    versions = range(answer.first_version, answer.last_version + 1)
    modes = [MODES[version % len(MODES)] for version in versions[1:]]
    if answer.reason == "abort":
        last = answer.last_version + 1  # the switch that it did not live to see
        modes.append(MODES[last % len(MODES)])
        assert modes[-1] == "abort", f"{answer} was ended by an update that ends nothing"
    else:
        assert len(answer.ids) == LENGTH and answer.reason == "length", answer
    reached = {0}
    for version in versions:
        if version > versions[0] and MODES[version % len(MODES)] == "in_place" and reached - {0}:
            return mode in modes
        further: set[int] = set()
        for begin in reached:
            left = answer.ids[begin:]
            said = tokens(version % 2, (*answer.prompt, *answer.ids[:begin]), len(left)) if left else ()
            same = next((n for n, (one, other) in enumerate(zip(left, said, strict=True)) if one != other), len(left))
            further |= set(range(begin, begin + same + 1))
        reached = further
    assert len(answer.ids) in reached, f"{answer} has tokens of no version"
    return mode in modes


@pytest.fixture(scope="module")
def folders(checkpoint: CheckpointFactory) -> list[Path]:
    return [checkpoint("qwen3"), checkpoint("qwen3", seed=1)]


def test_updates_under_load_lose_and_mix_nothing(server: ServerProcess, folders: list[Path]) -> None:
    check_updates(server, folders, 9)


@pytest.mark.full
def test_100_updates_under_load_lose_and_mix_nothing(server: ServerProcess, folders: list[Path]) -> None:
    check_updates(server, folders, 100)

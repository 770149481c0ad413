"""Weights are updated again and again under load, in all modes of pauses: no request is lost, and each token is of the right version."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from srt.protocol.engine_work import LoadWeights
from tests.faults.test_replacement import words_for
from tests.faults.test_update_groups import connected, send, stored
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


@contextmanager
def updating(server: ServerProcess, folders: list[Path], way: str) -> Iterator[Callable[[int], httpx.Response]]:
    """Yield what brings the weights of a version, which are those of the folders in turns."""
    if way == "disk":
        yield lambda number: update(server, folders[number % 2], weight_version=str(number))
        return
    group, tensors = connected(server, "many"), [stored(folder) for folder in folders]
    yield lambda number: send(
        server, group.broadcast, tensors[number % 2], group_name="many", weight_version=str(number)
    )
    assert post(server, "/destroy_weights_update_group", {"group_name": "many"}).status_code == 200
    group.close()


def check_updates(server: ServerProcess, folders: list[Path], num_updates: int, way: str) -> None:
    assert update(server, folders[0], weight_version="0").status_code == 200
    with updating(server, folders, way) as update_to, Load(server) as load:
        for number in range(1, num_updates + 1):
            begun = len(load.answers)
            while len(load.answers) < begun + 1 and not load.errors:
                threading.Event().wait(0.001)  # so that each version answers something
            mode = MODES[number % len(MODES)]
            assert post(server, "/pause_generation", {"mode": mode}).status_code == 200
            done = update_to(number)
            assert done.status_code == 200, done.text
            load.version = number
            assert post(server, "/continue_generation", {}).status_code == 200
    assert not load.errors and len(load.answers) >= num_updates
    reference = Reference(folders)
    judged = {mode: sum(check_answer(answer, mode, reference) for answer in load.answers) for mode in MODES}
    assert all(judged.values()), f"each mode must have had a request under way: {judged}"


class Reference:
    """What a request says whose weights change on the way, run by itself on one rank."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._runner = make_runner(folders[0], 16, dtype="float32")
        self._version = 0  # of the runner's weights
        self._known: dict[tuple[int, ...], list[int]] = {}

    def said(self, ids: list[int], history: History, count: int) -> list[int]:
        """Return `count` tokens behind these ids, of which keys and values are computed by the first version.

        The versions behind it keep the keys and values of those before, and go on as soon as there are as many tokens as they say.
        """
        key = (*ids, -1, *(number for change in history for number in change), -1, count)
        if key not in self._known:
            self._known[key] = self._run(Job(list(ids), greedy(count)), history)
        return self._known[key]

    def _run(self, job: Job, history: History) -> list[int]:
        (begin, version), *changes = history
        self._become(version)
        self._runner.reset()
        driver, waiting, running = PlanDriver(self._runner, 16), [job], list[Job]()
        while not job.is_done:
            if changes and len(job.outputs) == changes[0][0] - begin:
                self._become(changes.pop(0)[1])
                continue
            driver._step(waiting, running)
        return job.outputs

    def _become(self, version: int) -> None:
        if version % 2 != self._version % 2:
            self._runner.update_weights(LoadWeights(str(self._folders[version % 2])), lambda: None)
        self._version = version


History = tuple[tuple[int, int], ...]
"""Tokens that there were, and the version that came then, for each version since keys and values were computed anew."""


def check_answer(answer: Answer, mode: str, reference: Reference) -> bool:
    """Check an answer, and return whether an update of this mode may have met it.

    The versions follow each other. From where one ends, the next goes on as its checkpoint does behind what there is: with the keys and
    values that there are if the update was in place, else with its own ones.
    """
    versions = range(answer.first_version, answer.last_version + 1)
    modes = [MODES[version % len(MODES)] for version in versions[1:]]
    if answer.reason == "abort":
        last = answer.last_version + 1  # the switch that it did not live to see
        modes.append(MODES[last % len(MODES)])
        assert modes[-1] == "abort", f"{answer} was ended by an update that ends nothing"
    else:
        assert len(answer.ids) == LENGTH and answer.reason == "length", answer

    def fits(version: int, history: History) -> bool:
        """Whether the tokens from the last change on may be those of this version and the ones behind it."""
        (start, _), (begin, _) = history[0], history[-1]
        known, left = [*answer.prompt, *answer.ids[:start]], len(answer.ids) - start
        said = answer.ids[:start] + (reference.said(known, history, left) if left else [])
        end = next((n for n, (one, other) in enumerate(zip(answer.ids, said, strict=True)) if one != other), len(said))
        if version == versions[-1]:
            return end == len(said)
        following = version + 1
        is_kept = MODES[following % len(MODES)] == "in_place"
        return any(
            fits(following, (*history, (n, following)) if is_kept and n else ((n, following),))
            for n in range(end, begin - 1, -1)
        )

    first = versions[0]
    assert fits(first, ((0, first),)), f"{answer} has tokens of no version"
    return mode in modes


@pytest.fixture(scope="module")
def folders(checkpoint: CheckpointFactory) -> list[Path]:
    return [checkpoint("qwen3"), checkpoint("qwen3", seed=1)]


def test_updates_under_load_lose_and_mix_nothing(server: ServerProcess, folders: list[Path]) -> None:
    check_updates(server, folders, 9, "disk")


@pytest.mark.full
@pytest.mark.parametrize("way", ["disk", "group"])
def test_100_updates_under_load_lose_and_mix_nothing(server: ServerProcess, folders: list[Path], way: str) -> None:
    check_updates(server, folders, 100, way)

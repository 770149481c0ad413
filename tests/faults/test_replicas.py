"""A real server with two replicas: it answers as one with a single replica does, also while processes of it are killed."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import srt
from tests.faults.test_replacement import (
    BODIES,
    DRAWN,
    GREEDY,
    SCHEDULER,
    WORKER,
    Chunks,
    Trigger,
    all_streamed,
    called,
    check_same,
    streamed,
    victim_of,
)
from tests.support.checkpoints import CheckpointFactory
from tests.support.server_process import END_S, ServerProcess

pytestmark = pytest.mark.e2e

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 8192, "max_replacements": 100}


@pytest.fixture(scope="module")
def server(qwen3_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    words = ["--model-path", str(qwen3_checkpoint), "--port", "0", "--dp-size", "2"]
    words += [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with ServerProcess("srt.launch_server", words, tmp_path_factory.mktemp("replicas")) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return server.wait_ready()


@pytest.fixture(scope="module")
def undisturbed(url: str) -> list[Chunks]:
    return all_streamed(url)


def states_of(url: str) -> list[dict[str, Any]]:
    info = called(lambda: httpx.get(f"{url}/server_info", params={"deep": "true"}, timeout=END_S))
    found: list[dict[str, Any]] = info.json()["internal_states"]
    return found


def check_books(url: str) -> None:
    """All processes of both replicas agree on what there is, and nothing runs."""
    while len(states_of(url)) < 2:  # the frontend has not met the new one yet
        pass
    assert httpx.post(f"{url}/flush_cache", params={"timeout": END_S}, timeout=2 * END_S).status_code == 200
    states = states_of(url)
    assert [state["dp_rank"] for state in states] == [0, 1]
    for state in states:
        assert state["num_running"] == state["num_waiting"] == state["num_pinned"] == 0
        assert state["num_free_pages"] == state["num_total_pages"]


def test_each_replica_says_the_same_and_says_which_it_is(url: str, undisturbed: list[Chunks]) -> None:
    for replica in (0, 1):
        routed = [streamed(url, {**body, "routed_dp_rank": replica}) for body in BODIES[::4]]
        check_same(routed, undisturbed[::4])
        assert {chunk["meta_info"]["dp_rank"] for chunks in routed for chunk in chunks.values()} == {replica}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "data_parallel_rank": 2}
    refused = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=END_S)
    assert refused.status_code == 400 and "from 0 to 1 (see --dp-size), not 2" in refused.text


def test_work_is_spread_and_metrics_show_it_for_each_replica(url: str, undisturbed: list[Chunks]) -> None:
    assert all(state["num_steps"] > 0 for state in states_of(url))
    lines = httpx.get(f"{url}/metrics", timeout=END_S).text.splitlines()
    running = [line for line in lines if line.startswith("sglang:num_running_reqs{")]
    assert [line.partition('dp_rank="')[2][0] for line in running] == ["0", "1"]
    processes = httpx.get(f"{url}/health", timeout=END_S).json()["processes"]
    assert {"scheduler 0", "scheduler 1", "worker 0", "worker 1", "frontend 0"} < processes.keys()


def test_pause_and_abort_hold_for_both_replicas(url: str, server: ServerProcess) -> None:
    endless = {"text": "Endless", "sampling_params": {**GREEDY, "max_new_tokens": 2000}}
    have_begun = threading.Barrier(3)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(streamed, url, {**endless, "routed_dp_rank": replica}, Trigger(2, have_begun.wait))
            for replica in (0, 1)
        ]
        have_begun.wait(END_S)
        assert httpx.post(f"{url}/pause_generation", json={"mode": "in_place"}, timeout=END_S).status_code == 200
        before, after = ([state["num_steps"] for state in states_of(url)] for _ in range(2))
        assert before == after
        assert httpx.post(f"{url}/flush_cache", timeout=END_S).status_code == 400
        assert httpx.post(f"{url}/abort_request", json={"abort_all": True}, timeout=END_S).status_code == 200
        ends = [future.result(END_S)[0]["meta_info"]["finish_reason"]["type"] for future in running]
    assert ends == ["abort", "abort"]
    assert httpx.post(f"{url}/continue_generation", json={}, timeout=END_S).status_code == 200
    check_books(url)


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param((WORKER,), id="worker"),
        pytest.param((SCHEDULER,), id="scheduler", marks=pytest.mark.full),
        pytest.param((WORKER, SCHEDULER), id="both"),
    ],
)
def test_the_other_replica_goes_on_with_what_a_killed_one_had(
    url: str, server: ServerProcess, undisturbed: list[Chunks], modules: tuple[str, ...]
) -> None:
    again = len(server.lines_with("at work again"))
    victims = [victim_of(server, module, 1) for module in modules]  # the second one of each: both of replica 1
    check_same(all_streamed(url, Trigger(200, lambda: [victim.kill() for victim in victims])), undisturbed)
    assert httpx.get(f"{url}/ready", timeout=END_S).status_code == 200  # the other one is enough
    server.wait_for("at work again", again + 1)
    check_books(url)


def test_both_replicas_get_new_weights_and_a_killed_one_has_them_again(
    url: str, server: ServerProcess, undisturbed: list[Chunks], qwen3_checkpoint: Path, checkpoint: CheckpointFactory
) -> None:
    def update(folder: Path, version: str) -> None:
        body = {"model_path": str(folder), "weight_version": version}
        answer = httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=END_S)
        assert answer.status_code == 200, answer.text

    def of_replicas() -> list[Any]:
        chunks = [streamed(url, {**BODIES[0], "routed_dp_rank": replica})[0] for replica in (0, 1)]
        assert [chunk["meta_info"]["dp_rank"] for chunk in chunks] == [0, 1]
        return [(chunk["output_ids"], chunk["meta_info"]["weight_version"]) for chunk in chunks]

    update(checkpoint("qwen3", seed=1), "one")
    updated = of_replicas()
    assert updated[0] == updated[1] and updated[0][0] != undisturbed[0][0]["output_ids"]
    again = len(server.lines_with("at work again"))
    victim_of(server, WORKER, 1).kill()
    server.wait_for("at work again", again + 1)
    check_books(url)
    assert of_replicas() == updated
    update(qwen3_checkpoint, "default")
    assert of_replicas() == [(undisturbed[0][0]["output_ids"], "default")] * 2


@pytest.mark.full
def test_a_runtime_has_replicas_too(qwen3_checkpoint: Path) -> None:
    sampling = DRAWN | {"sampling_seed": 1}
    with srt.Runtime(model_path=str(qwen3_checkpoint), dp_size=2, **OPTIONS) as runtime:
        first, second = (runtime.generate(prompt, sampling) for prompt in ("Once", "Twice"))
        assert {answer["meta_info"]["dp_rank"] for answer in (first, second)} <= {0, 1}
        assert runtime.flush_cache()
        assert [state["dp_rank"] for state in runtime.get_server_info()["internal_states"]] == [0, 1]

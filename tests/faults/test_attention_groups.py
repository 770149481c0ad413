"""A server whose attention groups share experts gives the answers of one process, whatever dies."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from tests.faults.test_replacement import (
    BODIES,
    GREEDY,
    SCHEDULER,
    WORKER,
    Chunks,
    Trigger,
    all_streamed,
    check_same,
    streamed,
    url_of,
    victim_of,
)
from tests.faults.test_replicas import check_books, states_of
from tests.faults.test_stages import NUMBER, serving
from tests.support.checkpoints import CheckpointFactory
from tests.support.counting_worker import FAILING_RANK, FAILING_SIZE, told_by
from tests.support.poisoned_worker import POISON
from tests.support.server_process import END_S, ServerProcess

pytestmark = pytest.mark.e2e

GROUPS = ("--enable-dp-attention", "--dp-size", "2", "--watchdog-timeout", "10")
ENDLESS = {"text": "Endless", "sampling_params": {**GREEDY, "max_new_tokens": 2000}}


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Chunks]:
    """The answers of a server in which one process runs everything."""
    with serving(folder, tmp_path_factory.mktemp("whole")) as server:
        return [*all_streamed(url_of(server)), streamed(url_of(server), NUMBER)]


@pytest.fixture(scope="module")
def whole(alone: list[Chunks]) -> list[Chunks]:
    """Those to BODIES."""
    return alone[:-1]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(folder, tmp_path_factory.mktemp("groups"), *GROUPS, "--tp", "2") as process:
        yield process


def check_files(server: ServerProcess, num_ranks: int) -> None:
    """No sockets or files of ended engines are left."""
    (run_dir,) = server.left_behind()
    names = [path.name for path in run_dir.iterdir()]
    kinds = Counter("call" if "-" in name and name[0] == "c" else name.rstrip("0123456789") for name in names)
    assert (kinds["call"], kinds["experts-rendezvous-"], kinds["f"]) == (num_ranks, 1, 2), names


def test_two_groups_answer_as_one_process(server: ServerProcess, alone: list[Chunks]) -> None:
    url = url_of(server)
    check_same([*all_streamed(url), streamed(url, NUMBER)], alone)
    assert all(state["num_steps"] > 0 for state in states_of(url))
    check_books(url)


def test_a_group_serves_while_the_other_has_no_request(server: ServerProcess, whole: list[Chunks]) -> None:
    url = url_of(server)
    for group in (0, 1):
        before = [state["num_steps"] for state in states_of(url)]
        routed = [streamed(url, {**body, "routed_dp_rank": group}) for body in BODIES[::4]]
        check_same(routed, whole[::4])
        after = [state["num_steps"] for state in states_of(url)]
        assert after[group] > before[group] and after[1 - group] == before[1 - group]


def test_cached_prefixes_and_aborts(server: ServerProcess, whole: list[Chunks]) -> None:
    url = url_of(server)
    check_same([streamed(url, BODIES[8])], [whole[8]])
    again = streamed(url, BODIES[8])
    check_same([again], [whole[8]])
    assert again[0]["meta_info"]["cached_tokens"] > 0
    have_begun = threading.Barrier(3)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        endless = [
            pool.submit(
                streamed,
                url,
                {**ENDLESS, "routed_dp_rank": group, "rid": f"endless {group}"},
                Trigger(1, have_begun.wait),
            )
            for group in (0, 1)
        ]
        have_begun.wait(END_S)  # else they may come after their aborts
        triggers = [Trigger(at, partial(abort, url, f"endless {group}")) for at, group in ((40, 0), (160, 1))]

        def notice() -> None:
            for trigger in triggers:
                trigger()

        check_same(all_streamed(url, notice), whole)
        reasons = [future.result(END_S)[0]["meta_info"]["finish_reason"]["type"] for future in endless]
    assert reasons == ["abort", "abort"]
    check_books(url)


def abort(url: str, rid: str) -> None:
    assert httpx.post(f"{url}/abort_request", json={"rid": rid}, timeout=END_S).status_code == 200


@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.full), 150])
@pytest.mark.parametrize(
    ("module", "number"), [pytest.param(WORKER, 0, marks=pytest.mark.full), (WORKER, 1), (SCHEDULER, 1)]
)
def test_both_groups_are_replaced_when_a_process_of_one_is_killed(
    server: ServerProcess, whole: list[Chunks], module: str, number: int, at: int
) -> None:
    again = len(server.lines_with("at work again"))
    victim, others = victim_of(server, module, number), [victim_of(server, WORKER, one) for one in (0, 1)]
    check_same(all_streamed(url_of(server), Trigger(at, victim.kill)), whole)
    server.wait_for("at work again", again + 2)
    assert not any(process.is_running() for process in (victim, *others))
    check_books(url_of(server))
    check_files(server, 2)


@pytest.mark.full
def test_a_worker_that_hangs_is_replaced_with_both_groups(server: ServerProcess, whole: list[Chunks]) -> None:
    again = len(server.lines_with("at work again"))
    victim = victim_of(server, WORKER, 1)
    check_same(all_streamed(url_of(server), Trigger(150, victim.suspend)), whole)
    server.wait_for("at work again", again + 2)
    assert not victim.is_running()
    check_books(url_of(server))


def test_an_idle_group_that_dies_takes_the_busy_one_along(server: ServerProcess, whole: list[Chunks]) -> None:
    again = len(server.lines_with("at work again"))
    victim = victim_of(server, WORKER, 1)
    body = {**BODIES[0], "routed_dp_rank": 0}
    check_same([streamed(url_of(server), body, Trigger(20, victim.kill))], whole[:1])
    server.wait_for("at work again", again + 2)
    check_books(url_of(server))


def test_weights_are_not_updated(server: ServerProcess, folder: Path) -> None:
    answer = httpx.post(f"{url_of(server)}/update_weights_from_disk", json={"model_path": str(folder)}, timeout=END_S)
    assert answer.status_code == 400 and "--enable-dp-attention" in answer.text, answer.text


@pytest.mark.full
def test_a_request_that_kills_workers_fails_alone(folder: Path, tmp_path: Path, whole: list[Chunks]) -> None:
    words = ["launch", "--model-path", str(folder), "--device", "cpu", "--dtype", "float32", "--port", "0", "--tp", "2"]
    words += ["--max-total-tokens", "16384", "--chunked-prefill-size", "24", *GROUPS]
    with ServerProcess("tests.support.poisoned_worker", words, tmp_path) as server:
        url = url_of(server)
        params: dict[str, Any] = {**GREEDY, "sampling_seed": POISON}
        body = {"text": "Story 0", "sampling_params": params, "routed_dp_rank": 0}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            poisoned: list[concurrent.futures.Future[httpx.Response]] = []

            def poison() -> None:
                poisoned.append(pool.submit(httpx.post, f"{url}/generate", json=body, timeout=2 * END_S))

            check_same(all_streamed(url, Trigger(100, poison)), whole)
            answer = poisoned[0].result(END_S)
        assert answer.status_code == 500
        assert "The engine died twice while it ran this request and nothing else." in answer.text
        check_books(url)
        server.send(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.full
def test_groups_replay_graphs_of_the_sizes_that_all_have_captured(
    folder: Path, tmp_path: Path, whole: list[Chunks]
) -> None:
    """One rank fails to capture the second size. A worker stands in for graphs, and counts replays."""
    words = ["launch", "--model-path", str(folder), "--device", "cpu", "--dtype", "float32", "--port", "0", "--tp", "2"]
    words += ["--max-total-tokens", "16384", "--chunked-prefill-size", "24", "--cuda-graph-bs", "1", "4", "8", *GROUPS]
    with ServerProcess("tests.support.counting_worker", words, tmp_path, {FAILING_RANK: "1"}) as server:
        check_same(all_streamed(url_of(server)), whole)
        server.wait_for(f"The CUDA graph for {FAILING_SIZE} rows or tokens could not be captured")
        for rank in (0, 1):
            server.wait_for(told_by(rank))
        server.send(signal.SIGTERM)
        assert server.wait() == 0, server.lines


@pytest.mark.full
@pytest.mark.parametrize("options", [("--tp", "4"), ("--tp", "4", "--ep-size", "2"), ("--tp", "2", "--ep-size", "2")])
def test_groups_of_several_ranks_answer_as_one_process_and_replace_workers(
    options: tuple[str, ...], folder: Path, tmp_path: Path, whole: list[Chunks]
) -> None:
    with serving(folder, tmp_path, *GROUPS, *options) as server:
        check_same(all_streamed(url_of(server)), whole)
        for number in range(int(options[1])):
            victim = victim_of(server, WORKER, number)
            check_same(all_streamed(url_of(server), Trigger(100, victim.kill)), whole)
            server.wait_for("at work again", 2 * (number + 1))
            assert not victim.is_running()


@pytest.mark.full
def test_weights_are_read_back_from_all_groups(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen2_moe")
    stored = load_file(folder / "model.safetensors")
    with serving(folder, tmp_path, *GROUPS, "--tp", "2") as server:
        for name in (
            "model.layers.0.mlp.shared_expert.gate_proj.weight",  # all ranks share its rows, or its columns
            "model.layers.0.mlp.shared_expert.down_proj.weight",
            "model.layers.1.self_attn.o_proj.weight",
        ):
            answer = httpx.post(f"{url_of(server)}/get_weights_by_name", json={"name": name}, timeout=END_S)
            assert answer.json() == stored[name][:100].float().tolist(), name

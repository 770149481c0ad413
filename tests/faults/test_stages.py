"""A server whose layers are divided between stages gives the answers of one process, whatever dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from tests.faults.test_replacement import (
    WORKER,
    Chunks,
    Trigger,
    all_streamed,
    check_books,
    check_same,
    streamed,
    url_of,
    victim_of,
)
from tests.support.checkpoints import CheckpointFactory
from tests.support.server_process import END_S, ServerProcess

pytestmark = pytest.mark.e2e

SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
NUMBER = {"text": "A number", "sampling_params": {"temperature": 0, "max_new_tokens": 40, "json_schema": SCHEMA}}


@contextmanager
def serving(folder: Path, tmp: Path, *options: str) -> Iterator[ServerProcess]:
    """A server whose prompts are computed in small chunks."""
    words = ["--model-path", str(folder), "--device", "cpu", "--dtype", "float32", "--port", "0"]
    words += ["--max-total-tokens", "16384", "--chunked-prefill-size", "24", "--max-replacements", "1000", *options]
    with ServerProcess("srt.launch_server", words, tmp) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3", num_layers=4)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Chunks], Chunks]:
    """The answers of a server in which one process runs all layers."""
    with serving(folder, tmp_path_factory.mktemp("whole")) as server:
        return all_streamed(url_of(server)), streamed(url_of(server), NUMBER)


@pytest.fixture(scope="module")
def two_stages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(folder, tmp_path_factory.mktemp("stages"), "--pp-size", "2") as server:
        yield server


def test_two_stages_answer_as_one_process(two_stages: ServerProcess, whole: tuple[list[Chunks], Chunks]) -> None:
    url = url_of(two_stages)
    check_same([*all_streamed(url), streamed(url, NUMBER)], [*whole[0], whole[1]])
    check_books(two_stages)
    info = httpx.get(f"{url}/server_info", timeout=END_S).json()
    assert info["internal_states"][0]["world_size"] == 2


def test_weights_of_any_stage_are_read_back(two_stages: ServerProcess, folder: Path) -> None:
    url = f"{url_of(two_stages)}/get_weights_by_name"
    stored = load_file(folder / "model.safetensors")
    for layer in (0, 3):
        name = f"model.layers.{layer}.input_layernorm.weight"
        answer = httpx.post(url, json={"name": name}, timeout=END_S)
        assert answer.json() == stored[name][:100].tolist()
    absent = httpx.post(url, json={"name": "model.absent"}, timeout=END_S)
    assert absent.status_code == 400 and "has no tensor 'model.absent'" in absent.text


@pytest.mark.parametrize("stage_from_the_end", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_worker_of_any_stage_is_replaced(
    stage_from_the_end: int, two_stages: ServerProcess, whole: tuple[list[Chunks], Chunks]
) -> None:
    again = len(two_stages.lines_with("at work again"))
    victim = victim_of(two_stages, WORKER, stage_from_the_end)
    check_same(all_streamed(url_of(two_stages), Trigger(150, victim.kill)), whole[0])
    two_stages.wait_for("at work again", again + 1)
    assert not victim.is_running()
    check_books(two_stages)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        ("--tp", "4"),
        ("--pp-size", "4"),
        ("--pp-size", "2", "--tp", "2"),
        ("--pp-size", "2", "--disable-overlap-schedule"),
        ("--pp-size", "2", "--dp-size", "2"),
        ("--pp-size", "2", "--disable-radix-cache", "--pp-layer-partition", "3", "1"),
    ],
)
def test_divided_servers_answer_as_one_process_and_replace_workers(
    options: tuple[str, ...], folder: Path, tmp_path: Path, whole: tuple[list[Chunks], Chunks]
) -> None:
    with serving(folder, tmp_path, *options) as server:
        check_same(all_streamed(url_of(server)), whole[0])
        workers = [child for child in server.started() if child.cmdline()[-1] == WORKER]
        for number in range(len(workers)):
            victim = victim_of(server, WORKER, number)
            check_same(all_streamed(url_of(server), Trigger(100, victim.kill)), whole[0])
            server.wait_for("at work again", number + 1)
            assert not victim.is_running()


@pytest.mark.full
def test_groups_of_experts_answer_as_one_process_and_replace_workers(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    experts = checkpoint("qwen3_moe")
    with serving(experts, tmp_path) as server:
        alone = all_streamed(url_of(server))
    with serving(experts, tmp_path, "--tp", "2", "--ep-size", "2") as server:
        check_same(all_streamed(url_of(server)), alone)
        for number in range(2):
            victim = victim_of(server, WORKER, number)
            check_same(all_streamed(url_of(server), Trigger(100, victim.kill)), alone)
            server.wait_for("at work again", number + 1)
            assert not victim.is_running()

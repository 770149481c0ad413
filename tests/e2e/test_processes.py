"""The whole server from outside: `python -m srt.launch_server`, its processes, and how they end."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.checkpoints import CheckpointFactory
from tests.support.server_process import END_S, ServerProcess, all_gone

pytestmark = pytest.mark.e2e

LONG = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
ENDLESS = {**LONG, "max_new_tokens": 100_000}
SHORT = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


def launch(checkpoint: Path | str, tmp: Path, *words: str, port: int = 0) -> ServerProcess:
    always = ["--model-path", str(checkpoint), "--device", "cpu", "--port", str(port)]
    always += ["--max-total-tokens", "200000", "--max-running-requests", "8"]
    return ServerProcess("srt.launch_server", [*always, *words], tmp)


@contextmanager
def streaming(url: str, params: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The data lines of a running stream."""
    body = {"text": "The capital of France is", "sampling_params": params, "stream": True}
    with (
        httpx.Client(timeout=END_S) as client,
        client.stream("POST", f"{url}/generate", json=body) as answer,
    ):
        assert answer.status_code == 200
        yield (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))


@pytest.fixture(scope="session")
def endless_checkpoint(checkpoint: CheckpointFactory) -> Path:
    """A model whose context no request of these tests comes to the end of."""
    return checkpoint("qwen3", context_length=200_000)


def role_of(process: psutil.Process) -> str:
    return str(process.cmdline()[-1])


def of_role(server: ServerProcess, module: str) -> list[psutil.Process]:
    return [one for one in server.children() if role_of(one) == module]


def test_a_server_starts_answers_and_stops_in_order(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    with launch(qwen3_checkpoint, tmp_path, "--tp", "2", "--tokenizer-worker-num", "2") as server:
        url = server.wait_ready()
        assert sorted(role_of(one) for one in server.started()) == [
            *["srt.entrypoints.http_server"] * 2,
            "srt.managers.scheduler",
            *["srt.managers.tp_worker"] * 2,
        ]
        for process in [psutil.Process(server.pid), *server.children()]:
            loaded = any("libtorch" in file.path for file in process.memory_maps())
            assert loaded == (role_of(process) == "srt.managers.tp_worker"), process.cmdline()
        answers = [
            httpx.post(f"{url}/generate", json={"text": "x", "sampling_params": SHORT}, timeout=END_S).json()
            for _ in range(8)
        ]
        assert len({tuple(answer["output_ids"]) for answer in answers}) == 1
        children = server.children()
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert all_gone(children)
        assert server.left_behind() == []
        # A few lines, and nothing that looks like trouble.
        assert len(server.lines) < 25
        assert not any(word in line for line in server.lines for word in ("Traceback", "Error", "rror:"))


def test_what_runs_when_the_stop_comes_is_finished(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    with launch(qwen3_checkpoint, tmp_path) as server:
        url = server.wait_ready()
        with streaming(url, LONG) as lines:
            next(lines)
            server.send(signal.SIGINT)
            server.wait_for("Stopping")
            rest = list(lines)
        assert rest[-1] == "[DONE]"
        last = json.loads(rest[-2])
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
        assert server.wait() == 0


def test_a_second_stop_ends_what_runs(endless_checkpoint: Path, tmp_path: Path) -> None:
    with launch(endless_checkpoint, tmp_path) as server:
        url = server.wait_ready()
        with streaming(url, ENDLESS) as lines:
            next(lines)
            server.send(signal.SIGINT)
            server.wait_for("Stopping")
            server.send(signal.SIGINT)
            assert server.wait() == 0


@pytest.mark.parametrize("module", ["srt.managers.tp_worker", "srt.managers.scheduler"])
def test_a_dead_engine_ends_the_server_with_the_reason_and_clients_are_told(
    endless_checkpoint: Path, tmp_path: Path, module: str
) -> None:
    with launch(endless_checkpoint, tmp_path, "--max-replacements", "0") as server:
        url = server.wait_ready()
        children = server.children()
        with streaming(url, ENDLESS) as lines:
            next(lines)
            of_role(server, module)[0].kill()
            rest = list(lines)
        assert any("error" in json.loads(line) for line in rest if line != "[DONE]")
        assert server.wait() == 1
        name = "Worker 0" if module.endswith("worker") else "Scheduler 0"
        assert server.lines[-1] == f"{name} was killed by SIGKILL (out of memory?)."
        assert all_gone(children)


def test_nothing_survives_a_killed_supervisor(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    with launch(qwen3_checkpoint, tmp_path, "--tp", "2") as server:
        server.wait_ready()
        assert len(server.started()) == 4
        children = server.children()
        server.send(signal.SIGKILL)
        assert all_gone(children)


def test_nothing_survives_a_supervisor_killed_during_the_start(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    with launch(qwen3_checkpoint, tmp_path, "--tp", "2") as server:
        server.wait_for("worker 0: imports")
        children = server.children()
        server.send(signal.SIGKILL)
        assert all_gone(children)


def test_a_stop_during_the_start_ends_everything(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    with launch(qwen3_checkpoint, tmp_path) as server:
        server.wait_for("worker 0: imports")
        children = server.children()
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert all_gone(children)


def test_a_taken_port_is_one_sentence(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launch(qwen3_checkpoint, tmp_path, port=port) as server:
            assert server.wait() == 1
    assert len(server.lines) == 1
    assert f"Port {port} of 127.0.0.1 cannot be taken" in server.lines[0]
    assert "--port" in server.lines[0]


def test_every_wrong_start_is_one_sentence(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(qwen3_checkpoint, broken)
    (broken / "config.json").write_text("{")
    cut = tmp_path / "cut"
    shutil.copytree(qwen3_checkpoint, cut)
    (cut / "model.safetensors").write_bytes((qwen3_checkpoint / "model.safetensors").read_bytes()[:-100])
    certificate = ["--ssl-certfile", str(broken / "config.json")]
    cases: list[tuple[Path | str, list[str], str]] = [
        ("/no/such/folder", [], "--model-path /no/such/folder does not exist"),
        (broken, [], "config.json is not JSON"),
        (cut, [], "model.safetensors is cut short"),
        (qwen3_checkpoint, ["--tp", "3"], "--tp 3 does not divide the model's 4 query heads"),
        (qwen3_checkpoint, ["--page-size", "0"], "--page-size must be at least 1"),
        (qwen3_checkpoint, ["--colour", "blue"], "Unknown option --colour"),
        (qwen3_checkpoint, ["--nccl-port", "1"], "--nccl-port is not supported yet"),
        (qwen3_checkpoint, ["--host", "203.0.113.1"], "203.0.113.1"),
        (qwen3_checkpoint, certificate, "config.json cannot be used"),
    ]
    for checkpoint, words, said in cases:
        with launch(checkpoint, tmp_path, *words) as server:
            is_option = any(word in said for word in ("must be", "Unknown", "not supported yet"))
            assert server.wait() == (2 if is_option else 1)
        assert len(server.lines) == 1, server.lines
        assert said in server.lines[0]
        assert server.lines[0].endswith((".", ")."))


def test_a_checkpoint_that_only_a_worker_can_judge_is_one_sentence_too(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    overrides = json.dumps({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    with launch(qwen3_checkpoint, tmp_path, "--tp", "2", "--json-model-override-args", overrides) as server:
        assert server.wait() == 1
    assert "model.layers.2." in server.lines[-1]
    assert not any("Traceback" in line for line in server.lines)
    assert server.left_behind() == []

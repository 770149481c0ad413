"""What an operator relies on: health, metrics, logs, keys, certificates, traces. One server for those that only look."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.server_process import END_S, ServerProcess

pytestmark = pytest.mark.e2e


def launch(checkpoint: Path, tmp: Path, *words: str) -> ServerProcess:
    always = ["--model-path", str(checkpoint), "--device", "cpu", "--port", "0", "--dtype", "float32"]
    always += ["--max-total-tokens", "8192", "--max-running-requests", "4"]
    return ServerProcess("srt.launch_server", [*always, *words], tmp)


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def wait_for(client: httpx.Client, path: str, status: int) -> httpx.Response:
    while (answer := client.get(path)).status_code != status:
        assert answer.status_code in (200, 503)
    return answer


def test_a_server_with_a_frozen_process_does_not_call_itself_healthy(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    with launch(qwen3_checkpoint, tmp_path, "--tp", "2") as server:
        with httpx.Client(base_url=server.wait_ready(), timeout=END_S) as client:
            processes = client.get("/health").json()["processes"]
            assert set(processes) == {"supervisor", "frontend 0", "scheduler 0", "worker 0", "worker 1"}
            assert client.get("/ready").json()["ready"]
            for name in ("scheduler 0", "worker 1"):
                with frozen(psutil.Process(processes[name]["pid"])):
                    told = wait_for(client, "/ready", 503).json()
                    assert told["reason"].startswith(f"{name.capitalize()} has given no sign of life for")
                    assert told["ready"] is False
                    assert [client.get(path).status_code for path in ("/health", "/ping")] == [503, 503]
                wait_for(client, "/ready", 200)
                assert client.get("/health").status_code == 200
            assert client.get("/health_generate").status_code == 200
        server.send(signal.SIGTERM)
        assert server.wait() == 0

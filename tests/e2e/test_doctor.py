"""`srt doctor` beside real servers: one that runs, and one that has failed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from srt.utils.checkpoint import SHIPPED_MODELS
from tests.e2e.conftest import Server
from tests.support.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.e2e


def examine(tmp: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "srt", "doctor", "--port", "0", "--device", "cpu", *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp)},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_it_tells_how_the_processes_of_a_running_server_are(tiny_server: Server) -> None:
    page = examine(tiny_server.process.tmp)
    told = re.findall(r"^  srt-\S+: (\S+(?: \d)?) +pid (\d+): well$", page, re.MULTILINE)
    assert {name for name, _ in told} == {"frontend 0", "scheduler 0", "supervisor", "worker 0"}
    supervisor = psutil.Process(tiny_server.process.pid)
    pids = {process.pid for process in (supervisor, *supervisor.children())}
    assert {int(pid) for _, pid in told} == pids
    assert re.search(r"^  ok     PyTorch: \d", page, re.MULTILINE)


def test_it_shows_why_the_last_server_ended(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(SHIPPED_MODELS / "tiny", folder)
    weights = (folder / "model.safetensors").read_bytes()
    assert b"layers.0.mlp.up_proj" in weights
    (folder / "model.safetensors").write_bytes(weights.replace(b"layers.0.mlp.up_proj", b"layers.0.mlp.xp_proj"))
    words = ["--model-path", str(folder), "--port", "0", "--device", "cpu", "--max-total-tokens", "1024"]
    with ServerProcess("srt.launch_server", words, tmp_path) as server:
        assert server.wait() == 1
    page = examine(tmp_path)
    assert re.search(rf"server {server.pid} supervisor ERROR: .*_proj", page), page
    assert re.search(r"^  none$", page, re.MULTILINE)

"""With --enable-deterministic-inference ranks on GPUs give a request the same bits, whatever runs beside it, and however sums travel.

Where there is one GPU, the ranks of the first tests take turns on it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.e2e.test_deterministic import body, results, streamed_past_a_death
from tests.support.checkpoints import CheckpointFactory
from tests.support.server_process import ServerProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="this mode is for Hopper"
    ),
]
CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of the size of a real model's, with random weights."""
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((CONFIGS / "qwen3-0.6b.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4, "vocab_size": 32000}))
    return folder


def try_ranks(folder: Path, *options: str) -> tuple[int, str]:
    """Whether a probe has more than one result on two ranks, as an exit code, and the digest of all results."""
    words = ["--model", str(folder), "--tp-size", "2", "--trials", "150", "--least-chunk", "64", *options]
    command = [sys.executable, "-m", "tests.gpu.deterministic_trials", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    assert "digest " in done.stdout, done.stdout
    print(done.stdout)
    return done.returncode, done.stdout.rpartition("digest ")[2].split()[0]


def test_two_ranks_give_one_result_however_sums_travel(folder: Path) -> None:
    found = [try_ranks(folder), try_ranks(folder, "--disable-custom-all-reduce")]
    assert found == [(0, found[0][1])] * 2


@pytest.mark.parametrize("option", ["--ordinary", "--plant-norms"])
def test_the_check_finds_differences(folder: Path, option: str) -> None:
    assert try_ranks(folder, option)[0] == 1


@pytest.mark.two_gpus
def test_a_request_that_outlives_a_worker_has_the_same_result(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    words = ["--model-path", str(checkpoint("qwen3")), "--device", "cuda", "--dtype", "bfloat16", "--port", "0"]
    words += ["--tp", "2", "--max-total-tokens", "4096", "--chunked-prefill-size", "64", "--page-size", "4"]
    words += ["--enable-deterministic-inference", "--max-replacements", "100"]
    with ServerProcess("srt.launch_server", words, tmp_path) as server:
        bodies = [body(50, seed, num_tokens=400) for seed in range(4)]
        before = results(server, bodies)
        assert [results(server, [one])[0] for one in bodies] == before
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(results, server, bodies[1:])
            first = streamed_past_a_death(server, bodies[0])
            assert [first, *others.result()] == before
        assert server.lines_with("replaced")

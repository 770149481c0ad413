"""A server saves its weights by rank, and another one serves them: its worker is killed, and its weights are updated."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_replacement import WORKER, victim_of, words_for
from tests.faults.test_weight_updates import PROMPTS, post, update
from tests.support.checkpoints import CheckpointFactory
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


@contextmanager
def serving(folder: Path, logs: Path, *words: str) -> Iterator[ServerProcess]:
    with ServerProcess(
        "srt.launch_server", [*words_for(folder), *words, "--max-replacements", "1000"], logs
    ) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


def answers(server: ServerProcess) -> list[list[int]]:
    found: Any = post(server, "/generate", {"input_ids": PROMPTS, "sampling_params": GREEDY}).json()
    return [answer["output_ids"] for answer in found]


@pytest.mark.full
def test_what_a_server_saves_another_one_serves(
    checkpoint: CheckpointFactory, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    old, new, folder = checkpoint("qwen3"), checkpoint("qwen3", seed=1), tmp_path / "saved"
    with serving(old, tmp_path_factory.mktemp("first"), "--quantization", "int8") as server:
        expected = answers(server)
        assert post(server, "/save_sharded_model", {"path": str(folder), "pattern": "x"}).status_code == 400
        refused = post(server, "/save_sharded_model", {"path": str(folder), "max_size": -3})
        assert refused.status_code == 400 and "max_size must be at least 1" in refused.text and not folder.exists()
        saved = post(server, "/save_sharded_model", {"path": str(folder), "max_size": 200_000})
        assert saved.status_code == 200, saved.text
        again = post(server, "/save_sharded_model", {"path": str(folder)})
        assert again.status_code == 400 and "is not empty" in again.text
        victim_of(server, WORKER).kill()
        assert answers(server) == expected
    options = ("--quantization", "int8", "--load-format", "sharded_state")
    with serving(folder, tmp_path_factory.mktemp("second"), *options) as server:
        assert answers(server) == expected
        victim_of(server, WORKER).kill()
        assert answers(server) == expected
        assert update(server, new).status_code == 200
        others = answers(server)
        victim_of(server, WORKER).kill()
        assert answers(server) == others != expected
        assert update(server, folder).status_code == 200
        victim_of(server, WORKER).kill()
        assert answers(server) == expected

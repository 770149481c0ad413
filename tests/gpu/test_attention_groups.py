"""A server of two attention groups on two GPUs: each token is the oracle's, with graphs and without, whatever dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.test_replacement import BODIES, Trigger, all_streamed, url_of, victim_of
from tests.gpu.test_pipeline import check_answers
from tests.support.checkpoints import CheckpointFactory
from tests.support.close_draws import AnswerJudge
from tests.support.counting_worker import FAILING_RANK, FAILING_SIZE, told_by
from tests.support.server_process import ServerProcess

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

WORKER = "tests.support.counting_worker"
NO_RANK = "none"


@contextmanager
def serving(folder: Path, tmp: Path, *options: str, failing_rank: str = NO_RANK) -> Iterator[ServerProcess]:
    words = ["launch", "--model-path", str(folder), "--device", "cuda", "--dtype", "float32", "--port", "0"]
    words += ["--max-total-tokens", "16384", "--chunked-prefill-size", "24", "--max-replacements", "1000"]
    words += ["--tp", "2", "--dp-size", "2", "--enable-dp-attention", "--ep-size", "2", "--attention-backend", "triton"]
    with ServerProcess(WORKER, [*words, *options], tmp, {FAILING_RANK: failing_rank}) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


@pytest.mark.parametrize(
    "options", [("--cuda-graph-bs", "1", "2", "4", "8"), ("--disable-cuda-graph",)], ids=["graphs", "no graphs"]
)
def test_a_killed_worker_of_either_group_leaves_the_answers_as_they_are(
    options: tuple[str, ...], checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_moe")
    judge = AnswerJudge(folder, BODIES)
    with serving(folder, tmp_path, *options) as server:
        url = url_of(server)
        check_answers(judge, all_streamed(url), "two groups")
        for rank in (0, 1) if "--cuda-graph-bs" in options else ():
            server.wait_for(told_by(rank))
        for rank in (0, 1):
            again = len(server.lines_with("at work again"))
            victims = [victim_of(server, WORKER, one) for one in (0, 1)]
            check_answers(judge, all_streamed(url, Trigger(150, victims[rank].kill)), f"worker {rank} is killed")
            server.wait_for("at work again", again + 2)
            assert not any(victim.is_running() for victim in victims)


def test_a_size_that_one_group_cannot_capture_is_dropped_by_both(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe")
    judge = AnswerJudge(folder, BODIES)
    with serving(folder, tmp_path, "--cuda-graph-bs", "1", "4", "8", failing_rank="1") as server:
        check_answers(judge, all_streamed(url_of(server)), "two groups with graphs of 8 rows alone")
        server.wait_for(f"The CUDA graph for {FAILING_SIZE} rows or tokens could not be captured")
        for rank in (0, 1):
            server.wait_for(told_by(rank))

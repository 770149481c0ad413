"""Stages of a pipeline on GPUs give the tokens of one process. Tests of the stages alone run them on one GPU if there is only one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from srt.runtime import Runtime
from tests.faults.test_replacement import (
    BODIES,
    WORKER,
    Chunks,
    Trigger,
    all_streamed,
    url_of,
    victim_of,
)
from tests.gpu.test_tensor_parallel import (
    MOST_REPLACEMENTS,
    check_real_shape,
    num_graphs_left,
    outputs_of,
)
from tests.support.checkpoints import CheckpointFactory
from tests.support.close_draws import AnswerJudge
from tests.support.server_process import END_S, ServerProcess

pytestmark = pytest.mark.gpu
LIMIT_S = 240


def run_stages(case: str, tmp_path: Path, num_stages: int, folder: Path | None = None) -> list[str]:
    """Run one of tests.gpu.stage_ranks' cases on all stages. Returns what each said before `done`."""
    command = [sys.executable, "-m", "tests.gpu.stage_ranks", case]
    rest = [
        str(num_stages),
        str(tmp_path / f"rendezvous-{num_stages}"),
        *([] if folder is None else [str(folder)]),
    ]
    stages = [
        subprocess.Popen(
            [*command, str(stage), *rest], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
        )
        for stage in range(num_stages)
    ]
    said = [""] * num_stages

    def listen(stage: int) -> None:
        said[stage] = stages[stage].communicate()[0]

    threads = [threading.Thread(target=listen, args=(stage,)) for stage in range(num_stages)]

    def end_all() -> None:
        for stage in stages:
            stage.kill()

    timer = threading.Timer(LIMIT_S, end_all)
    timer.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timer.cancel()
    for stage, words in zip(stages, said, strict=True):
        assert stage.returncode == 0 and words.endswith("done\n"), "\n".join(text[-4000:] for text in said)
    return [words.removesuffix("done\n") for words in said]


def last_line(words: str) -> list[list[int]]:
    found: list[list[int]] = json.loads(words.splitlines()[-1])
    return found


@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_is_sent_arrives_in_each_of_many_steps(num_stages: int, tmp_path: Path) -> None:
    run_stages("links", tmp_path, num_stages)


def test_no_number_is_lost_or_late_while_stages_work_at_different_speeds(tmp_path: Path) -> None:
    run_stages("hammer", tmp_path, 2)


def test_a_stage_that_is_gone_ends_the_wait_with_an_error_that_names_it(tmp_path: Path) -> None:
    run_stages("dead", tmp_path, 2)


@pytest.mark.parametrize("case", ["tokens", "window", "single", "window without graphs", "single without graphs"])
def test_stages_draw_what_one_process_draws(case: str, checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = checkpoint("qwen3", num_layers=4)
    (whole,) = run_stages(case, tmp_path, 1, folder)
    for said in run_stages(case, tmp_path, 2, folder):
        assert last_line(said) == last_line(whole)


# ---- Servers, on two GPUs


@pytest.mark.two_gpus
@pytest.mark.parametrize("options", [{}, {"page_size": 1, "chunked_prefill_size": 16}, {"disable_cuda_graph": True}])
def test_two_stages_on_two_gpus_give_the_tokens_of_a_cpu(
    options: dict[str, Any], checkpoint: CheckpointFactory
) -> None:
    shared: dict[str, Any] = {"model_path": str(checkpoint("qwen3")), "dtype": "float32", "max_total_tokens": 8192}
    shared["max_replacements"] = MOST_REPLACEMENTS
    with Runtime(**shared, device="cpu") as runtime:
        expected = outputs_of(runtime)
    graphs = {"attention_backend": "triton", "cuda_graph_bs": [2, 4, 8], **options}
    with Runtime(**shared, **graphs, device="cuda", pp_size=2) as runtime:
        assert outputs_of(runtime) == expected, "before all graphs are there"
        while num_graphs_left(runtime):
            pass
        assert outputs_of(runtime) == expected


@pytest.mark.two_gpus
def test_two_stages_of_a_real_shape_say_what_one_process_says_of_the_same_tokens() -> None:
    """The log-probabilities of tokens that two stages draw in bfloat16 are those that one process computes for the same tokens."""
    check_real_shape((1, 6, 100), pp_size=2)


@contextmanager
def serving(folder: Path, tmp: Path, *options: str) -> Iterator[ServerProcess]:
    words = ["--model-path", str(folder), "--device", "cuda", "--dtype", "float32", "--port", "0"]
    words += ["--max-total-tokens", "16384", "--chunked-prefill-size", "24", "--max-replacements", "1000", *options]
    with ServerProcess("srt.launch_server", words, tmp) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


def check_answers(judge: AnswerJudge, answers: list[Chunks], said: str) -> None:
    """Compare each token with the oracle's draw. Batches of other shapes round differently, so a close draw may come out differently."""
    wrong = judge.wrong_tokens(answers)
    error = judge.largest_logprob_error(answers)
    print(f"{said}: {len(wrong)} other tokens, logprobs within {error:.1e}", *wrong, sep="\n  ", flush=True)
    assert all(one.is_close for one in wrong), [str(one) for one in wrong if not one.is_close]


@pytest.mark.two_gpus
@pytest.mark.parametrize("options", [(), ("--disable-cuda-graph",)], ids=["graphs", "no graphs"])
def test_aborts_and_killed_workers_of_both_stages_leave_the_answers_as_they_are(
    options: tuple[str, ...], checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = checkpoint("qwen3", num_layers=4)
    judge = AnswerJudge(folder, BODIES)
    with serving(folder, tmp_path, "--pp-size", "2", *options) as server:
        url = url_of(server)
        for time in range(2):
            check_answers(judge, all_streamed(url), f"two stages, time {time}")

        def abort() -> None:
            httpx.post(f"{url}/abort_request", json={"rid": "to be aborted"}, timeout=END_S)

        body = {
            "text": "Aborted",
            "rid": "to be aborted",
            "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
        }
        long = threading.Thread(target=lambda: httpx.post(f"{url}/generate", json=body, timeout=END_S))
        long.start()
        check_answers(judge, all_streamed(url, Trigger(100, abort)), "beside an abort")
        long.join()
        for stage_from_the_end in (0, 1):
            victim = victim_of(server, WORKER, stage_from_the_end)
            check_answers(judge, all_streamed(url, Trigger(150, victim.kill)), f"worker {stage_from_the_end} is killed")
            assert not victim.is_running()

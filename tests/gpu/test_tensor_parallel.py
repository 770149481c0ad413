"""Ranks on two GPUs, whose collectives are in the graphs: the tokens of one CPU. And what two or four add up by themselves, to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from srt.runtime import Runtime
from tests.gpu.peer_ranks import FIRST_RUNS
from tests.support.checkpoints import CheckpointFactory

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

PROMPTS = [[5 + i, 6, 7] * (2 + i) for i in range(7)]
SIZES = [2, 4] if torch.cuda.device_count() >= 4 else [2]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}


# What these leave of a vocabulary lies on one rank as a rule.
FILTERED: list[dict[str, Any]] = [
    {"top_k": 1, "temperature": 1.3},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_p": 0.5, "temperature": 1.0},
    {"min_p": 0.3, "temperature": 0.8},
    {"top_k": 3, "temperature": 0.9, "frequency_penalty": 0.5},
]


def outputs_of(runtime: Runtime) -> list[list[int]]:
    """Greedy ones, and draws from what filters leave."""
    drawn = [{**GREEDY, **wish, "sampling_seed": seed} for seed, wish in enumerate(FILTERED)]
    wishes = [*([GREEDY] * len(PROMPTS)), *drawn]
    answers = runtime.generate(input_ids=[*PROMPTS, *PROMPTS[: len(drawn)]], sampling_params=wishes)
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["length"] * len(wishes)
    return [answer["output_ids"] for answer in answers]


def num_graphs_left(runtime: Runtime) -> int:
    (state,) = runtime.get_server_info()["internal_states"]
    return int(state["num_graphs_left"])


@pytest.mark.parametrize(("page_size", "disable_custom_all_reduce"), [(1, False), (16, False), (16, True)])
def test_two_ranks_in_graphs_give_the_tokens_of_a_cpu(
    checkpoint: CheckpointFactory, page_size: int, disable_custom_all_reduce: bool
) -> None:
    options: dict[str, Any] = {
        "model_path": str(checkpoint("qwen3")),
        "dtype": "float32",
        "page_size": page_size,
        "max_total_tokens": 8192,
    }
    with Runtime(**options, device="cpu") as runtime:
        expected = outputs_of(runtime)
    graphs: dict[str, Any] = {"attention_backend": "triton", "cuda_graph_bs": [2, 4, 8]}
    graphs["disable_custom_all_reduce"] = disable_custom_all_reduce
    with Runtime(**options, **graphs, device="cuda", tp_size=2) as runtime:
        assert num_graphs_left(runtime) > 0
        assert outputs_of(runtime) == expected, "before all graphs are there"
        while num_graphs_left(runtime):  # they are captured while nobody asks for anything else
            pass
        assert outputs_of(runtime) == expected


def run_ranks(case: str, folder: Path, size: int) -> None:
    """One of tests.gpu.peer_ranks' cases, on all ranks."""
    command = [sys.executable, "-m", "tests.gpu.peer_ranks", case]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, words in zip(ranks, said, strict=True):
        assert rank.returncode == 0 and words.endswith("done\n"), "\n".join(said)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", FIRST_RUNS)
def test_sums_equal_those_of_gathered_parts_to_the_bit_however_late_a_rank_comes(
    case: str, size: int, tmp_path: Path
) -> None:
    run_ranks(case, tmp_path, size)


@pytest.mark.parametrize("size", SIZES)
def test_sums_in_a_graph_are_those_of_the_numbers_at_each_replay(size: int, tmp_path: Path) -> None:
    run_ranks("graph", tmp_path, size)


def test_a_peer_that_is_gone_ends_the_wait_with_an_error_that_names_it(tmp_path: Path) -> None:
    run_ranks("dead", tmp_path, 2)

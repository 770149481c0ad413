"""Ranks on two GPUs, whose collectives are in the graphs: the tokens of one CPU. And what two or four add up by themselves, to the bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import models
from srt.runtime import Runtime
from tests.gpu.peer_ranks import FIRST_RUNS
from tests.support.checkpoints import CheckpointFactory

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

PROMPTS = [[5 + i, 6, 7] * (2 + i) for i in range(7)]
SIZES = [2, 4] if torch.cuda.device_count() >= 4 else [2]
MOST_REPLACEMENTS = 0  # a rank that ends would otherwise be replaced, and the tokens would be the same
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
    drawn = [{**GREEDY, **filter_, "sampling_seed": seed} for seed, filter_ in enumerate(FILTERED)]
    params = [*([GREEDY] * len(PROMPTS)), *drawn]
    answers = runtime.generate(input_ids=[*PROMPTS, *PROMPTS[: len(drawn)]], sampling_params=params)
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["length"] * len(params)
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
        "max_replacements": MOST_REPLACEMENTS,
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


@pytest.mark.parametrize("disable_custom_all_reduce", [False, True], ids=["peers", "nccl"])
@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_moe", {}), ("deepseek_v3", {"num_layers": 3, "tied": False}), ("gpt_oss", {})]
)
def test_two_ranks_with_half_of_the_experts_each_give_the_tokens_of_a_cpu(
    checkpoint: CheckpointFactory, family: str, changes: dict[str, Any], disable_custom_all_reduce: bool
) -> None:
    options: dict[str, Any] = {
        "model_path": str(checkpoint(family, **changes)),
        "dtype": "float32",
        "page_size": 16,
        "max_total_tokens": 8192,
        "max_replacements": MOST_REPLACEMENTS,
    }
    with Runtime(**options, device="cpu") as runtime:
        expected = outputs_of(runtime)
    graphs: dict[str, Any] = {"attention_backend": "triton", "cuda_graph_bs": [1, 2, 4, 8]}
    graphs["disable_custom_all_reduce"] = disable_custom_all_reduce
    with Runtime(**options, **graphs, device="cuda", tp_size=2, ep_size=2) as runtime:
        assert outputs_of(runtime) == expected, "before all graphs are there"
        while num_graphs_left(runtime):
            pass
        assert outputs_of(runtime) == expected
        alone = runtime.generate(input_ids=[PROMPTS[1]], sampling_params=GREEDY)
        assert alone[0]["output_ids"] == expected[1]


@pytest.mark.parametrize(
    ("family", "changes", "ep_size"),
    [("qwen3_moe", {}, 2), ("qwen3_moe", {}, 1), ("deepseek_v3", {"num_layers": 3, "tied": False}, 2)],
)
@pytest.mark.parametrize(
    "how", [{"disable_custom_all_reduce": True, "disable_cuda_graph": True}, {"disable_cuda_graph": True}, {}], ids=str
)
def test_two_attention_groups_give_the_tokens_of_a_cpu(
    checkpoint: CheckpointFactory, family: str, changes: dict[str, Any], ep_size: int, how: dict[str, Any]
) -> None:
    """All requests at once, then one alone in each group, beside which the other group only computes experts."""
    options: dict[str, Any] = {
        "model_path": str(checkpoint(family, **changes)),
        "dtype": "float32",
        "page_size": 16,
        "max_total_tokens": 8192,
        "max_replacements": MOST_REPLACEMENTS,
        "attention_backend": "triton",
    }
    with Runtime(**{**options, "attention_backend": None}, device="cpu") as runtime:
        expected = outputs_of(runtime)
    groups: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": ep_size}
    groups |= {"cuda_graph_bs": [1, 2, 4, 8], **how}
    with Runtime(**options, **groups, device="cuda", load_balance_method="round_robin") as runtime:
        for _ in range(2):
            assert outputs_of(runtime) == expected
        for prompt, output in list(zip(PROMPTS, expected, strict=False))[:3]:
            (alone,) = runtime.generate(input_ids=[prompt], sampling_params=GREEDY)
            assert alone["output_ids"] == output


@pytest.mark.parametrize(("family", "ep_size"), [("qwen3", 1), ("qwen3_moe", 2)])
def test_two_ranks_update_weights_and_lend_memory(checkpoint: CheckpointFactory, family: str, ep_size: int) -> None:
    """Under captured graphs: afterwards the tokens are those of a CPU with the same weights."""
    folders = [str(checkpoint(family, seed=seed)) for seed in (0, 1)]
    options: dict[str, Any] = {"dtype": "float32", "page_size": 16, "max_total_tokens": 8192}
    options["max_replacements"] = MOST_REPLACEMENTS
    expected = []
    for folder in folders:
        with Runtime(model_path=folder, **options, device="cpu") as runtime:
            expected.append(outputs_of(runtime))
    graphs: dict[str, Any] = {"attention_backend": "triton", "cuda_graph_bs": [2, 4, 8], "enable_memory_saver": True}
    with Runtime(model_path=folders[0], **options, **graphs, device="cuda", tp_size=2, ep_size=ep_size) as runtime:
        while num_graphs_left(runtime):
            pass
        assert outputs_of(runtime) == expected[0]
        runtime.release_memory_occupation()
        runtime.resume_memory_occupation()
        assert outputs_of(runtime) == expected[0], "after a loan"
        runtime.update_weights_from_disk(folders[1])
        assert outputs_of(runtime) == expected[1], "after an update"
        runtime.release_memory_occupation()
        runtime.update_weights_from_disk(folders[0])
        runtime.resume_memory_occupation()
        assert outputs_of(runtime) == expected[0], "after an update of released memory"
        assert num_graphs_left(runtime) == 0


def logprobs_while_drawn(runtime: Runtime, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """What was drawn behind each prompt, all of them at the same time, and the logprobs that decodes gave it."""
    sampling = [{"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": seed} for seed in range(len(prompts))]
    answers = runtime.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    logprobs = [[value for value, *_ in one["meta_info"]["output_token_logprobs"]] for one in answers]
    return [one["output_ids"] for one in answers], logprobs


def logprobs_as_prompts(runtime: Runtime, prompts: list[list[int]], drawn: list[list[int]]) -> list[list[float]]:
    """Of the same tokens, where they are given."""
    answers = runtime.generate(
        input_ids=[prompt + ids for prompt, ids in zip(prompts, drawn, strict=True)],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=[len(prompt) for prompt in prompts],
    )
    return [[value for value, *_ in one["meta_info"]["input_token_logprobs"]] for one in answers]


def distance(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """0 for the same, some 1.4 for those of other rows."""
    a, b = np.array(ours), np.array(theirs)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b - b.mean()))


def check_real_shape(batch_sizes: Sequence[int], **divided: int) -> None:
    """A model divided like this says of the tokens that it draws in these batches what one process says of them."""
    options: dict[str, Any] = {"model_path": models.folder_of("qwen3-0.6b"), "load_format": "dummy"}
    options["max_total_tokens"] = 24576  # so that other tests may run on the same GPUs
    rng = np.random.default_rng(3)
    rows = [[rng.integers(0, 150_000, 5 + 7 * i % 300).tolist() for i in range(count)] for count in batch_sizes]
    with Runtime(**options, **divided) as runtime:
        while num_graphs_left(runtime):
            pass
        ours = [logprobs_while_drawn(runtime, prompts) for prompts in rows]
    with Runtime(**options, attention_backend="torch_native", disable_cuda_graph=True) as runtime:
        theirs = [logprobs_as_prompts(runtime, prompts, drawn) for prompts, (drawn, _) in zip(rows, ours, strict=True)]
    for (_, logprobs), reference in zip(ours, theirs, strict=True):
        assert distance(logprobs, reference) <= 0.1, len(reference)
    assert distance(ours[-1][1][::-1], theirs[-1]) > 0.5, "rows cannot be told from each other"


def test_two_ranks_of_a_real_shape_say_what_one_says_of_the_same_tokens() -> None:
    """In bfloat16 ranks stream weights, add up sums in each other's memory, and replay graphs of 1 to 128 rows."""
    check_real_shape((1, 2, 6, 40, 100), tp_size=2)


def run_ranks(case: str, folder: Path, size: int, module: str = "tests.gpu.peer_ranks") -> None:
    """One of this module's cases, on all ranks."""
    command = [sys.executable, "-m", module, case]
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

"""Large sums over two or four GPUs, to the bit, and the tokens of servers whose prompts use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import models
from srt.runtime import Runtime
from tests.gpu.test_tensor_parallel import (
    SIZES,
    distance,
    logprobs_as_prompts,
    logprobs_while_drawn,
    num_graphs_left,
    run_ranks,
)
from tests.support.checkpoints import CheckpointFactory

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

MODULE = "tests.gpu.large_sum_ranks"
HIDDEN = 1024  # of a small model: in float32, prompts of 513 tokens have large sums


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cases", ["large,pieces", "sums,graph"])
def test_large_sums_are_those_of_rank_order_however_late_a_rank_comes(cases: str, size: int, tmp_path: Path) -> None:
    run_ranks(cases, tmp_path, size, MODULE)


@pytest.mark.parametrize("case", ["halves", "model"])
def test_divided_rows_have_the_bits_of_whole_sums(case: str, tmp_path: Path) -> None:
    run_ranks(case, tmp_path, 2, MODULE)


@pytest.mark.parametrize("case", ["gone", "gone-halves"])
def test_a_peer_that_is_gone_ends_the_wait_of_a_large_sum_with_an_error_that_names_it(
    case: str, tmp_path: Path
) -> None:
    run_ranks(case, tmp_path, 2, MODULE)


def test_prompts_with_large_sums_are_continued_as_on_a_cpu(checkpoint: CheckpointFactory) -> None:
    options: dict[str, Any] = {
        "model_path": str(checkpoint("qwen3", hidden_size=HIDDEN, num_layers=2)),
        "dtype": "float32",
        "max_total_tokens": 8192,
        "max_replacements": 0,  # a rank that ends would otherwise be replaced, and the tokens would be the same
    }
    prompts = [[5 + i, 6, 7, 11 + i] * count for i, count in enumerate((140, 200, 5, 333))]
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}

    def outputs_of(runtime: Runtime) -> list[list[int]]:
        answers = [runtime.generate(input_ids=[prompt], sampling_params=params)[0] for prompt in prompts]
        return [one["output_ids"] for one in answers + runtime.generate(input_ids=prompts, sampling_params=params)]

    with Runtime(**options, device="cpu") as runtime:
        expected = outputs_of(runtime)
    with Runtime(**options, device="cuda", tp_size=2, attention_backend="triton", cuda_graph_bs=[2, 4]) as runtime:
        assert outputs_of(runtime) == expected


def test_long_prompts_of_a_real_shape_give_what_one_process_says_of_the_same_tokens() -> None:
    """In bfloat16, with sums of up to 16 MiB in chunks of 8,192 tokens: normed in the same launch."""
    options: dict[str, Any] = {"model_path": models.folder_of("qwen3-0.6b"), "load_format": "dummy"}
    options |= {"max_total_tokens": 24576, "chunked_prefill_size": 8192}
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 150_000, count).tolist() for count in (1100, 2500, 1030, 5000)]
    with Runtime(**options, tp_size=2, max_replacements=0) as runtime:
        while num_graphs_left(runtime):
            pass
        drawn, ours = logprobs_while_drawn(runtime, prompts)
    with Runtime(**options, attention_backend="torch_native", disable_cuda_graph=True) as runtime:
        theirs = logprobs_as_prompts(runtime, prompts, drawn)
    assert distance(ours, theirs) <= 0.1
    assert distance(ours[::-1], theirs) > 0.5, "rows cannot be told from each other"

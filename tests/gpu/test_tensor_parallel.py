"""Two ranks on two GPUs, whose collectives are in the graphs: the tokens of one CPU."""

from __future__ import annotations

from typing import Any

import pytest

from srt.runtime import Runtime
from tests.support.checkpoints import CheckpointFactory

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

PROMPTS = [[5 + i, 6, 7] * (2 + i) for i in range(7)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}


def outputs_of(runtime: Runtime) -> list[list[int]]:
    return [answer["output_ids"] for answer in runtime.generate(input_ids=PROMPTS, sampling_params=GREEDY)]


def num_graphs_left(runtime: Runtime) -> int:
    (state,) = runtime.get_server_info()["internal_states"]
    return int(state["num_graphs_left"])


@pytest.mark.parametrize("page_size", [1, 16])
def test_two_ranks_in_graphs_give_the_tokens_of_a_cpu(checkpoint: CheckpointFactory, page_size: int) -> None:
    options: dict[str, Any] = {
        "model_path": str(checkpoint("qwen3")),
        "dtype": "float32",
        "page_size": page_size,
        "max_total_tokens": 8192,
    }
    with Runtime(**options, device="cpu") as runtime:
        expected = outputs_of(runtime)
    graphs: dict[str, Any] = {"attention_backend": "triton", "cuda_graph_bs": [2, 4, 8]}
    with Runtime(**options, **graphs, device="cuda", tp_size=2) as runtime:
        assert num_graphs_left(runtime) > 0
        assert outputs_of(runtime) == expected, "before all graphs are there"
        while num_graphs_left(runtime):  # they are captured while nobody asks for anything else
            pass
        assert outputs_of(runtime) == expected

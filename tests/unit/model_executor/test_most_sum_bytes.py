"""How large the tensors are that ranks add up, for which they keep memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from srt.model_executor.loaded_model import most_divided_bytes, most_sum_bytes
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig
from tests.support.checkpoints import CheckpointFactory


@pytest.mark.parametrize(
    ("chunk", "dtype", "tokens", "item_bytes"),
    [(64, "bfloat16", 64, 2), (64, "float32", 64, 4), (-1, "bfloat16", 4096, 2), (1 << 20, "bfloat16", 4096, 2)],
)
def test_the_largest_step_has_a_chunk_and_a_token_of_every_other_request(
    chunk: int, dtype: str, tokens: int, item_bytes: int, qwen3_checkpoint: Path
) -> None:
    config = ModelConfig.from_folder(str(qwen3_checkpoint))
    args = ServerArgs(model_path=str(qwen3_checkpoint), chunked_prefill_size=chunk, dtype=dtype, max_running_requests=7)
    assert config.context_length == 4096
    assert most_sum_bytes(args, config) == (tokens + 7) * config.hidden_size * item_bytes


@pytest.mark.parametrize(
    ("changed", "is_divided"),
    [
        ({}, True),
        ({"tp_size": 1}, False),
        ({"tp_size": 4}, False),
        ({"pp_size": 2}, False),
        ({"enable_deterministic_inference": True}, False),
    ],
)
def test_rows_are_divided_by_two_ranks_with_whole_models(
    changed: dict[str, Any], is_divided: bool, qwen3_checkpoint: Path
) -> None:
    config = ModelConfig.from_folder(str(qwen3_checkpoint))
    args = ServerArgs(model_path=str(qwen3_checkpoint), **{"tp_size": 2, **changed})
    assert most_divided_bytes(args, config) == (most_sum_bytes(args, config) if is_divided else 0)


@pytest.mark.parametrize(("family", "quantization"), [("qwen3_moe", None), ("gemma3_text", None), ("qwen3", "fp8")])
def test_experts_quantised_weights_and_plain_layers_are_not_divided(
    family: str, quantization: str | None, checkpoint: CheckpointFactory
) -> None:
    folder = checkpoint(family)
    config = ModelConfig.from_folder(str(folder), quantization=quantization)
    assert most_divided_bytes(ServerArgs(model_path=str(folder), tp_size=2), config) == 0

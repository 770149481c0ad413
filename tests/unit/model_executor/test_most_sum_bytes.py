"""How large the tensors are that ranks add up, for which they keep memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from srt.model_executor.loaded_model import most_sum_bytes
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig


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

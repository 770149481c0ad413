"""What --enable-deterministic-inference does not support is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from srt.managers.supervisor.preflight import check_model
from srt.server_args import ArgumentError, parse_args
from srt.utils.errors import StartError
from tests.support.checkpoints import CheckpointFactory

WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "layer_types": None}
WORDS = ["--device", "cpu", "--enable-deterministic-inference"]


@pytest.mark.parametrize(
    "others",
    [
        ["--speculative-algorithm", "NGRAM"],
        ["--enable-torch-compile"],
        ["--quantization", "fp8"],
        ["--kv-cache-dtype", "fp8_e4m3"],
        ["--model-impl", "transformers"],
        ["--is-embedding"],
        ["--dtype", "float16"],
        ["--attention-backend", "torch_native"],
        ["--prefill-attention-backend", "torch_native"],
        ["--decode-attention-backend", "torch_native"],
    ],
    ids=lambda others: others[0],
)
def test_an_option_is_refused_by_its_name(others: list[str]) -> None:
    with pytest.raises(ArgumentError, match=f"--enable-deterministic-inference does not support {others[0]}"):
        parse_args(["--model-path", "tiny", *WORDS, *others])


@pytest.mark.parametrize(
    ("family", "fields", "words", "reason"),
    [
        ("qwen3_moe", {}, [], "serves dense models"),
        ("gemma2", {}, [], "serves dense models"),
        ("qwen3", {"head_dim": 8}, [], "multiple of 16"),
        ("qwen3", {}, ["--json-model-override-args", '{"torch_dtype": "float16"}'], "computes in float32 or bfloat16"),
    ],
)
def test_a_model_is_refused(
    checkpoint: CheckpointFactory, family: str, fields: dict[str, Any], words: list[str], reason: str
) -> None:
    folder = checkpoint(family, **fields)
    with pytest.raises(StartError, match=reason):
        check_model(parse_args(["--model-path", str(folder), *WORDS, *words]))


@pytest.mark.parametrize(
    ("family", "fields", "words", "reason"),
    [
        ("qwen3", {"head_dim": 144}, [], "heads of at most 128 on a GPU"),
        ("qwen3", {"config": WINDOW}, [], "does not serve models with sliding windows on a GPU"),
    ],
)
def test_a_model_is_refused_on_a_gpu(
    checkpoint: CheckpointFactory, family: str, fields: dict[str, Any], words: list[str], reason: str
) -> None:
    folder = checkpoint(family, **fields)
    with pytest.raises(StartError, match=reason):
        check_model(parse_args(["--model-path", str(folder), "--device", "cuda", *WORDS[2:], *words]))


@pytest.mark.parametrize("words", [WORDS, [*WORDS, "--tp", "2"], ["--device", "cuda", *WORDS[2:], "--tp", "2"]])
def test_a_dense_model_is_served(checkpoint: CheckpointFactory, words: list[str]) -> None:
    check_model(parse_args(["--model-path", str(checkpoint("qwen3")), *words]))

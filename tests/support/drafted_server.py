"""What a server answers through all of its processes, with drafts and without, for random models of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import srt
from tests.support.checkpoints import CheckpointFactory
from tests.support.drafted_engine import MOST_DRAFTS, VOCAB
from tests.support.plan_driver import token_ids


class Served(NamedTuple):
    """A random model, and the options with which it is served."""

    family: str
    fields: dict[str, Any]
    options: dict[str, Any]


SERVED = {
    "windows": Served("gemma3_text", {"num_layers": 4}, {}),
    "windows and sinks": Served("gpt_oss", {}, {}),
    "experts": Served("qwen3_moe", {}, {}),
    "latents": Served("deepseek_v3", {"num_layers": 3, "tied": False}, {}),
    "fp8 weights": Served("qwen3", {}, {"quantization": "fp8"}),
    "fp8 experts": Served("qwen3_moe", {}, {"quantization": "fp8"}),
    "fp8 memory": Served("qwen3", {}, {"kv_cache_dtype": "fp8_e4m3"}),
    "fp8 memory of windows": Served("gemma3_text", {"num_layers": 4}, {"kv_cache_dtype": "fp8_e4m3"}),
}
NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1 + MOST_DRAFTS}
REPEATED = {"temperature": 0, "logit_bias": {"17": 100}, "max_new_tokens": 30}  # of one token, so drafts are right
PARAMETERS: list[dict[str, Any]] = [
    REPEATED,  # first: a server's first steps bring drafts whatever times it measures, later ones only if they pay
    {"temperature": 0, "max_new_tokens": 60},
    {"temperature": 0.7, "top_k": 40, "frequency_penalty": 0.3, "sampling_seed": 3, "max_new_tokens": 40},
]


ROUNDING = ("fp8 weights", "fp8 experts")
"""Inputs are rounded to fp8 here. Sums of several rows have another order, and a rounding that it turns changes logits visibly.
Which steps bring drafts depends on times, so only answers that a bias makes certain are compared."""


def check_server(checkpoint: CheckpointFactory, kind: str, device: str) -> None:
    """Compare the answers of two servers of this kind of model, one of which drafts by repetition."""
    served = SERVED[kind]
    folder, parameters = checkpoint(served.family, **served.fields), [REPEATED] if kind in ROUNDING else PARAMETERS
    most = most_tokens_a_step(folder, device, served.options, NGRAM, parameters)
    print(f"{kind}: up to {most:.2f} tokens a step")
    assert most > 1


def most_tokens_a_step(
    folder: Path,
    device: str,
    options: dict[str, Any],
    drafts: dict[str, Any],
    parameters: Sequence[dict[str, Any]] = PARAMETERS,
) -> float:
    """Compare the answers of two servers, one of which has the options of `drafts` too. Return the most tokens a step of an answer."""
    rng = np.random.default_rng(4)
    prompts = [token_ids(rng, length, VOCAB) for length in (60, 3, 17)]
    expected, found = (_answers(folder, device, prompts, parameters, {**options, **given}) for given in ({}, drafts))
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    return float(max(meta.get("spec_accept_length", 0.0) for _, meta in found))


def _answers(
    folder: Path,
    device: str,
    prompts: list[list[int]],
    parameters: Sequence[dict[str, Any]],
    options: dict[str, Any],
) -> list[tuple[list[int], dict[str, Any]]]:
    with srt.Runtime(**_options(folder, device, options)) as runtime:
        answers = [
            answer
            for given in parameters
            for _ in range(2)
            for answer in runtime.generate(input_ids=prompts, sampling_params={"ignore_eos": True, **given})
        ]
    return [(answer["output_ids"], answer["meta_info"]) for answer in answers]


def _options(folder: Path, device: str, options: dict[str, Any]) -> dict[str, Any]:
    whole = {"model_path": str(folder), "device": device, "dtype": "float32", "max_total_tokens": 4096, **options}
    return whole | ({"max_running_requests": 8, "chunked_prefill_size": 64} if device == "cuda" else {})

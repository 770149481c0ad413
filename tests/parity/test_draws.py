"""Same request, same draw: a seeded request gets the same tokens whatever shares its steps, at any tensor parallelism, cold or warm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import srt
from srt.sampling.sampling_params import SamplingParams
from tests.support.checkpoints import CheckpointFactory
from tests.support.oracle import Oracle

NUM_TOKENS = 64
VOCAB = 509
BATCH = 64

# Every filter, penalty and mask at least once, alone and together; temperatures of 0.7 and more.
TARGETS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.8, "frequency_penalty": 0.7},
    {"temperature": 0.8, "presence_penalty": 1.1},
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logit_bias": {"17": 5.0, "300": -100, "301": 3.5}},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 1.0, "min_new_tokens": 40, "stop_token_ids": list(range(100, 160))},
]


@dataclass(frozen=True, slots=True)
class Target:
    prompt_ids: list[int]
    parameters: dict[str, Any]
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class World:
    folder: Path
    targets: list[Target]
    companions: list[tuple[list[int], dict[str, Any]]]


@pytest.fixture(scope="module")
def world(checkpoint: CheckpointFactory) -> World:
    folder = checkpoint("qwen3", vocab_size=VOCAB)
    eos = tuple(json.loads((folder / "generation_config.json").read_text())["eos_token_id"])
    oracle, rng = Oracle(folder), np.random.default_rng(5)
    targets = [_safe_target(oracle, parameters, eos, rng) for parameters in TARGETS]
    return World(folder, targets, [_companion(rng, i) for i in range(2 * BATCH)])  # some end before others begin


def _safe_target(oracle: Oracle, parameters: dict[str, Any], eos: tuple[int, ...], rng: np.random.Generator) -> Target:
    """A prompt and a seed for which no decision in 64 tokens was close. A rule of the vocabulary must end no request early."""
    stops = "stop_token_ids" in parameters
    while True:
        prompt = [int(i) for i in rng.integers(16, VOCAB, int(rng.integers(20, 60)))]
        given = {
            **parameters,
            "max_new_tokens": NUM_TOKENS,
            "ignore_eos": not stops,
            "sampling_seed": int(rng.integers(1 << 62)),
        }
        spec = SamplingParams.from_dict(given).spec(NUM_TOKENS, eos)
        expected = oracle.expect(prompt, spec, given["sampling_seed"])
        if expected.is_safe and (expected.stopped if stops else len(expected.ids) == NUM_TOKENS):
            return Target(prompt, given, expected.ids)


def _companion(rng: np.random.Generator, number: int) -> tuple[list[int], dict[str, Any]]:
    """Another request of the batch, with parameters of its own."""
    prompt = [int(i) for i in rng.integers(16, VOCAB, int(rng.integers(1, 90)))]
    choices: list[dict[str, Any]] = [
        *TARGETS,
        {"temperature": 0},
        {"temperature": 0.5, "stop_token_ids": [40, 41]},
        {"n": 2},
    ]
    return prompt, {**choices[number % len(choices)], "max_new_tokens": int(rng.integers(40, 90))}


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def runtime(request: pytest.FixtureRequest, world: World) -> Iterator[srt.Runtime]:
    tp = request.param
    with srt.Runtime(
        model_path=str(world.folder), device="cpu", dtype="float32", tp_size=tp, max_total_tokens=30_000
    ) as runtime:
        yield runtime


@pytest.mark.e2e
def test_a_seeded_request_alone_gets_the_draws_of_the_rule(runtime: srt.Runtime, world: World) -> None:
    for target in world.targets:
        runtime.flush_cache()
        assert _generate(runtime, target) == target.expected


@pytest.mark.e2e
def test_twice_in_a_row_and_with_a_warm_cache_the_draws_are_the_same(runtime: srt.Runtime, world: World) -> None:
    runtime.flush_cache()
    before = _report(runtime)["num_cached_tokens"]
    for target in world.targets:
        assert _generate(runtime, target) == target.expected
        assert _generate(runtime, target) == target.expected
    assert _report(runtime)["num_cached_tokens"] - before >= 16 * len(world.targets)


@pytest.mark.e2e
def test_in_a_batch_of_64_with_every_other_parameter_the_draws_are_the_same(runtime: srt.Runtime, world: World) -> None:
    runtime.flush_cache()

    async def together() -> list[Any]:
        calls = [
            runtime.async_generate(input_ids=ids, sampling_params=parameters) for ids, parameters in world.companions
        ]
        spread = len(calls) // len(world.targets)
        for i, target in enumerate(world.targets):
            calls.insert(
                i * (spread + 1), runtime.async_generate(input_ids=target.prompt_ids, sampling_params=target.parameters)
            )
        answers = list(await asyncio.gather(*calls))
        return [answers[i * (spread + 1)] for i in range(len(world.targets))]

    answers = asyncio.run(together())
    assert [tuple(answer["output_ids"]) for answer in answers] == [target.expected for target in world.targets]
    assert _report(runtime)["max_rows_in_step"] >= BATCH


@pytest.mark.e2e
def test_the_seed_that_was_drawn_is_told_and_repeats_the_answer(runtime: srt.Runtime, world: World) -> None:
    prompt = world.targets[0].prompt_ids
    first = runtime.generate(input_ids=prompt, sampling_params={"temperature": 1.0, "max_new_tokens": 24})
    again = {"temperature": 1.0, "max_new_tokens": 24, "sampling_seed": first["meta_info"]["seed"]}
    assert runtime.generate(input_ids=prompt, sampling_params=again)["output_ids"] == first["output_ids"]


def _generate(runtime: srt.Runtime, target: Target) -> tuple[int, ...]:
    return tuple(runtime.generate(input_ids=target.prompt_ids, sampling_params=target.parameters)["output_ids"])


def _report(runtime: srt.Runtime) -> dict[str, Any]:
    report: dict[str, Any] = runtime.get_server_info()["internal_states"][0]
    return report

"""What a worker reports of its experts, from the choices of a model's own steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from srt.layers.moe.expert_load import PERIOD_S, ExpertLoads
from srt.layers.moe.experts import ExpertLayers
from tests.support.checkpoints import CheckpointFactory
from tests.support.plan_driver import Job, PlanDriver, greedy, token_ids
from tests.support.runners import make_runner


def test_a_worker_reports_the_experts_that_its_steps_took(checkpoint: CheckpointFactory) -> None:
    runner = make_runner(checkpoint("qwen2_moe", num_layers=3), 16)
    (first, second) = [module for module in runner.loaded.model.modules() if isinstance(module, ExpertLayers)]
    runner.inspect()
    PlanDriver(runner, 16).run([Job(token_ids(np.random.default_rng(0), 1, 512), greedy(5))])
    assert int(first.load[:-2].sum()) == int(second.load[:-2].sum()) == 5 * 2, "five tokens, each with two experts"
    values = runner.inspect()
    assert values["distinct_experts"] == 2.0
    assert values["distinct_experts_of_layers"] == "2.00 2.00"
    assert "distinct_experts" not in runner.inspect(), "the second inspection counts from the first one on"


def test_a_load_is_the_mean_of_steps_and_the_busiest_expert_against_the_mean(checkpoint: CheckpointFactory) -> None:
    model = make_runner(checkpoint("qwen2_moe", num_layers=3), 16).loaded.model
    reader, other = ExpertLoads(model), ExpertLoads(model)
    reader.read()
    layers = [module for module in model.modules() if isinstance(module, ExpertLayers)]
    with torch.inference_mode():
        for layer in layers:
            layer.load += torch.tensor([6, 0, 1, 1, 0, 0, 0, 0, 5, 2])
    for load in reader.read():
        assert (load.num_steps, load.distinct, load.peak) == (2, 2.5, pytest.approx(6.0))
    assert reader.read() == []
    assert len(other.poll(0.0)) == 2, "what one reader has read is new to another"
    with torch.inference_mode():
        for layer in layers:
            layer.load += torch.tensor([0, 4, 0, 0, 0, 0, 0, 0, 1, 1])
    assert other.poll(PERIOD_S / 2) == [], "not that soon again"
    assert [(load.distinct, load.peak) for load in other.poll(PERIOD_S)] == [(1.0, 8.0)] * 2


def test_a_model_without_experts_reports_none(checkpoint: CheckpointFactory) -> None:
    assert "distinct_experts" not in make_runner(checkpoint("llama"), 16).inspect()

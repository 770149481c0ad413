"""The training loop against a real server, at few steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from recipes.grpo_tiny.task import WORDS, draw_questions, is_held_out, reward
from recipes.grpo_tiny.train import FOLDER, Rollout, Settings, learn, logprobs_of, train
from recipes.tiny.model import load_checkpoint

FEW = Settings(steps=2, questions=4, group=4, held_out_questions=8, threads=1)


@pytest.fixture(autouse=True)
def _same_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.e2e
def test_the_same_seed_gives_the_same_curve() -> None:
    first, again = train(FEW), train(FEW)
    assert replace(first, seconds=0.0) == replace(again, seconds=0.0)
    assert train(replace(FEW, seed=1, steps=1)).logprob_gaps != first.logprob_gaps[:1]
    assert max(first.logprob_gaps) < 1e-3, "the server does not have the weights that were pushed"


@pytest.mark.e2e
@pytest.mark.full
def test_the_reward_rises() -> None:
    settings = replace(Settings(), steps=16, threads=1)
    history = train(settings)
    assert sum(history.rewards[-4:]) > sum(history.rewards[:4]) + 0.6
    assert history.held_out[1] > history.held_out[0] + 0.3


def test_an_update_prefers_what_was_rewarded() -> None:
    model = load_checkpoint(FOLDER)
    good, bad = [Rollout([5, 6], ids, [0.0] * 3, gain, gain) for ids, gain in (([7, 8, 9], 0.5), ([10, 11, 12], -0.5))]
    before = logprobs_of(model, [good, bad])[0].detach()
    for one, row in zip((good, bad), before.tolist(), strict=True):
        one.logprobs = row[1:]
    learn(model, torch.optim.SGD(model.parameters(), 0.05), [good, bad], Settings(minibatches=1))
    after = logprobs_of(model, [good, bad])[0].detach()
    change = (after - before)[:, 1:].sum(-1)
    assert change[0] > 0 > change[1]


def test_an_update_without_a_difference_changes_nothing() -> None:
    model = load_checkpoint(FOLDER)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    learn(model, torch.optim.SGD(model.parameters(), 1.0), [Rollout([5], [6], [-1.0], 1.0)] * 2, Settings())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_held_out_questions_share_no_word_with_the_others() -> None:
    shown, held = ([word for word in WORDS if is_held_out(word) == side] for side in (False, True))
    assert len(held) >= 15 and len(shown) >= 60
    rng = random.Random(0)
    for question in draw_questions(rng, 50, held_out=True):
        joined = question.answer[::-1]
        assert any(joined == one + other for one in held for other in held)
        assert (reward(question, question.answer), reward(question, joined)) == (1.0, 0.0)

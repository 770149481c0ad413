"""Group relative policy optimisation, with the server as the policy that answers and a copy in PyTorch that learns.

A step draws questions and lets the server answer each several times. An answer's advantage is its reward less the mean of its group. The
copy is updated by them, and its weights go to the server, which the next step asks. Both compute in float32; the server in its
deterministic mode, so that the same seed gives the same answers whatever shares a batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from recipes.grpo_tiny.task import Question, draw_questions, reward
from recipes.tiny.model import Model, load_checkpoint
from srt.runtime import Runtime
from srt.utils.checkpoint import SHIPPED_MODELS

FOLDER = SHIPPED_MODELS / "tiny"
MOST_TOKENS = 32
HELD_OUT_SEED = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run, committed with its results."""

    seed: int = 0
    steps: int = 40
    questions: int = 16
    group: int = 8
    """Answers to each question."""
    minibatches: int = 2
    learning_rate: float = 2e-5
    clip: float = 0.2
    """The ratio of an answer's tokens to those of the policy that gave it counts up to 1 ± clip."""
    held_out_questions: int = 128
    threads: int = 2
    """Of PyTorch. Sums of floats depend on it."""


@dataclass(slots=True)
class Rollout:
    """An answer of the server, with what the update needs."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    """Of the output ids, as the server computed them."""
    reward: float
    advantage: float = 0.0


@dataclass(slots=True)
class History:
    """What a run has shown, step by step. Held-out questions are answered greedily, before the first step and behind the last."""

    rewards: list[float] = field(default_factory=list)
    logprob_gaps: list[float] = field(default_factory=list)
    """Largest difference in a step between the server's logprobs and the copy's: whether the server has the copy's weights."""
    held_out: list[float] = field(default_factory=list)
    seconds: float = 0.0


def train(settings: Settings, report: Callable[[int, History], None] = lambda step, history: None) -> History:
    """Run the loop, and call `report` after each step."""
    torch.set_num_threads(settings.threads)
    begin_s = time.monotonic()
    history = History()
    model = load_checkpoint(FOLDER)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    with Runtime(
        model_path=str(FOLDER), device="cpu", dtype="float32", enable_deterministic_inference=True, random_seed=0
    ) as engine:
        push(engine, model, "step-0")  # the checkpoint is in bfloat16; from here on both have the same bits
        history.held_out.append(held_out_share(engine, settings))
        for step in range(settings.steps):
            rng = random.Random(f"{settings.seed} {step}")
            rollouts = roll_out(engine, draw_questions(rng, settings.questions), settings, rng, f"step-{step}")
            history.rewards.append(sum(one.reward for one in rollouts) / len(rollouts))
            history.logprob_gaps.append(logprob_gap(model, rollouts))
            learn(model, optimizer, rollouts, settings)
            push(engine, model, f"step-{step + 1}")
            history.seconds = time.monotonic() - begin_s
            report(step, history)
        history.held_out.append(held_out_share(engine, settings))
    history.seconds = time.monotonic() - begin_s
    return history


def push(engine: Runtime, model: Model, version: str) -> None:
    """Give the server the copy's weights."""
    tensors = {f"model.{name}": value.detach().contiguous() for name, value in model.state_dict().items()}
    engine.update_weights_from_tensor(save(tensors), weight_version=version)


def roll_out(
    engine: Runtime, questions: list[Question], settings: Settings, rng: random.Random, version: str
) -> list[Rollout]:
    """Let the server answer each question `group` times, and give each answer its advantage."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "n": settings.group, "max_new_tokens": MOST_TOKENS}
    each = [{**sampling, "sampling_seed": rng.getrandbits(63)} for _ in questions]
    answers = engine.generate([one.prompt for one in questions], each, return_logprob=True, logprob_start_len=0)
    rollouts = []
    for number, question in enumerate(questions):
        group = [
            _rollout(question, answer, version)
            for answer in answers[number * settings.group : (number + 1) * settings.group]
        ]
        mean = sum(one.reward for one in group) / len(group)
        for one in group:
            one.advantage = one.reward - mean
        rollouts += group
    return rollouts


def _rollout(question: Question, answer: dict[str, Any], version: str) -> Rollout:
    meta = answer["meta_info"]
    assert meta["weight_version"] == version, f"the weights of {version} were pushed, not {meta['weight_version']}"
    return Rollout(
        prompt_ids=[token for _, token, _ in meta["input_token_logprobs"]],
        output_ids=answer["output_ids"],
        logprobs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
        reward=reward(question, answer["text"]),
    )


def learn(model: Model, optimizer: torch.optim.Optimizer, rollouts: list[Rollout], settings: Settings) -> None:
    """Make one pass over the answers, in minibatches. Groups whose answers are all right or all wrong say nothing."""
    useful = [one for one in rollouts if one.advantage]
    size = -(-len(useful) // settings.minibatches)
    for first in range(0, len(useful), max(1, size)):
        some = useful[first : first + size]
        logprobs, before, mask = logprobs_of(model, some)
        advantages = torch.tensor([[one.advantage] for one in some])
        ratio = (logprobs - before).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - settings.clip, 1 + settings.clip) * advantages)
        loss = -(gain * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def logprobs_of(model: Model, rollouts: list[Rollout]) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors [answers, tokens]: the copy's logprobs of the output ids, the server's, and 1.0 where there is such a token."""
    rows = [one.prompt_ids + one.output_ids for one in rollouts]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    before, mask = torch.zeros(len(rows), width - 1), torch.zeros(len(rows), width - 1)
    for row, (text, one) in enumerate(zip(rows, rollouts, strict=True)):
        ids[row, : len(text)] = torch.tensor(text)
        outputs = slice(len(one.prompt_ids) - 1, len(text) - 1)
        before[row, outputs] = torch.tensor(one.logprobs)
        mask[row, outputs] = 1.0
    hidden = model.hidden(ids)[:, :-1]
    logits = F.linear(hidden, model.embed_tokens.weight)
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return logprobs, before, mask


@torch.no_grad()
def logprob_gap(model: Model, rollouts: list[Rollout]) -> float:
    """Return the largest difference between what the server and the copy say about the answers."""
    logprobs, before, mask = logprobs_of(model, rollouts)
    return float(((logprobs - before) * mask).abs().max())


def held_out_share(engine: Runtime, settings: Settings) -> float:
    """Return the share of right answers, drawn greedily, to questions whose words training never shows."""
    questions = draw_questions(random.Random(HELD_OUT_SEED), settings.held_out_questions, held_out=True)
    answers = engine.generate([one.prompt for one in questions], {"temperature": 0.0, "max_new_tokens": MOST_TOKENS})
    rewards = [reward(question, answer["text"]) for question, answer in zip(questions, answers, strict=True)]
    return sum(rewards) / len(rewards)

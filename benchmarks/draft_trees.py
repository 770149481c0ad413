"""Tokens that a verification brings with the best tree of drafts, beside chains: counted in answers of the shipped model.

    python -m benchmarks.draft_trees [--drafter tiny-draft tiny-eagle3] [--noises 0,0.2,0.4] [--temperatures 0,1]

A tree has up to `k` drafts for each place, the k most likely behind the drafts before it. At a temperature above 0 the request's own noise
is added first, as when srt drafts. A path of drafts is right if the answer goes on with it, so each answer is read once: what is drafted
behind other tokens than its own does not matter. The best tree of n drafts has the n paths that were right most often in every second
answer; through the others it is walked, from one verification to the next. Noise on its weights makes a drafter agree less.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import srt
from benchmarks import limits
from recipes.tiny.corpus import SKILL_NAMES
from recipes.tiny.eagle3 import Head, tapped
from recipes.tiny.evaluate import draw_cases
from recipes.tiny.model import Model, load_checkpoint
from recipes.tiny.tokenizer import load_tokenizer
from srt.layers.philox import gumbel_noise
from srt.utils.checkpoint import resolve_model_path

SIZES = (3, 4, 7, 15)  # drafts of a verification
WIDTHS = (1, 2, 4)  # drafts for each place; 1: chains
DEPTH, HEAD_DEPTH = 15, 8
LENGTH = 80  # tokens of an answer
UNRANKED = 1 << 20
Path = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """`ranks[b][d]` is the rank of the token d + 1 places behind the answer's token b among the drafts for its place, 0 for the first."""

    ranks: list[list[int]]

    def tokens_a_step(self, tree: set[Path]) -> tuple[int, int]:
        """Walk through the answer. Return its tokens and its verifications."""
        at, num_steps = 0, 0
        while at < len(self.ranks):
            right = 0
            while right < len(self.ranks[at]) and tuple(self.ranks[at][: right + 1]) in tree:
                right += 1
            at += right + 1
            num_steps += 1
        return at, num_steps


def sequences(temperature: float, count: int) -> list[tuple[int, list[int], int]]:
    """Return (the prompt's length, ids of prompt and answer, seed) of answers of tiny."""
    tokenizer = load_tokenizer(resolve_model_path("tiny"))
    cases = [case for name in SKILL_NAMES for case in draw_cases(name, -(-count // len(SKILL_NAMES)), seed=5)][:count]
    prompts = [tokenizer.encode(case.prompt(), add_special_tokens=False).ids for case in cases]
    given = [{"temperature": temperature, "max_new_tokens": LENGTH, "sampling_seed": seed} for seed in range(count)]
    with srt.Runtime(model_path="tiny", device="cpu", dtype="float32") as runtime:
        answers = runtime.generate(input_ids=prompts, sampling_params=given)
    pairs = zip(prompts, answers, strict=True)
    return [(len(prompt), prompt + answer["output_ids"], seed) for seed, (prompt, answer) in enumerate(pairs)]


class Drafter:
    """tiny-draft or tiny-eagle3, with noise on its weights."""

    def __init__(self, name: str, tiny: Model, noise: float) -> None:
        folder = resolve_model_path(name)
        self._tiny, self._known = tiny, torch.arange(tiny.shape.vocab_size)
        self.vocab_size = tiny.shape.vocab_size
        self._model: Model | Head
        if name == "tiny-eagle3":
            tensors = load_file(folder / "model.safetensors")
            self._known = tensors.pop("d2t") + torch.arange(len(tensors["lm_head.weight"]))
            del tensors["t2d"]
            self._model = Head(tiny, self._known, 0)
            self._model.load_state_dict({key: value.float() for key, value in tensors.items()})
        else:
            self._model = load_checkpoint(folder)
        add_noise(self._model, noise)

    def logits(self, ids: list[int]) -> list[Tensor]:
        """Return [places, vocabulary] for each depth, or one for all: row p is of the token behind place p, for a draft of this depth."""
        row = torch.tensor([ids])
        if isinstance(self._model, Model):
            return [self._model(row)[0]]
        features, _ = tapped(self._tiny, row)
        chain = self._model.chain(self._tiny.embed_tokens(row)[:, 1:], features[:, :-1], HEAD_DEPTH)
        whole = [torch.full((len(ids), self._tiny.shape.vocab_size), float("-inf")) for _ in chain]
        for target, logits in zip(whole, chain, strict=True):
            target[1:, self._known] = logits[0]
        return whole


def add_noise(model: nn.Module, noise: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))


def read(drafter: Drafter, start: int, ids: list[int], seed: int, temperature: float) -> Answer:
    """Rank the answer's tokens, which begin at `start`."""
    length, targets = len(ids), torch.tensor(ids[1:])[:, None]
    places = torch.arange(1, length)
    noise = gumbel_noise(torch.full_like(places, seed), places, 0, drafter.vocab_size) if temperature else None
    by_depth = []
    for logits in drafter.logits(ids):
        values = logits[:-1] if noise is None else logits[:-1] / temperature + noise
        of_token = values.gather(1, targets)
        ranks = (values > of_token).sum(1)
        ranks[of_token[:, 0] == float("-inf")] = UNRANKED
        by_depth.append(ranks.tolist())
    last = length - 1
    if len(by_depth) == 1:  # a model drafts alike at each depth
        by_depth *= DEPTH
    return Answer([[by_depth[d][b + d] for d in range(min(len(by_depth), last - b))] for b in range(start, last)])


def best_tree(answers: list[Answer], size: int, width: int) -> set[Path]:
    counts: Counter[Path] = Counter()
    for ranks in (ranks for answer in answers for ranks in answer.ranks):
        for depth, rank in enumerate(ranks):
            if rank >= width:
                break
            counts[tuple(ranks[: depth + 1])] += 1
    # Behind drafts that are all the most likely ones, so that a chain has its length even if it was never right to its end.
    paths = set(counts) | {(0,) * depth for depth in range(1, DEPTH + 1)}
    return set(sorted(paths, key=lambda path: (-counts[path], len(path), path))[:size])


def measure(answers: list[Answer]) -> None:
    chosen, walked = answers[::2], answers[1::2]
    firsts = [ranks[0] for answer in walked for ranks in answer.ranks]
    shares = ", ".join(f"{sum(rank < width for rank in firsts) / len(firsts):.1%}" for width in WIDTHS)
    print(f"  a token is among the first {', '.join(map(str, WIDTHS))} drafts for its place: {shares}")
    for size in SIZES:
        said = []
        for width in WIDTHS:
            tree = {(0,) * depth for depth in range(1, size + 1)} if width == 1 else best_tree(chosen, size, width)
            totals = [answer.tokens_a_step(tree) for answer in walked]
            tokens = sum(tokens for tokens, _ in totals) / sum(steps for _, steps in totals)
            said.append(f"{tokens:5.2f} ({max(map(len, tree))} deep)")
        print(f"  {size:2} drafts: chain {said[0]}, 2 a place {said[1]}, 4 a place {said[2]}", flush=True)


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--drafter", nargs="+", default=["tiny-draft", "tiny-eagle3"], choices=["tiny-draft", "tiny-eagle3"]
    )
    parser.add_argument(
        "--noises", default="0,0.2,0.4", help="standard deviations of the noise, as shares of the weights'"
    )
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--answers", type=int, default=120)
    options = parser.parse_args()
    tiny = load_checkpoint(resolve_model_path("tiny"))
    print(limits.versions())
    for temperature in map(float, options.temperatures.split(",")):
        texts = sequences(temperature, options.answers)
        for name in options.drafter:
            for noise in map(float, options.noises.split(",")):
                print(f"{name}, noise {noise}, temperature {temperature}")
                drafter = Drafter(name, tiny, noise)
                measure(
                    [read(drafter, start, ids, seed, temperature) for start, ids, seed in texts if len(ids) - start > 2]
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Train both models, in one run: `python -m recipes.tiny.train`.

Each step shows the same rows to tiny and to tiny-draft. tiny learns what the text says; tiny-draft learns that too, and what tiny
would say, so that its guesses are tiny's. A run that was stopped goes on where its last state was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.tiny.chat import END, END_OF_TEXT
from recipes.tiny.corpus import draw_texts
from recipes.tiny.model import TINY, TINY_DRAFT, Model, save_checkpoint
from recipes.tiny.packing import ROWS_PER_SHARD, ShardTask, stream_shards
from recipes.tiny.plot import loss_svg
from recipes.tiny.tokenizer import load_tokenizer, save_tokenizer, token_id, train_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENIZER_SEED, TOKENIZER_TEXTS = 7, 30_000
STATE = "state.pt"
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run depends on. Committed with its results."""

    seed: int = 0
    steps: int = 6000
    long_steps: int = 500
    """The last steps, whose rows have the length of the whole context."""
    rows: int = 128
    row_tokens: int = 1024
    learning_rate: float = 2.5e-3
    draft_learning_rate: float = 4e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1

    def shape_of(self, step: int) -> tuple[int, int]:
        """Rows, and tokens in each, of a step. The tokens of a step are always as many."""
        if step < self.steps - self.long_steps:
            return self.rows, self.row_tokens
        return self.rows // 2, self.row_tokens * 2

    def rate_at(self, step: int) -> float:
        """Between 0 and 1: up in a straight line, then down to nearly nothing along a cosine."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(slots=True)
class History:
    """Losses, averaged over some steps each."""

    tiny: list[tuple[int, float]] = field(default_factory=list)
    draft: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0


def losses(tiny: Model, draft: Model, ids: Tensor, learned: Tensor, imitation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What tiny minimises, what draft minimises, and draft's part of it that comes from the text. `imitation` is between 0 and 1."""
    targets = torch.where(learned, ids, -100)[:, 1:].reshape(-1)
    logits = tiny(ids)[:, :-1].float().reshape(len(targets), -1)
    guesses = draft(ids)[:, :-1].float().reshape(len(targets), -1)
    tiny_loss = F.cross_entropy(logits, targets)
    draft_loss = F.cross_entropy(guesses, targets)
    teacher = logits.detach().log_softmax(-1)
    divergence = (teacher.exp() * (teacher - guesses.log_softmax(-1))).sum(-1)
    chosen = targets >= 0
    divergence = (divergence * chosen).sum() / chosen.sum()
    return tiny_loss, draft_loss * (1 - imitation) + divergence * imitation, draft_loss


class Trainer:
    """Owns the models, their optimizers and the history of one run."""

    def __init__(self, settings: Settings, device: torch.device, compiled: bool) -> None:
        self.settings, self.device = settings, device
        self.step = 0
        self.history = History()
        self.tiny, self.draft = Model(TINY), Model(TINY_DRAFT)
        self.tiny.draw_weights(settings.seed)
        self.draft.draw_weights(settings.seed + 1)
        self.tiny.to(device)
        self.draft.to(device)
        self._optimizers = [
            self._optimizer(self.tiny, settings.learning_rate),
            self._optimizer(self.draft, settings.draft_learning_rate),
        ]
        self._losses = torch.compile(losses, dynamic=False) if compiled else losses

    def _optimizer(self, model: Model, rate: float) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        for group in groups:
            group["peak"] = rate
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), eps=1e-9, fused=self.device.type == "cuda")

    def train_step(self, ids: Tensor, learned: Tensor) -> tuple[Tensor, Tensor]:
        rate = self.settings.rate_at(self.step)
        imitation = torch.tensor(min(0.9, 1.5 * self.step / self.settings.steps), device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            tiny_loss, draft_objective, draft_loss = self._losses(self.tiny, self.draft, ids, learned, imitation)
        (tiny_loss + draft_objective).backward()
        for model, optimizer in zip((self.tiny, self.draft), self._optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return tiny_loss.detach(), draft_loss.detach()

    def state(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "step": self.step,
            "history": asdict(self.history),
            "models": [self.tiny.state_dict(), self.draft.state_dict()],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where that state was taken. ValueError if it belongs to a run with other settings."""
        if state["settings"] != asdict(self.settings):
            raise ValueError("The saved state belongs to a run with other settings: give them again, or remove it.")
        self.step = state["step"]
        self.history = History(**state["history"])
        for model, saved in zip((self.tiny, self.draft), state["models"], strict=True):
            model.load_state_dict(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def shard_tasks(settings: Settings, first_step: int) -> Iterator[ShardTask]:
    """All shards from `first_step` on. A shard's index does not depend on where a run was resumed."""
    for step in range(first_step, settings.steps):
        rows, row_tokens = settings.shape_of(step)
        for part in range(math.ceil(rows / ROWS_PER_SHARD)):
            yield ShardTask(settings.seed, step * 1000 + part, row_tokens)


def batches(
    settings: Settings, folder: Path, first_step: int, workers: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    with contextlib.closing(stream_shards(folder, shard_tasks(settings, first_step), workers)) as shards:
        for step in range(first_step, settings.steps):
            rows, _ = settings.shape_of(step)
            parts = list(itertools.islice(shards, math.ceil(rows / ROWS_PER_SHARD)))
            ids = torch.from_numpy(np.concatenate([part.ids for part in parts])[:rows].astype(np.int32))
            learned = torch.from_numpy(np.concatenate([part.learned for part in parts])[:rows])
            yield ids.to(device, non_blocking=True).long(), learned.to(device, non_blocking=True)


class Progress:
    """One line that is written over again on a terminal, or a line now and then elsewhere."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._began, self._began_at = time.perf_counter(), trainer.step
        self._previous = self._began

    def show(self, tiny: float, draft: float) -> None:
        trainer, now = self._trainer, time.perf_counter()
        trainer.history.seconds += now - self._previous
        self._previous = now
        rate = (now - self._began) / max(1, trainer.step - self._began_at)
        steps, tokens = trainer.settings.steps, trainer.settings.rows * trainer.settings.row_tokens
        width = 24 * trainer.step // steps
        line = (
            f"[{'#' * width}{'.' * (24 - width)}] {trainer.step}/{steps}  tiny {tiny:.4f}  draft {draft:.4f}  "
            f"{tokens / rate / 1e6:.2f} Mtok/s  {(steps - trainer.step) * rate:.0f} s left"
        )
        on_terminal = sys.stderr.isatty()
        print(
            f"\r{line}" if on_terminal else line,
            end="" if on_terminal and trainer.step < steps else "\n",
            file=sys.stderr,
            flush=True,
        )


def train(
    settings: Settings, work: Path, device: torch.device, workers: int, compiled: bool, save_every: int
) -> Trainer:
    """Train to the end with the tokenizer in `work`, from the state there if there is one."""
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(settings, device, compiled)
    state_file = work / STATE
    if state_file.is_file():
        trainer.load_state(torch.load(state_file, map_location=device, weights_only=True))
    progress = Progress(trainer)
    window: list[tuple[Tensor, Tensor]] = []
    interval = max(1, min(25, settings.steps // 20))
    for ids, learned in batches(settings, work, trainer.step, workers, device):
        window.append(trainer.train_step(ids, learned))
        if trainer.step % interval == 0 or trainer.step == settings.steps:
            tiny, draft = (float(torch.stack(values).mean()) for values in zip(*window, strict=True))
            window.clear()
            trainer.history.tiny.append((trainer.step, round(tiny, 6)))
            trainer.history.draft.append((trainer.step, round(draft, 6)))
            progress.show(tiny, draft)
        if trainer.step % save_every == 0 and trainer.step < settings.steps:
            torch.save(trainer.state(), state_file.with_suffix(".new"))
            os.replace(state_file.with_suffix(".new"), state_file)
    return trainer


def export(trainer: Trainer, work: Path, out: Path, results: Path) -> None:
    """Both checkpoints into `out`; settings, losses and their plot into `results`."""
    tokenizer = load_tokenizer(work)
    for name, model in (("tiny", trainer.tiny), ("tiny-draft", trainer.draft)):
        save_checkpoint(model, out / name, token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, END))
        save_tokenizer(tokenizer, out / name)
    results.mkdir(parents=True, exist_ok=True)
    report = {
        "settings": asdict(trainer.settings),
        "parameters": {"tiny": trainer.tiny.num_parameters, "tiny-draft": trainer.draft.num_parameters},
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": round(trainer.history.seconds, 1),
        "loss": {"tiny": trainer.history.tiny, "tiny-draft": trainer.history.draft},
    }
    (results / "training.json").write_text(json.dumps(report) + "\n", "utf-8")
    curves = {"tiny": trainer.history.tiny, "tiny-draft": trainer.history.draft}
    (results / "loss.svg").write_text(loss_svg(curves, "Loss of the assistant's tokens"), "utf-8")


def main(argv: list[str] | None = None) -> None:
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "srt/assets/models", help="where the checkpoints go")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where losses and plot go")
    parser.add_argument(
        "--work", type=Path, default=REPOSITORY / ".cache/tiny", help="tokenizer and state, to resume from"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that make text"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--save-every", type=int, default=500, help="steps between two saved states")
    for name, value in asdict(default).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args(argv)
    settings = Settings(**{name: getattr(args, name) for name in asdict(default)})
    if not (args.work / STATE).is_file():
        texts = itertools.islice(draw_texts(TOKENIZER_SEED), TOKENIZER_TEXTS)
        save_tokenizer(train_tokenizer(texts), args.work)
    trainer = train(settings, args.work, torch.device(args.device), args.workers, args.compile, args.save_every)
    export(trainer, args.work, args.out, args.results)
    (args.work / STATE).unlink(missing_ok=True)


if __name__ == "__main__":
    main()

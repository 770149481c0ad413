"""Train tiny by rewards, against a server in this process' children: `python -m recipes.grpo_tiny [--steps 40] [--seed 0]`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from recipes.grpo_tiny.train import History, Settings, train
from recipes.tiny.plot import share_svg

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the plot and the figures")
    options = parser.parse_args()
    settings = Settings(seed=options.seed, steps=options.steps)
    history = train(settings, show)
    before, after = history.held_out
    print(f"held-out questions: {before:.3f} right before, {after:.3f} after; {history.seconds:.0f} s")
    options.results.mkdir(parents=True, exist_ok=True)
    report = {"settings": asdict(settings), **asdict(history)}
    (options.results / "training.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    curve = list(enumerate(history.rewards))
    plot = share_svg({f"reward of a step's {settings.questions * settings.group} answers": curve}, "Mean reward")
    (options.results / "reward.svg").write_text(plot, "utf-8")


def show(step: int, history: History) -> None:
    gap = history.logprob_gaps[-1]
    print(
        f"step {step:3}  reward {history.rewards[-1]:.3f}  logprob gap {gap:.1e}  {history.seconds:6.1f} s", flush=True
    )


if __name__ == "__main__":
    main()

"""Run simulated worlds, one a seed:   python -m tests.scheduler.simulate --seed 7   or   --seeds 1000 [--from 0]."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.scheduler.world import World


def run_worlds(seeds: range) -> Counter[str]:
    """What happened in all of them; AssertionError with the seed for the first that breaks a promise."""
    statistics: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(
                f"World {seed} broke: {error}\n{world.settings}\n"
                f"Replay it with: python -m tests.scheduler.simulate --seed {seed}"
            ) from error
        statistics += world.statistics
    return statistics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run this world only")
    parser.add_argument("--seeds", type=int, default=100, help="how many worlds")
    parser.add_argument("--from", type=int, default=0, dest="first", help="seed of the first")
    options = parser.parse_args()
    seeds = (
        range(options.seed, options.seed + 1)
        if options.seed is not None
        else range(options.first, options.first + options.seeds)
    )
    started = time.perf_counter()
    try:
        statistics = run_worlds(seeds)
    except AssertionError:
        traceback.print_exc()
        return 1
    seconds = time.perf_counter() - started
    for name, number in sorted(statistics.items()):
        print(f"{name:24} {number:>10}")
    print(f"{len(seeds)} worlds in {seconds:.1f} s, {statistics['num_steps'] / seconds:.0f} steps/s: nothing broken")
    return 0


if __name__ == "__main__":
    sys.exit(main())

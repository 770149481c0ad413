"""Run simulated worlds, one a seed, and say what happened in them.

python -m tests.scheduler.simulate --seeds 1000 [--from 0]          so many worlds
python -m tests.scheduler.simulate --steps 10000000 [--jobs 16] [--resume FILE]
                                                                    worlds until so many steps; FILE keeps what was done
python -m tests.scheduler.simulate --seed 7                         one world: this is how a failure is replayed

Worlds from 1,000,000 on have several page groups. With --steps, one of them runs beside every five others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.scheduler.rules import LEAST_PER_MILLION, PREFIX, RULES
from tests.scheduler.windowed import FIRST_WINDOWED
from tests.scheduler.world import World

MOST_ROWS = 1024
PER_MILLION = ("preemptions", "num_evicted_pages", "deaths", "crossing aborts", "prefix hits")
SAVE_EVERY = 5  # worlds
TELL_EVERY_S = 30.0


@dataclass(slots=True)
class Tally:
    """What happened in the worlds from `first` up to `next_seed`."""

    first: int = 0
    next_seed: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    statistics: Counter[str] = field(default_factory=Counter)
    steps_by_rows: list[int] = field(default_factory=lambda: [0] * MOST_ROWS)  # of worlds without a theme or a poison

    @property
    def num_steps(self) -> int:
        return self.statistics["steps"]

    def add(self, world: World) -> None:
        self.statistics.update(world.statistics)
        # Worlds that are alike are small, so that what they are about happens often; where workers die of requests, these run alone.
        if not (world.settings.is_alike or world.settings.num_poisons):
            counts = np.bincount(world.rows_per_step, minlength=MOST_ROWS)
            self.steps_by_rows = (counts + self.steps_by_rows).tolist()

    def merge(self, other: Tally) -> None:
        """What happened in the worlds that come next."""
        assert other.first == self.next_seed, f"worlds {other.first} do not follow {self.next_seed}"
        self.next_seed = other.next_seed
        self.cpu_s += other.cpu_s
        self.statistics.update(other.statistics)
        self.steps_by_rows = [a + b for a, b in zip(self.steps_by_rows, other.steps_by_rows, strict=True)]

    def save(self, file: Path) -> None:
        draft = file.with_suffix(".tmp")
        draft.write_text(json.dumps({name: getattr(self, name) for name in Tally.__slots__}))
        draft.replace(file)

    @classmethod
    def load(cls, file: Path) -> Tally:
        fields = json.loads(file.read_text())
        return cls(**{**fields, "statistics": Counter(fields["statistics"])})

    def rows_quantile(self, share: float) -> int:
        """So many rows had the step that this share of the steps did not exceed, in worlds without a theme."""
        return int(np.searchsorted(np.cumsum(self.steps_by_rows), share * sum(self.steps_by_rows)))

    def share_with_rows(self, rows: int) -> float:
        return sum(self.steps_by_rows[rows:]) / max(sum(self.steps_by_rows), 1)

    def per_million(self, name: str) -> float:
        return self.statistics[name] * 1e6 / max(self.num_steps, 1)

    def report(self) -> str:
        lines = [f"{name:22} {number:>12,}" for name, number in sorted(self.statistics.items()) if PREFIX not in name]
        lines += [f"{name:22} {self.per_million(name):>12,.0f} per million steps" for name in PER_MILLION]
        lines += self._lines_of_rules()
        lines.append(
            f"running rows in worlds without a theme: median {self.rows_quantile(0.5)},"
            f" {self.share_with_rows(64):.1%} of the steps have at least 64"
        )
        lines.append(
            f"{self.num_steps:,} steps ({self.statistics['events']:,} events) in worlds {self.first} to {self.next_seed - 1}:"
            f" {self.wall_s:.1f} s, {self.num_steps / max(self.wall_s, 1e-9):,.0f} steps/s;"
            f" {self.cpu_s:.1f} s of CPU, {self.num_steps / max(self.cpu_s, 1e-9):,.0f} steps/s. Nothing broke."
        )
        return "\n".join(lines)

    def unknown_rules(self) -> list[str]:
        """Counted, but not named in rules.py."""
        return sorted({name for name in self.statistics if name.startswith(PREFIX)} - {PREFIX + name for name in RULES})

    def rare_rules(self) -> dict[str, float]:
        """Those that had too little to judge, and how often they had something, per million steps."""
        counts = {name: self.per_million(PREFIX + name) for name in RULES}
        return {name: count for name, count in counts.items() if count < LEAST_PER_MILLION}

    def _lines_of_rules(self) -> list[str]:
        rare = self.rare_rules()
        counts = sorted((self.per_million(PREFIX + name), name) for name in RULES)
        lines = [f"{name:50} {count:>12,.0f}{'  RARE' if name in rare else ''}" for count, name in counts]
        return ["rules: how often each had something to judge, per million steps", *lines]


def run_worlds(
    seeds: Iterable[int], tally: Tally | None = None, *, check_every: int = 16, is_beside: bool = False
) -> Tally:
    """What happened in all of them. AssertionError names the seed that breaks a promise.

    Worlds that run beside those of the tally do not count in its order.
    """
    tally = tally or Tally()
    for seed in seeds:
        cpu, wall = time.process_time(), time.perf_counter()
        world = World(seed, check_every=check_every)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(
                f"World {seed} broke at {world.now:.3f} s: {type(error).__name__}: {error}\n{world.settings}\n"
                f"Replay it with: python -m tests.scheduler.simulate --seed {seed}"
            ) from error
        tally.add(world)
        tally.next_seed += not is_beside
        tally.cpu_s += time.process_time() - cpu
        tally.wall_s += time.perf_counter() - wall
    return tally


def soak(tally: Tally, steps: int, file: Path | None = None, *, jobs: int = 1, tell: bool = False) -> None:
    """Go on with these worlds until there were so many steps; the file keeps up.

    Several processes take the next worlds in turn. Worlds are counted in order, so the file says which are done, and any number of
    processes may go on from there. AssertionError names the seed that breaks a promise.
    """
    if tally.num_steps >= steps:
        return
    told, before = time.perf_counter(), tally.wall_s - time.perf_counter()
    with closing(_tallies(tally.next_seed, jobs)) as tallies:
        for some in tallies:
            tally.merge(some)
            tally.wall_s = before + time.perf_counter()
            if file is not None:
                tally.save(file)
            if tally.num_steps >= steps:
                return
            if tell and time.perf_counter() - told > TELL_EVERY_S:
                told = time.perf_counter()
                print(f"{tally.num_steps:,} steps, {tally.num_steps / tally.wall_s:,.0f} a second", flush=True)


def _tallies(first: int, jobs: int) -> Generator[Tally, None, None]:
    """Of the worlds from this one on, some at a time, for ever."""
    firsts = itertools.count(first, SAVE_EVERY)
    if jobs == 1:
        yield from map(_some_worlds, firsts)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        ahead = deque(pool.submit(_some_worlds, next(firsts)) for _ in range(2 * jobs))
        try:
            while True:
                yield ahead.popleft().result()
                ahead.append(pool.submit(_some_worlds, next(firsts)))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _some_worlds(first: int) -> Tally:
    tally = run_worlds(range(first, first + SAVE_EVERY), Tally(first, first))
    return tally if first >= FIRST_WINDOWED else run_worlds([FIRST_WINDOWED + first], tally, is_beside=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, help="run this world only")
    what.add_argument("--seeds", type=int, default=100, help="how many worlds")
    what.add_argument("--steps", type=int, help="run worlds until they have so many steps in all")
    parser.add_argument("--from", type=int, default=0, dest="first", help="seed of the first")
    parser.add_argument(
        "--resume", type=Path, help="with --steps: go on behind the worlds that this file tells of, and keep it"
    )
    parser.add_argument("--jobs", type=int, default=1, help="with --steps: so many processes")
    options = parser.parse_args()
    tally = Tally(options.first, options.first)
    try:
        if options.seed is not None:
            tally = run_worlds([options.seed], Tally(options.seed, options.seed))
        elif options.steps is not None:
            tally = Tally.load(options.resume) if options.resume and options.resume.exists() else tally
            soak(tally, options.steps, options.resume, jobs=options.jobs, tell=True)
        else:
            run_worlds(range(options.first, options.first + options.seeds), tally)
    except AssertionError:
        traceback.print_exc()
        return 1
    print(tally.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())

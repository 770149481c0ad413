"""Plant each bug of the lists in a copy of the package, and say which simulated world finds it first.

python -m tests.scheduler.plant [NAME ...] [--jobs 2]     all bugs, or those whose names contain one of these texts

`first_worlds.json` keeps the answers, so that a test need not run all worlds before that one. It is written anew here after the worlds
were changed; a test whose world finds nothing any more looks through all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from srt.utils.compiled import SWITCH
from tests.scheduler.control_mutations import CONTROL_MUTATIONS
from tests.scheduler.frontend_mutations import FRONTEND_MUTATIONS
from tests.scheduler.mutations import MORE_MUTATIONS, MUTATIONS, PACKAGE, Mutation
from tests.scheduler.resource_mutations import RESOURCE_MUTATIONS

SIMULATED = (*MUTATIONS, *MORE_MUTATIONS, *CONTROL_MUTATIONS, *FRONTEND_MUTATIONS, *RESOURCE_MUTATIONS)
MOST_WORLDS = 300
FIRST_WORLDS = Path(__file__).with_name("first_worlds.json")


def first_worlds() -> dict[str, int]:
    """The world that found each bug when all were last looked for, by the bug's name."""
    worlds: dict[str, int] = json.loads(FIRST_WORLDS.read_text())
    return worlds


def find(mutation: Mutation, folder: Path, worlds: range = range(MOST_WORLDS)) -> tuple[int | None, str]:
    """Plant the bug in this empty folder. Return the first of these worlds that breaks, or None, and what was printed."""
    mutation.plant(folder)
    return look(folder, worlds)


def look(folder: Path, worlds: range) -> tuple[int | None, str]:
    """Run these worlds with the package in this folder. Return the first that breaks, or None, and what was printed."""
    run = f"sys.argv[1:] = ['--from', '{worlds.start}', '--seeds', '{len(worlds)}']; sys.exit(main())"
    output = run_with(folder, "from tests.scheduler.simulate import main", run)
    found = re.search(r"World (\d+) broke.*", output)
    return (int(found[1]) if found else None), output


def run_with(folder: Path, *lines: str) -> str:
    """Run these lines of Python with the package in this folder. Return what is printed."""
    environment = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{PACKAGE.parent}",
        "PYTHONDONTWRITEBYTECODE": "1",
        SWITCH: "0",
    }
    program = "; ".join(["import sys, srt", lines[0], "print(srt.__file__, file=sys.stderr)", *lines[1:]])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert str(folder) in done.stderr, f"another package was simulated:\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr


def _find_in_folder_of_its_own(mutation: Mutation) -> int | None:
    with tempfile.TemporaryDirectory() as folder:
        return find(mutation, Path(folder))[0]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="texts that the names of the bugs contain; all bugs if there are none")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    options = parser.parse_args(words)
    wanted = [m for m in SIMULATED if not options.names or any(text in m.name for text in options.names)]
    known, lost = first_worlds(), 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutation, world in zip(wanted, pool.map(_find_in_folder_of_its_own, wanted), strict=True):
            print(f"{mutation.name}: {'not found' if world is None else f'world {world}'}", flush=True)
            known.pop(mutation.name, None)
            if world is None:
                lost += 1
            else:
                known[mutation.name] = world
            kept = {m.name: known[m.name] for m in SIMULATED if m.name in known}
            FIRST_WORLDS.write_text(json.dumps(kept, indent=0) + "\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())

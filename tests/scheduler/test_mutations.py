"""A simulation that finds nothing proves something only if it would find what is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from srt.utils.compiled import SWITCH
from tests.scheduler.mutations import MORE_MUTATIONS, MUTATIONS, PACKAGE, Mutation

MOST_SEEDS = 60


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_planted_bug_is_found_within_60_worlds(mutation: Mutation, tmp_path: Path) -> None:
    find(mutation, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("mutation", MORE_MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_another_planted_bug_is_found_within_60_worlds(mutation: Mutation, tmp_path: Path) -> None:
    find(mutation, tmp_path)


def find(mutation: Mutation, tmp_path: Path) -> None:
    mutation.plant(tmp_path)
    output = _simulate(tmp_path)
    found = re.search(r"World (\d+) broke.*", output)
    assert found, f"nothing was found in {MOST_SEEDS} worlds:\n{output[-2000:]}"
    print(f"\n{mutation.name}: {found.group(0)}")


def test_every_bug_can_still_be_planted() -> None:
    for mutation in (*MUTATIONS, *MORE_MUTATIONS):
        compile(mutation.text(), mutation.file, "exec")


def test_a_bug_is_planted_without_what_was_built_before_it(tmp_path: Path) -> None:
    MUTATIONS[0].plant(tmp_path)
    assert not [*(tmp_path / "srt").rglob("*.so"), *(tmp_path / "srt/compiled").glob("*")]


def _simulate(folder: Path) -> str:
    """With the package in this folder, at the default settings."""
    environment = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{PACKAGE.parent}",
        "PYTHONDONTWRITEBYTECODE": "1",
        SWITCH: "0",
    }
    program = "import sys, srt; from tests.scheduler.simulate import main; print(srt.__file__, file=sys.stderr); sys.exit(main())"
    command = [sys.executable, "-c", program, "--seeds", str(MOST_SEEDS)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert str(folder) in done.stderr, f"another package was simulated:\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr

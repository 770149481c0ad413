"""A simulation that finds nothing proves something only if it would find what is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from srt.utils.compiled import SWITCH
from tests.scheduler.control_mutations import CONTROL_MUTATIONS
from tests.scheduler.frontend_mutations import FRONTEND_MUTATIONS
from tests.scheduler.mutations import MORE_MUTATIONS, MUTATIONS, PACKAGE, REPLACEMENT_MUTATIONS, Mutation
from tests.scheduler.resource_mutations import RESOURCE_MUTATIONS

MOST_SEEDS = 120  # luck with the first ones must not decide
FEW_SEEDS = 60


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_planted_bug_is_found_within_120_worlds(mutation: Mutation, tmp_path: Path) -> None:
    find(mutation, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("mutation", MORE_MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_another_planted_bug_is_found_within_120_worlds(mutation: Mutation, tmp_path: Path) -> None:
    find(mutation, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("mutation", CONTROL_MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_bug_in_control_calls_is_found_within_60_worlds(mutation: Mutation, tmp_path: Path) -> None:
    find(mutation, tmp_path, FEW_SEEDS)


@pytest.mark.full
@pytest.mark.parametrize("mutation", RESOURCE_MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_bug_in_how_resources_are_prepared_is_found_within_60_worlds(mutation: Mutation, tmp_path: Path) -> None:
    find(mutation, tmp_path, FEW_SEEDS)


@pytest.mark.full
@pytest.mark.parametrize("mutation", FRONTEND_MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_bug_in_a_host_process_is_found_within_60_worlds(mutation: Mutation, tmp_path: Path) -> None:
    find(mutation, tmp_path, FEW_SEEDS)


@pytest.mark.parametrize("mutation", REPLACEMENT_MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_bug_in_what_is_replaced_is_found_by_stories(mutation: Mutation, tmp_path: Path) -> None:
    mutation.plant(tmp_path)
    output = _run(tmp_path, "from tests.scheduler.test_replacements import tell_all", "tell_all()")
    found = re.search(r"story \d+ at .*", output)
    assert found, f"nothing was found in all stories:\n{output[-2000:]}"
    print(f"\n{mutation.name}: {found.group(0)}")


def find(mutation: Mutation, tmp_path: Path, most: int = MOST_SEEDS) -> None:
    mutation.plant(tmp_path)
    output = _simulate(tmp_path, most)
    found = re.search(r"World (\d+) broke.*", output)
    assert found, f"nothing was found in {most} worlds:\n{output[-2000:]}"
    print(f"\n{mutation.name}: {found.group(0)}")


def test_every_bug_can_still_be_planted() -> None:
    planted = (*MUTATIONS, *MORE_MUTATIONS, *CONTROL_MUTATIONS, *FRONTEND_MUTATIONS, *RESOURCE_MUTATIONS)
    for mutation in (*planted, *REPLACEMENT_MUTATIONS):
        compile(mutation.text(), mutation.file, "exec")


def test_a_bug_is_planted_without_what_was_built_before_it(tmp_path: Path) -> None:
    MUTATIONS[0].plant(tmp_path)
    assert not [*(tmp_path / "srt").rglob("*.so"), *(tmp_path / "srt/compiled").glob("*")]


def _simulate(folder: Path, most: int) -> str:
    """At the default settings."""
    run = f"sys.argv[1:] = ['--seeds', '{most}']; sys.exit(main())"
    return _run(folder, "from tests.scheduler.simulate import main", run)


def _run(folder: Path, *lines: str) -> str:
    """With the package in this folder; what is printed."""
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

"""A simulation that finds nothing proves something only if it would find what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scheduler.control_mutations import CONTROL_MUTATIONS
from tests.scheduler.engine_work_mutations import ENGINE_WORK_MUTATIONS
from tests.scheduler.frontend_mutations import FRONTEND_MUTATIONS
from tests.scheduler.mutations import MORE_MUTATIONS, MUTATIONS, REPLACEMENT_MUTATIONS, Mutation
from tests.scheduler.plant import MOST_WORLDS, SIMULATED, find, first_worlds, look, run_with
from tests.scheduler.resource_mutations import RESOURCE_MUTATIONS
from tests.scheduler.window_mutations import WINDOW_MUTATIONS

MORE = (*MORE_MUTATIONS, *CONTROL_MUTATIONS, *FRONTEND_MUTATIONS, *RESOURCE_MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_planted_bug_is_found_by_a_world(mutation: Mutation, tmp_path: Path) -> None:
    check_found(mutation, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("mutation", MORE, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_another_planted_bug_is_found_by_a_world(mutation: Mutation, tmp_path: Path) -> None:
    check_found(mutation, tmp_path)


@pytest.mark.parametrize("mutation", REPLACEMENT_MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_bug_in_what_is_replaced_is_found_by_stories(mutation: Mutation, tmp_path: Path) -> None:
    mutation.plant(tmp_path)
    output = run_with(tmp_path, "from tests.scheduler.test_replacements import tell_all", "tell_all()")
    found = re.search(r"story \d+ at .*", output)
    assert found, f"nothing was found in all stories:\n{output[-2000:]}"
    print(f"\n{mutation.name}: {found.group(0)}")


@pytest.mark.parametrize("mutation", ENGINE_WORK_MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_bug_in_updates_and_loans_is_found_by_worlds_of_them(mutation: Mutation, tmp_path: Path) -> None:
    mutation.plant(tmp_path)
    output = run_with(tmp_path, "from tests.scheduler.engine_work import tell_all", "tell_all()")
    found = re.search(r"world \d+ of engine work broke.*", output)
    assert found, f"nothing was found in all worlds:\n{output[-2000:]}"
    print(f"\n{mutation.name}: {found.group(0)}")


def check_found(mutation: Mutation, folder: Path) -> None:
    """The world that found it last is tried alone first: worlds know nothing of each other."""
    last = first_worlds().get(mutation.name, 0)
    assert last < MOST_WORLDS
    world, output = find(mutation, folder, range(last, last + 1))
    if world is None:
        world, output = look(folder, range(MOST_WORLDS))
    assert world is not None, f"nothing was found in {MOST_WORLDS} worlds:\n{output[-2000:]}"
    print(f"\n{mutation.name}: found by world {world}")


def test_every_bug_can_still_be_planted() -> None:
    for mutation in (*SIMULATED, *REPLACEMENT_MUTATIONS, *WINDOW_MUTATIONS, *ENGINE_WORK_MUTATIONS):
        compile(mutation.text(), mutation.file, "exec")


def test_names_of_bugs_are_unique_and_those_of_first_worlds() -> None:
    names = [mutation.name for mutation in SIMULATED]
    assert len(set(names)) == len(names)
    assert set(first_worlds()) <= set(names), "first_worlds.json knows bugs that are not there any more"


def test_a_bug_is_planted_without_what_was_built_before_it(tmp_path: Path) -> None:
    MUTATIONS[0].plant(tmp_path)
    assert not [*(tmp_path / "srt").rglob("*.so"), *(tmp_path / "srt/compiled").glob("*")]

"""Which requests a name means."""

from __future__ import annotations

import pytest

from srt.protocol.labels import is_named, numbered


def test_the_name_of_a_batch_means_each_of_its_prompts() -> None:
    assert numbered("mine", 3) == ["mine_0", "mine_1", "mine_2"]
    assert all(is_named(label, "mine") for label in (*numbered("mine", 12), "mine"))


@pytest.mark.parametrize("label", ["mine2", "mine_", "mine_a", "mine_1_x", "min", "Mine", "a_mine_1"])
def test_a_name_that_only_begins_alike_means_another(label: str) -> None:
    assert not is_named(label, "mine")


def test_one_prompt_of_a_batch_has_a_name_of_its_own() -> None:
    assert [is_named(label, "mine_1") for label in ("mine_0", "mine_1", "mine_10", "mine")] == [
        False,
        True,
        False,
        False,
    ]


def test_the_empty_name_means_all() -> None:
    assert is_named("whatever", "")

"""What all tests share. Fixtures and helpers with more than one user live here and in tests/support."""

from __future__ import annotations

import os

# Before torch is imported anywhere: its threads would fight over the two cores that tests may have, and over those of
# the processes that tests start. Nothing may reach for the hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest

from tests.support.checkpoints import CheckpointFactory


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """`checkpoint("llama", tied=False) -> Path`: a random checkpoint, written once per session and never changed.

    The keywords are the fields of `srt.model_loader.random_checkpoint.CheckpointSpec`.
    A test that alters a checkpoint copies it first.
    """
    return CheckpointFactory(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def qwen3_checkpoint(checkpoint: CheckpointFactory) -> Path:
    """The checkpoint for tests to which the family does not matter."""
    return checkpoint("qwen3")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--share 1/4` keeps the second quarter of the tests that are marked `full`, and every other test."""
    parser.addoption("--share", metavar="I/N", help="of the tests marked full, run only share I (from 0) of N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other shares. Neighbours, which are alike, fall into different shares."""
    option: str | None = config.getoption("--share")
    if option is None:
        return
    share, num_shares = (int(part) for part in option.split("/"))
    if not 0 <= share < num_shares:
        raise pytest.UsageError(f"--share counts from 0 and ends before the number of shares: {option}")
    full = [item for item in items if item.get_closest_marker("full")]
    others = {item.nodeid for index, item in enumerate(full) if index % num_shares != share}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
    items[:] = [item for item in items if item.nodeid not in others]

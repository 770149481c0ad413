"""What all tests share. Fixtures and helpers with more than one user live here and in tests/support."""

from __future__ import annotations

import os
import signal

# Before torch is imported anywhere: its threads would fight over the two cores that tests may have, and over those of
# the processes that tests start. Nothing may reach for the hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# The sources as they are; that their compiled form is the same has tests of its own.
os.environ.setdefault("SRT_COMPILED", "0")

from pathlib import Path

import pytest

from tests.support.checkpoints import CheckpointFactory

# Where a shell's background job runs the tests it ignores Ctrl-C, and so would every program that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# They run in environments of their own, by `make clients`.
collect_ignore = ["clients"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """`checkpoint("llama", tied=False) -> Path`: a random checkpoint, written once per session and never changed.

    The keywords are the fields of `tests.support.random_checkpoint.CheckpointSpec`.
    A test that alters a checkpoint copies it first.
    """
    return CheckpointFactory(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def qwen3_checkpoint(checkpoint: CheckpointFactory) -> Path:
    """The checkpoint for tests to which the family does not matter."""
    return checkpoint("qwen3")

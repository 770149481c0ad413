"""The environment of the Makefile shares the host's packages only where that spares the install of PyTorch."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from scripts.create_venv import host_torch_is_in_range


@pytest.mark.parametrize(
    ("version", "shared"),
    [("2.10.1", False), ("2.11.0+cu130", True), ("2.13.0", True), ("2.14.0", False), ("3.0", False)],
)
def test_a_host_torch_is_shared_when_setup_py_would_keep_it(
    monkeypatch: pytest.MonkeyPatch, version: str, shared: bool
) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert host_torch_is_in_range() is shared


def test_a_host_without_torch_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert not host_torch_is_in_range()


def test_the_torch_of_a_virtual_environment_is_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix + "/elsewhere")
    assert not host_torch_is_in_range()

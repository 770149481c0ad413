"""Fixtures for tests of kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compile_cpu_kernels import compile_library
from srt.kernels.build import cpu_library


@pytest.fixture(scope="session")
def cpu_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that an installation has built of these sources, or else one that is built now."""
    path = cpu_library.built_library()
    if not path.is_file():
        path = tmp_path_factory.mktemp("compiled") / cpu_library.NAME
        compile_library(path)
    return path

"""CUDA C++ sources use no language feature that NVRTC 13.0 refuses. Here kernels are compiled by a newer NVRTC, which accepts more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "srt" / "kernels"
FILES = sorted(file for kind in ("*.cu", "*.cuh") for file in KERNELS.rglob(kind))
GENERIC_LAMBDA = re.compile(r"\[[&=\w, ]*\]\s*\([^)]*\bauto\b")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_lambda_has_a_parameter_of_any_type(file: Path) -> None:
    """NVRTC 13.0 takes such a lambda within a kernel for a function of the host. Later ones compile it."""
    assert not GENERIC_LAMBDA.search(file.read_text("utf-8"))


def test_such_a_lambda_would_be_noticed() -> None:
    assert GENERIC_LAMBDA.search("auto process = [&](auto how_many) {")
    assert GENERIC_LAMBDA.search("for_each(parts, [&, i](int n, const auto& part) {")
    assert not GENERIC_LAMBDA.search("auto row_of = [&](int item) {")

"""Every kernel against its plain PyTorch reference, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.kernels.interpreted import run_interpreted

SCRIPTS = sorted(Path(__file__).parent.glob("interpreted_*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem.removeprefix("interpreted_"))
def test_kernel_equals_its_reference(script: Path) -> None:
    run_interpreted(script)

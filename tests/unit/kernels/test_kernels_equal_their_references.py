"""Every kernel against its plain PyTorch reference, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.kernels.interpreted import run_interpreted

SCRIPTS = sorted(Path(__file__).parent.glob("interpreted_*.py"))
SLOW = (
    *"adjust_logits decode_attention even_attention experts extend_attention filter fused_decode".split(),
    *"layers lora sample shared_prefix verify_rows".split(),
)


def name_of(script: Path) -> str:
    return script.stem.removeprefix("interpreted_")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=name_of(script), marks=[pytest.mark.full] if name_of(script) in SLOW else [])
        for script in SCRIPTS
    ],
)
def test_kernel_equals_its_reference(script: Path) -> None:
    run_interpreted(script)

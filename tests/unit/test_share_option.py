"""`pytest --share I/N` spreads the tests marked `full` over several runs, and loses none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent

WORLD = """
import pytest

@pytest.mark.full
@pytest.mark.parametrize("case", range(7))
def test_full(case: int) -> None: ...

def test_always() -> None: ...
"""


def _names_selected(world: Path, share: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", str(world), "-m", "not gpu", "--share", share, "--collect-only", "-q"]
    command += ["-p", "tests.conftest", "-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(world)]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"::(\S+)", done.stdout))


def test_every_share_has_the_ordinary_tests_and_together_they_have_each_full_test_once(tmp_path: Path) -> None:
    (tmp_path / "test_world.py").write_text(WORLD)
    first, second = (_names_selected(tmp_path, f"{share}/2") for share in range(2))
    assert first & second == {"test_always"}
    assert first | second == {"test_always", *(f"test_full[{case}]" for case in range(7))}

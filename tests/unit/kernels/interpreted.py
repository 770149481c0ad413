"""Runs a file of tests in Triton's interpreter, in a process of its own.

The interpreter must be asked for before Triton is first imported, and then it holds for the whole process: the other
tests of a run would no longer meet the compiler. So those files are named `interpreted_*.py`, which pytest does not
collect, and a test of an ordinary file runs each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(file: Path) -> None:
    """Fails with pytest's own output if a test of `file` fails, is skipped, or if there is none."""
    assert file.is_file(), file
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout

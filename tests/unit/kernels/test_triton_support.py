"""Where Triton cannot run, the user is told so in a sentence that names the option."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from srt.kernels.build.triton_support import require_triton, why_triton_cannot_run
from srt.utils.errors import StartError


def test_a_cpu_without_the_interpreter_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(StartError, match="--attention-backend triton needs a CUDA device"):
        require_triton("cpu")


def test_a_cpu_with_the_interpreter_and_a_cuda_device_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    require_triton("cpu")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert why_triton_cannot_run("cuda") is None


def test_another_kind_of_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = why_triton_cannot_run("mps")
    assert reason is not None
    assert "'mps'" in reason


def test_a_host_without_triton_is_told_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = why_triton_cannot_run("cuda")
    assert reason is not None
    assert "not installed" in reason


def test_references_and_support_do_not_import_triton() -> None:
    code = "import sys, tests.support.attention_reference, srt.kernels.build.triton_support; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

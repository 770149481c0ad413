"""Where compiled Python lies when Python itself would keep none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from srt.utils.bytecode import bytecode_environment

NAME = "a_heavy_package"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that was installed and not compiled."""
    source = tmp_path / "site" / NAME / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return source


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"HOME": str(tmp_path), "SRT_CACHE_DIR": str(tmp_path / "caches"), **more}


def test_where_python_keeps_none_the_next_process_finds_what_the_last_compiled(source: Path, tmp_path: Path) -> None:
    given = environment(tmp_path, PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(source.parents[1]))
    moved = bytecode_environment(given, NAME)
    folder = tmp_path / "caches" / "bytecode"
    assert moved == {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", f"import {NAME} as it; print(it.__cached__)"]
    said = subprocess.run(command, env=given | moved, capture_output=True, text=True, check=True).stdout
    assert Path(said.strip()).is_relative_to(folder)
    assert Path(said.strip()).is_file()
    assert not Path(cache_from_source(str(source))).exists()


def test_what_an_installation_has_compiled_is_used(source: Path, tmp_path: Path) -> None:
    compiled = Path(cache_from_source(str(source)))
    compiled.parent.mkdir()
    compiled.touch()
    assert bytecode_environment(environment(tmp_path, PYTHONDONTWRITEBYTECODE="1"), NAME) == {}


def test_python_writes_it_where_it_may(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytecode_environment(environment(tmp_path, PYTHONDONTWRITEBYTECODE=""), NAME) == {}
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(source.parent))
    assert bytecode_environment(environment(tmp_path), NAME).keys() == {
        "PYTHONPYCACHEPREFIX",
        "PYTHONDONTWRITEBYTECODE",
    }


def test_what_the_user_has_moved_stays(source: Path, tmp_path: Path) -> None:
    given = environment(tmp_path, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX="/elsewhere")
    assert bytecode_environment(given, NAME) == {}


def test_a_package_that_is_not_there_needs_nothing(tmp_path: Path) -> None:
    assert bytecode_environment(environment(tmp_path, PYTHONDONTWRITEBYTECODE="1"), "no_such_package") == {}

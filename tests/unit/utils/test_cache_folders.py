"""Where caches go when the home cannot be written, or when they were moved."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from srt.utils.cache_folders import FOLDERS, cache_environment, own_folder
from srt.utils.errors import StartError

READ_ONLY = "/proc/nowhere"  # for root too


def test_a_home_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    assert cache_environment({"HOME": str(tmp_path)}) == {}


def test_a_home_that_cannot_be_written_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = cache_environment({"HOME": READ_ONLY, "HF_HOME": "/models"})
    base = tmp_path / f"srt-cache-{os.getuid()}"
    assert set(given) == set(FOLDERS) - {"HF_HOME"}
    assert given["TRITON_CACHE_DIR"] == str(base / "triton")
    assert base.stat().st_mode & 0o777 == 0o700
    assert cache_environment({"HOME": READ_ONLY})["HF_HOME"] == str(base / "huggingface")


def test_a_folder_that_somebody_else_could_have_prepared_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"srt-cache-{os.getuid()}").symlink_to(tmp_path / "theirs")
    given = Path(cache_environment({"HOME": READ_ONLY})["TRITON_CACHE_DIR"])
    assert given.parent.parent == tmp_path
    assert given.parent.name.startswith(f"srt-cache-{os.getuid()}-")


def test_caches_can_be_moved(tmp_path: Path) -> None:
    given = cache_environment({"HOME": str(tmp_path), "SRT_CACHE_DIR": str(tmp_path / "a/b")})
    assert given["HF_HOME"] == str(tmp_path / "a/b/huggingface")
    assert (tmp_path / "a/b").is_dir()


def test_what_we_keep_ourselves_follows_the_same_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    home = {"HOME": str(tmp_path / "home")}
    assert own_folder("tokenizers", home) == tmp_path / "home/.cache/srt/tokenizers"
    assert own_folder("tokenizers", {**home, "XDG_CACHE_HOME": f"{tmp_path}/x"}) == tmp_path / "x/srt/tokenizers"
    assert own_folder("tokenizers", {**home, "SRT_CACHE_DIR": f"{tmp_path}/a"}) == tmp_path / "a/tokenizers"
    assert own_folder("tokenizers", {"HOME": READ_ONLY}) == tmp_path / f"srt-cache-{os.getuid()}" / "tokenizers"
    with pytest.raises(StartError, match="with SRT_CACHE_DIR"):
        own_folder("tokenizers", {**home, "SRT_CACHE_DIR": READ_ONLY})


def test_a_place_that_cannot_be_written_is_refused_in_a_sentence() -> None:
    with pytest.raises(StartError, match=r"^The folder /proc/nowhere cannot be made: .* with SRT_CACHE_DIR\.$"):
        cache_environment({"HOME": "/", "SRT_CACHE_DIR": READ_ONLY})

"""`make lint` refuses long commit subjects, of commits since 0.2.0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check_commits import LONGEST, ROOT, VERSION_FILE

FITTING, TOO_LONG = "x" * LONGEST, "x" * (LONGEST + 1)


@pytest.fixture(autouse=True)
def own_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the host's git reaches the repositories of these tests."""
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "a")
        monkeypatch.setenv(f"{name}_EMAIL", "a@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository whose first two commits are of 0.1.0, one of them with a long subject."""
    folder = tmp_path / "project"
    (folder / VERSION_FILE).parent.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    commit(folder, "Begin", "0.1.0")
    commit(folder, TOO_LONG, "0.1.0")
    return folder


def commit(folder: Path, subject: str, version: str) -> None:
    (folder / VERSION_FILE).write_text(f'__version__ = "{version}"\n')
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    subprocess.run(
        ["git", "commit", "-q", "--allow-empty", "-m", f"{subject}\n\nBody " + "y" * 99], cwd=folder, check=True
    )


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.check_commits", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_subjects_are_checked_from_the_commit_after_0_2_0_on(project: Path) -> None:
    assert check(project).stdout == "0 commits since 0.2.0, 0 with a subject that is too long\n"
    commit(project, TOO_LONG, "0.2.0")
    commit(project, FITTING, "0.2.0")
    assert (check(project).returncode, check(project).stdout[:10]) == (0, "1 commits ")
    commit(project, TOO_LONG, "0.2.0")
    done = check(project)
    assert done.returncode == 1
    assert f"the subject has {LONGEST + 1} characters, {LONGEST} are allowed: {TOO_LONG}\n" in done.stderr


def test_later_versions_do_not_move_the_first_commit_that_is_checked(project: Path) -> None:
    for version in ("0.2.0", "0.2.0", "0.3.0", "0.4.0"):
        commit(project, FITTING, version)
    assert check(project).stdout.startswith("3 commits since 0.2.0, 0 ")


@pytest.mark.parametrize(
    ("versions", "depth", "checked"),
    [
        (["0.2.0", "0.2.0", "0.2.0"], 2, 1),  # the older one looks as if it brought the version
        (["0.2.0", "0.2.0", "0.3.0", "0.3.0"], 2, 2),  # no commit of the clone is of 0.2.0
        (["0.2.0", "0.2.0"], 4, 1),  # only commits of 0.1.0 are missing
    ],
)
def test_a_shallow_clone_is_checked_as_far_back_as_it_goes(
    project: Path, tmp_path: Path, versions: list[str], depth: int, checked: int
) -> None:
    for version in versions:
        commit(project, FITTING, version)
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", f"--depth={depth}", project.as_uri(), str(clone)], check=True)
    done = check(clone)
    assert (done.returncode, done.stdout) == (0, f"{checked} commits since 0.2.0, 0 with a subject that is too long\n")


def test_without_a_repository_or_git_there_is_nothing_to_check(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = (0, "no git repository here: no commits to check\n")
    alone = check(tmp_path)
    assert (alone.returncode, alone.stdout) == nothing
    commit(project, TOO_LONG, "0.2.0")
    commit(project, TOO_LONG, "0.2.0")
    within = check(project / "srt")  # as a copy of ours would lie in another project's repository
    assert (within.returncode, within.stdout) == nothing
    monkeypatch.setenv("PATH", str(tmp_path))
    without = check(project)
    assert (without.returncode, without.stdout) == nothing

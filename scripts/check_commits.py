"""Check the subjects of commits: `python -m scripts.check_commits [FOLDER]`.

Subjects have at most 72 characters, from the commit on that made the version 0.2.0; earlier ones are as they are. A shallow clone
is checked as far back as it goes. Without git, or outside a repository, there is nothing to check, and a line says so.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LONGEST = 72
ROOT = Path(__file__).parents[1]
VERSION_FILE = "srt/version.py"
FIRST_VERSION = '__version__ = "0.2.0"'


def git(folder: Path, *words: str) -> str | None:
    """The output of a git command; None where git is missing or refuses it."""
    command = ["git", *words]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commits_to_check(folder: Path) -> list[tuple[str, str]] | None:
    """Abbreviated ids and subjects, newest first; None where `folder` is not the top of a repository with commits."""
    top = git(folder, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != folder.resolve():
        return None  # a copy within another project's repository, whose commits are not ours
    changes = git(folder, "log", "--reverse", "--format=%H", f"-S{FIRST_VERSION}", "--", VERSION_FILE)
    if changes:  # the first one brought the line; later ones take it away
        newer = f"{changes.split()[0]}..HEAD"
    elif git(folder, "rev-parse", "--is-shallow-repository") == "true":
        newer = "HEAD"  # cut off later than that: a commit where history is cut off counts as the one that brought all its lines
    else:
        return []
    lines = git(folder, "log", "--no-merges", "--format=%h%x09%s", newer)
    if lines is None:
        return None
    return [(commit, subject) for commit, _, subject in (line.partition("\t") for line in lines.splitlines())]


def main() -> int:
    """Name each subject that is too long."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    commits = commits_to_check(folder)
    if commits is None:
        print("no git repository here: no commits to check")
        return 0
    long = [(commit, subject) for commit, subject in commits if len(subject) > LONGEST]
    for commit, subject in long:
        print(f"{commit}: the subject has {len(subject)} characters, {LONGEST} are allowed: {subject}", file=sys.stderr)
    print(f"{len(commits)} commits since 0.2.0, {len(long)} with a subject that is too long")
    return 1 if long else 0


if __name__ == "__main__":
    raise SystemExit(main())

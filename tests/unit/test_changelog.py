"""The changelog is by release, the newest first, which is the package's version."""

from __future__ import annotations

import re

from srt import __version__
from tests.support.server_process import ROOT

SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
MAX_COLUMNS = 120
LINES = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()


def test_releases_are_dated_and_the_newest_is_this_version() -> None:
    releases = [
        re.fullmatch(r"## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)", line) for line in LINES if line.startswith("## ")
    ]
    found = [(tuple(map(int, release[1].split("."))), release[2]) for release in releases if release is not None]
    assert len(found) == len(releases) >= 2
    assert found == sorted(found, reverse=True)
    assert ".".join(map(str, found[0][0])) == __version__


def test_a_release_has_sections_in_their_order_and_short_lines() -> None:
    for release in "\n".join(LINES).split("\n## ")[1:]:
        titles = re.findall(r"^### (.*)$", release, re.MULTILINE)
        assert titles and titles == [section for section in SECTIONS if section in titles]
    assert [line for line in LINES if len(line) > MAX_COLUMNS] == []

"""The documents stay short, name what exists, and use the words of the field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.server_process import ROOT

DOCS = ROOT / "docs"
GENERATED = (DOCS / "api.md", DOCS / "models.md", DOCS / "options.md")
PAGES = sorted(page for page in DOCS.rglob("*.md") if page not in GENERATED)
INDEXED = sorted(page for folder in ("decisions", "kernels") for page in (DOCS / folder).glob("*.md"))
COINED = re.compile(r"\b(wish(es)?|vitals|page board|rehears\w*|worst step|pace|io_struct)\b", re.IGNORECASE)
PATH = re.compile(r"(?<![\w/.-])(?:srt|tests|scripts|benchmarks|recipes)/[\w/.-]*\w")
BUILT = {"srt/compiled"}  # by setup.py
MAX_COLUMNS, MAX_PARAGRAPH_WORDS = 120, 80


def prose(page: Path) -> list[str]:
    """The lines of a page, blank where they are code or a row of a table."""
    text = page.read_text("utf-8")
    text = re.sub(r"^ *```.*?^ *```$", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    return ["" if line.startswith(("|", "    ")) else line for line in text.splitlines()]


def paragraphs(page: Path) -> list[str]:
    """Runs of lines of prose; an item of a list is one, and so is a title."""
    text = "\n".join(prose(page))
    return [part for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |#)", text) if part.strip()]


def by_page(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.relative_to(DOCS).as_posix())


def test_the_architecture_is_one_short_page() -> None:
    assert len((DOCS / "architecture.md").read_text("utf-8").splitlines()) <= 150


@by_page([page for page in INDEXED if page.parent.name == "decisions" and page.name != "README.md"])
def test_a_decision_is_one_page_of_four_parts(page: Path) -> None:
    lines = page.read_text("utf-8").splitlines()
    titles = [line for line in lines if line.startswith("#")]
    assert titles[0].startswith("# ")
    assert titles[1:] == ["## Context", "## Decision", "## Figure", "## What would change it"]
    assert len(lines) <= 60


@pytest.mark.parametrize("folder", ["decisions", "kernels"])
def test_every_page_is_in_the_index_of_its_folder(folder: str) -> None:
    linked = re.findall(
        r"^\| \[[^]]+\]\(([\w.-]+\.md)\)", (DOCS / folder / "README.md").read_text("utf-8"), re.MULTILINE
    )
    pages = [page.name for page in INDEXED if page.parent.name == folder and page.name != "README.md"]
    assert sorted(linked) == pages


@by_page(PAGES)
def test_lines_and_paragraphs_are_short(page: Path) -> None:
    wide = [number for number, line in enumerate(prose(page), start=1) if len(line) > MAX_COLUMNS]
    assert wide == [], f"{page.name}: more than {MAX_COLUMNS} columns"
    long = [paragraph[:60] for paragraph in paragraphs(page) if len(paragraph.split()) > MAX_PARAGRAPH_WORDS]
    assert long == [], f"{page.name}: more than {MAX_PARAGRAPH_WORDS} words"


@by_page(PAGES)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"^```diff$.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    missing = [path for path in PATH.findall(text) if path not in BUILT and not (ROOT / path).exists()]
    assert missing == []


@by_page(PAGES)
def test_no_word_is_coined(page: Path) -> None:
    assert [found[0] for found in COINED.finditer(page.read_text("utf-8"))] == []


def test_the_reading_path_is_as_long_as_its_title_says() -> None:
    text = (DOCS / "architecture.md").read_text("utf-8")
    title = re.search(r"^## Twelve files, in this order, about ([\d,]+) lines", text, re.MULTILINE)
    assert title is not None
    files = re.findall(r"\d+\. `([\w/.]+)` \|", text)
    assert len(files) == 12
    lines = sum(len((ROOT / name).read_text("utf-8").splitlines()) for name in files)
    said = int(title[1].replace(",", ""))
    assert abs(lines - said) <= 200, f"the files have {lines} lines in all, not about {said}"

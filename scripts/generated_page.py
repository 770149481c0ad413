"""Pages of docs/ that are written from the sources, by `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(page: Path, text: str, source: str) -> int:
    """Write a page; with `--check` on the command line, only compare it. Return the exit code. `source`: what the page is made from."""
    if "--check" not in sys.argv[1:]:
        page.write_text(text, "utf-8")
        return 0
    if page.exists() and page.read_text("utf-8") == text:
        return 0
    print(f"{page} is not what {source}: run `make docs`", file=sys.stderr)
    return 1

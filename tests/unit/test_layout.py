"""What can be held of the layout of `srt/`: short files and functions, a sentence for each folder, and the field's words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_process import ROOT

MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 60
PACKAGE = ROOT / "srt"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FILES = frozenset(SOURCES)
FOLDERS = sorted({path.parent for path in SOURCES})
CODE = {".py", ".cu", ".cuh", ".js", ".css", ".html"}

# Longer than allowed, with their lines: an entry goes when its part is split, and none is added.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}

# What the field calls penalties and biases, heartbeats, a mailbox, precompiling, the peak step, HTTP types, and the scheduler.
COINED = re.compile(
    r"wishes|vitals|page[ _]?board|rehears|worst[ _]?step|io_struct|\bclass (?-i:Replica)\b", re.IGNORECASE
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions_of(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(qualified name, lines) of each function in a syntax tree. Decorators do not count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from functions_of(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            assert child.end_lineno is not None
            yield prefix + child.name, child.end_lineno - child.lineno + 1
            yield from functions_of(child, f"{prefix}{child.name}.")
        else:
            yield from functions_of(child, prefix)


def test_files_have_at_most_600_lines() -> None:
    lines = {name_of(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > MAX_FILE_LINES} == LONG_FILES


def test_functions_have_at_most_60_lines() -> None:
    """Kernels are excepted: Triton's are one function each."""
    lines = {
        f"{name_of(path)} {function}": count
        for path in SOURCES
        if PACKAGE / "kernels" not in path.parents
        for function, count in functions_of(ast.parse(path.read_text("utf-8")))
    }
    assert {name: count for name, count in lines.items() if count > MAX_FUNCTION_LINES} == LONG_FUNCTIONS


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_a_folder_says_in_a_sentence_what_it_holds(folder: Path) -> None:
    package = folder / "__init__.py"
    assert package.is_file(), f"{name_of(folder)} holds modules and has no __init__.py"
    text = ast.get_docstring(ast.parse(package.read_text("utf-8"))) or ""
    first = text.partition("\n\n")[0]
    assert first.endswith(".") and len(first.split()) >= 5, f"{name_of(package)} opens with {first!r}"


def test_no_word_or_name_is_coined() -> None:
    files = [path for path in PACKAGE.rglob("*") if path.suffix in CODE]
    assert {path.suffix for path in files} == CODE
    found = [
        f"{name_of(path)}: {word}"
        for path in files
        for word in COINED.findall(f"{path.stem}\n{path.read_text('utf-8')}")
    ]
    assert found == []
    assert COINED.findall("class Replica: apply_wishes worst_step PageBoard Rehearsal class Replicas, a replica") == [
        "class Replica",
        "wishes",
        "worst_step",
        "PageBoard",
        "Rehears",
    ]


def imports_of(path: Path) -> set[Path]:
    """The files of `srt/` that a file imports, also those for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            files = (ROOT.joinpath(*parts[:length]).with_suffix(".py") for length in range(len(parts), 1, -1))
            found |= {next((file for file in files if file in FILES), path)}
    return found - {path}


def test_no_files_import_each_other_in_a_circle() -> None:
    """Files that import none that is left are taken away again and again; only circles, and what imports them, stay."""
    left = {path: imports_of(path) for path in SOURCES}
    while done := [path for path, imported in left.items() if not imported & left.keys()]:
        for path in done:
            del left[path]
    assert [name_of(path) for path in left] == []

"""Which modules are compiled: all that the scheduler runs for requests and steps, with the types of all that those import."""

from __future__ import annotations

import ast
import configparser
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts.compile_scheduler import mypy_config
from srt.utils import compiled
from srt.utils.compiled import MODULES, PACKAGE, TYPED, built_folder, source

FOLDER = "srt.managers.scheduler"
PROCESS = {f"{FOLDER}.__main__", f"{FOLDER}.process"}


def tree_of(name: str) -> ast.Module:
    return ast.parse(source(name).read_text("utf-8"))


def imported_by(name: str) -> set[str]:
    """The project's modules that a module imports, for types alone too. Of the package `srt` itself only the version is taken."""
    found: set[str] = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{name} has a relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found.update(one for one in names if one.startswith("srt.") and source(one).is_file())
    return found


def reached_from(names: Iterable[str]) -> set[str]:
    """These modules, and all that they import, directly or not."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imported_by(name)
    return found


def has_class_keywords(name: str) -> bool:
    """Whether a class is declared with keywords, as msgspec's structs are: mypyc drops these without a word."""
    return any(isinstance(node, ast.ClassDef) and node.keywords for node in ast.walk(tree_of(name)))


def modules_of_the_process_alone() -> set[str]:
    """The process, and those modules of its folder that nothing else imports."""
    package = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    imports = {name: imported_by(name) for name in package if source(name).is_file()}
    alone = set(PROCESS)
    while True:
        importers = {
            name: {one for one, those in imports.items() if name in those} for name in modules_of_the_folder() - alone
        }
        more = {name for name, those in importers.items() if those and those <= alone}
        if not more:
            return alone
        alone |= more


def modules_of_the_folder() -> set[str]:
    folder = source(FOLDER).with_suffix("")
    return {f"{FOLDER}.{path.stem}" for path in folder.glob("*.py")} - {f"{FOLDER}.__init__"}


def test_every_module_of_the_scheduler_but_its_process_is_compiled() -> None:
    needed = modules_of_the_folder() - modules_of_the_process_alone()
    assert "srt.managers.scheduler.planner" in needed
    assert needed - set(MODULES) == {name for name in needed if has_class_keywords(name)}
    assert not [name for name in MODULES if has_class_keywords(name)]


def test_the_compiler_reads_every_module_that_compiled_ones_import() -> None:
    assert set(TYPED) == reached_from(MODULES) - set(MODULES)
    config = configparser.ConfigParser()
    config.read_string(mypy_config())
    sections = {name.removeprefix("mypy-") for name in config if config[name].get("follow_imports") == "silent"}
    assert sections == {"msgspec.*", *TYPED}


@pytest.mark.parametrize("name", [*MODULES, *TYPED])
def test_an_edit_of_any_source_that_the_compiler_reads_makes_the_compiled_form_stale(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "srt"
    shutil.copytree(PACKAGE, copy, ignore=lambda folder, names: [one for one in names if is_other_file(folder, one)])
    monkeypatch.setattr(compiled, "PACKAGE", copy)
    before = built_folder()
    with source(name).open("a") as file:
        file.write("# edited\n")
    assert built_folder() != before


def is_other_file(folder: str, name: str) -> bool:
    """Neither a source nor a folder that may hold some."""
    path = Path(folder, name)
    return name in ("__pycache__", "compiled") or (path.is_file() and path.suffix != ".py")

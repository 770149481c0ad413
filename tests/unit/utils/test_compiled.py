"""The scheduler's compiled form: the same decisions as its sources, and never those of other sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.compile_scheduler import ROOT, compile_into
from srt.utils.compiled import MODULES, PACKAGE, SUFFIX, SWITCH, built_folder, source

PLAIN = "0"
SUITES = ("tests/unit/mem_cache/test_allocator.py", "tests/unit/mem_cache/test_radix_cache.py")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation has built of these sources, or else what is built now, which takes a minute."""
    folder = built_folder()
    if not folder.is_dir():
        folder = tmp_path_factory.mktemp("compiled")
        compile_into(folder)
    return folder


def run(switch: Path | str, *command: str, cwd: Path = ROOT) -> str:
    environment = os.environ | {SWITCH: str(switch), "PYTHONPATH": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_compiled_scheduler_passes_the_schedulers_own_tests(compiled: Path) -> None:
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/unit/managers/scheduler").glob("test_*.py"))
    run(compiled, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITES, *tests)


def test_both_forms_live_through_the_same_simulated_worlds(compiled: Path) -> None:
    simulate = ("-m", "tests.scheduler.simulate", "--seeds", "8")
    reports = [run(switch, *simulate).splitlines() for switch in (compiled, PLAIN)]
    (*one, _), (*other, _) = reports  # the last line tells how long it took
    assert one == other


def test_all_modules_are_there_and_taken(compiled: Path) -> None:
    script = f"import importlib; print(*(importlib.import_module(name).__file__ for name in {MODULES}), sep='\\n')"
    assert all(file.startswith(str(compiled)) for file in run(compiled, "-c", script).splitlines())
    assert run(PLAIN, "-c", script).splitlines() == [str(source(name)) for name in MODULES]


def test_the_scheduler_benchmark_runs_all_modules_compiled(compiled: Path) -> None:
    last = run(compiled, "-m", "benchmarks.scheduler", "--quick", "--only", "step").splitlines()[-1]
    assert json.loads(last)["form"] == "compiled"  # it refuses a mixture


def test_a_source_that_was_edited_since_runs_as_it_is(compiled: Path, tmp_path: Path) -> None:
    copy = tmp_path / "srt"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "compiled", "assets"))
    shutil.copytree(compiled, copy / "compiled" / built_folder().name)
    where = ("-c", "import srt.managers.scheduler.planner as planner; print(planner.__file__)")
    assert run("", *where, cwd=tmp_path).strip().endswith(SUFFIX)
    with (copy / "managers/scheduler/slots.py").open("a") as file:
        file.write("# edited\n")
    assert run("", *where, cwd=tmp_path).strip() == str(copy / "managers/scheduler/planner.py")

"""A copy of the project for a long soak, which nobody edits meanwhile, with the scheduler and the simulation compiled by mypyc.

    python -m tests.scheduler.compile FOLDER [COMMIT]
    cd FOLDER && OMP_NUM_THREADS=1 python -m tests.scheduler.simulate --steps 10000000 --jobs 2 --resume soak.json

Takes three minutes, git, a C compiler and Python's headers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKS = (
    "fairness fake_worker host_process ledger_frontend obligations resource_rules room"
    " server settings supervision traffic verdicts world"
)
SOURCES = [f"tests/scheduler/{name}.py" for name in CHECKS.split()]
EXERCISE = "tests.scheduler.simulate --steps 15000 --jobs 1"
CONFIG = """\
[mypy]
explicit_package_bases = True
ignore_missing_imports = True
follow_imports = skip
disable_error_code = attr-defined, index, var-annotated, valid-type, misc, call-arg, union-attr, assignment, arg-type
[mypy-srt.*]
follow_imports = silent
[mypy-msgspec.*]
follow_imports = silent
"""


def copy_and_compile(folder: Path, commit: str) -> None:
    """The files of this commit; what is compiled lies beside its source, where Python looks first."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    subprocess.run(["git", "checkout", "-q", "--detach", commit], cwd=folder, check=True)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    for module in ("scripts.compile_scheduler", "tests.scheduler.compile"):
        subprocess.run([sys.executable, "-m", module], cwd=folder, env=environment, check=True)


def compile_here() -> None:
    from mypyc.build import mypycify

    from scripts.compile_scheduler import build_with_profile

    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch, "mypy.ini")
        config.write_text(CONFIG)
        extensions = mypycify(
            [f"--config-file={config}", f"--cache-dir={scratch}/cache", *SOURCES],
            opt_level="3",
            debug_level="0",
            target_dir=f"{scratch}/c",
            group_name="srt_simulation",
        )

        def exercise() -> None:
            shutil.copytree(f"{scratch}/lib", ROOT, dirs_exist_ok=True)
            codes.append(subprocess.run([sys.executable, "-m", *EXERCISE.split()], cwd=ROOT).returncode)

        codes: list[int] = []
        build_with_profile(extensions, scratch, exercise)
        if any(codes):
            sys.exit("The simulation broke, as it says above.")
        shutil.copytree(f"{scratch}/lib", ROOT, dirs_exist_ok=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        copy_and_compile(Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 2 else "HEAD")
    else:
        os.chdir(ROOT)
        compile_here()

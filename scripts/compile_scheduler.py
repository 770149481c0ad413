"""Compile what the scheduler does for every request and step: `python -m scripts.compile_scheduler [FOLDER]`.

Needs mypy, a C compiler and Python's headers; takes a minute. It is compiled twice: first to see under load what is done how
often, which makes the second 6 to 8 % faster, where the compiler is gcc. Without FOLDER the result lies where `srt.utils.compiled`
looks for it, and what was built of earlier sources is deleted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# `make lint` checks the types. Here only the compiled modules are read, and those in TYPED; everything else is Any.
CONFIG = """\
[mypy]
explicit_package_bases = True
ignore_missing_imports = True
follow_imports = skip
disable_error_code = attr-defined, index, var-annotated, valid-type, misc, call-arg, union-attr
"""
FOLLOWED = """\
[mypy-{}]
follow_imports = silent
"""

EXERCISE = """\
from benchmarks.scheduler_load import Load, LoadedScheduler
for policy in ("fcfs", "lpm", "priority"):
    LoadedScheduler(256, Load("short answers", prompt_len=200, answer_len=10, waiting=10), policy).measure(300)
    LoadedScheduler(64, Load("long answers", prompt_len=2000, answer_len=200, waiting=100), policy).measure(300)
"""
EXERCISE_S = 120.0
OPTIONS = ["-fno-plt", "-fno-semantic-interposition"]
# What was not exercised is not to be small instead of fast.
PROFILED = ["-fprofile-use", "-fprofile-partial-training", "-Wno-missing-profile"]


def mypy_config() -> str:
    """Name the modules whose types the compiler may rely on."""
    from srt.utils.compiled import TYPED

    return CONFIG + "".join(map(FOLLOWED.format, ("msgspec.*", *TYPED)))


def compile_into(folder: Path) -> None:
    """Leave the compiled modules there, one file each, and the library that they share. Any error means that it cannot be done."""
    import numpy  # noqa: F401  # where it is missing, mypy takes a comparison of two arrays for a bool
    from mypyc.build import mypycify

    from srt.utils.compiled import GROUP, MODULES, source

    with tempfile.TemporaryDirectory() as scratch, _inside(ROOT):
        config = Path(scratch, "mypy.ini")
        config.write_text(mypy_config())
        paths = [str(source(name).relative_to(ROOT)) for name in MODULES]
        extensions = mypycify(
            [f"--config-file={config}", f"--cache-dir={scratch}/cache", *paths],
            opt_level="3",  # 5 to 8 % faster than 2
            debug_level="0",
            target_dir=f"{scratch}/c",
            group_name=GROUP.removesuffix("__mypyc"),
        )
        build_with_profile(extensions, scratch, lambda: _exercise(_flat(scratch, Path(scratch, "exercised")), scratch))
        _flat(scratch, folder)


def build_with_profile(extensions: Sequence[Any], scratch: str, exercise: Callable[[], None]) -> None:
    """Leave what is built in `scratch`/lib. `exercise` is called in between, to run what lies there then."""
    try:
        _build(extensions, scratch, ["-fprofile-generate"])
        exercise()
        if not any(Path(scratch).rglob("*.gcda")):
            raise RuntimeError("it counts nothing that can be used")
        _build(extensions, scratch, PROFILED)
    except (Exception, SystemExit) as error:  # other compilers make other profiles, or none
        print(f"compiled without a profile: {str(error)[-300:]}", file=sys.stderr)
        _build(extensions, scratch, [])


def _build(extensions: Sequence[Any], scratch: str, options: list[str]) -> None:
    from setuptools import Distribution

    for file in Path(scratch, "lib").rglob("*.so"):  # older setuptools make no folder twice
        file.unlink()
    for extension in extensions:
        plain = [option for option in extension.extra_compile_args if option not in OPTIONS and "profile" not in option]
        extension.extra_compile_args, extension.extra_link_args = [*plain, *OPTIONS, *options], options
    command = Distribution({"ext_modules": list(extensions)}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = f"{scratch}/lib", f"{scratch}/temp"
    command.parallel, command.force = os.cpu_count(), True
    command.ensure_finalized()
    command.run()


def _exercise(folder: Path, scratch: str) -> None:
    """Have what was built there count what it does; it leaves that beside the object files."""
    from srt.utils.compiled import SWITCH

    command = [sys.executable, "-c", EXERCISE]
    environment = {**os.environ, SWITCH: str(folder), "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True, timeout=EXERCISE_S)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())


def _flat(scratch: str, folder: Path) -> Path:
    """What was built, moved into one flat folder: the modules' packages are the sources' own."""
    built = Path(scratch, "lib")
    folder.mkdir(parents=True, exist_ok=True)
    for file in built.rglob("*.so"):
        shutil.move(file, folder / ".".join((*file.relative_to(built).parent.parts, file.name)))
    return folder


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> None:
    from srt.utils.compiled import built_folder

    if len(sys.argv) > 1:
        compile_into(Path(sys.argv[1]).resolve())
        return
    folder = built_folder()
    shutil.rmtree(folder.parent, ignore_errors=True)
    compile_into(folder)
    print(f"compiled into {folder}")


if __name__ == "__main__":
    main()

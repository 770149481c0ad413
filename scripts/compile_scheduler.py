"""Compile what the scheduler does for every request and step: `python -m scripts.compile_scheduler [FOLDER]`.

Needs mypy, a C compiler and Python's headers; takes half a minute. Without FOLDER the result lies where `srt.utils.compiled` looks
for it, and what was built of earlier sources is deleted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# `make lint` checks the types. Here only what is compiled is read, with the messages, whose fields have types; all else is Any.
CONFIG = """\
[mypy]
explicit_package_bases = True
ignore_missing_imports = True
follow_imports = skip
disable_error_code = attr-defined, index, var-annotated, valid-type, misc, call-arg, union-attr
[mypy-srt.protocol.messages]
follow_imports = silent
[mypy-srt.protocol.views]
follow_imports = silent
[mypy-msgspec.*]
follow_imports = silent
"""


def compile_into(folder: Path) -> None:
    """Leave the compiled modules there, one file each, and the library that they share. Any error means that it cannot be done."""
    import numpy  # noqa: F401  # where it is missing, mypy takes a comparison of two arrays for a bool
    from mypyc.build import mypycify
    from setuptools import Distribution

    from srt.utils.compiled import GROUP, MODULES, source

    with tempfile.TemporaryDirectory() as scratch, _inside(ROOT):
        config = Path(scratch, "mypy.ini")
        config.write_text(CONFIG)
        paths = [str(source(name).relative_to(ROOT)) for name in MODULES]
        extensions = mypycify(
            [f"--config-file={config}", f"--cache-dir={scratch}/cache", *paths],
            opt_level="3",  # 5 to 8 % faster than 2
            debug_level="0",
            target_dir=f"{scratch}/c",
            group_name=GROUP.removesuffix("__mypyc"),
        )
        for extension in extensions:
            extension.extra_compile_args += ["-fno-plt", "-fno-semantic-interposition"]
        command = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = f"{scratch}/lib", f"{scratch}/temp"
        command.parallel = os.cpu_count()
        command.ensure_finalized()
        command.run()
        folder.mkdir(parents=True, exist_ok=True)
        # One flat folder: the modules' packages are the sources' own.
        for file in Path(scratch, "lib").rglob("*.so"):
            package = file.relative_to(f"{scratch}/lib").parent.parts
            shutil.move(file, folder / ".".join((*package, file.name)))


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

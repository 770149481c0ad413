"""A wheel of the project: all files of the package, the compiled scheduler, a tag that says so, and a server that runs from it."""

from __future__ import annotations

import shutil
import signal
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import httpx
import psutil
import pytest

from srt import __version__
from srt.kernels.build.cpu_library import NAME
from srt.utils.compiled import GROUP, MODULES, SUFFIX
from tests.support.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.e2e

# As `python -m build` calls them, but with the packages of this environment in place of freshly installed ones.
SDIST = "from setuptools.build_meta import build_sdist as build; build({!r})"
WHEEL = "from setuptools.build_meta import build_wheel as build; build({!r})"
WITHOUT_COMPILER = "import os, sys; sys.modules['mypyc'] = None; os.environ['CXX'] = 'no-compiler'; "
LEFT_OUT = shutil.ignore_patterns("__pycache__", "compiled")


def package_files() -> set[str]:
    """Names of all files of the package, as in a fresh clone: without caches and without what was compiled here."""
    names = (path.relative_to(ROOT).as_posix() for path in (ROOT / "srt").rglob("*") if path.is_file())
    return {name for name in names if "/__pycache__/" not in name and "/compiled/" not in name}


def copy_project(folder: Path) -> Path:
    """What packaging may look at, and a build's leftover from a file that was deleted since."""
    for name in ("srt", "scripts", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=LEFT_OUT)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    leftover = folder / "build/lib/srt/deleted.py"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    return folder


def build(program: str, source: Path, result: Path) -> Path:
    """Run a build in the folder `source`; the one file that it leaves in `result`."""
    command = [sys.executable, "-c", program.format(str(result))]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = result.iterdir()
    return file


def names_in(wheel: Path) -> set[str]:
    """All names but those of the folder that describes the wheel."""
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if not name.startswith(f"srt_serve-{__version__}.dist-info/")}


def test_a_wheel_without_a_compiler_holds_the_whole_package_and_fits_everywhere(tmp_path: Path) -> None:
    project = copy_project(tmp_path / "project")
    wheel = build(WITHOUT_COMPILER + WHEEL, project, tmp_path / "dist")
    assert wheel.name == f"srt_serve-{__version__}-py3-none-any.whl"
    assert names_in(wheel) == package_files()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_wheel_serves_the_shipped_model_with_the_compiled_scheduler(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Through a source distribution, as `python -m build` does it."""
    project = copy_project(tmp_path / "project")
    sdist = build(SDIST, project, tmp_path / "sdist")
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    wheel = build(WHEEL, next((tmp_path / "unpacked").iterdir()), tmp_path / "dist")

    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"srt_serve-{__version__}-{version}-{version}-linux_"), wheel.name
    compiled = {name for name in names_in(wheel) if "/compiled/" in name}
    assert names_in(wheel) - compiled == package_files()
    assert {Path(name).name for name in compiled} == {NAME, *(name + SUFFIX for name in (*MODULES, GROUP))}

    python = install(wheel, tmp_path / "environment")
    elsewhere = tmp_path_factory.mktemp("wheel")  # The sockets of the server lie in it: its path has to be short.
    words = ["--model-path", "tiny", "--port", "0", "--device", "cpu", "--max-total-tokens", "16384"]
    alone = {"PATH": "/usr/bin:/bin", "HOME": str(elsewhere), "OMP_NUM_THREADS": "1"}
    with ServerProcess(
        "srt.launch_server", words, elsewhere, alone, cwd=elsewhere, is_alone=True, python=python
    ) as server:
        url = server.wait_ready()
        body = {"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "2 + 2 = 4"
        # A module's own file only refers to the library; some are not loaded, as the library knows its modules.
        loaded = compiled_files_of(server, "srt.managers.scheduler")
        packages = python.parents[1] / f"lib/python3.{sys.version_info.minor}/site-packages"
        assert any(Path(name).name == GROUP + SUFFIX for name in loaded)
        assert loaded <= {str(packages / name) for name in compiled}
        assert NAME in {Path(name).name for name in compiled_files_of(server, "srt.managers.tp_worker")}
        server.send(signal.SIGTERM)
        assert server.wait() == 0, server.lines


def install(wheel: Path, environment: Path) -> Path:
    """The interpreter of a new environment that holds the wheel, and finds what that needs among the packages of this one."""
    venv.create(environment, symlinks=True)
    python = environment / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    # A line in a .pth file is searched last, and .pth files that lie there do not count: so not the editable project.
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "requirements.pth").write_text("\n".join(site.getsitepackages()))
    return python


def compiled_files_of(server: ServerProcess, module: str) -> set[str]:
    """The compiled files of ours that the child process which runs `module` has loaded."""
    (child,) = (one for one in server.started() if module in one.cmdline())
    return {region.path for region in psutil.Process(child.pid).memory_maps() if "/compiled/" in region.path}

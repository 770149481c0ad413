"""The container file and the systemd unit. Neither can be run here, but what they say can: the same commands, in as bare surroundings."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.e2e

UNIT = ROOT / "contrib/srt.service"
BARE = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, in order, with continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in text.splitlines() if line.strip()]


def the_one(name: str) -> str:
    (value,) = [value for key, value in instructions() if key == name]
    return value


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install` makes of the files that the Dockerfile copies: a folder as site-packages would be."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")]
    for names in (value.split()[:-1] for key, value in instructions() if key == "COPY"):
        for name in names:
            assert name in kept, f"{name} is copied, but .dockerignore keeps it out"
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(ROOT / name, source / name)
    (source / "scripts/compile_scheduler.py").unlink()  # it takes a minute, and has tests of its own
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    offline = ["--no-build-isolation", "--no-index", "--target", str(site)]
    done = subprocess.run([*pip, *offline, str(source)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return site


def test_the_container_file_is_well_formed() -> None:
    known = "FROM RUN ARG COPY ENV VOLUME USER WORKDIR EXPOSE HEALTHCHECK STOPSIGNAL ENTRYPOINT".split()
    names = [name for name, _ in instructions()]
    assert names[0] == "FROM"
    assert set(names) <= set(known)
    for name, value in instructions():
        if name == "RUN":
            command = value.replace("${PIP_OPTIONS}", "")
            assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0, value
    assert names.index("USER") < names.index("ENTRYPOINT"), "it does not serve as root"
    assert json.loads(the_one("ENTRYPOINT"))[:2] == ["srt", "serve"]


def test_the_image_has_all_that_it_needs_and_nothing_of_the_tests(image: Path) -> None:
    files = {str(path.relative_to(image)) for path in image.rglob("*") if path.is_file()}
    assert {"srt/entrypoints/page/index.html", "srt/assets/models/tiny/model.safetensors", "srt/py.typed"} <= files
    assert not any(name.startswith(("tests", "benchmarks", "recipes")) for name in files)
    entry_points = next(image.glob("*.dist-info/entry_points.txt")).read_text("utf-8")
    assert "srt = srt.cli.main:main" in entry_points


def test_the_container_serves_is_healthy_and_stops_in_order(image: Path, tmp_path: Path) -> None:
    _, *words = json.loads(the_one("ENTRYPOINT"))
    port = free_port()
    volume = the_one("VOLUME")
    variables = dict(
        pair.split("=", 1) for pair in shlex.split(the_one("ENV").replace(volume, str(tmp_path / "volume")))
    )
    assert "SRT_CACHE_DIR" in variables
    environment = {**BARE, "PYTHONPATH": str(image), **variables}
    with ServerProcess(
        "srt", [*words, "--port", str(port)], tmp_path, environment, cwd=tmp_path, is_alone=True
    ) as server:
        server.wait_ready()
        check = json.loads(the_one("HEALTHCHECK").split("CMD ", 1)[1])
        assert check[0] == "srt"
        command = [sys.executable, "-m", *check]
        environment |= {"TMPDIR": str(tmp_path)}
        assert subprocess.run(command, env=environment, timeout=60).returncode == 0
        server.send(getattr(signal, the_one("STOPSIGNAL")))
        assert server.wait() == 0, server.lines
        assert subprocess.run(command, env=environment, timeout=60).returncode == 1


# ---- systemd


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, comment_prefixes="#", interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return parser


def test_the_unit_is_one_that_systemd_takes() -> None:
    assert unit().sections() == ["Unit", "Service", "Install"]
    analyze = shutil.which("systemd-analyze")
    if analyze:  # what is checked below holds without it, too
        told = subprocess.run([analyze, "verify", str(UNIT)], capture_output=True, text=True, timeout=60).stderr
        mine = [line for line in told.splitlines() if "srt.service" in line]
        assert mine == ["srt.service: Command /opt/srt/bin/srt is not executable: No such file or directory"]


def test_the_unit_leaves_srt_the_time_that_it_takes_to_stop() -> None:
    service = unit()["Service"]
    assert service["KillMode"] == "mixed", "only srt itself is told to stop: the order of the end is its business"
    assert int(service["TimeoutStopSec"]) > 25
    assert service["Restart"] == "on-failure"


@pytest.mark.parametrize(("options", "code"), [(None, 0), ("--model-path no-such-model", 1)])
def test_what_the_unit_starts_works_without_a_home_and_says_how_it_ended(
    options: str | None, code: int, tmp_path: Path
) -> None:
    service = unit()["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert Path(program).name == "srt"
    (default,) = re.findall(r'^Environment="SRT_OPTIONS=(.*)"$', UNIT.read_text("utf-8"), re.MULTILINE)
    given = options or default
    words = [word for part in words for word in (shlex.split(given) if part == "$SRT_OPTIONS" else [part])]
    cache = tmp_path / "cache"
    cache.mkdir()
    environment = {**BARE, "PYTHONPATH": str(ROOT), "HF_HOME": f"{cache}/huggingface", "HF_HUB_OFFLINE": "1"}
    with ServerProcess("srt", [*words, "--port", "0"], tmp_path, environment, cwd=Path("/"), is_alone=True) as server:
        if code == 0:
            server.wait_ready()
            server.send(signal.SIGTERM)
        assert server.wait() == code, server.lines
    assert os.listdir(cache) == [], "the shipped model needs no cache"

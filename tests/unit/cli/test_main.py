"""The console command, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import srt
from srt.cli import main as cli
from srt.managers.supervisor.run_dir import ADDRESS_FILE, RunDir


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"srt {srt.__version__}\n"


def test_an_unknown_command_is_named_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["swerve"]) == 2
    assert "'swerve'" in capsys.readouterr().err


def test_where_no_server_runs_none_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_dir = RunDir(tmp_path)
    assert cli.main(["health"]) == 1
    assert capsys.readouterr().out == "No server of this user listens on this host.\n"
    (run_dir.path / ADDRESS_FILE).write_text("http://127.0.0.1:1")
    assert cli.main(["health"]) == 1
    assert "refused" in capsys.readouterr().out
    run_dir.remove()
    assert [cli.main(["health", word]) for word in ("--help", "--port")] == [0, 2]


def test_no_command_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "srt serve" in capsys.readouterr().out


def test_importing_the_package_loads_neither_torch_nor_the_engine() -> None:
    script = "import srt, sys; print([name for name in sys.modules if name in ('torch', 'numpy', 'srt.runtime')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_runtime_raises_can_be_caught_by_its_name_in_the_package() -> None:
    assert {srt.Runtime.__name__, srt.StartError.__name__, srt.ArgumentError.__name__} < set(srt.__all__)
    assert issubclass(srt.EngineDied, srt.RequestError)


def test_an_unknown_attribute_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Engines"):
        srt.Engines  # noqa: B018


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_is_in_the_usage_and_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"srt {command}" in cli.USAGE
    try:
        status: object = cli.main([command, "--help"])
    except SystemExit as end:  # argparse ends so
        status = end.code
    assert status == 0
    said = capsys.readouterr().out
    assert "usage:" in said
    assert ("--model-path" in said) == (command not in ("health", "verify"))

"""What happens before processes exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from srt import launch_server


def test_the_launcher_loads_nothing_heavy_before_the_children_are_started() -> None:
    heavy = "{'numpy', 'msgspec', 'zmq', 'torch', 'asyncio', 'pydantic'}"
    script = f"import sys, srt.launch_server; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_wrong_option_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_server.main(["--model-path", "m", "--tp", "none"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "--tp" in said.err


def test_the_environment_of_other_systems_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert launch_server.main([]) == 1
    assert capsys.readouterr().err == "srt runs on Linux (and WSL2) only, not on darwin.\n"


@pytest.mark.parametrize("closed", [(0,), (2,), (0, 1, 2)])
def test_closed_standard_streams_lead_nowhere_instead_of_being_taken_for_sockets(closed: tuple[int, ...]) -> None:
    script = """
import os, sys
from srt.launch_server import open_standard_streams
open_standard_streams()
assert sys.stderr is not None and sys.stdout is not None
assert os.open(os.devnull, os.O_RDONLY) > 2
assert all(os.get_inheritable(number) for number in range(3))
sys.stderr.write("somewhere")
"""

    def close_them() -> None:
        for number in closed:
            os.close(number)

    done = subprocess.run([sys.executable, "-c", script], preexec_fn=close_them)
    assert done.returncode == 0


def test_a_start_that_fails_is_one_json_line_where_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_server.main(["--model-path", "/no/such/folder", "--port", "0", "--log-format", "json"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["level"], told["process"]) == ("error", "supervisor")
    assert "/no/such/folder does not exist" in told["message"]

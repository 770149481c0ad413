"""What a bug report says: all that is asked for, no secret, and each check that fails."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from srt.cli import doctor
from srt.cli.doctor import hidden
from srt.managers.supervisor import preflight
from srt.managers.supervisor.worker_places import worker_places
from srt.server_args import ServerArgs


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    facts: dict[str, object] = {"version": "2.13.0", "cuda": None, "threads": 2, "gpus": [], "uuids": [], "peers": []}
    monkeypatch.setattr(doctor, "_torch_facts", lambda: facts)


def examine(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = doctor.main(["--port", "0", "--device", "cpu", *words])
    return code, capsys.readouterr().out


def failed(page: str) -> dict[str, str]:
    return dict(re.findall(r"^  FAILED ([^:]*): (.*)$", page, re.MULTILINE))


def test_a_healthy_machine_passes_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, page = examine(capsys)
    assert (code, failed(page)) == (0, {}), page
    assert page.endswith("Every check passed.\n")
    for title in (
        "srt",
        "This machine",
        "Environment",
        "Options",
        "Workers",
        "Folders",
        "Running servers",
        "Checks",
        "Last log",
    ):
        assert re.search(rf"^{title}", page, re.MULTILINE), title
    assert re.search(r"^  transformers +\d", page, re.MULTILINE)
    assert re.search(r"^  scheduler +(compiled|plain Python)", page, re.MULTILINE)
    assert re.search(r"^  --device +cpu  \(not the default\)$", page, re.MULTILINE)
    assert re.search(r"^  --page-size +16$", page, re.MULTILINE)


def test_no_secret_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRT_API_KEY", "hush-1")
    monkeypatch.setenv("HF_TOKEN", "hush-2")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hush-3@proxy:3128")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-4")
    _, page = examine(capsys, "--api-key", "hush-5", "--admin-api-key", "hush-6")
    assert "hush" not in page
    assert re.search(r"^  HF_TOKEN +\(set\)$", page, re.MULTILINE)
    assert "http://(hidden)@proxy:3128" in page
    assert re.search(r"^  --api-key +\(set\)", page, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_HOME", "/cache", "/cache"),
        ("HF_TOKEN", "", ""),
        ("hf_token", "x", "(set)"),
        ("all_proxy", "socks5://a@b:1", "socks5://(hidden)@b:1"),
    ],
)
def test_what_is_hidden_of_a_variable(name: str, value: str, shown: str) -> None:
    assert hidden(name, value) == shown


@pytest.mark.parametrize(
    ("words", "check", "sentence"),
    [
        (["--model-path", "no-such-model"], "model", "no-such-model"),
        (["--page-sizes", "3"], "options", "--page-sizes"),
        (["--tp", "3"], "model", "3"),
        (["--host", "203.0.113.1"], "address", "203.0.113.1"),
        (["--device", "cuda"], "devices", "PyTorch sees 0"),
    ],
)
def test_what_cannot_work_is_named(
    words: list[str], check: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page = examine(capsys, *words)
    assert code == 1
    assert set(failed(page)) == {check}, page
    assert sentence in failed(page)[check]
    assert page.endswith("1 of the checks failed.\n")


def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, page = examine(capsys, "--port", str(taken.getsockname()[1]))
    assert code == 1
    assert "cannot be taken" in failed(page)["address"]


def test_a_temporary_folder_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    code, page = examine(capsys)
    assert code == 1
    assert "TMPDIR" in failed(page)["temporary folder"]


def test_caches_that_were_moved_are_shown_and_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path / "cache"))
    _, page = examine(capsys)
    assert re.search(rf"^  downloaded models +{tmp_path}/cache/huggingface/hub \(", page, re.MULTILINE)
    assert re.search(rf"^  compiled kernels +{tmp_path}/cache/triton \(", page, re.MULTILINE)
    (tmp_path / "file").touch()
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, page = examine(capsys)
    assert code == 1
    assert "SRT_CACHE_DIR" in failed(page)["caches"]


def test_a_pytorch_that_does_not_load_is_quoted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_torch_facts", lambda: "ImportError: libcudart.so.13: cannot open")
    code, page = examine(capsys)
    assert code == 1
    assert failed(page) == {"PyTorch": "ImportError: libcudart.so.13: cannot open"}


def test_packages_that_do_not_fit_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_requirements", lambda: ["numpy>=99"])
    _, page = examine(capsys)
    assert "pip install 'numpy>=99'" in failed(page)["packages"]
    monkeypatch.setattr(doctor, "_requirements", lambda: ["no-such-package"])
    _, page = examine(capsys)
    assert failed(page)["packages"].startswith("no-such-package is missing")


def test_the_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--help"]) == 0
    assert "--tensor-parallel-size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--tp", "2"], ["replica 0 GPU 0, 1"]),
        (["--dp-size", "2", "--base-gpu-id", "1"], ["replica 0 GPU 1", "replica 1 GPU 2"]),
        (["--pp-size", "2", "--tp", "2"], ["replica 0 stage 0: GPU 2, 3; stage 1: GPU 0, 1"]),
        (["--tp", "2", "--device", "cpu"], ["replica 0 2 rank(s) on the CPU"]),
        (
            ["--model-path", "tiny-moe", "--tp", "4", "--dp-size", "2", "--enable-dp-attention"],
            ["attention group 0 GPU 0, 1", "attention group 1 GPU 2, 3"],
        ),
    ],
)
def test_the_gpus_of_all_workers_are_shown(
    words: list[str], lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "gpu_memory", lambda index: None)
    _, page = examine(capsys, "--device", "cuda", *words)
    section = page.partition("\nWorkers\n")[2].partition("\n\n")[0]
    assert [" ".join(line.split()) for line in section.splitlines()] == lines


def test_workers_of_another_host_are_left_out() -> None:
    args = ServerArgs(model_path="m", tp_size=2, dp_size=2, nnodes=2, node_rank=1)
    assert dict(worker_places(args, False)) == {"replica 1": "GPU 0, 1"}

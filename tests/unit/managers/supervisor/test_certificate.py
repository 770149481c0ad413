"""Files that cannot serve HTTPS are refused before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from srt.managers.supervisor.preflight import ServerPlan, check_certificate
from srt.server_args import ArgumentError, ServerArgs, parse_args
from srt.utils.errors import StartError
from tests.support.server_process import ROOT

GOOD = str(ROOT / "tests/support/localhost.pem")  # with a key whose password is "secret"


def refusal(**options: Any) -> str:
    with pytest.raises(StartError) as refused:
        check_certificate(ServerArgs(model_path="m", **options))
    return str(refused.value)


def test_a_good_one_is_taken_and_the_url_says_so() -> None:
    args = ServerArgs(model_path="m", port=443, ssl_certfile=GOOD, ssl_keyfile_password="secret")
    check_certificate(args)
    with socket.socket() as listener:
        assert ServerPlan(args, Path("m"), listener).url == "https://127.0.0.1:443"


def test_others_are_refused_in_a_sentence_and_nobody_is_asked_for_a_password(tmp_path: Path) -> None:
    assert refusal(ssl_certfile="/nowhere.pem").startswith("The certificate /nowhere.pem cannot be used: No such file")
    (tmp_path / "empty.pem").touch()
    assert "empty.pem cannot be used" in refusal(ssl_certfile=str(tmp_path / "empty.pem"))
    for password in (None, "wrong"):
        assert "localhost.pem cannot be used" in refusal(ssl_certfile=GOOD, ssl_keyfile_password=password)
    assert f"{GOOD} with /nowhere.key cannot" in refusal(ssl_certfile=GOOD, ssl_keyfile="/nowhere.key")


def test_a_key_without_a_certificate_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="--ssl-keyfile needs --ssl-certfile"):
        parse_args(["--model-path", "m", "--ssl-keyfile", "x"])

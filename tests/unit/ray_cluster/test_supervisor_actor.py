"""The actor of a replica as an object, without Ray: it owns a real supervisor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from srt.protocol.codec import encode
from srt.protocol.messages import EngineStart
from srt.ray_cluster.options import with_whole_paths, without_http
from srt.ray_cluster.supervisor_actor import SupervisorActor
from srt.server_args import parse_args
from tests.support.server_process import ROOT
from tests.support.several_hosts import free_ports

ARGS = parse_args("--model-path tiny --use-ray --device cpu --dist-timeout 1".split())


def test_a_host_that_cannot_join_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the actor sets it
    address = f"127.0.0.1:{free_ports('127.0.0.1')}"  # where nobody listens
    args = replace(ARGS, nnodes=2, node_rank=1, dist_init_addr=address)
    actor = SupervisorActor(encode(EngineStart(args, False, b"s" * 32), 0, 0))
    assert actor.run().startswith(f"Host 0 cannot be reached at {address}")


def test_paths_that_exist_become_whole_and_names_stay() -> None:
    assert with_whole_paths(ARGS).model_path == "tiny"
    model = ROOT / "srt/assets/models/tiny"
    assert with_whole_paths(replace(ARGS, model_path=f"{model}/../tiny")).model_path == f"{model}/../tiny"


def test_secrets_of_http_do_not_travel() -> None:
    words = "--model-path tiny --use-ray --device cpu --api-key secret --ssl-certfile c --ssl-keyfile k --ssl-keyfile-password p"
    args = parse_args([*words.split(), "--admin-api-key", "other"])
    assert without_http(args) == parse_args("--model-path tiny --use-ray --device cpu".split())

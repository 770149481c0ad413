"""Without Ray: what is refused, which process runs on which host, and what the process that talks to Ray says."""

from __future__ import annotations

import importlib.util
import select
from pathlib import Path

import pytest

from srt.managers.process.replica_layout import children_of, host_of
from srt.managers.supervisor import ray_placement
from srt.managers.supervisor.preflight import check_model
from srt.managers.supervisor.ray_placement import RayPlacement
from srt.server_args import parse_args
from srt.utils.errors import StartError

ARGS = parse_args("--model-path tiny --dp-size 2 --tp 2 --use-ray --device cpu".split())
PLACERS = {
    "refused_by_ray": "link.send(Failed('No Ray cluster.'))",
    "ends_at_once": "",
    "placed": "link.send(RayReached('127.0.0.1')); order = link.receive_blocking(); link.send(Failed(str(order.args.nnodes)))",
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Ray look installed."""
    monkeypatch.setattr(ray_placement, "check_ray_installed", lambda: None)


@pytest.fixture(params=PLACERS)
def placer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: None) -> str:
    """Put a process that is not Ray's in the placer's place. Returns its name."""
    lines = [
        "import os, socket",
        "from srt.protocol.stream import MessageStream",
        "from srt.protocol.messages import Failed",
        "from srt.protocol.host_messages import RayReached",
        "link = MessageStream(socket.socket(fileno=int(os.environ['SRT_LIFELINE_FD'])), generation=None)",
        PLACERS[request.param],
    ]
    (tmp_path / f"{request.param}.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(ray_placement, "PLACER", request.param)
    return str(request.param)


def test_a_server_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else found(name))
    with pytest.raises(StartError, match=r"pip install 'srt-serve\[ray\]'"):
        RayPlacement(ARGS)


def test_what_the_placer_says_reaches_the_user(placer: str) -> None:
    if placer == "placed":
        with RayPlacement(ARGS) as placement:
            led = placement.led(ARGS)
            assert led.leader_address()[0] == "127.0.0.1" and led.nnodes == 3
            placement.place()
            select.select([placement], [], [])
            with pytest.raises(StartError, match=r"^3$"):
                placement.check()
    else:
        sentence = "No Ray cluster" if placer == "refused_by_ray" else "The process that talks to Ray has ended"
        with pytest.raises(StartError, match=sentence), RayPlacement(ARGS):
            pass


def test_host_0_computes_nothing_and_every_replica_is_a_host() -> None:
    children = children_of(1, ARGS.tp_size, ARGS.dp_size)
    hosts = {str(child): host_of(child, ARGS) for child in children}
    assert hosts == {
        **dict.fromkeys(("worker 0", "worker 1", "scheduler 0"), 1),
        **dict.fromkeys(("worker 2", "worker 3", "scheduler 1"), 2),
        "frontend 0": 0,
    }


def test_ray_is_refused_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srt.managers.supervisor.preflight.runs_on_cpu", lambda args: False)
    with pytest.raises(StartError, match="--use-ray starts replicas that compute on CPUs only"):
        check_model(ARGS)

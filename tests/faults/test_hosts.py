"""A server on two hosts answers as one on a single host does; when a host dies, what must end ends, and nothing else is lost."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.faults.test_replacement import FRONTEND, WORKER, Chunks, Trigger, all_streamed, check_same, victim_of
from tests.faults.test_replicas import check_books
from tests.support.checkpoints import CheckpointFactory
from tests.support.server_process import END_S, ServerProcess, all_gone
from tests.support.several_hosts import OtherNamespace, TwoHosts, words_for

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3", num_layers=4)


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Chunks]:
    """The answers of a server on one host."""
    with ServerProcess("srt.launch_server", words_for(folder), tmp_path_factory.mktemp("one-host")) as server:
        return all_streamed(server.wait_ready())


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Make a folder with a short name: sockets lie in folders of both hosts within, and their names are limited."""
    with tempfile.TemporaryDirectory(prefix="srt-") as folder:
        yield Path(folder)


@pytest.fixture
def replicas(folder: Path, tmp_path: Path) -> TwoHosts:
    """A replica on each host."""
    return TwoHosts(words_for(folder, "--dp-size", "2"), tmp_path)


def check_ended(server: ServerProcess, sentence: str, left: list[psutil.Process]) -> None:
    """This host has ended by itself, has said why, and nothing of it is left."""
    assert server.wait() == 1, server.lines
    assert server.lines_with(sentence), server.lines
    assert all_gone(left) and not server.left_behind()


def test_replicas_on_two_hosts_survive_the_loss_of_one(replicas: TwoHosts, undisturbed: list[Chunks]) -> None:
    with replicas.started() as (leader, other):
        url = leader.wait_ready()
        check_same(all_streamed(url), undisturbed)
        check_books(url)
        processes = httpx.get(f"{url}/health", timeout=END_S).json()["processes"]
        assert {"scheduler 0", "scheduler 1", "worker 0", "worker 1", "frontend 0"} < processes.keys()
        lines = httpx.get(f"{url}/metrics", timeout=END_S).text.splitlines()
        assert sum(line.startswith("sglang:num_running_reqs{") for line in lines) == 2

        victim_of(other, WORKER).kill()  # a process of the other host alone is replaced there
        leader.wait_for("at work again")
        check_books(url)

        left = other.children()
        check_same(all_streamed(url, Trigger(200, other.popen.kill)), undisturbed)
        leader.wait_for("Host 1 at 127.0.0.1 is gone")
        assert all_gone(left)
        check_same(all_streamed(url), undisturbed)
        assert httpx.get(f"{url}/ready", timeout=END_S).status_code == 200

        with replicas.start(1) as again:
            leader.wait_for("at work again", 2)
            check_books(url)
            victim_of(leader, FRONTEND).kill()  # the next one finds both replicas
            leader.wait_for("at work again", 3)
            check_same(all_streamed(url), undisturbed)
            left = again.children()
            leader.send(signal.SIGTERM)
            assert leader.wait() == 0, leader.lines
            assert again.wait() == 0, again.lines
            assert all_gone(left) and not again.left_behind() and not leader.left_behind()


def test_all_ends_with_the_host_that_leads(replicas: TwoHosts) -> None:
    with replicas.started() as (leader, other):
        left = [*leader.children(), *other.children()]
        leader.popen.kill()
        check_ended(other, "Host 0 is gone", left)


@pytest.mark.parametrize("option", ["--tp", pytest.param("--pp-size", marks=pytest.mark.full)])
@pytest.mark.parametrize("dies", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_replica_may_span_hosts_and_ends_with_each(
    option: str, dies: int, folder: Path, tmp_path: Path, undisturbed: list[Chunks]
) -> None:
    with TwoHosts(words_for(folder, option, "2"), tmp_path).started() as (leader, other):
        check_same(all_streamed(leader.wait_ready()), undisturbed)
        victim_of(other, WORKER).kill()
        leader.wait_for("at work again")
        check_same(all_streamed(leader.wait_ready()), undisturbed)
        left = [*leader.children(), *other.children()]
        if dies == 0:
            leader.popen.kill()
            check_ended(other, "Host 0 is gone", left)
        else:
            other.popen.kill()
            check_ended(leader, "Host 1 at 127.0.0.1 is gone", left)


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [("--dp-size", "2", "--tp", "2"), ("--dp-size", "4"), ("--pp-size", "2", "--tp", "2")]
)
def test_other_layouts_on_two_hosts_answer_as_one_process(
    options: tuple[str, ...], folder: Path, tmp_path: Path, undisturbed: list[Chunks]
) -> None:
    with TwoHosts(words_for(folder, *options), tmp_path).started() as (leader, other):
        check_same(all_streamed(leader.wait_ready()), undisturbed)
        victim_of(other, WORKER, 1).kill()
        leader.wait_for("at work again")
        check_same(all_streamed(leader.wait_ready()), undisturbed)
        leader.send(signal.SIGTERM)
        assert leader.wait() == 0 and other.wait() == 0, [*leader.lines, *other.lines]


@pytest.fixture
def waiting(replicas: TwoHosts) -> Iterator[ServerProcess]:
    """Host 0, which waits for the other one."""
    with replicas.start(0) as leader:
        leader.wait_for("Waiting for 1 more host")
        yield leader


def test_hosts_that_do_not_fit_are_refused_in_a_sentence(
    replicas: TwoHosts, waiting: ServerProcess, folder: Path, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    wrong_key = tmp_path / "wrong"
    wrong_key.write_text("0" * 64)
    elsewhere = checkpoint("qwen3", num_layers=4, seed=1)
    for more, sentence in (
        (("--page-size", "32"), "--page-size is 16 on host 0 and 32 on host 1"),
        (("--cluster-key-file", str(wrong_key)), "--cluster-key-file those of host 0?"),
        (("--model-path", str(elsewhere)), "The checkpoint of host 1 differs"),
        (("--nnodes", "4", "--dp-size", "4", "--node-rank", "3"), "--nnodes is 2 on host 0 and 4"),
    ):
        with replicas.start(1, *more) as other:
            assert other.wait() == 1 and other.lines_with(sentence), other.lines
    with replicas.start(1) as other, replicas.start(1) as second:
        waiting.wait_ready()
        waiting.wait_for("cannot join: Another host has --node-rank 1 already")
        refused = next(host for host in (other, second) if not host.lines_with("Host 1 has joined"))
        assert refused.wait() == 1 and refused.lines_with("Another host has --node-rank 1 already"), refused.lines
        waiting.send(signal.SIGTERM)
        assert waiting.wait() == 0


def test_a_host_that_nobody_answers_says_so(replicas: TwoHosts) -> None:
    with replicas.start(1, "--dist-timeout", "1") as other:
        assert other.wait() == 1 and other.lines_with("Host 0 cannot be reached at 127.0.0.1:"), other.lines
    with replicas.start(0, "--dist-timeout", "1") as leader:
        assert leader.wait() == 1 and leader.lines_with("Host 1 has not joined within 1 s"), leader.lines


@pytest.mark.full
def test_a_cut_cable_loses_nothing(folder: Path, tmp_path: Path, undisturbed: list[Chunks]) -> None:
    try:
        namespace = OtherNamespace(tmp_path)
    except OSError as error:
        pytest.skip(f"no network namespace can be made: {error}")
    try:
        hosts = TwoHosts(words_for(folder, "--dp-size", "2"), tmp_path / "h", namespace.address, namespace.python)
        with hosts.started() as (leader, other):
            left = other.children()
            check_same(all_streamed(leader.wait_ready(), Trigger(200, namespace.cut)), undisturbed)
            leader.wait_for("Host 1 at 198.18.36.2")
            check_ended(other, "Host 0", left)
            leader.send(signal.SIGTERM)
            assert leader.wait() == 0, leader.lines
    finally:
        namespace.close()

"""Host 0 as the owner of the membership: real sockets, and hosts that the test plays."""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as with_fields

from srt.managers.process.child_process import ChildKey
from srt.managers.process.heartbeats import HeartbeatReader
from srt.managers.process.replica_layout import children_of, host_of
from srt.managers.supervisor import hosts as hosts_module
from srt.managers.supervisor.events import ChildExited, Event, HostBack, HostLost, LinkLost
from srt.managers.supervisor.following import join
from srt.managers.supervisor.hosts import ChildSaid, Hosts
from srt.protocol import host_link
from srt.protocol.cluster_key import secret_of_run
from srt.protocol.codec import decode, encode, protocol_hash
from srt.protocol.engine_work import EngineLedger
from srt.protocol.host_messages import (
    HostBeat,
    HostEnd,
    HostExited,
    HostHeard,
    HostHello,
    HostKill,
    HostLinkLost,
    HostSpawn,
    HostTell,
)
from srt.protocol.messages import Heartbeat, Message, Stop
from srt.protocol.stream import MessageStream
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from tests.support.several_hosts import free_ports

SECRET = b"s" * 32
HELLO = HostHello(1, "code", "weights", {"page_size": "16", "nnodes": "2"})
Join = Callable[..., MessageStream]


def args_of(**options: object) -> ServerArgs:
    given = {"model_path": "tiny", "nnodes": 2, "dp_size": 2, "cluster_key_file": "key", **options}
    args = ServerArgs(**{"dist_init_addr": f"127.0.0.1:{free_ports('127.0.0.1')}", **given})  # type: ignore[arg-type]
    args.check()
    return args


def elsewhere(args: ServerArgs) -> list[ChildKey]:
    every = children_of(1, args.tp_size, args.dp_size, args.pp_size)
    return [child for child in every if host_of(child, args) > 0]


class World:
    """Host 0, and what it was told."""

    def __init__(self, args: ServerArgs, run_dir: Path) -> None:
        self.args, self.run_dir = args, run_dir
        self.hosts = Hosts(args, elsewhere(args), with_fields(HELLO, rank=0), SECRET, run_dir)
        self.news: list[ChildSaid | Event | str] = []

    def join(self, hello: HostHello = HELLO, secret: bytes = SECRET) -> MessageStream:
        """Join as another host, while host 0 answers."""
        found: list[MessageStream | StartError] = []

        def run() -> None:
            try:
                found.append(join(self.args, hello, secret, lambda _: None)[1])
            except StartError as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self.until(lambda: bool(found))
        thread.join()
        if isinstance(found[0], StartError):
            raise found[0]
        return found[0]

    def until(self, is_done: Callable[[], bool]) -> None:
        """Receive until it is so."""
        while not is_done():
            self.hosts._selector.select(0.05)
            self.news += self.hosts.receive()

    def next_news(self) -> ChildSaid | Event | str:
        self.until(lambda: bool(self.news))
        return self.news.pop(0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(args_of(), tmp_path)
    yield world
    world.hosts.close("")


def test_a_host_joins_hears_orders_and_is_heard(world: World) -> None:
    host = world.join()
    assert world.news == ["Host 1 has joined from 127.0.0.1.", HostBack(world.hosts.children)]
    worker = ChildKey("worker", 1, 1)
    assert world.hosts.owns(worker) and not world.hosts.owns(ChildKey("worker", 0))
    world.hosts.start(worker, 2, 1, 0, EngineLedger())
    world.hosts.tell(worker, Stop(1.0))
    world.hosts.kill(worker)
    start, tell, kill = (host.receive_blocking() for _ in range(3))
    port = world.args.leader_address()[1]
    assert start == HostSpawn(
        "worker", 1, 1, 2, 1, 0, EngineLedger(), ["", f"127.0.0.1:{port + 4}"], "", "", world.hosts._run
    )
    assert isinstance(tell, HostTell) and decode(tell.message).message == Stop(1.0)
    assert kill == HostKill("worker", 1)

    world.news.clear()
    host.send(HostHeard("worker", 1, encode(Heartbeat(0.5), 0, 0)))
    assert world.next_news() == ChildSaid(worker, Heartbeat(0.5))
    (status,) = HeartbeatReader(world.run_dir, 30.0).read(0.0)
    assert (status.process, status.pid, status.age_s) == ("worker 1", 0, 0.5)
    host.send(HostLinkLost("worker", 1, None))
    host.send(HostExited("worker", 1, -9))
    assert [world.next_news(), world.next_news()] == [LinkLost(worker, None), ChildExited(worker, -9)]
    world.hosts.close("")
    assert host.receive_blocking() == HostEnd("")


def test_no_process_of_another_run_has_the_same_secret(world: World, tmp_path: Path) -> None:
    frontend = ChildKey("frontend", 0)
    again = World(args_of(), tmp_path)
    found = [one.hosts.meeting(frontend).secret for one in (world, world, again)]
    assert found[0] == found[1] == secret_of_run(SECRET, world.hosts._run)
    assert found[2] not in (found[0], SECRET) and found[0] != SECRET
    again.hosts.close("")


def test_a_host_that_goes_is_lost_and_may_come_back(world: World) -> None:
    for _ in range(2):
        host = world.join()
        world.news.clear()
        host.close()
        assert world.next_news() == HostLost(world.hosts.children, "Host 1 at 127.0.0.1 is gone.")
    world.hosts.kill(world.hosts.children[0])  # nobody hears it


def test_a_silent_host_is_lost_unless_host_0_slept_itself(world: World) -> None:
    world.join()
    last_s = world.hosts._joined[1].last_heard_s
    assert world.hosts.tend(last_s + hosts_module.SILENT_S - 1) == []
    world.hosts.excuse(last_s + 60)
    assert world.hosts.tend(last_s + 61) == []
    (lost,) = world.hosts.tend(last_s + 61 + hosts_module.SILENT_S)
    assert isinstance(lost, HostLost) and "no sign of life" in lost.sentence


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (with_fields(HELLO, code="other"), "Host 1 runs other code of srt"),
        (with_fields(HELLO, weights="other"), "The checkpoint of host 1 differs"),
        (
            with_fields(HELLO, options=HELLO.options | {"page_size": "32"}),
            "--page-size is 16 on host 0 and 32 on host 1",
        ),
        (with_fields(HELLO, rank=2), "--node-rank 2 is not that of another host"),
        (with_fields(HELLO, rank=0), "--node-rank 0 is not that of another host"),
    ],
)
def test_a_host_that_differs_is_refused_on_both_sides(world: World, hello: HostHello, words: str) -> None:
    with pytest.raises(StartError, match=words):
        world.join(hello)
    assert [words in str(news) for news in world.news] == [True]


def test_a_second_host_of_one_rank_and_one_without_the_secret_are_refused(world: World) -> None:
    first = world.join()
    with pytest.raises(StartError, match="Another host has --node-rank 1 already"):
        world.join()
    with pytest.raises(StartError, match="--cluster-key-file those of host 0"):
        world.join(secret=b"t" * 32)
    first.send(HostBeat({"1": {"num_running": 1.0}}))
    world.until(lambda: "1" in world.hosts._counters)
    assert world.hosts._counters["1"].values() == {"num_running": 1.0}


@pytest.mark.parametrize(
    "message",
    [
        HostExited("worker", 0, 0),  # a process of host 0
        HostExited("frontend", 0, 0),
        HostBeat({"../7": {}}),
        HostHeard("worker", 1, b"no message"),
        HELLO,
    ],
)
def test_what_no_host_may_say_cuts_it_off(world: World, message: Message) -> None:
    host = world.join()
    world.news.clear()
    host.send(message)
    lost = world.next_news()
    assert isinstance(lost, HostLost) and "sent what cannot be read" in lost.sentence


def test_who_says_nothing_keeps_nobody_waiting(world: World) -> None:
    address = world.args.leader_address()
    silent = [socket.create_connection(address) for _ in range(hosts_module.MOST_GREETINGS - 1)]
    world.join()
    for one in silent:
        one.close()


def test_who_sends_byte_by_byte_loses_his_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(host_link, "HANDSHAKE_S", 0.2)
        patch.setattr(hosts_module, "HELLO_S", 0.2)
        send_byte_by_byte(world)
    world.join()


def send_byte_by_byte(world: World) -> None:
    """Until both who do so have lost their places: one in its greeting, one behind it."""
    greeting = host_link._GREETING.pack(host_link._MAGIC, protocol_hash().encode(), b"1", bytes(32))
    slow = [socket.create_connection(world.args.leader_address()) for _ in range(2)]
    slow[0].sendall(greeting + b"\xff\xff\xff\0")  # the length of a long message
    waiting = set(slow)
    for _ in range(6_000):
        for one in list(waiting):
            try:
                one.sendall(b"s")
            except OSError:
                waiting.remove(one)
        if not waiting:
            break
        select.select([], [], [], 0.01)
    assert not waiting


def test_a_failed_accept_does_not_end_the_wait_for_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, errors = socket.socket.accept, [errno.ECONNABORTED, errno.EMFILE]

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if errors:
            raise OSError(errors.pop(), "for once")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    world = World(args_of(), tmp_path)
    world.join()
    world.hosts.close("")
    assert not errors


def test_a_divided_replica_meets_at_its_first_host(tmp_path: Path) -> None:
    args = args_of(dp_size=1, tp_size=2)
    world = World(args, tmp_path)
    port = args.leader_address()[1]
    meeting = world.hosts.meeting(ChildKey("worker", 0))
    assert (meeting.frontends, meeting.workers, meeting.ranks) == (
        [""],
        f"127.0.0.1:{port + 2}",
        f"127.0.0.1:{port + 3}",
    )
    assert world.hosts.children == (ChildKey("worker", 1),)
    world.hosts.close("")


def test_a_ray_cluster_without_room_is_named_as_the_reason(tmp_path: Path) -> None:
    args = args_of(nnodes=1, cluster_key_file=None, use_ray=True, ray_num_cpus=4, dist_timeout=1)
    world = World(replace(args, nnodes=3), tmp_path)
    with pytest.raises(StartError, match=r"Hosts 1, 2 have not joined .* 4 free CPUs of one node for each replica"):
        world.hosts.wait(lambda _: None)
    world.hosts.close("")


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    args = args_of(dist_init_addr="198.51.100.1:5000")
    with pytest.raises(StartError, match="Host 0 cannot listen at --dist-init-addr"):
        Hosts(args, [], HELLO, SECRET, tmp_path)
    unknown = replace(args, dist_init_addr="no.such.host.invalid:5000")
    with pytest.raises(StartError, match="is not known"):
        join(unknown, HELLO, SECRET, lambda _: None)

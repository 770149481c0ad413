"""Servers on two hosts, as far as one machine can show them: two supervisors that meet over TCP, or two network namespaces."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.server_process import ServerProcess

MODULE = "srt.launch_server"
NUM_PORTS = 1 + 3 * 4  # that four replicas take
NETWORK = "198.18.36"  # set aside for tests (RFC 2544)


@dataclass(slots=True)
class TwoHosts:
    """How to start the server on each of two hosts."""

    words: list[str]
    folder: Path
    address: str = "127.0.0.1"
    python_elsewhere: Path = Path(sys.executable)  # runs on the other host

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        key_file = self.folder / "key"
        key_file.write_text(secrets.token_hex(32))
        self.words = [*self.words, "--nnodes", "2", "--dist-init-addr", f"{self.address}:{free_ports(self.address)}"]
        self.words += ["--cluster-key-file", str(key_file)]

    def start(self, rank: int, *more: str) -> ServerProcess:
        """Start host `rank`; options in `more` replace those of all hosts."""
        tmp = self.folder / f"host-{rank}-{secrets.token_hex(2)}"
        tmp.mkdir()
        python = Path(sys.executable) if rank == 0 else self.python_elsewhere
        return ServerProcess(MODULE, [*self.words, "--node-rank", str(rank), *more], tmp, python=python)

    @contextlib.contextmanager
    def started(self) -> Iterator[tuple[ServerProcess, ServerProcess]]:
        with self.start(0) as leader, self.start(1) as other:
            leader.wait_ready()
            yield leader, other


def words_for(model: Path | str, *options: str) -> list[str]:
    words = ["--model-path", str(model), "--device", "cpu", "--dtype", "float32", "--port", "0"]
    return [*words, "--max-total-tokens", "8192", "--max-replacements", "1000", *options]


def free_ports(address: str) -> int:
    """Return the first of NUM_PORTS ports in a row that nobody has, and that no other process of this run of tests is given meanwhile."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        first = 20_000 + NUM_PORTS * (number + count * secrets.randbelow(10_000 // NUM_PORTS // count))
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + NUM_PORTS):
                    stack.enter_context(socket.create_server((address, port)))
            except OSError:
                continue
            return first


class OtherNamespace:
    """A network namespace with one cable to ours, which can be cut. OSError if this process may not make one."""

    def __init__(self, folder: Path) -> None:
        self._name, self._cable = f"srt-{secrets.token_hex(2)}", f"srt{secrets.token_hex(2)}"
        self.address = f"{NETWORK}.1"  # ours
        self.python = folder / "python-elsewhere"
        try:
            _ip("netns", "add", self._name)
            _ip("link", "add", self._cable, "type", "veth", "peer", "name", "cable", "netns", self._name)
            _ip("addr", "add", f"{self.address}/30", "dev", self._cable)
            _ip("link", "set", self._cable, "up")
            _ip("-n", self._name, "addr", "add", f"{NETWORK}.2/30", "dev", "cable")
            _ip("-n", self._name, "link", "set", "cable", "up")
            _ip("-n", self._name, "link", "set", "lo", "up")
        except OSError:
            self.close()
            raise
        self.python.write_text(f'#!/bin/sh\nexec ip netns exec {self._name} {sys.executable} "$@"\n')
        self.python.chmod(0o755)

    def cut(self) -> None:
        _ip("link", "set", self._cable, "down")

    def close(self) -> None:
        for words in (("link", "del", self._cable), ("netns", "del", self._name)):
            with contextlib.suppress(OSError):
                _ip(*words)


def _ip(*words: str) -> None:
    command: Sequence[str] = ("ip", *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

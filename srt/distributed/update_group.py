"""The process group over which a trainer sends weights to the ranks of a server. Trainers may use this class too: rank 0 sends.

The group meets at a TCPStore of rank 0, under the keys that torch's own groups use, so that a trainer may as well create its side with
`torch.distributed`. It is no part of torch's global groups.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as torch_distributed
from torch import Tensor

Backend = Literal["gloo", "nccl"]
dist: Any = torch_distributed  # its own annotations lack what is used here
POLL_S = 2e-3
CONNECT_S = 0.05
SENDER = 0


class UpdateGroupError(Exception):
    """Raised when the other side of a group does not come, is gone or is silent; the sentence says so."""


class UpdateGroup:
    """One rank of the group. After an UpdateGroupError it is of no use, and should be closed."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        name: str = "weight_update_group",
        backend: Backend = "gloo",
        timeout_s: float = 60.0,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """Meet the other ranks at a port of rank 0's host. `report` is called again and again while they are awaited.

        UpdateGroupError if they do not come within `timeout_s`, at once if the host is not known; and later by `broadcast` if a
        tensor takes longer than `timeout_s`.
        """
        self._name = name
        self._backend: Backend = backend
        self._timeout_s = timeout_s
        opened: list[Any] = []
        failed: list[BaseException] = []

        def open_group() -> None:
            try:
                opened.append(_open(address, port, rank, world_size, name, backend, timeout_s))
            except Exception as error:  # torch's own, of several types
                failed.append(error)

        thread = threading.Thread(target=open_group, name="update group", daemon=True)
        thread.start()
        deadline_s = time.monotonic() + timeout_s + 5.0
        while thread.is_alive() and time.monotonic() < deadline_s:
            thread.join(POLL_S)
            report()
        if failed and isinstance(failed[0], UpdateGroupError):
            raise failed[0]
        if not opened:
            reason = f": {_first_line(failed[0])}" if failed else ""
            raise UpdateGroupError(
                f"The {world_size} ranks of the group {name} did not meet at {address}:{port} within {timeout_s:.0f} s{reason}"
            )
        self._store, self._group = opened[0]

    @property
    def device_type(self) -> str:
        """Where the tensors of `broadcast` must be."""
        return "cuda" if self._backend == "nccl" else "cpu"

    def broadcast(self, tensors: Sequence[Tensor], report: Callable[[], None] = lambda: None) -> None:
        """Send these tensors, or fill them with what rank 0 sends, one after the other. All ranks give the same types and shapes."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        # As bytes, because gloo knows no floats of 8 bits.
        parts = [one.view(torch.uint8) if one.dtype.itemsize == 1 else one for one in tensors]
        try:
            for work in self._begin(lambda: [self._group.broadcast([part], options) for part in parts], report):
                deadline_s = time.monotonic() + self._timeout_s
                while not work.is_completed():
                    if time.monotonic() > deadline_s:
                        raise self._silence()
                    time.sleep(POLL_S)
                    report()
                work.wait()
        except RuntimeError as error:
            if "wait timeout" in str(error):  # of the store, by which NCCL connects
                raise self._silence() from error
            raise UpdateGroupError(f"The group {self._name} is broken: {_first_line(error)}") from error
        if self._backend == "nccl":
            torch.cuda.current_stream().synchronize()

    def _silence(self) -> UpdateGroupError:
        return UpdateGroupError(f"A tensor did not come through the group {self._name} within {self._timeout_s:.0f} s.")

    def _begin(self, send_all: Callable[[], list[Any]], report: Callable[[], None]) -> list[Any]:
        """Return the broadcasts under way.

        NCCL connects at the first one, and waits for rank 0 there: in another thread, so that this one reports.
        """
        if self._backend != "nccl":
            return send_all()
        begun: list[list[Any]] = []
        failed: list[RuntimeError] = []
        stream = torch.cuda.current_stream()

        def begin() -> None:
            try:
                with torch.inference_mode(), torch.cuda.device(stream.device), torch.cuda.stream(stream):
                    begun.append(send_all())
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=begin, name="update group", daemon=True)
        thread.start()
        deadline_s = time.monotonic() + self._timeout_s + 5.0
        while thread.is_alive() and time.monotonic() < deadline_s:
            thread.join(POLL_S)
            report()
        if failed:
            raise failed[0]
        if not begun:
            raise self._silence()
        return begun[0]

    def close(self) -> None:
        """Leave the group. What is under way fails, here and at the other ranks."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()


def _open(
    address: str, port: int, rank: int, world_size: int, name: str, backend: Backend, timeout_s: float
) -> tuple[Any, Any]:
    if rank != SENDER:
        _await_port(address, port, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    tcp = dist.TCPStore(address, port, world_size, rank == SENDER, timeout)
    store = dist.PrefixStore(name, tcp)
    for prefix in (f"{name}/", "cpu/" if backend == "gloo" else "cuda/"):  # as torch.distributed names them
        store = dist.PrefixStore(prefix, store)
    kind = dist.ProcessGroupGloo if backend == "gloo" else dist.ProcessGroupNCCL
    options = kind._Options() if backend == "gloo" else kind.Options()
    if backend == "gloo":
        options._timeout = timeout
        options._devices = [kind.create_device(hostname=_own_address(address, port))]
    else:
        options._timeout = timedelta(days=1)  # NCCL would end the process; `broadcast` gives up before
    return tcp, kind(store, rank, world_size, options)


def _await_port(address: str, port: int, timeout_s: float) -> None:
    """Wait until something listens at the port; TCPStore would write a page of C++ frames to the log for each failed try."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout_s).close()
            return
        except (socket.gaierror, ValueError) as error:  # ValueError: what cannot be a name at all
            raise UpdateGroupError(f"The host {address[:200]!r} is not known: {_first_line(error)}") from error
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(CONNECT_S)


def _own_address(address: str, port: int) -> str:
    """Return the address of this host's interface that reaches another host. Nothing is sent to find it."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

"""A worker's link to the scheduler, and a thread that always listens to the supervisor.

The thread that executes a plan receives it itself: a hand-over between threads would cost more than the rest of the host's work.
"""

from __future__ import annotations

import os
import queue
import threading

import zmq

from srt.managers.process.child import Child, SupervisorGone
from srt.protocol.link_errors import LinkBroken
from srt.protocol.links import DealerLink, worker_endpoint
from srt.protocol.messages import FromWorker, Stop, ToWorker

LINGER_MS = 2000  # time to deliver the last messages of a worker that ends


class WorkerLink:
    """The link on which plans arrive, in the order in which they were sent. For one thread only."""

    def __init__(self, child: Child) -> None:
        start = child.start
        self._child = child
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = worker_endpoint(start.run_dir, start.generation, start.meeting)
        identity = f"w{start.index}".encode()
        self._link = DealerLink(self._context, endpoint.path, start.generation, identity, endpoint.keys)
        self._is_stopped = False
        self._is_woken = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for source in (self._link.socket, self._wake):
            self._poller.register(source, zmq.POLLIN)
        threading.Thread(target=self._hear_supervisor, name="supervisor", daemon=True).start()

    def next_plan(self, block: bool = True) -> ToWorker | None:
        """Return the next plan; None when the supervisor asks to stop.

        `queue.Empty` after a `wake`, or if there is none and `block` is off.

        LinkBroken if a plan was lost or could not be read: plans are deltas, so the worker cannot continue.
        """
        while not self._is_stopped:
            message = self._link.receive()
            if isinstance(message, ToWorker):
                return message
            if message is not None:
                raise LinkBroken(f"the scheduler sent {type(message).__name__}, which a worker does not accept")
            if not block or self._is_woken:
                self._is_woken = False
                raise queue.Empty
            if dict(self._poller.poll()).get(self._wake):
                os.eventfd_read(self._wake)
        return None

    def wake(self) -> None:
        """Make `next_plan` return soon. Any thread may call this."""
        self._is_woken = True
        os.eventfd_write(self._wake, 1)

    def send(self, message: FromWorker) -> None:
        self._link.send(message)

    def close(self) -> None:
        """Deliver what is still queued, then close the link."""
        self._link.close(LINGER_MS)
        self._context.term()

    def _hear_supervisor(self) -> None:
        poller = zmq.Poller()
        poller.register(self._child.fileno(), zmq.POLLIN)
        try:
            while True:
                poller.poll()
                while (message := self._child.receive()) is not None:
                    if isinstance(message, Stop):
                        self._is_stopped = True
                        os.eventfd_write(self._wake, 1)
        except SupervisorGone:
            os._exit(1)  # at once: the executing thread may be waiting for the device, and there is nothing to save

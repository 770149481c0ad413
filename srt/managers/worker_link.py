"""A worker's I/O thread: the scheduler's plans come in, answers go out, the supervisor is heard, whatever the device is busy with."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque

import zmq

from srt.managers.child import Child, SupervisorGone
from srt.protocol.link_errors import LinkBroken
from srt.protocol.links import DealerLink, worker_path
from srt.protocol.messages import FromWorker, StepPlan, Stop, ToWorker, WorkPlan

LINGER_MS = 2000  # for the last words of a worker that ends


class WorkerLink:
    """Plans in the order in which they were sent. `send` and `next_plan` are for the thread that executes."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._inbox: queue.SimpleQueue[ToWorker | Exception | None] = queue.SimpleQueue()
        self._outbox: deque[FromWorker] = deque()
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="worker link", daemon=True)
        self._thread.start()

    def next_plan(self, block: bool = True) -> ToWorker | None:
        """The next plan; None when the supervisor asks to stop. `queue.Empty` if there is none and `block` is off.

        LinkBroken if a plan was lost or could not be read: plans are deltas, so there is no going on.
        """
        item = self._inbox.get(block)
        if isinstance(item, Exception):
            raise item
        return item

    def send(self, message: FromWorker) -> None:
        self._outbox.append(message)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what is to be sent, and end."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()

    def _run(self) -> None:
        start = self._child.start
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoint = worker_path(start.run_dir, start.generation)
        link = DealerLink(context, endpoint, start.generation, f"w{start.index}".encode())
        try:
            self._relay(link)
        except SupervisorGone:
            os._exit(1)  # the executing thread may be waiting for the device: nothing is left to be saved
        except Exception as error:  # the executing thread says why the worker ends
            self._inbox.put(error)
        link.close(LINGER_MS)
        context.term()

    def _relay(self, link: DealerLink) -> None:
        poller = zmq.Poller()
        for source in (link.socket, self._wake, self._child.fileno()):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while self._outbox:
                link.send(self._outbox.popleft())
            if self._closing:
                return
            if self._child.fileno() in ready:
                self._hear_supervisor()
            if link.socket in ready:
                self._take_plans(link)

    def _hear_supervisor(self) -> None:
        while (message := self._child.receive()) is not None:
            if isinstance(message, Stop):
                self._inbox.put(None)

    def _take_plans(self, link: DealerLink) -> None:
        while (message := link.receive()) is not None:
            if not isinstance(message, (StepPlan, WorkPlan)):
                raise LinkBroken(f"the scheduler sent {type(message).__name__}")
            self._inbox.put(message)

"""What a worker prepares for requests beside its steps, such as compiled grammars: in threads, so that no step waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from srt.protocol.messages import Prepared, Resource

NUM_THREADS: Final = 2

logger = logging.getLogger(__name__)


class PrepareError(Exception):
    """A resource cannot be prepared. The message is a sentence for the client that needs it."""


class Loader(Protocol):
    """Prepares and keeps the resources of one kind."""

    def prepare(self, key: str, content: bytes) -> None:
        """Prepare one, in any thread. PrepareError if that cannot be done."""

    def maintain(self) -> None:
        """Look after what is kept, in any thread, now and then while it is used."""

    def release(self, key: str) -> None:
        """Forget one. Called by the thread that executes steps, after `prepare` has returned."""


class ResourceThreads:
    """Runs the loaders. All methods are for the thread that executes steps; `on_done` is called in others when there is an answer."""

    def __init__(self, loaders: Mapping[str, Loader], on_done: Callable[[], None]) -> None:
        """`loaders` by kind."""
        self._loaders = loaders
        self._on_done = on_done
        self._jobs: queue.SimpleQueue[Resource | Loader] = queue.SimpleQueue()  # a loader: it is to be maintained
        self._answers: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        self._kinds: dict[str, str] = {}  # by key, of what is or is being prepared
        self._has_threads = False

    def prepare(self, resource: Resource) -> None:
        """Begin to prepare it. `pop_answers` tells when that is done."""
        self._kinds[resource.key] = resource.kind
        if not self._has_threads:
            self._has_threads = True
            for number in range(NUM_THREADS):
                # As daemons: one that hangs must not keep the process from its end.
                threading.Thread(target=self._work, name=f"resources {number}", daemon=True).start()
        self._jobs.put(resource)

    def maintain(self, loader: Loader) -> None:
        """Let a loader look after what it keeps, in a thread. Something of it was prepared."""
        self._jobs.put(loader)

    def release(self, key: str) -> None:
        """Forget a resource whose answer was sent."""
        loader = self._loaders.get(self._kinds.pop(key))
        if loader is not None:
            loader.release(key)

    def pop_answers(self) -> list[Prepared]:
        """Return the answers since the last call."""
        answers = []
        while True:
            try:
                answers.append(self._answers.get_nowait())
            except queue.Empty:
                return answers

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if isinstance(job, Resource):
                self._answers.put(Prepared(job.key, self._prepare(job)))
                self._on_done()
                continue
            try:
                job.maintain()
            except Exception:
                logger.exception("What was prepared could not be maintained.")

    def _prepare(self, resource: Resource) -> str:
        """Return why it cannot be prepared; empty if it is."""
        loader = self._loaders.get(resource.kind)
        if loader is None:
            return f"This server's workers cannot prepare a {resource.kind}."
        try:
            loader.prepare(resource.key, resource.content)
        except PrepareError as error:
            return str(error)
        except Exception as error:  # a defect, of this request alone
            logger.exception("A %s could not be prepared.", resource.kind)
            return f"The {resource.kind} could not be prepared: {type(error).__name__}: {error}"
        return ""

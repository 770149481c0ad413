"""Wait, in a thread, for outputs of steps that cannot be polled: those that another stage of a pipeline sends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from srt.distributed.errors import CollectiveError

if TYPE_CHECKING:
    from srt.model_executor.step.step_output import StepOutput


class OutputWaiter:
    """Waits for outputs in their order, and wakes the executing thread after each. Its thread starts with the first output."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait_for(self, output: StepOutput) -> None:
        self._outputs.put(output)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ids of the last stage", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._outputs.get().wait()
            except CollectiveError:
                self._wake()  # the executing thread gets the same error when it waits
                return
            self._wake()

"""A real worker that dies of one request: of a row whose seed is POISON, at the second of its decode steps, as by a fault in a kernel.

`python -m tests.support.poisoned_worker launch --model-path …` is a whole server of such workers.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from srt.managers.process.child import Child
from srt.managers.tp_worker import process as tp_worker
from srt.protocol.messages import PlanSection
from tests.support.other_workers import run_or_launch

POISON = 666


class Poisoned:
    """Stands before a worker's ModelRunner, and looks at what it is given."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._num_decodes: dict[int, int] = {}  # of the slots that POISON has had

    def launch(self, section: PlanSection) -> Any:
        for admission in section.admissions:
            self._num_decodes.pop(admission.slot, None)
            if admission.seed == POISON:
                self._num_decodes[admission.slot] = 0
        for slot in section.decode_slots.tolist():
            if slot in self._num_decodes:
                self._num_decodes[slot] += 1
                if self._num_decodes[slot] == 2:
                    os.kill(os.getpid(), signal.SIGSEGV)
        return self._runner.launch(section)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def work(child: Child) -> None:
    load = tp_worker.load_runner
    tp_worker.load_runner = lambda child: Poisoned(load(child))  # type: ignore[assignment, return-value]
    tp_worker.main(child)


if __name__ == "__main__":
    run_or_launch("tests.support.poisoned_worker", work)

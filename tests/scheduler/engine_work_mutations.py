"""Bugs to plant in updates of weights and loans of memory, which the worlds of engine_work.py find."""

from __future__ import annotations

from tests.scheduler.mutations import Mutation

ENGINE_WORK_MUTATIONS = (
    Mutation(
        "adapters that come while memory is lent are forgotten",
        "managers/scheduler/scheduler.py",
        "                self._settle(core, core.resources.answered(rank, message))\n",
        "                ready = core.resources.answered(rank, message)\n"
        "                self._settle(core, [] if self._changes.lends_memory else ready)\n",
    ),
    *(
        Mutation(name, "managers/scheduler/engine_changes.py", anchor, change)
        for name, anchor, change in (
            (
                "steps run while memory is released",
                "return self._change is not None or self.pauses.is_on or bool(self._ledger.released)",
                "return self._change is not None or self.pauses.is_on",
            ),
            (
                "steps run while weights are exchanged",
                "return self._change is not None or self.pauses.is_on or bool(self._ledger.released)",
                "return self.pauses.is_on or bool(self._ledger.released)",
            ),
            (
                "weights are exchanged beside steps in flight",
                "if change is None or change.is_sent or core.stream.num_in_flight:",
                "if change is None or change.is_sent:",
            ),
            (
                "what is cached of old weights is used with new ones",
                "        core.memory.retire(core.planner.running())\n        # What came",
                "        # What came",
            ),
            (
                "keys and values are used that were given back",
                '            if "kv_cache" in work.tags:\n                core.memory.retire(core.planner.running())\n',
                "",
            ),
            (
                "an update is answered before it is recorded",
                "        return [*effects, *_answer(change, reply, clients)]\n\n    def _finish_loan",
                "        return [*_answer(change, reply, clients), *effects]\n\n    def _finish_loan",
            ),
            (
                "what is released is released again",
                "tags = [tag for tag in work.tags if tag not in released]",
                "tags = list(work.tags)",
            ),
            (
                "a failed update is recorded",
                "        if change.errors:\n            return _answer(",
                "        if change.errors and isinstance(change.work, SameWeights):\n            return _answer(",
            ),
            (
                "tensors are said to be in a folder",
                "if isinstance(work, LoadWeights) and not work.is_partial:\n            source",
                "if isinstance(work, LoadWeights):\n            source",
            ),
            (
                "requests are refused when memory is back",
                "refuses_requests=bool(released) and self._ledger.refuses_requests",
                "refuses_requests=self._ledger.refuses_requests",
            ),
        )
    ),
)

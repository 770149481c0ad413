"""Bugs to plant in how resources are prepared, kept and released, and in who waits for them."""

from __future__ import annotations

from tests.scheduler.mutations import Mutation

_RESOURCES = "managers/scheduler/resources.py"
_SCHEDULER = "managers/scheduler/scheduler.py"
_PLANNER = "managers/scheduler/planner.py"

RESOURCE_MUTATIONS = (
    Mutation("admitted before its resource is ready", _PLANNER, "self._queue.hold(request)", "self._line_up(request)"),
    Mutation(
        "the first rank's answer makes it ready",
        _RESOURCES,
        "        if entry.ranks_left:\n            return []",
        "        if entry.ranks_left and rank:\n            return []",
    ),
    Mutation(
        "another rank's answer counts",
        _RESOURCES,
        "entry.ranks_left.remove(rank)",
        "entry.ranks_left.discard(0) if 0 in entry.ranks_left else entry.ranks_left.remove(rank)",
    ),
    Mutation(
        "released while it is used again",
        _RESOURCES,
        "            self._idle.pop(resource.key, None)\n            return True",
        "            return True",
    ),
    Mutation(
        "released with its first user",
        _RESOURCES,
        "if entry.users == 0:\n            self._note_unused(entry)\n\n",
        "if True:\n            self._note_unused(entry)\n\n",
    ),
    Mutation(
        "released though there is room",
        _RESOURCES,
        "            self._idle[key] = entry",
        "            self._release(entry)",
    ),
    Mutation(
        "more are held than the workers hold", _RESOURCES, "self._num_held += 1", "self._num_held += not self._idle"
    ),
    Mutation(
        "not prepared again after a replacement",
        "managers/tokenizer_manager/request_ledger.py",
        "resumed=entry.was_sent,",
        "resumed=entry.was_sent, resource=None if entry.was_sent else request.resource,",
    ),
    Mutation(
        "a failure is not told", _RESOURCES, "return (400, entry.reason) if entry.reason else None", "return None"
    ),
    Mutation("what failed is kept", _RESOURCES, "elif entry.reason or entry.is_late:", "elif entry.is_late:"),
    Mutation(
        "nobody waits too long",
        _RESOURCES,
        "        late = [entry for entry in self._preparing.values() if now >= entry.asked_s + LONGEST_S]",
        "        late: list[_Entry] = []",
    ),
    Mutation(
        "the late keep their place", _RESOURCES, "self._num_held -= not entry.is_late\n            entry", "entry"
    ),
    Mutation(
        "one of those that wait is forgotten",
        _RESOURCES,
        "done, entry.waiting = entry.waiting, []",
        "done, entry.waiting = entry.waiting[:4], []",
    ),
    Mutation("the ended are made ready", _RESOURCES, "entry.waiting.remove(request)", "pass"),
    Mutation(
        "asked for again by each request",
        _RESOURCES,
        "if entry is not None and not entry.is_closed:",
        "if entry is not None and entry.is_asked and not entry.is_closed:",
    ),
    Mutation(
        "those who came last are prepared first",
        _RESOURCES,
        "in self._unasked.items() if key not in self._later), None)",
        "in reversed(self._unasked.items()) if key not in self._later), None)",
    ),
    Mutation(
        "what nobody needs any more is prepared",
        _RESOURCES,
        "            del self._unasked[key]\n            if",
        "            if",
    ),
    Mutation(
        "admitted without the key",
        "managers/scheduler/plan_draft.py",
        '"" if request.resource is None else request.resource.key',
        '""',
    ),
    Mutation(
        "ended ones wait on",
        _PLANNER,
        "self.preempted.remove(request) | self._queue.let_go(request)",
        "self.preempted.remove(request)",
    ),
    Mutation(
        "the last of the waiting is asked when it is ready",
        _SCHEDULER,
        "                core.planner.make_ready(request)",
        "                core.planner.add(request)",
    ),
    Mutation(
        "time alone ends nobody's wait",
        _SCHEDULER,
        "        times.append(self._core.resources.next_overdue_s())\n",
        "",
    ),
    Mutation("others are kept out as long as it has requests", _RESOURCES, "num_patient > self._num_closed", "False"),
    Mutation(
        "a closed one takes requests",
        _RESOURCES,
        "if entry is not None and not entry.is_closed:",
        "if entry is not None:",
    ),
    Mutation("nothing is opened again", _RESOURCES, "while self._num_closed > len(outside)", "while False"),
    Mutation(
        "an ended one that came later counts on",
        _RESOURCES,
        "            if self._later.pop(key, None) is None:",
        "            if key not in self._later:",
    ),
    Mutation(
        "what is pinned makes room",
        _RESOURCES,
        "if key in self._pinned and not (entry.reason",
        "if False and not (entry.reason",
    ),
    Mutation("what was pinned stays for ever", _RESOURCES, "key in before and key not in wanted", "False"),
    Mutation("all places are pinned", _RESOURCES, "message.resources[: self._most_held - 1]", "message.resources"),
    Mutation(
        "what is pinned waits for its first request",
        _RESOURCES,
        "                self._entry_for_new(resource)\n            elif",
        "                pass\n            elif",
    ),
)

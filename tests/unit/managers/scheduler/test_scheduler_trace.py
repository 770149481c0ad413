"""A trace is recorded while the scheduler plans: by a Scheduler driven by hand, and its SchedulerTrace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from srt.managers.process.runtime_switches import ControlWords
from srt.managers.process.tracer import PART_PREFIX, Tracer
from srt.managers.scheduler.scheduler_trace import SchedulerTrace
from srt.server_args import ServerArgs
from tests.unit.managers.scheduler.scheduler_host import Host, request, worker_hello

NUM_ENDS = 16  # that teach the forecast


class TracedHost(Host):
    def __init__(self, run_dir: Path, **options: Any) -> None:
        super().__init__(**options)
        self.run_dir = run_dir
        args = ServerArgs(model_path="m")
        self.control = ControlWords.create(run_dir, args)
        self.tracer = Tracer("scheduler 0", run_dir, ControlWords.open(run_dir, args))
        self.trace = SchedulerTrace(self.tracer, self.control, self.scheduler.request_in)

    def tick(self) -> None:
        watch = self.trace.watch_tick(self.now) if self.trace.is_on else None
        self._apply(self.scheduler.tick(self.now, watch))

    def slices(self, name: str) -> list[dict[str, Any]]:
        """Of all that was recorded, what these were told with."""
        self.control.stop_trace()
        self.tracer.tend()
        part = orjson.loads((self.run_dir / f"{PART_PREFIX}1-scheduler-0").read_bytes())
        return [event["args"] for event in part["events"] if event["ph"] == "X" and event["name"] == name]


def test_two_plans_of_a_tick_are_told_though_the_second_preempts_who_is_in_the_first(tmp_path: Path) -> None:
    host = TracedHost(tmp_path, hello=worker_hello(num_pages=6), schedule_conservativeness=0.01)
    for rid in range(NUM_ENDS):
        host.say(request(100 + rid, [rid], stop_ids=list(range(100))))
        host.run()
    host.control.start_trace(None)
    num_before = len(host.all_plans)
    for rid in range(1, 5):
        host.say(request(rid, [rid] * 4, max_new=12))
    host.tick()
    while host.plans:
        while (
            host.plans
        ):  # all results are there before the next tick, as when the scheduler was busy with something else
            host.answer()
        host.tick()
        host.acknowledge()
    assert host.value("num_preempted") != 0
    told = host.slices("plan")
    assert len(told) == len(host.all_plans) - num_before
    by_slot = {0: ""}
    for plan, words in zip(host.all_plans[num_before:], told, strict=True):
        by_slot |= {admission.slot: f"r{admission.seed}" for admission in plan.admissions}
        assert [prompt["request"] for prompt in words["prompts"]] == [by_slot[s] for s in plan.extend_slots.tolist()]
        assert words["decoding"] == [by_slot[s] for s in plan.decode_slots.tolist()]

"""Recording traces, asked for over HTTP, without other processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from srt.entrypoints import profiler as profiler_module
from srt.entrypoints.profiler import Profiler
from srt.managers.process.heartbeats import ProcessStatus
from srt.managers.process.runtime_switches import ControlWords
from srt.managers.process.tracer import Tracer
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.server_args import ServerArgs
from tests.support.foreign_objects import whole_objects
from tests.unit.entrypoints.fake_engine import World

ARGS = ServerArgs(model_path="m")


class Server:
    """Two frontends and a worker that writes its part when it is told to."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        ControlWords.create(run_dir, ARGS)
        self.worker = Tracer("worker 0", run_dir, ControlWords.open(run_dir, ARGS), pid=9)
        self.silent_s = 0.0
        self.frontends = [
            Profiler(
                run_dir,
                ControlWords.open(run_dir, ARGS),
                lambda: [ProcessStatus("worker 0", 9, self.silent_s, 0.0, False)],
            )
            for _ in range(2)
        ]


def started_by_who_has_gone(run_dir: Path, folder: Path) -> Path:
    """A frontend that has ended since then, in a process of its own. Returns where the trace was to lie."""
    script = """
import asyncio, os, sys
from pathlib import Path
from srt.entrypoints.profiler import Profiler
from srt.managers.process.runtime_switches import ControlWords
from srt.server_args import ServerArgs

async def go(run_dir: str, folder: str) -> None:
    control = ControlWords.open(run_dir, ServerArgs(model_path="m"))
    print(Profiler(Path(run_dir), control, list).start(folder, None), flush=True)
    os._exit(0)

asyncio.run(go(*sys.argv[1:]))
"""
    words = [sys.executable, "-c", script, str(run_dir), str(folder)]
    return Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())


def test_any_frontend_may_end_what_another_has_begun(tmp_path: Path) -> None:
    async def go() -> None:
        server = Server(tmp_path)
        first, second = server.frontends
        path = first.start(str(tmp_path), None)
        with pytest.raises(RequestError, match="being recorded already"):
            second.start(None, None)
        server.worker.slice("step", 1.0, 2.0)
        stopping = asyncio.create_task(second.stop())
        await asyncio.sleep(0)
        server.worker.tend()
        told = await stopping
        assert (told["path"], told["missing_processes"]) == (str(path), [])
        assert "step" in {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        assert await first.stop() == told, "the last one"

    asyncio.run(go())


def test_a_trace_whose_frontend_has_gone_is_written_by_one_of_those_that_are_asked(tmp_path: Path) -> None:
    async def go() -> None:
        server = Server(tmp_path)
        path = started_by_who_has_gone(tmp_path, tmp_path / "traces")
        server.worker.slice("step", 1.0, 2.0)
        stopping = [asyncio.create_task(frontend.stop()) for frontend in server.frontends]
        await asyncio.sleep(0)
        server.worker.tend()
        assert [(await told)["path"] for told in stopping] == [str(path)] * 2
        assert "step" in {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        assert not any(name.startswith(("trace-part", "trace-claim")) for name in os.listdir(tmp_path))

    asyncio.run(go())


def test_another_trace_may_begin_where_the_frontend_of_the_last_has_gone(tmp_path: Path) -> None:
    async def go() -> None:
        server = Server(tmp_path)
        first = started_by_who_has_gone(tmp_path, tmp_path / "traces")
        server.worker.slice("old step", 1.0, 2.0)
        second = server.frontends[0].start(str(tmp_path / "traces"), None)
        with pytest.raises(RequestError, match="being recorded already"):
            server.frontends[1].start(None, None)
        server.worker.slice("new step", 3.0, 4.0)
        stopping = asyncio.create_task(server.frontends[0].stop())
        await asyncio.sleep(0)
        server.worker.tend()
        assert (await stopping)["path"] == str(second)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})  # the other one is written, too
        for path, name in ((first, "old step"), (second, "new step")):
            events = json.loads(path.read_text())["traceEvents"]
            assert [event["name"] for event in events if event["ph"] == "X"] == [name]

    asyncio.run(go())


def test_a_frozen_process_is_not_waited_for_and_is_named(tmp_path: Path) -> None:
    async def go() -> None:
        server = Server(tmp_path)
        server.silent_s = 60.0
        server.frontends[0].start(str(tmp_path), None)
        assert (await server.frontends[0].stop())["missing_processes"] == ["worker 0"]

    asyncio.run(go())


def test_a_trace_that_cannot_be_written_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiler_module, "merge", fail)

    async def go() -> None:
        server = Server(tmp_path)
        server.silent_s = 60.0
        server.frontends[0].start(str(tmp_path), None)
        with pytest.raises(RequestError, match=r"could not be written: No space left on device\."):
            await server.frontends[1].stop()

    asyncio.run(go())


def test_a_recording_that_nobody_has_claimed_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler_module, "WRITTEN_S", 0.01)

    async def go() -> None:
        server = Server(tmp_path)
        ControlWords.open(tmp_path, ARGS).start_trace(None)
        with pytest.raises(RequestError, match="was not written within"):
            await server.frontends[0].stop()

    asyncio.run(go())


@pytest.mark.parametrize("folder", ["traces", "/proc/nowhere", "/tmp/\0", "/" + "x" * 5000])
def test_a_folder_that_cannot_be_is_a_400(tmp_path: Path, folder: str) -> None:
    async def go() -> None:
        with pytest.raises(RequestError) as refused:
            Server(tmp_path).frontends[0].start(folder, None)
        assert (refused.value.status, refused.value.parameter) == (400, "output_dir")

    asyncio.run(go())


def test_a_recording_that_waits_for_steps_is_one_already_and_can_be_stopped(tmp_path: Path) -> None:
    async def go() -> None:
        server = Server(tmp_path)
        path = server.frontends[0].start(str(tmp_path), None, 5, "warm", "run")
        assert path == tmp_path / "warm-run.json"
        assert not server.worker.is_on
        with pytest.raises(RequestError, match="being recorded already"):
            server.frontends[1].start(None, None)
        stopping = asyncio.create_task(server.frontends[1].stop())
        await asyncio.sleep(0)
        server.worker.tend()
        assert (await stopping)["path"] == str(path)
        assert [event["ph"] for event in json.loads(path.read_text())["traceEvents"]] == ["M", "M", "M"]

    asyncio.run(go())


class Recording(World):
    """The application with a run folder, in which nobody else is."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        control = ControlWords.create(run_dir, ARGS)
        self.service.control = control
        self.service.profiler = Profiler(run_dir, control, list)


# SGLang's whole request as it is written down, and what its own clients send.
(WHOLE,) = whole_objects("profile")


@pytest.mark.parametrize(
    "body",
    [
        WHOLE,
        {**WHOLE, "activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": False, "profile_stages": []},
        {"num_steps": "5", "start_step": "3", "activities": [], "merge_profiles": True, "profile_by_stage": None},
        {"output_dir": "", "profile_prefix": "", "profile_id": "", "start_step": 0},
    ],
)
def test_sglangs_whole_body_begins_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, object]
) -> None:
    monkeypatch.setenv("SRT_PROFILE_DIR", str(tmp_path / "traces"))
    world = Recording(tmp_path)
    answer = world.post("/start_profile", body)
    assert answer.status_code == 200, answer.text
    assert world.service.control.is_trace_open


def test_steps_before_and_in_a_recording_are_counted_and_its_file_is_named(tmp_path: Path) -> None:
    world = Recording(tmp_path)
    body = {"output_dir": str(tmp_path), "start_step": "2", "num_steps": "1", "profile_prefix": "p", "profile_id": "7"}
    answer = world.post("/start_profile", body).json()
    assert answer == {"message": "Recording begins after 2 steps.", "path": str(tmp_path / "p-7.json")}
    seen = []
    for _ in range(4):
        seen.append(world.service.control.trace)
        world.service.control.count_step()
    assert seen == [0, 0, 1, -1]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"activities": ["CPU", "MEM"]}, "activities may hold CPU and GPU, which are in every trace; 'MEM' is not"),
        ({"activities": ["RPD"]}, "'RPD' is not recorded here."),
        ({"activities": ["CUDA_PROFILER"]}, "'CUDA_PROFILER' is not recorded here."),
        ({"num_steps": 0}, "num_steps is out of range"),
        ({"num_steps": "five"}, "num_steps must be an integer."),
        ({"start_step": -1}, "start_step is out of range"),
        ({"profile_by_stage": True}, "profile_by_stage is not supported: a step may compute prompts and decodes"),
        ({"profile_stages": ["decode"]}, "profile_stages is not supported: a step may compute prompts and decodes"),
        ({"with_stack": True}, "with_stack is not supported: a trace has named spans and no Python stacks."),
        ({"record_shapes": True}, "record_shapes is not supported: a trace has steps and no operators."),
        ({"detailed_annotations": True}, "detailed_annotations is not supported. Leave it out"),
        (
            {"profile_prefix": "../x"},
            "profile_prefix may have at most 100 characters: letters, digits, '.', '_' and '-'.",
        ),
        ({"profile_id": "x" * 101}, "profile_id may have at most 100 characters: letters"),
        ({"profile_id": "x\n"}, "profile_id may have at most 100 characters: letters"),
        ({"req_type": 2}, "req_type is not supported"),
        ({"bogus": 1}, "bogus is not a known parameter."),
    ],
)
def test_what_is_not_recorded_here_is_refused_by_name(tmp_path: Path, body: dict[str, object], sentence: str) -> None:
    world = Recording(tmp_path)
    answer = world.post("/start_profile", body)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]
    assert not world.service.control.is_trace_open


def test_a_trace_can_be_asked_for_without_a_body_and_by_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRT_PROFILE_DIR", str(tmp_path))
    assert Recording(tmp_path).get("/start_profile").status_code == 200
    assert World().get("/stop_profile").status_code == 400

"""`srt.Runtime` as a program holds it: real processes, a random model."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save

import srt
from srt.entrypoints.engine_process import EngineProcess
from srt.managers.tokenizer_manager.api_types import EngineDied, RequestError
from srt.server_args import ArgumentError, from_keywords
from srt.utils.errors import StartError
from tests.support.checkpoints import CheckpointFactory
from tests.support.server_process import END_S, ROOT, all_gone
from tests.support.trace_checks import check_trace

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 100_000, "ignore_eos": True}  # does not end by itself
PROMPT = "The capital of France is"


def start(checkpoint: Path, **options: Any) -> srt.Runtime:
    limits = {"max_total_tokens": 400_000, "max_running_requests": 32}
    return srt.Runtime(model_path=str(checkpoint), device="cpu", **limits, **options)


@pytest.fixture(scope="session")
def endless_checkpoint(checkpoint: CheckpointFactory) -> Path:
    """A model whose context no request of these tests comes to the end of."""
    return checkpoint("qwen3", context_length=200_000)


@pytest.fixture(scope="module")
def runtime(endless_checkpoint: Path) -> Iterator[srt.Runtime]:
    with start(endless_checkpoint) as runtime:
        yield runtime


def processes_of(runtime: srt.Runtime) -> list[psutil.Process]:
    supervisor = psutil.Process(runtime.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def worker_of(runtime: srt.Runtime) -> psutil.Process:
    return next(one for one in processes_of(runtime) if "srt.managers.tp_worker" in one.cmdline())


def test_one_prompt_gives_a_dict_in_the_shape_of_generate(runtime: srt.Runtime) -> None:
    answer = runtime.generate(PROMPT, GREEDY)
    assert len(answer["output_ids"]) == 6
    assert isinstance(answer["text"], str)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["completion_tokens"] == 6
    assert meta["prompt_tokens"] > 0
    assert {"id", "seed", "cached_tokens", "e2e_latency"} <= set(meta)


def test_many_prompts_give_a_list_and_each_is_answered_as_if_alone(runtime: srt.Runtime) -> None:
    prompts = ["one", "two and two", "three"]
    alone = [runtime.generate(prompt, GREEDY)["output_ids"] for prompt in prompts]
    assert [answer["output_ids"] for answer in runtime.generate(prompts, GREEDY)] == alone
    parameters = [{**GREEDY, "max_new_tokens": count} for count in (1, 2, 3)]
    answers = runtime.generate(prompts, parameters)
    assert [answer["output_ids"] for answer in answers] == [ids[: i + 1] for i, ids in enumerate(alone)]


def test_token_ids_may_stand_for_text(runtime: srt.Runtime) -> None:
    answer = runtime.generate(input_ids=[5, 6, 7], sampling_params=GREEDY, return_logprob=True, top_logprobs_num=2)
    logprobs = answer["meta_info"]["output_token_logprobs"]
    assert [token_id for _, token_id, _ in logprobs] == answer["output_ids"]
    assert [len(top) for top in answer["meta_info"]["output_top_logprobs"]] == [2] * 6


def test_a_stream_ends_with_the_whole_answer(runtime: srt.Runtime) -> None:
    whole = runtime.generate(PROMPT, GREEDY)
    chunks = list(runtime.generate(PROMPT, GREEDY, stream=True))
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_chunks_of_many_prompts_say_whose_they_are(runtime: srt.Runtime) -> None:
    prompts = ["one", "two and two"]
    last = {chunk["index"]: chunk for chunk in runtime.generate(prompts, GREEDY, stream=True)}
    assert [last[i]["output_ids"] for i in range(2)] == [one["output_ids"] for one in runtime.generate(prompts, GREEDY)]


def test_both_kinds_of_call_work_inside_a_running_loop(runtime: srt.Runtime) -> None:
    async def in_a_notebook() -> None:
        plain = runtime.generate(PROMPT, GREEDY)
        one, two = await asyncio.gather(
            runtime.async_generate(PROMPT, GREEDY), runtime.async_generate(["x", "y"], GREEDY)
        )
        assert one["output_ids"] == plain["output_ids"]
        assert len(two) == 2
        chunks = [chunk async for chunk in await runtime.async_generate(PROMPT, GREEDY, stream=True)]
        assert chunks[-1]["output_ids"] == plain["output_ids"]

    asyncio.run(in_a_notebook())


def test_any_thread_may_call(runtime: srt.Runtime) -> None:
    expected = runtime.generate(PROMPT, GREEDY)["output_ids"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: runtime.generate(PROMPT, GREEDY), range(24)))
    assert all(answer["output_ids"] == expected for answer in answers)


def wait_until_idle(runtime: srt.Runtime) -> None:
    """Each look is a round trip to the scheduler, so this ends as soon as what came before is done."""
    for _ in range(10_000):
        if runtime.flush_cache():
            return
    raise AssertionError(f"requests still run: {runtime.get_server_info()['internal_states']}")


def test_a_stream_that_is_closed_or_dropped_stops_running(runtime: srt.Runtime) -> None:
    closed, dropped = (runtime.generate(PROMPT, LONG, stream=True) for _ in range(2))
    assert next(closed)["output_ids"]
    assert next(dropped)["output_ids"]
    assert not runtime.flush_cache()
    closed.close()
    del dropped
    wait_until_idle(runtime)
    assert list(closed) == []


def test_cancelling_a_coroutine_aborts_its_request(runtime: srt.Runtime) -> None:
    async def cancel_one() -> None:
        call = asyncio.create_task(runtime.async_generate(PROMPT, LONG))
        stream = await runtime.async_generate(PROMPT, LONG, stream=True)
        await anext(stream)  # the other one was sent before it
        call.cancel()
        await stream.aclose()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancel_one())
    wait_until_idle(runtime)


def test_abort_ends_a_request_by_its_name(runtime: srt.Runtime) -> None:
    stream = runtime.generate(PROMPT, LONG, stream=True, rid="mine")
    first = next(stream)
    assert first["meta_info"]["id"] == "mine"
    assert runtime.abort("mine") == 1
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    with pytest.raises(ArgumentError, match="rid"):
        runtime.abort()


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"colour": 1}}, "colour"),
        ({"input_ids": [5]}, "input_ids"),
        ({"lora_path": "x"}, "lora_path"),
        ({"return_logprob": "yes"}, "return_logprob"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_named_and_the_next_call_works(
    runtime: srt.Runtime, call: dict[str, Any], parameter: str
) -> None:
    for stream in (False, True):
        with pytest.raises(RequestError, match=parameter):
            runtime.generate(PROMPT, stream=stream, **call)
    assert runtime.generate(PROMPT, GREEDY)["output_ids"]


def test_a_prefix_can_be_cached_ahead(runtime: srt.Runtime) -> None:
    prefix = "Once upon a time there was a fox who could not sleep. " * 4
    runtime.cache_prefix(prefix)
    meta = runtime.generate(prefix + "He", {"max_new_tokens": 1})["meta_info"]
    assert meta["cached_tokens"] >= meta["prompt_tokens"] // 2


def test_weights_are_updated_looked_at_and_named(runtime: srt.Runtime, endless_checkpoint: Path) -> None:
    """By the checkpoint that it has already, so that other tests find the model as it was."""
    before, hashes = runtime.generate(PROMPT, GREEDY)["output_ids"], runtime.weights_checker()["ranks"]
    stored = load_file(endless_checkpoint / "model.safetensors")
    assert runtime.get_weights_by_name("model.norm.weight", 7) == stored["model.norm.weight"][:7].tolist()
    other = {"model.norm.weight": 2 * stored["model.norm.weight"]}
    assert runtime.update_weights_from_tensor(save(other), weight_version="twice")["success"]
    assert runtime.weights_checker()["ranks"] != hashes
    assert runtime.generate(PROMPT, GREEDY)["meta_info"]["weight_version"] == "twice"
    assert runtime.update_weights_from_disk(str(endless_checkpoint))["success"]
    assert runtime.update_weight_version("default")["new_version"] == "default"
    assert runtime.weights_checker()["ranks"] == hashes
    assert runtime.generate(PROMPT, GREEDY)["output_ids"] == before
    with pytest.raises(RequestError, match="is not a folder"):
        runtime.update_weights_from_disk("/absent")
    with pytest.raises(AttributeError, match="cannot replace weights in this way"):
        runtime.update_weights_from_ipc  # noqa: B018


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("async_encode", "to_thread"),
        ("load_lora_adapter_async", "to_thread"),
        ("add_request", "async_generate"),
        ("collective_rpc", "nothing but its own steps"),
        ("endpoint", "no language"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(runtime: srt.Runtime, name: str, reason: str) -> None:
    with pytest.raises(AttributeError, match=f"Runtime.{name} is not supported: .*{reason}"):
        getattr(runtime, name)
    assert not hasattr(runtime, "bogus")
    assert srt.Engine is srt.Runtime
    assert (runtime.url, runtime.generate_url) == (None, None)


def test_server_info_and_the_tokenizer(runtime: srt.Runtime) -> None:
    info = runtime.get_server_info()
    assert info["status"] == "ready"
    assert info["device"] == "cpu"
    assert info["startup"]["children"]["worker 0"]["ready_s"] <= info["startup_time"]
    assert runtime.get_tokenizer().decode(runtime.get_tokenizer().encode("a b")) == "a b"


def test_the_model_is_described_and_a_trace_recorded(runtime: srt.Runtime, tmp_path: Path) -> None:
    model = runtime.get_model_info()
    assert (model["model_type"], model["is_generation"], model["context_length"]) == ("qwen3", True, 200_000)
    runtime.freeze_gc()
    path = runtime.start_profile(output_dir=str(tmp_path))
    runtime.generate(PROMPT, GREEDY)
    told = runtime.stop_profile()
    assert (told["path"], told["missing_processes"]) == (path, [])
    trace = json.loads(Path(path).read_text())
    check_trace(trace)
    assert {"plan", "forward", "result"} <= {event["name"] for event in trace["traceEvents"]}
    with pytest.raises(RequestError, match="must be an absolute path"):
        runtime.start_profile(output_dir="here")


def test_this_process_has_no_torch_and_no_port(qwen3_checkpoint: Path) -> None:
    script = f"""
import sys, srt
runtime = srt.Runtime(model_path={str(qwen3_checkpoint)!r}, device="cpu", max_total_tokens=1024)
assert runtime.generate("x", {{"max_new_tokens": 2}})["text"] is not None
assert runtime.url is None
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = run_script(script)  # which neither has a main guard nor shuts down
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_fork_can_neither_use_nor_end_it(qwen3_checkpoint: Path) -> None:
    script = f"""
import os, sys, srt
from srt.managers.tokenizer_manager.api_types import EngineDied
runtime = srt.Runtime(model_path={str(qwen3_checkpoint)!r}, device="cpu", max_total_tokens=1024)
stream = runtime.generate("x", {{"max_new_tokens": 3, "ignore_eos": True}}, stream=True)
chunks = [next(stream)]  # which may have all tokens already
if os.fork() == 0:
    try:
        runtime.generate("x")
    except EngineDied as error:
        print(error, flush=True)
    sys.exit(0)  # all that is done at the end of a process is done here too
os.wait()
assert len([*chunks, *stream][-1]["output_ids"]) == 3
assert runtime.generate("x", {{"max_new_tokens": 3}})["output_ids"]
"""
    done = run_script(script)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "A Runtime can be used only in the process that created it, not in a fork.\n",
        "",
    )


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)


def test_a_runtime_outlives_the_thread_that_made_it_and_pending_calls_learn_of_its_end(
    endless_checkpoint: Path,
) -> None:
    made: list[srt.Runtime] = []
    thread = threading.Thread(target=lambda: made.append(start(endless_checkpoint, tp_size=2)))
    thread.start()
    thread.join()
    runtime = made[0]
    processes = processes_of(runtime)
    assert runtime.generate(PROMPT, GREEDY)["output_ids"]
    stream = runtime.generate(PROMPT, LONG, stream=True)
    next(stream)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = pool.submit(runtime.generate, PROMPT, LONG)
        runtime.shutdown()
        with pytest.raises(EngineDied):
            pending.result(END_S)
    with pytest.raises(EngineDied):
        list(stream)
    with pytest.raises(EngineDied, match="shut down"):
        runtime.generate(PROMPT)
    runtime.shutdown()
    assert all_gone(processes)


def test_two_runtimes_do_not_disturb_each_other_when_one_dies(endless_checkpoint: Path) -> None:
    with start(endless_checkpoint, max_replacements=0) as one, start(endless_checkpoint, port=0) as other:
        expected = one.generate(PROMPT, GREEDY)["output_ids"]
        assert other.generate(PROMPT, GREEDY)["output_ids"] == expected
        assert one.url is None
        assert other.url is not None
        with urllib.request.urlopen(f"{other.url}/health") as answer:
            assert answer.status == 200
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stream = one.generate(PROMPT, LONG, stream=True)
            next(stream)
            pending = pool.submit(list, stream)
            worker_of(one).kill()
            with pytest.raises(EngineDied, match="Worker 0 was killed by SIGKILL"):
                pending.result(END_S)
        with pytest.raises(EngineDied, match="Worker 0 was killed by SIGKILL"):
            one.generate(PROMPT)
        assert other.generate(PROMPT, GREEDY)["output_ids"] == expected


HOLDER = """
import os, signal, srt, sys
runtime = srt.Runtime(model_path=sys.argv[1], device="cpu", max_total_tokens=1024)
if sys.argv[2] == "fork" and os.fork() == 0:
    signal.pause()
print(runtime.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("kind", ["plain", "fork"])
def test_nothing_survives_a_program_that_is_killed(qwen3_checkpoint: Path, kind: str) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(qwen3_checkpoint), kind],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert holder.stdout is not None
    with holder, holder.stdout:
        supervisor = psutil.Process(int(holder.stdout.readline()))
        engine = [supervisor, *supervisor.children(recursive=True)]
        assert len(engine) == 3
        holder.kill()
        # In the second case a fork of the program is still there.
        assert all_gone(engine)
        os.killpg(holder.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"model_path": "/no/such/folder"}, StartError, "--model-path /no/such/folder does not exist"),
        ({"tp_size": 3}, StartError, "--tp 3 does not divide the model's 4 query heads"),
        ({"tp_size": "2"}, ArgumentError, "tp_size must be int, not str"),
        ({"colour": 1}, ArgumentError, "Unknown option colour"),
        ({"host": "0.0.0.0"}, ArgumentError, "host needs port"),
        ({"launch_timeout": 0}, ArgumentError, "launch_timeout must be a positive number of seconds, not 0"),
        ({"max_total_tokens": 1}, StartError, "max-total-tokens"),
    ],
    ids=str,
)
def test_a_start_that_fails_raises_the_sentence(
    qwen3_checkpoint: Path,
    capfd: pytest.CaptureFixture[str],
    options: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    with pytest.raises(error, match=said):
        srt.Runtime(**{"model_path": str(qwen3_checkpoint), "device": "cpu", **options})
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("timeout_s", [0.001, 0.4], ids=["before anything is known", "while processes start"])
def test_a_start_that_takes_too_long_is_given_up_and_leaves_nothing(qwen3_checkpoint: Path, timeout_s: float) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(StartError, match=rf"did not start within launch_timeout \({timeout_s} s\)"):
        srt.Runtime(launch_timeout=timeout_s, model_path=str(qwen3_checkpoint), device="cpu")
    assert all_gone(list(set(psutil.Process().children(recursive=True)) - before))


def test_a_start_that_is_interrupted_leaves_nothing(qwen3_checkpoint: Path) -> None:
    """A Stop may be read together with the order that it follows."""
    args = from_keywords({"model_path": str(qwen3_checkpoint), "device": "cpu", "log_level": "error"})
    engine = EngineProcess(args, http=False)
    supervisor = psutil.Process(engine.pid)
    engine.stop()
    assert all_gone([supervisor])
    engine.stop()


def test_the_compiler_of_grammars_is_started_ahead_and_ends_with_the_runtime(endless_checkpoint: Path) -> None:
    others = psutil.Process().children()
    with start(endless_checkpoint) as runtime:
        asked = runtime._engine._manager
        assert asked is not None and asked._compiler_start is not None, "nobody has asked for a form yet"
        assert runtime.generate(PROMPT, {"regex": "[ab]{3}", "temperature": 0})["text"].strip("ab") == ""
        found = [one for one in psutil.Process().children() if one not in others]
        compilers = [one for one in found if "srt.constrained.compile_process" in one.cmdline()]
        assert len(compilers) == 1
    assert psutil.wait_procs(compilers, timeout=END_S)[1] == []

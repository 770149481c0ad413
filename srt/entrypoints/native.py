"""Routes of the native API: /generate, information on model and server, and calls that pause, flush or abort."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from srt.entrypoints.answers import Done
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.native_shapes import NativeAnswer, parse_generate
from srt.entrypoints.request_schema import LABEL, RequestBody, bad_parameter, described
from srt.entrypoints.service import Service
from srt.entrypoints.streaming import DONE, answer_call, event
from srt.managers.process.replica_layout import ReplicaLayout
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, RequestError
from srt.managers.tokenizer_manager.request_checks import check_label
from srt.protocol.messages import Scalar
from srt.sampling.parameter_checks import show
from srt.version import __version__

FLUSH_RETRY_S = 0.05
MAX_FLUSH_WAIT_S = 600.0

# Paths of other servers' endpoints that this one lacks -> the rest of a sentence that says what is missing and what to use instead.
UNSUPPORTED = {
    "/v1/responses/input_tokens": "counts tokens only when it generates: a response's usage has input_tokens",
    "/v1/responses/compact": "does not compact conversations: send the items that are to be kept",
    **dict.fromkeys(
        ("/open_session", "/close_session"),
        "keeps no sessions: send the whole prompt each time; a prefix shared with earlier prompts is cached",
    ),
    "/set_internal_state": "cannot change its options while running: restart it with other options",
    "/slow_down": "cannot be slowed down: /pause_generation stops it for a while",
    **dict.fromkeys(
        (
            "/update_weights_from_ipc",
            "/begin_weight_update",
            "/end_weight_update",
        ),
        "cannot replace weights in this way while running: /update_weights_from_disk reads a checkpoint",
    ),
}


class _Answer:
    """An adapter from `NativeAnswer` to the `streaming.Answer` protocol."""

    def __init__(self, shapes: NativeAnswer) -> None:
        self._shapes = shapes

    def add(self, prompt: int, update: ChoiceUpdate) -> None:
        self._shapes.add(prompt, update)

    def result(self) -> Any:
        return self._shapes.result()

    def events(self, prompt: int, update: ChoiceUpdate) -> bytes:
        return event(self._shapes.chunk(self._shapes.add(prompt, update)))

    def last_events(self) -> bytes:
        return DONE


async def generate(exchange: Exchange, service: Service) -> None:
    body = await exchange.read_json()
    engine = service.engine()
    call = parse_generate(body, engine.sampling_params)
    answer = NativeAnswer(
        call,
        engine.text.token_text,
        incremental=service.args.incremental_streaming_output,
        num_drafts=service.args.num_drafts,
        is_deterministic=service.args.enable_deterministic_inference,
        weight_version=lambda: engine.limits.weight_version,
    )
    await answer_call(
        exchange,
        engine,
        call.inputs,
        _Answer(answer),
        stream=call.stream,
        interval=service.args.stream_interval,
    )


async def model_info(exchange: Exchange, service: Service) -> None:
    await exchange.send_json(model_facts(service))


def model_facts(service: Service) -> dict[str, Any]:
    """Return the answer of /model_info."""
    engine, args = service.engine(), service.args
    model = engine.model
    return {
        "model_path": args.model_path,
        "served_model_name": args.model_names()[0],
        "tokenizer_path": args.tokenizer_path or args.model_path,
        "is_generation": model.pooling is None,
        "preferred_sampling_params": model.sampling_defaults or None,
        "weight_version": engine.limits.weight_version,
        "load_format": args.load_format,
        "reasoning_parser": model.reasoning_parser,
        "tool_call_parser": model.tool_call_parser,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": model.model_type,
        "architectures": list(model.architectures),
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "has_chat_template": model.has_chat_template,
    }


async def server_info(exchange: Exchange, service: Service) -> None:
    """Return options, limits and counters. `?deep=true` compares the tables of all processes; a difference is a 500 that names it."""
    deep = _query(exchange, "deep").get("deep", "false").lower()
    if deep not in ("true", "false", "1", "0"):
        raise bad_parameter("deep", f"must be true or false, not {show(deep)}")
    await exchange.send_json(await server_facts(service, deep in ("true", "1")))


async def server_facts(service: Service, deep: bool = False) -> dict[str, Any]:
    """Return the answer of /server_info: options, limits, each scheduler's counters and those of the frontend that answers."""
    engine = service.engine()
    args = service.args.public_values()
    limits = msgspec.structs.asdict(engine.limits)
    replies = await engine.get_states(deep)
    differences = [reply.message for reply in replies.values() if not reply.ok]
    if differences:
        raise RequestError(500, " ".join(differences))
    startup = service.startup_report()
    numbers = service.engine_numbers()
    states = [
        {
            **args,
            **limits,
            **({"dp_rank": replica} if service.args.dp_size > 1 else {}),
            "world_size": ReplicaLayout.of(service.args).num_ranks,
            "effective_max_running_requests_per_dp": reply.values.get("num_slots"),
            "last_gen_throughput": numbers.get(replica, {}).get("last_gen_throughput", 0.0),
            "memory_usage": _memory_usage(startup, str(ReplicaLayout.of(service.args, replica).workers[0])),
            "avg_spec_accept_length": _spec_accept_length(reply.values),
            **reply.values,
        }
        for replica, reply in replies.items()
    ]
    return {
        **args,
        **limits,
        "launch_command": service.args.command(),
        "max_req_input_len": limits["max_request_tokens"] - 1,
        "status": service.status,
        "startup_time": service.startup_s,
        "startup": startup,
        "kv_events": None,
        "internal_states": states,
        "frontend": {"index": service.index, **engine.stats()},
        "version": __version__,
    }


def _spec_accept_length(counters: Mapping[str, Scalar]) -> float | None:
    """Return the tokens that a row with drafts gets in a step, on average; None if there were none."""
    num_ids, num_rows = counters.get("num_verified_ids"), counters.get("num_verified_rows")
    return num_ids / num_rows if isinstance(num_ids, int) and isinstance(num_rows, int) and num_rows else None


def _memory_usage(startup: Any, worker: str) -> dict[str, Any] | None:
    """Return a worker's memory in GB; the other ranks of its replica have the same share."""
    facts = {} if startup is None else startup["children"].get(worker, {}).get("values", {})
    if "weight_bytes" not in facts:
        return None
    return {
        "weight": round(facts["weight_bytes"] / 1e9, 3),
        "kvcache": round(facts["kv_bytes"] / 1e9, 3),
        "token_capacity": facts["max_total_num_tokens"],
    }


async def flush_cache(exchange: Exchange, service: Service) -> None:
    """Empty the prefix cache. Answer 400 if requests still run after `timeout` seconds."""
    deadline = time.monotonic() + _flush_timeout_s(_query(exchange, "timeout").get("timeout", "0"))
    engine = service.engine()
    while True:
        done, message = await engine.flush_cache()
        if done:
            await exchange.send_text(message or "The cache is empty.")
            return
        if time.monotonic() >= deadline:
            raise RequestError(400, message)
        await asyncio.sleep(FLUSH_RETRY_S)


class PauseBody(RequestBody):
    """POST /pause_generation."""

    FAMILY: ClassVar[str] = "pause"

    mode: Literal["abort", "retract", "in_place"] = described(
        "Treatment of running requests: abort ends them, retract frees their memory and lets them wait, in_place keeps them as they are.",
        "abort",
    )


async def pause_generation(exchange: Exchange, service: Service) -> None:
    """Pause generation. The answer comes when no step is in flight. New requests are accepted, and wait."""
    body = PauseBody.parse(await exchange.read_json(if_empty={}))
    is_paused, message = await service.engine().pause(body.mode)
    if not is_paused:
        raise RequestError(400, message)  # another client has continued generation in the meantime
    done: Done = {"message": "Generation is paused.", "status": "ok"}
    await exchange.send_json(done)


class ContinueBody(RequestBody):
    """POST /continue_generation."""

    FAMILY: ClassVar[str] = "continue"

    torch_empty_cache: bool = described(
        "Accepted without effect: the device's memory is allocated once, at the start, and cannot be released.", False
    )


async def continue_generation(exchange: Exchange, service: Service) -> None:
    ContinueBody.parse(await exchange.read_json(if_empty={}))
    await service.engine().resume()
    done: Done = {"message": "Generation continues.", "status": "ok"}
    await exchange.send_json(done)


def _query(exchange: Exchange, *known: str) -> dict[str, str]:
    given = exchange.query()
    for name in given:
        if name not in known:
            raise bad_parameter(name[:100], "is not a known parameter")
    return given


def _flush_timeout_s(text: str) -> float:
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s <= MAX_FLUSH_WAIT_S:
        raise bad_parameter("timeout", f"must be a number of seconds from 0 to {MAX_FLUSH_WAIT_S:g}, not {show(text)}")
    return timeout_s


class AbortBody(RequestBody):
    """POST /abort_request."""

    FAMILY: ClassVar[str] = "abort"

    rid: str | None = described("The name of a request or of a whole batch.", string=LABEL)
    abort_all: bool = described("Abort every request of the server.", False)


async def abort_request(exchange: Exchange, service: Service) -> None:
    given = AbortBody.parse(await exchange.read_json())
    if given.abort_all and given.rid:
        raise bad_parameter("rid", "and abort_all exclude each other: give one of them")
    if not given.abort_all and not given.rid:
        raise bad_parameter("rid", "is required, unless abort_all is true")
    check_label("rid", given.rid or "")
    await service.engine().abort_label("" if given.abort_all else given.rid or "")
    await exchange.send(200, b"")

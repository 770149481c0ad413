"""The routes `/start_profile` and `/stop_profile`: their bodies, checks and answers. `profiler.py` takes the trace that they ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from srt.entrypoints.exchange import Exchange
from srt.entrypoints.request_schema import RequestBody, bad_parameter
from srt.entrypoints.service import Service

RECORDED = ("CPU", "GPU")
MAX_STEPS = 1 << 31
NAME_PATTERN = "^[A-Za-z0-9._-]{0,100}$"  # for values that become part of a file's name

# Fields that change what SGLang records -> the rest of a sentence that says why they have no effect here.
LACKING: Mapping[str, str] = MappingProxyType(
    {
        "profile_by_stage": "is not supported: a step may compute prompts and decodes together. Leave it out; in the trace each plan"
        " lists its prompts and counts its decodes",
        "profile_stages": "is not supported: a step may compute prompts and decodes together. Leave it out; in the trace each plan"
        " lists its prompts and counts its decodes",
        "with_stack": "is not supported: a trace has named spans and no Python stacks. Leave it out, or attach py-spy to a process",
        "record_shapes": "is not supported: a trace has steps and no operators. Leave it out; each plan has the number of its tokens",
        "detailed_annotations": "is not supported. Leave it out; each plan lists its prompts and counts its decodes in any case",
    }
)


def _from_digits(value: object) -> object:
    """Return a number sent as text as an integer: SGLang's clients do that."""
    return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value) else value


def _only_false(name: str) -> Any:
    reason = LACKING[name].removeprefix("is not supported").lstrip(".: ").removeprefix("Leave it out; ")
    return Field(None, description=f"Only false or empty: {reason}.")


class StartBody(RequestBody):
    """POST /start_profile."""

    FAMILY: ClassVar[str] = "profile"

    output_dir: str | None = Field(
        None,
        description="Folder of the trace, as an absolute path. By default $SRT_PROFILE_DIR, or the folder of temporary files.",
    )
    num_steps: Annotated[int, BeforeValidator(_from_digits), Field(ge=1, le=MAX_STEPS)] | None = Field(
        None, description="Number of the model's steps after which the recording ends without /stop_profile."
    )
    start_step: Annotated[int, BeforeValidator(_from_digits), Field(ge=0, le=MAX_STEPS)] | None = Field(
        None, description="Number of the model's steps, from this call, after which the recording begins."
    )
    activities: list[str] | None = Field(None, description="May name CPU and GPU. Both are in every trace.")
    profile_prefix: str | None = Field(
        None, description="Beginning of the file's name.", json_schema_extra={"pattern": NAME_PATTERN}
    )
    profile_id: str | None = Field(
        None, description="The file's name, in place of the time.", json_schema_extra={"pattern": NAME_PATTERN}
    )
    merge_profiles: bool | None = Field(None, description="Without effect: all processes are always in one file.")
    profile_by_stage: bool | None = _only_false("profile_by_stage")
    profile_stages: list[str] | None = _only_false("profile_stages")
    with_stack: bool | None = _only_false("with_stack")
    record_shapes: bool | None = _only_false("record_shapes")
    detailed_annotations: bool | None = _only_false("detailed_annotations")

    def check(self) -> None:
        """Raise RequestError (400) for things that are not recorded here; the message says what is recorded instead."""
        for activity in self.activities or ():
            if activity not in RECORDED:
                reason = f"may hold CPU and GPU, which are in every trace; {activity[:40]!r} is not recorded here"
                raise bad_parameter("activities", reason)
        for name, reason in LACKING.items():
            if getattr(self, name):
                raise bad_parameter(name, reason)
        for name in ("profile_prefix", "profile_id"):
            if not re.fullmatch(NAME_PATTERN, getattr(self, name) or ""):
                raise bad_parameter(name, "may have at most 100 characters: letters, digits, '.', '_' and '-'")


async def start_profile(exchange: Exchange, service: Service) -> None:
    """Record a trace of all processes, until /stop_profile or for `num_steps` steps. Memory is bounded."""
    given = StartBody.parse(await exchange.read_json(if_empty={}))
    given.check()
    path = service.profiler.start(
        given.output_dir,
        given.num_steps,
        given.start_step or 0,
        given.profile_prefix or "",
        given.profile_id or "",
    )
    message = f"Recording begins after {given.start_step} steps." if given.start_step else "Recording."
    await exchange.send_json({"message": message, "path": str(path)})


async def stop_profile(exchange: Exchange, service: Service) -> None:
    """End the recording. The answer comes when the file is written; it has the file's path and number of events."""
    await exchange.read_body()
    await exchange.send_json({"message": "The trace is written.", **await service.profiler.stop()})

"""`/start_profile` and `/stop_profile`: a trace of requests and steps over all processes of the server, for Perfetto."""

from __future__ import annotations

from pydantic import Field

from srt.entrypoints.exchange import Exchange
from srt.entrypoints.service import Service
from srt.managers.request_schema import RequestBody, bad_parameter


class StartBody(RequestBody):
    """POST /start_profile."""

    output_dir: str | None = Field(
        None,
        description="Folder of the trace, an absolute path. By default $SRT_PROFILE_DIR, or that of temporary files.",
    )
    num_steps: int | None = Field(
        None, ge=1, description="End after so many steps of the model, without /stop_profile."
    )
    activities: list[str] | None = Field(None, description="CPU and GPU: both are in every trace.")


async def start_profile(exchange: Exchange, service: Service) -> None:
    """Record what all processes do from now on, until /stop_profile or for `num_steps` steps. Memory is bounded."""
    given = StartBody.parse(await exchange.read_json(if_empty={}))
    if given.activities is not None and not set(given.activities) <= {"CPU", "GPU"}:
        raise bad_parameter("activities", "may hold CPU and GPU only")
    path = service.profiler.start(given.output_dir, given.num_steps)
    await exchange.send_json({"message": "Recording.", "path": str(path)})


async def stop_profile(exchange: Exchange, service: Service) -> None:
    """End the recording. The answer comes when the file is written: it says where, and how many events it has."""
    await exchange.read_body()
    await exchange.send_json({"message": "The trace is written.", **await service.profiler.stop()})

"""Routes for the operator of a running server: request logging and garbage collection."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from srt.entrypoints.exchange import Exchange
from srt.entrypoints.request_schema import RequestBody
from srt.entrypoints.service import Service
from srt.managers.process.runtime_switches import NO_REQUEST_LOG


class NoBody(RequestBody):
    """A body without fields, for requests that are complete by their path."""

    FAMILY: ClassVar[str] = "freeze_gc"


class LoggingBody(RequestBody):
    """POST /configure_logging."""

    FAMILY: ClassVar[str] = "logging"

    log_requests: bool | None = Field(None, description="True: log requests from now on. False: do not.")
    log_requests_level: int | None = Field(
        None,
        ge=0,
        le=3,
        description="Details to log. 0: names and counts; 1: also parameters; 2: also the beginnings of texts; 3: whole texts.",
    )


async def configure_logging(exchange: Exchange, service: Service) -> None:
    """Switch request logging on or off in all frontends, and set how much is logged."""
    given = LoggingBody.parse(await exchange.read_json())
    control = service.control
    is_on = control.request_log_level != NO_REQUEST_LOG if given.log_requests is None else given.log_requests
    level = service.args.log_requests_level if given.log_requests_level is None else given.log_requests_level
    control.request_log_level = level if is_on else NO_REQUEST_LOG
    await exchange.send_json({"log_requests": is_on, "log_requests_level": level})


async def freeze_gc(exchange: Exchange, service: Service) -> None:
    """Make every process collect its garbage now, and exclude the remaining objects from later collections."""
    NoBody.parse(await exchange.read_json(if_empty={}))
    service.control.freeze_gc()
    await exchange.send_text("All processes exclude their present objects from garbage collection.")

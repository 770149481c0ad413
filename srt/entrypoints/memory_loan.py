"""Routes that lend the server's memory to others, and take it back."""

from __future__ import annotations

from typing import ClassVar, Literal

from srt.entrypoints.answers import Succeeded
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.request_schema import RequestBody, bad_parameter, described
from srt.entrypoints.service import Service
from srt.entrypoints.weights import check_done
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.protocol.engine_work import MEMORY_TAGS, MemoryWork, ReleaseMemory, ResumeMemory

Tag = Literal["weights", "kv_cache", "cuda_graph"]


class ReleaseBody(RequestBody):
    """POST /release_memory_occupation."""

    FAMILY: ClassVar[str] = "release_memory_occupation"

    tags: list[Tag] | None = described("The parts to release; null: all of them.")
    refuse_requests: bool = described(
        "Refuse new requests with a 503 until all memory is back. Otherwise they wait.", False
    )


class ResumeBody(RequestBody):
    """POST /resume_memory_occupation."""

    FAMILY: ClassVar[str] = "resume_memory_occupation"

    tags: list[Tag] | None = described("The parts to take back; null: all that are released.")


async def release_memory_occupation(exchange: Exchange, service: Service) -> None:
    """Give memory back to the GPU, or on a CPU to the host, and run nothing until all of it was resumed."""
    await exchange.send_json(await release(ReleaseBody.parse(await exchange.read_json(if_empty={})), service))


async def resume_memory_occupation(exchange: Exchange, service: Service) -> None:
    """Take memory again that was released. Requests go on when nothing is released any more."""
    await exchange.send_json(await resume(ResumeBody.parse(await exchange.read_json(if_empty={})), service))


async def release(body: ReleaseBody, service: Service) -> Succeeded:
    tags = _tags(body.tags)
    num_bytes = await _done(ReleaseMemory(tags, refuses_requests=body.refuse_requests), service)
    return {"success": True, "message": f"Each rank has released {num_bytes / 1e6:,.1f} MB ({', '.join(tags)})."}


async def resume(body: ResumeBody, service: Service) -> Succeeded:
    tags = _tags(body.tags)
    await _done(ResumeMemory(tags), service)
    return {"success": True, "message": f"The memory is back ({', '.join(tags)})."}


def _tags(asked: list[Tag] | None) -> list[str]:
    if asked == []:
        raise bad_parameter("tags", f"must name some of {', '.join(MEMORY_TAGS)}, or be null for all")
    return [tag for tag in MEMORY_TAGS if asked is None or tag in asked]


async def _done(work: MemoryWork, service: Service) -> int:
    """Let all replicas do it, and return the bytes that the first rank of the first one has released."""
    if not service.args.enable_memory_saver:
        raise RequestError(400, "Memory cannot be released: start the server with --enable-memory-saver.")
    replies = await service.engine().ask_ranks(work)
    for reply in replies.values():
        check_done(reply)
    num_bytes = next(iter(replies.values())).values.get("num_bytes", 0)
    return num_bytes if isinstance(num_bytes, int) else 0

"""Routes that replace the model's weights, and name them, while the server runs."""

from __future__ import annotations

import asyncio
import os
from typing import ClassVar

from srt.entrypoints.answers import RenamedWeights, UpdatedWeights
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.request_schema import NAME, RequestBody, bad_parameter, described
from srt.entrypoints.service import Service
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.protocol.engine_work import LoadWeights


class UpdateFromDiskBody(RequestBody):
    """POST /update_weights_from_disk."""

    FAMILY: ClassVar[str] = "update_weights_from_disk"

    model_path: str = described(
        "The folder, on the server's machine, of a checkpoint with the names and shapes of the present one.",
        ...,
        string={"minLength": 1},
    )
    load_format: str | None = described("Null, or the server's --load-format.")
    abort_all_requests: bool = described(
        "End what runs. Otherwise running requests are computed again with the new weights, and go on behind the tokens that they"
        " have; those of a pause with the mode in_place keep their old keys and values.",
        False,
    )
    weight_version: str | None = described("The name of the new weights; null keeps the present one.", string=NAME)
    flush_cache: bool = described(
        "Must be true: what is cached of the old weights would give wrong answers with the new ones.", True
    )


class RenameBody(RequestBody):
    """POST /update_weight_version."""

    FAMILY: ClassVar[str] = "update_weight_version"

    new_version: str = described("The name of the weights.", ..., string=NAME)
    abort_all_requests: bool = described("End what runs, so that no answer is of two names.", True)


async def update_weights_from_disk(exchange: Exchange, service: Service) -> None:
    """Replace the weights of all replicas by another checkpoint's. A 400 says what does not fit, and leaves the old weights whole."""
    await exchange.send_json(await update_from_disk(UpdateFromDiskBody.parse(await exchange.read_json()), service))


async def update_weight_version(exchange: Exchange, service: Service) -> None:
    """Give the present weights another name, which answers have as weight_version."""
    await exchange.send_json(await rename(RenameBody.parse(await exchange.read_json()), service))


async def update_from_disk(body: UpdateFromDiskBody, service: Service) -> UpdatedWeights:
    if not body.flush_cache:
        raise bad_parameter("flush_cache", "must be true: what is cached of the old weights would give wrong answers")
    if body.load_format not in (None, "", service.args.load_format):
        raise bad_parameter("load_format", f"must be null, or {service.args.load_format} as for the server itself")
    work = LoadWeights(await asyncio.to_thread(_folder, body.model_path))
    done, sentence, num_paused = await service.engine().update_weights(
        work, body.weight_version or "", body.abort_all_requests
    )
    if not done:
        raise RequestError(400, sentence)
    return {
        "success": True,
        "message": f"The weights are those in {work.folder}.",
        "num_paused_requests": num_paused,
    }


def _folder(path: str) -> str:
    try:
        if os.path.isdir(path):
            return os.path.realpath(path)
    except ValueError:  # a path with a zero byte
        pass
    raise bad_parameter("model_path", f"{path[:200]!r} is not a folder on the server's machine")


async def rename(body: RenameBody, service: Service) -> RenamedWeights:
    engine = service.engine()
    if body.abort_all_requests:
        await engine.abort_label("")
    await engine.rename_weights(body.new_version)
    return {"success": True, "message": "The weights have the new name.", "new_version": body.new_version}

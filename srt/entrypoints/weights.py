"""Routes that replace the model's weights, and name them, while the server runs."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson

from srt.entrypoints.answers import RankHashes, RenamedWeights, UpdatedWeights, WeightHashes
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.request_schema import NAME, RequestBody, bad_parameter, described
from srt.entrypoints.service import Service
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.managers.tokenizer_manager.request_checks import check_label
from srt.protocol.engine_work import InspectWeights, LoadWeights
from srt.protocol.messages import ControlReply, Scalar
from srt.sampling.parameter_checks import show


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


TENSORS = "application/octet-stream"
MAX_TENSOR_BYTES = 1 << 30
VERSION, ABORTS = "weight_version", "abort_all_requests"  # parameters of /update_weights_from_tensor


MAX_ROWS = 1000


class RenameBody(RequestBody):
    """POST /update_weight_version."""

    FAMILY: ClassVar[str] = "update_weight_version"

    new_version: str = described("The name of the weights.", ..., string=NAME)
    abort_all_requests: bool = described("End what runs, so that no answer is of two names.", True)


class CheckBody(RequestBody):
    """POST /weights_checker."""

    FAMILY: ClassVar[str] = "weights_checker"

    action: Literal["checksum"] = described("What to do: return a hash of each weight.", "checksum")


class NamedBody(RequestBody):
    """POST /get_weights_by_name."""

    FAMILY: ClassVar[str] = "get_weights_by_name"

    name: str = described("The name of a tensor in the checkpoint.", ..., string={"minLength": 1})
    truncate_size: int = described("The number of its first rows to return.", 100, minimum=1, maximum=MAX_ROWS)


async def weights_checker(exchange: Exchange, service: Service) -> None:
    """Return a hash of each weight, as each rank of each replica holds it. Ranks have parts of most weights."""
    CheckBody.parse(await exchange.read_json(if_empty={}))
    await exchange.send_json(await checksums(service))


async def get_weights_by_name(exchange: Exchange, service: Service) -> None:
    """Return the first rows of one tensor of the checkpoint. Tensors that are quantised or stacked are refused."""
    await exchange.send_json(await named_weight(NamedBody.parse(await exchange.read_json()), service))


async def update_weights_from_disk(exchange: Exchange, service: Service) -> None:
    """Replace the weights of all replicas by another checkpoint's. A 400 says what does not fit, and leaves the old weights whole."""
    await exchange.send_json(await update_from_disk(UpdateFromDiskBody.parse(await exchange.read_json()), service))


async def update_weights_from_tensor(exchange: Exchange, service: Service) -> None:
    """Replace the weights that the body has, a safetensors file with names of the checkpoint, and keep the others.

    A model may come in several calls: pause generation before the first one, and continue it after the last one.
    """
    query = exchange.query()
    unknown = query.keys() - {VERSION, ABORTS}
    if unknown:
        raise bad_parameter(min(unknown)[:100], "is not a known parameter")
    kind = (exchange.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    if kind != TENSORS.encode():
        raise RequestError(
            415, f"Content-Type must be {TENSORS}: the body is a safetensors file, because pickles are never read."
        )
    aborts = query.get(ABORTS, "false").lower()
    if aborts not in ("true", "false"):
        raise bad_parameter(ABORTS, f"must be true or false, not {show(aborts)}")
    version = query.get(VERSION, "")
    check_label(VERSION, version)
    body = await exchange.read_body(MAX_TENSOR_BYTES)
    await exchange.send_json(await update_from_tensors(body, version, service, aborts=aborts == "true"))


async def update_weight_version(exchange: Exchange, service: Service) -> None:
    """Give the present weights another name, which answers have as weight_version."""
    await exchange.send_json(await rename(RenameBody.parse(await exchange.read_json()), service))


async def checksums(service: Service) -> WeightHashes:
    replies = await service.engine().ask_ranks(InspectWeights())
    ranks: list[RankHashes] = []
    for replica, reply in replies.items():
        check_done(reply)
        for rank, values in sorted(_by_rank(reply).items()):
            hashes = {name: str(value) for name, value in values.items()}
            ranks.append({"dp_rank": replica, "rank": rank, "checksums": hashes})
    return {"success": True, "message": f"These are the weights of {len(ranks)} ranks.", "ranks": ranks}


async def named_weight(body: NamedBody, service: Service) -> list[Any]:
    """Return rows of the tensor, or elements if it is a vector, put together from the parts of the ranks that share it."""
    if not 1 <= body.truncate_size <= MAX_ROWS:
        raise bad_parameter("truncate_size", f"must be from 1 to {MAX_ROWS}")
    replies = await service.engine().ask_ranks(InspectWeights(body.name, body.truncate_size))
    # One replica has all of it, unless all of them share the experts.
    asked = list(replies.values()) if service.args.enable_dp_attention else [next(iter(replies.values()))]
    parts: dict[int, dict[str, Scalar]] = {}
    for reply in asked:
        check_done(reply)
        parts |= {int(str(part["start"])): part for part in _by_rank(reply).values()}  # ranks may have the same part
    if not parts:
        raise RequestError(400, f"The model has no tensor {body.name[:200]!r}.")
    rows = [orjson.loads(str(parts[start]["rows"])) for start in sorted(parts)]
    if next(iter(parts.values()))["dim"] == 0:
        return list(itertools.chain.from_iterable(rows))[: body.truncate_size]
    return [list(itertools.chain.from_iterable(of_row)) for of_row in zip(*rows, strict=True)]


def check_done(reply: ControlReply) -> None:
    if not reply.ok:
        raise RequestError(400, reply.message)


def _by_rank(reply: ControlReply) -> dict[int, dict[str, Scalar]]:
    ranks: dict[int, dict[str, Scalar]] = {}
    for key, value in reply.values.items():
        rank, _, name = key.partition(" ")
        ranks.setdefault(int(rank), {})[name] = value
    return ranks


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


async def update_from_tensors(file: bytes, version: str, service: Service, *, aborts: bool) -> UpdatedWeights:
    """Replace the weights that this safetensors file has. The workers read it in a folder that is deleted afterwards."""
    assert service.run_dir is not None, "a server's processes share a folder"
    if service.args.nnodes > 1:
        raise RequestError(
            501, "Tensors in a body reach the workers of one host only: use /update_weights_from_disk with --nnodes."
        )
    folder = await asyncio.to_thread(_stored, file, service.run_dir)
    try:
        work = LoadWeights(folder, is_partial=True)
        done, sentence, num_paused = await service.engine().update_weights(work, version, aborts)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    if not done:
        raise RequestError(400, sentence.replace(f"The checkpoint {folder}", "The body").replace(folder, "the body"))
    return {"success": True, "message": "The tensors are in place.", "num_paused_requests": num_paused}


def _stored(file: bytes, run_dir: Path) -> str:
    folder = tempfile.mkdtemp(prefix="tensors-", dir=run_dir)
    Path(folder, "model.safetensors").write_bytes(file)
    return folder


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

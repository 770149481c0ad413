"""The route that saves the weights as each rank holds them."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

from srt.entrypoints.answers import Succeeded
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.request_schema import RequestBody, bad_parameter, described
from srt.entrypoints.service import Service
from srt.entrypoints.weights import check_done
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.protocol.engine_work import SaveWeights
from srt.server_args import ServerArgs
from srt.utils.checkpoint import resolve_model_path
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from srt.utils.sharded_state import LOAD_FORMAT, ShardedIndex, files_besides_weights

LOCK: Final = "saving.lock"
"""Name of a file that a folder has while weights are saved to it."""


class SaveBody(RequestBody):
    """POST /save_sharded_model."""

    path: str = described(
        "The folder to write, on the server's machine; it must be empty or not exist.", ..., string={"minLength": 1}
    )
    pattern: None = described("Must be null: files are named model-rank-0-part-0.safetensors and so on.")
    max_size: int | None = described("The most bytes of weights in a file; null: no limit.", minimum=1)


async def save_sharded_model(exchange: Exchange, service: Service) -> None:
    """Save the weights as each rank holds them. A server with the same options loads them with --load-format sharded_state."""
    await exchange.send_json(await save(SaveBody.parse(await exchange.read_json()), service))


async def save(body: SaveBody, service: Service) -> Succeeded:
    args = service.args
    if body.max_size is not None and body.max_size < 1:
        raise bad_parameter("max_size", "must be at least 1, or null")
    if args.nnodes > 1 or args.dp_size > 1:
        raise RequestError(
            400, "Weights are saved by one replica on one host: start a server without --dp-size and --nnodes."
        )
    try:
        source = await asyncio.to_thread(resolve_model_path, args.model_path, args.revision, args.download_dir)
        index = await asyncio.to_thread(_index, source, args)
        folder = await asyncio.to_thread(_new_folder, Path(body.path))
    except ModelError as error:
        raise RequestError(400, str(error)) from None
    try:
        replies = await service.engine().ask_ranks(SaveWeights(str(folder), body.max_size or 0))
        reply = next(iter(replies.values()))
        check_done(reply)
        packed_for = str(reply.values["packed_for"])
        await asyncio.to_thread(complete_folder, source, folder, replace(index, packed_for=packed_for))
        await asyncio.to_thread((folder / LOCK).unlink)
    except BaseException as error:
        await asyncio.to_thread(_empty, folder)
        if isinstance(error, OSError):
            raise RequestError(400, f"The weights cannot be written to {folder}: {error.strerror}.") from None
        raise
    return {"success": True, "message": f"The weights are in {folder}: load them with --load-format {LOAD_FORMAT}."}


def _index(source: Path, args: ServerArgs) -> ShardedIndex:
    return ShardedIndex.of(args, ModelConfig.served_from(source, args))


def _new_folder(path: Path) -> Path:
    """Make the folder, with a file in it that keeps other calls, of other frontends too, from writing there. ModelError if one does."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder = path.resolve()
        with (folder / LOCK).open("x"):
            is_empty = [one.name for one in folder.iterdir()] == [LOCK]
        if not is_empty:
            (folder / LOCK).unlink()
    except FileExistsError as error:
        if not (path / LOCK).is_file():
            raise ModelError(f"{str(path)[:200]!r} is a file: name a folder.") from error
        raise ModelError(
            f"Another call is writing to the folder {path}, or its server was killed meanwhile: name another one, or remove what is in it."
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"The folder {str(path)[:200]!r} cannot be written: {reason}.") from error
    if not is_empty:
        raise ModelError(f"The folder {folder} is not empty: name another one, or remove what is in it.")
    return folder


def complete_folder(source: Path, folder: Path, index: ShardedIndex) -> None:
    """Copy what a server reads besides the weights, and write the index, without which the folder is not complete."""
    for file in files_besides_weights(source):
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / file, folder / file)
    index.write(folder)


def _empty(folder: Path) -> None:
    for path in sorted(folder.iterdir(), key=lambda one: one.name == LOCK):  # the lock last
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

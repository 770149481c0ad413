"""The route that saves weights: one call at a time writes to a folder, and one that fails leaves nothing in it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from srt.entrypoints.service import Service
from srt.entrypoints.weight_saving import SaveBody, save
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.protocol.engine_work import SaveWeights
from srt.protocol.messages import ControlReply
from srt.server_args import ServerArgs
from srt.utils.checkpoint import SHARDED_INDEX

WEIGHTS = "model-rank-0-part-0.safetensors"


def write_weights(folder: str) -> None:
    Path(folder, WEIGHTS).write_text("weights")


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


class Engine:
    """Its ranks write a file, and end when they are told to."""

    def __init__(self, error: str = "") -> None:
        self.args = ServerArgs(model_path="tiny", device="cpu")
        self.error = error
        self.has_written, self.may_end = asyncio.Event(), asyncio.Event()

    def engine(self) -> Engine:
        return self

    async def ask_ranks(self, work: SaveWeights) -> dict[int, ControlReply]:
        write_weights(work.folder)
        self.has_written.set()
        await self.may_end.wait()
        return {0: ControlReply(1, not self.error, self.error, {"packed_for": ""})}

    async def save(self, folder: Path) -> Any:
        return await save(SaveBody.parse({"path": str(folder)}), cast(Service, self))


async def refused(engine: Engine, folder: Path) -> str:
    with pytest.raises(RequestError) as error:
        await engine.save(folder)
    return str(error.value)


def test_a_second_call_does_not_write_to_the_folder_of_the_first(tmp_path: Path) -> None:
    async def both() -> None:
        engine, folder = Engine(), tmp_path / "saved"
        first = asyncio.create_task(engine.save(folder))
        await engine.has_written.wait()
        assert "Another call is writing to the folder" in await refused(engine, folder)
        assert WEIGHTS in names_in(folder)
        engine.may_end.set()
        assert (await first)["success"]
        names = names_in(folder)
        assert names > {WEIGHTS, SHARDED_INDEX, "config.json"} and not any("lock" in name for name in names)
        assert "is not empty" in await refused(engine, folder)
        assert names_in(folder) == names

    asyncio.run(both())


def test_a_failing_call_leaves_the_folder_empty(tmp_path: Path) -> None:
    async def fail() -> None:
        engine = Engine("The disk is full.")
        engine.may_end.set()
        for _ in range(2):
            assert "The disk is full." in await refused(engine, tmp_path)
            assert not names_in(tmp_path)

    asyncio.run(fail())


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def fail() -> None:
        assert "is a file" in await refused(Engine(), tmp_path / "file")

    asyncio.run(fail())

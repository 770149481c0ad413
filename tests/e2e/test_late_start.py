"""A program that comes to its engine late, as on a machine where its own imports take longer than the engine's start."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from srt.entrypoints.engine_process import EngineProcess
from srt.entrypoints.local_engine import LocalEngine
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.server_args import from_keywords
from srt.utils.errors import StartError

pytestmark = pytest.mark.e2e


def num_messages(lifeline: socket.socket) -> int:
    """That wait on the socket to be read."""
    data, count = lifeline.recv(1 << 16, socket.MSG_PEEK), 0
    while len(data) >= 4 and len(data) >= 4 + struct.unpack_from("<I", data)[0]:
        data, count = data[4 + struct.unpack_from("<I", data)[0] :], count + 1
    return count


def test_an_engine_that_was_ready_before_its_program_looked_is_found_ready(qwen3_checkpoint: Path) -> None:
    args = from_keywords({"model_path": str(qwen3_checkpoint), "device": "cpu", "log_level": "error"})
    process = EngineProcess(args, http=False)
    engine = LocalEngine(process, args)
    try:
        while num_messages(process._lifeline._socket) < 2:  # where it is, and that it is ready
            time.sleep(0.02)
        engine.start()
        sampling = {"max_new_tokens": 3, "ignore_eos": True}
        answer = engine.run(engine.answer({"text": "a", "sampling_params": sampling}))
        assert len(answer["output_ids"]) == 3
    finally:
        engine.shutdown()


def test_a_start_that_fails_while_the_program_connects_leaves_no_open_socket(
    qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: asyncio.Queue[asyncio.Future[float]] = asyncio.Queue()
    managers: list[TokenizerManager] = []
    connect = TokenizerManager.connect

    async def connect_and_fail(**words: Any) -> TokenizerManager:
        managers.append(await connect(**words | {"generations": [2]}))  # nobody is there, so nobody hangs up
        (await starts.get()).set_exception(StartError("The engine has ended."))
        return managers[0]

    monkeypatch.setattr(LocalEngine, "_hear_supervisor", lambda engine, ready: starts.put_nowait(ready))
    monkeypatch.setattr(TokenizerManager, "connect", connect_and_fail)
    args = from_keywords({"model_path": str(qwen3_checkpoint), "device": "cpu", "log_level": "error"})
    engine = LocalEngine(EngineProcess(args, http=False), args)
    with pytest.raises(StartError, match="has ended"):
        engine.start()
    engine.shutdown()
    assert not managers[0]._replicas[0]._link.is_open

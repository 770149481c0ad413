"""A program that comes to its engine late, as on a machine where its own imports take longer than the engine's start."""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path

import pytest

from srt.entrypoints.local_engine import LocalEngine
from srt.managers.engine_process import EngineProcess
from srt.server_args import from_keywords

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

"""A program that trains beside its Runtime: it borrows the memory, and sends weights over a process group."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

import srt
from srt.distributed.update_group import UpdateGroup
from srt.utils.checkpoint import SHIPPED_MODELS

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0, "max_new_tokens": 8}
QUESTION = "What is 123 + 456?"


def test_memory_is_borrowed_and_weights_come_over_a_group() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])
    norm = load_file(SHIPPED_MODELS / "tiny" / "model.safetensors")["model.norm.weight"].float()
    with srt.Runtime(device="cpu", dtype="float32", enable_memory_saver=True) as runtime, ThreadPoolExecutor(1) as pool:
        before = runtime.generate(QUESTION, GREEDY)["output_ids"]
        runtime.release_memory_occupation()
        waiting = pool.submit(runtime.generate, QUESTION, GREEDY)
        runtime.resume_memory_occupation(["weights"])
        assert not waiting.done()
        runtime.resume_memory_occupation()
        assert waiting.result()["output_ids"] == before
        joining = pool.submit(runtime.init_weights_update_group, "127.0.0.1", port, 1, 2)
        group = UpdateGroup("127.0.0.1", port, 0, 2)
        joining.result()
        receiving = pool.submit(
            runtime.update_weights_from_distributed, ["model.norm.weight"], ["float32"], [list(norm.shape)]
        )
        group.broadcast([torch.zeros_like(norm)])
        assert receiving.result()["success"]
        assert runtime.get_weights_by_name("model.norm.weight", 3) == [0.0, 0.0, 0.0]
        assert set(runtime.generate(QUESTION, {**GREEDY, "ignore_eos": True})["output_ids"]) == {0}
        with pytest.raises(srt.RequestError, match="no folder has them"):
            runtime.release_memory_occupation(["weights"])
        runtime.destroy_weights_update_group()
        runtime.update_weights_from_disk(str(SHIPPED_MODELS / "tiny"))
        assert runtime.generate(QUESTION, GREEDY)["output_ids"] == before
        group.close()

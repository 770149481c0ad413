"""Weights from a process group on a GPU: over gloo from the CPU's memory, over NCCL from another GPU."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from srt.distributed.update_group import Backend, UpdateGroup, UpdateGroupError
from srt.model_executor.model_runner import ModelRunner
from srt.protocol.engine_work import JoinUpdateGroup, ReceiveWeights
from srt.utils.errors import UpdateError
from tests.gpu.test_weight_updates import captured, drawn
from tests.support.checkpoints import CheckpointFactory

pytestmark = pytest.mark.gpu


def trainer(port: int, backend: Backend, tensors: list[Tensor], *, leaves: bool = False) -> None:
    device = torch.device("cuda", 1) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    group = UpdateGroup("127.0.0.1", port, 0, 2, "group", backend)
    group.broadcast([one.to(device) for one in tensors])
    if leaves:
        group.close()


def check_received(runner: ModelRunner, folders: list[Path], backend: Backend) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])
    before = drawn(runner)
    tensors = load_file(folders[1] / "model.safetensors")
    kind = {torch.float32: "F32", torch.bfloat16: "BF16"}[next(iter(tensors.values())).dtype]
    work = ReceiveWeights(
        "group", list(tensors), [kind] * len(tensors), [list(one.shape) for one in tensors.values()], False
    )
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(trainer, port, backend, list(tensors.values()), leaves=backend == "gloo")
        runner.update_groups.join(JoinUpdateGroup("group", "127.0.0.1", port, 1, 2, backend), lambda: None)
        runner.update_weights(work, lambda: None)
        sending.result()
    assert drawn(runner) == drawn(captured(folders[1], dtype="bfloat16")) != before
    if backend == "gloo":
        with pytest.raises(UpdateError, match="the weights are the old ones"):
            runner.update_weights(work, lambda: None)
        assert drawn(runner) != before


def test_tensors_over_gloo_become_the_weights(checkpoint: CheckpointFactory) -> None:
    folders = [checkpoint("qwen3", seed=seed) for seed in (0, 1)]
    check_received(captured(folders[0], dtype="bfloat16"), folders, "gloo")


@pytest.mark.two_gpus
def test_tensors_over_nccl_become_the_weights(checkpoint: CheckpointFactory) -> None:
    folders = [checkpoint("qwen3", seed=seed) for seed in (0, 1)]
    check_received(captured(folders[0], dtype="bfloat16"), folders, "nccl")


@pytest.mark.two_gpus
def test_a_silent_sender_over_nccl_is_given_up() -> None:
    """NCCL connects at the first tensor, and waits there. Meanwhile the one that waits reports that it is well."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])

    def silent() -> UpdateGroup:
        torch.cuda.set_device(1)
        return UpdateGroup("127.0.0.1", port, 0, 2, "silent", "nccl")

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(silent)
        group = UpdateGroup("127.0.0.1", port, 1, 2, "silent", "nccl", timeout_s=5.0)
        reports: list[int] = []
        with pytest.raises(UpdateGroupError, match=r"^A tensor did not come through the group silent within 5 s\.$"):
            group.broadcast([torch.zeros(4, device="cuda")], lambda: reports.append(1))
        assert len(reports) > 100
        group.close()
        sending.result().close()
    assert torch.zeros(1, device="cuda").item() == 0.0

"""A trainer sends weights to a real server over a process group, and dies in the middle of it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d

from srt.distributed.update_group import UpdateGroup
from tests.faults.test_replacement import words_for
from tests.faults.test_weight_updates import PROMPTS, answers, expected, folders, post, update  # noqa: F401  # fixtures
from tests.support.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.e2e

NUM_RANKS = 2
dist: Any = distributed_c10d  # its own annotations lack what is used here
Broadcast = Callable[[list[Tensor]], None]


@pytest.fixture(scope="module")
def server(qwen3_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    words = [*words_for(qwen3_checkpoint), "--max-replacements", "1000"]
    with ServerProcess("srt.launch_server", words, tmp_path_factory.mktemp("grouped")) as process:
        process.wait_ready()
        yield process
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def init(server: ServerProcess, port: int, name: str) -> httpx.Response:
    return post(server, "/init_weights_update_group", {**init_body(port), "group_name": name, "backend": "gloo"})


def init_body(port: int) -> dict[str, Any]:
    return {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 1 + NUM_RANKS}


def connected(server: ServerProcess, name: str) -> UpdateGroup:
    """The trainer's side of a group that the server has joined."""
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(init, server, port, name)
        group = UpdateGroup("127.0.0.1", port, 0, 1 + NUM_RANKS, name)
        assert joining.result().status_code == 200, joining.result().text
    return group


def described(tensors: dict[str, Tensor]) -> dict[str, Any]:
    dtypes = [str(one.dtype) for one in tensors.values()]
    return {"names": list(tensors), "dtypes": dtypes, "shapes": [list(one.shape) for one in tensors.values()]}


def send(server: ServerProcess, broadcast: Broadcast, tensors: dict[str, Tensor], **body: Any) -> httpx.Response:
    """Let the server receive while the trainer sends."""
    parts = list(tensors.values())
    if "load_format" in body:
        parts = [torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in parts])]
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(post, server, "/update_weights_from_distributed", {**described(tensors), **body})
        broadcast(parts)
        return receiving.result()


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture
def old(server: ServerProcess, folders: list[Path]) -> list[Path]:  # noqa: F811
    """The folders; the server has the weights of the first one."""
    assert update(server, folders[0], weight_version="old").status_code == 200
    return folders


def test_buckets_of_tensors_become_the_weights(server: ServerProcess, old: list[Path], expected: Any) -> None:  # noqa: F811
    """One bucket tensor by tensor, one as bytes, in a pause; then one with another size of elements."""
    tensors = stored(old[1])
    names = sorted(tensors)
    group = connected(server, "buckets")
    whole: dict[str, Any] = {"group_name": "buckets", "weight_version": "new"}
    assert post(server, "/pause_generation", {"mode": "retract"}).status_code == 200
    for part, form in ((names[::2], {}), (names[1::2], {"load_format": "flattened_bucket"})):
        answer = send(server, group.broadcast, {name: tensors[name] for name in part}, **whole, **form)
        assert answer.status_code == 200, answer.text
    assert post(server, "/continue_generation", {}).status_code == 200
    assert answers(server, "new") == expected[1]
    norm, scale = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    mixed = {norm: tensors[norm].bfloat16()[:1].expand(len(tensors[norm])).contiguous(), scale: tensors[scale]}
    answer = send(server, group.broadcast, mixed, **whole, load_format="flattened_bucket")
    assert answer.status_code == 200, answer.text
    assert post(server, "/get_weights_by_name", {"name": norm}).json() == mixed[norm].float()[:100].tolist()
    assert post(server, "/get_weights_by_name", {"name": scale}).json() == tensors[scale][:100].tolist()
    assert post(server, "/destroy_weights_update_group", {"group_name": "buckets"}).status_code == 200
    group.close()


def test_a_trainer_may_use_a_group_of_pytorch(server: ServerProcess, old: list[Path]) -> None:
    """As trainers for other servers do, whose helper makes a group beside the default one."""
    name, port = "of pytorch", free_port()
    norm = {"model.norm.weight": 2 * stored(old[0])["model.norm.weight"]}
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(init, server, port, name)
        wait = timedelta(seconds=60)
        store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1 + NUM_RANKS, timeout=wait))
        group, _ = dist._new_process_group_helper(
            1 + NUM_RANKS, 0, [], dist.Backend("gloo"), dist.PrefixStore(name, store), group_name=name, timeout=wait
        )
        assert joining.result().status_code == 200, joining.result().text

    def broadcast(tensors: list[Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for one in tensors:
            group.broadcast([one], options).wait()

    assert send(server, broadcast, norm, group_name=name).status_code == 200
    read = post(server, "/get_weights_by_name", {"name": "model.norm.weight"}).json()
    assert read == norm["model.norm.weight"][:100].tolist()
    assert post(server, "/destroy_weights_update_group", {"group_name": name}).status_code == 200


def test_tensors_that_do_not_fit_change_nothing(server: ServerProcess, old: list[Path], expected: Any) -> None:  # noqa: F811
    group = connected(server, "misfits")
    norm = stored(old[1])["model.norm.weight"]
    for tensors, sentence in (
        ({"model.norm.weight": norm[1:]}, "of the wrong shape is model.norm.weight"),
        ({"model.absent": norm}, "model.absent"),
    ):
        refused = send(server, group.broadcast, tensors, group_name="misfits")
        assert refused.status_code == 400 and sentence in refused.text, refused.text
        assert "What came from the group misfits does not fit" in refused.text
    assert answers(server, "old") == expected[0]
    again = init(server, free_port(), "misfits")
    assert again.status_code == 400 and "There is a group misfits already" in again.text
    group.close()
    closed = post(server, "/update_weights_from_distributed", {**described({"a": norm}), "group_name": "misfits"})
    assert closed.status_code == 400 and "is broken" in closed.text and "the weights are the old ones" in closed.text
    gone = post(server, "/update_weights_from_distributed", {**described({"a": norm}), "group_name": "misfits"})
    assert gone.status_code == 400 and "There is no group 'misfits'" in gone.text
    assert answers(server, "old") == expected[0]


TRAINER = """
import sys, torch
from srt.distributed.update_group import UpdateGroup
group = UpdateGroup("127.0.0.1", int(sys.argv[1]), 0, 3, "dying")
sys.stdin.readline()
group.broadcast([torch.zeros(int(sys.argv[2]))])
print("sent", flush=True)
sys.stdin.readline()
"""


def test_a_trainer_that_dies_in_the_middle_leaves_the_old_weights(
    server: ServerProcess,
    old: list[Path],
    expected: Any,  # noqa: F811
) -> None:
    tensors = stored(old[1])
    some = {name: tensors[name] for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")}
    words = [sys.executable, "-c", TRAINER, str(port := free_port()), str(len(some["model.norm.weight"]))]
    with (
        subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer,
        ThreadPoolExecutor(1) as pool,
    ):
        assert trainer.stdin is not None and trainer.stdout is not None
        assert init(server, port, "dying").status_code == 200
        body = {**described(some), "group_name": "dying"}
        receiving = pool.submit(post, server, "/update_weights_from_distributed", body)
        trainer.stdin.write("go\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "sent\n"
        trainer.kill()
        failed = receiving.result()
    assert failed.status_code == 400 and "The group is closed, and the weights are the old ones" in failed.text
    assert answers(server, "old") == expected[0]
    group = connected(server, "dying")
    assert send(server, group.broadcast, tensors, group_name="dying", weight_version="new").status_code == 200
    assert answers(server, "new") == expected[1]
    assert post(server, "/destroy_weights_update_group", {"group_name": "dying"}).status_code == 200
    group.close()


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/init_weights_update_group", {"rank_offset": 2}, "the server's 2 ranks must be within world_size"),
        ("/init_weights_update_group", {"backend": "nccl"}, "nccl needs GPUs"),
        ("/init_weights_update_group", {"master_port": 0}, "master_port must be from 1 to 65535"),
        ("/update_weights_from_distributed", {"dtypes": ["float31"]}, "dtypes may be float64"),
        ("/update_weights_from_distributed", {"shapes": []}, "must have as many entries"),
        ("/update_weights_from_distributed", {"shapes": [[-1]]}, "no negative number"),
        ("/update_weights_from_distributed", {"shapes": [[1 << 40]]}, "send several calls"),
        ("/update_weights_from_distributed", {"flush_cache": False}, "flush_cache must be true"),
        ("/update_weights_from_distributed", {}, "There is no group 'weight_update_group'"),
        ("/destroy_weights_update_group", {}, "There is no group 'weight_update_group'"),
    ],
)
def test_what_cannot_be_done_is_refused(server: ServerProcess, path: str, body: dict[str, Any], sentence: str) -> None:
    whole: dict[str, dict[str, Any]] = {
        "/init_weights_update_group": init_body(9),
        "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
        "/destroy_weights_update_group": {},
    }
    refused = post(server, path, {**whole[path], **body})
    assert refused.status_code == 400 and sentence in refused.text, refused.text

"""Tensors that a trainer sends over a real gloo group: what is not filled to its end is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from srt.distributed.pipeline import Pipeline
from srt.distributed.update_group import UpdateGroup, UpdateGroupError
from srt.entrypoints.weight_groups import DTYPES as ANNOUNCED
from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.update_groups import UpdateGroups
from srt.model_loader.weight_copy import DTYPES
from srt.protocol.engine_work import JoinUpdateGroup, ReceiveWeights
from srt.utils.errors import UpdateError
from tests.support.ranks import CPU, single_rank

Joined = tuple[UpdateGroup, UpdateGroups]


def groups_of_a_rank(pipeline: Pipeline) -> UpdateGroups:
    return UpdateGroups(cast(LoadedModel, SimpleNamespace(tp=single_rank(), device=CPU, pipeline=pipeline)))


@pytest.fixture
def joined() -> Iterator[Joined]:
    """The trainer's side of a group, and a rank that has joined it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])
    groups = groups_of_a_rank(Pipeline(0, 1))
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(UpdateGroup, "127.0.0.1", port, 0, 2, "group")
        groups.join(JoinUpdateGroup("group", "127.0.0.1", port, 1, 2, "gloo"), lambda: None)
        trainer = meeting.result()
    yield trainer, groups
    trainer.close()


def receive(joined: Joined, sent: list[Tensor], announced: list[Tensor], *, are_joined: bool = False) -> list[Tensor]:
    """Let the trainer send these tensors while the rank expects what was announced."""
    trainer, groups = joined
    codes = {kind: code for code, kind in DTYPES.items()}
    names, kinds = [str(i) for i in range(len(announced))], [codes[one.dtype] for one in announced]
    work = ReceiveWeights("group", names, kinds, [list(one.shape) for one in announced], are_joined)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(trainer.broadcast, sent)
        try:
            return list(groups.receive(work, lambda: None).values())
        finally:
            sending.result()


def of_bytes(kind: torch.dtype, byte: int) -> Tensor:
    return torch.full((6 * kind.itemsize,), byte, dtype=torch.uint8).view(kind)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Compare bytes, because NaNs differ from themselves."""
    return ours.shape == theirs.shape and torch.equal(
        ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("are_joined", [False, True])
def test_what_was_announced_arrives_whatever_its_last_numbers_are(joined: Joined, are_joined: bool) -> None:
    sent = [of_bytes(DTYPES[code], byte) for code in ANNOUNCED.values() for byte in (0, 0xA5, 0xFF)]
    sent += [torch.tensor(float("nan")), torch.tensor([7], dtype=torch.uint8), torch.empty(0, 5), torch.ones(2, 3)]
    parts = [torch.cat([one.reshape(-1).view(torch.uint8) for one in sent])] if are_joined else sent
    assert all(map(same, receive(joined, parts, sent, are_joined=are_joined), sent))


@pytest.mark.parametrize(
    ("sent", "announced"),
    [
        (torch.ones(5), torch.ones(6)),
        (torch.ones(6, dtype=torch.bfloat16), torch.ones(6)),
        (torch.ones(5, dtype=torch.bfloat16), torch.ones(6, dtype=torch.bfloat16)),
        (torch.ones(8, dtype=torch.uint8), torch.ones(3, 4, dtype=torch.uint8)),
    ],
)
def test_fewer_numbers_than_announced_are_refused(joined: Joined, sent: Tensor, announced: Tensor) -> None:
    sentence = r"sent fewer numbers than it announced\. The group is closed, and the weights are the old ones\."
    with pytest.raises(UpdateError, match=sentence):
        receive(joined, [torch.ones(2), sent], [torch.ones(2), announced])


def test_fewer_bytes_than_announced_are_refused(joined: Joined) -> None:
    announced = [torch.ones(4), torch.ones(3, dtype=torch.bfloat16)]
    with pytest.raises(UpdateError, match="sent fewer numbers than it announced"):
        receive(joined, [torch.ones(20, dtype=torch.uint8)], announced, are_joined=True)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "a\0b"])
def test_a_host_that_is_not_known_is_no_reason_to_wait(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    if host.endswith(".invalid"):
        monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UpdateGroupError, match="is not known"):
        UpdateGroup(host, 29500, 1, 2, timeout_s=3600.0)


def test_a_stage_of_a_pipeline_joins_no_group() -> None:
    """Otherwise ranks of several stages would meet the trainer under the same number, and wait."""
    pipeline = cast(Pipeline, SimpleNamespace(num_stages=2))
    with pytest.raises(UpdateError, match="with --pp-size"):
        groups_of_a_rank(pipeline).join(JoinUpdateGroup("group", "127.0.0.1", 9, 1, 3, "gloo"), lambda: None)

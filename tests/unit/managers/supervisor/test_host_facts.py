"""What hosts compare before they serve together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from srt.managers.supervisor.host_facts import difference, facts_of
from srt.managers.supervisor.preflight import ServerPlan
from srt.protocol.host_messages import HostHello
from srt.server_args import ServerArgs


@pytest.fixture
def copy(qwen3_checkpoint: Path, tmp_path: Path) -> Path:
    """The same files in another folder."""
    return Path(shutil.copytree(qwen3_checkpoint, tmp_path / "copy"))


def facts(folder: Path, rank: int, draft: Path) -> HostHello:
    return facts_of(
        ServerPlan(
            ServerArgs(model_path=str(folder), node_rank=rank, speculative_draft_model_path=str(draft)),
            folder,
            None,
        )
    )


def test_folders_may_differ_but_not_what_is_in_them(qwen3_checkpoint: Path, copy: Path) -> None:
    ours = facts(qwen3_checkpoint, 0, qwen3_checkpoint)
    assert difference(ours, facts(copy, 1, copy)) is None
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert (
        difference(ours, facts(copy, 1, copy))
        == "The checkpoint of host 1 differs from that of host 0: copy the same files to both."
    )
    reason = difference(ours, facts(qwen3_checkpoint, 1, copy))
    assert reason is not None and reason.startswith(
        "The model of host 1 that drafts (--speculative-draft-model-path) differs"
    )

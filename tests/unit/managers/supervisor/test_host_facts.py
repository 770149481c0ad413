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


def facts(folder: Path, rank: int, draft: Path, scales: Path | None = None) -> HostHello:
    args = ServerArgs(
        model_path=str(folder),
        node_rank=rank,
        speculative_draft_model_path=str(draft),
        quantization_param_path=None if scales is None else str(scales),
    )
    return facts_of(ServerPlan(args, folder, None))


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


def test_files_of_scales_are_compared_by_content(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    files = []
    for name, content in (("ours", "1"), ("same", "1"), ("other", "2")):
        files.append(tmp_path / name)
        files[-1].write_text(content)
    ours, same, other = (
        facts(qwen3_checkpoint, rank, qwen3_checkpoint, file) for rank, file in zip((0, 1, 1), files, strict=True)
    )
    assert difference(ours, same) is None
    reason = difference(ours, other)
    assert reason is not None and reason.startswith("The file of --quantization-param-path on host 1 differs")
    assert difference(ours, facts(qwen3_checkpoint, 1, qwen3_checkpoint)) is not None

"""How much KV memory a worker takes, and the sentence when it cannot have it."""

from __future__ import annotations

import pytest
import torch

from srt.model_executor import memory_profile
from srt.model_executor.memory_profile import check_pages, check_tables, profile_max_num_token
from srt.server_args import ServerArgs
from srt.utils.errors import StartError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("available_gb", "max_total_tokens", "expected"),
    [
        (20, None, (2 << 30) // 1000),  # a tenth
        (100, None, (4 << 30) // 1000),  # and at most 4 GiB
        (20, 10_000_000, 10_000_000),  # unless told
        (20, 1, 1),
        (0, None, 0),
    ],
)
def test_a_cpu_worker_takes_a_tenth_of_the_memory_and_at_most_four_gib(
    monkeypatch: pytest.MonkeyPatch, available_gb: int, max_total_tokens: int | None, expected: int
) -> None:
    monkeypatch.setattr(memory_profile, "available_memory_bytes", lambda: available_gb << 30)
    args = ServerArgs(model_path="x", max_total_tokens=max_total_tokens)
    assert profile_max_num_token(args, CPU, bytes_per_token=1000) == expected


def test_more_tokens_than_memory_holds_are_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile, "available_memory_bytes", lambda: 1 << 30)
    args = ServerArgs(model_path="x", max_total_tokens=5_000_000)
    with pytest.raises(StartError, match=r"--max-total-tokens 5000000 needs 5.0 GB for KV, and .* 1073741 tokens"):
        profile_max_num_token(args, CPU, bytes_per_token=1000)


def test_ranks_share_the_memory_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile, "available_memory_bytes", lambda: 1_000_000_000)
    args = ServerArgs(model_path="x", max_total_tokens=600_000, tp_size=2)
    with pytest.raises(StartError, match=r"memory for 500000 tokens is left"):
        profile_max_num_token(args, CPU, bytes_per_token=1000)


def test_tables_that_do_not_fit_are_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile, "available_memory_bytes", lambda: 1_000_000_000)
    check_tables(256, 100_000, 1, CPU)
    with pytest.raises(StartError, match=r"^The tables of --max-running-requests 5000 take 2\.1 GB, and 1\.0 GB"):
        check_tables(5000, 100_000, 16, CPU)


def test_no_room_for_a_page_is_refused() -> None:
    check_pages(1, 16)
    with pytest.raises(StartError, match="even one KV page of 16 tokens"):
        check_pages(0, 16)

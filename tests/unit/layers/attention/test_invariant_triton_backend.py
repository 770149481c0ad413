"""Where the attention of deterministic servers on GPUs is refused."""

from __future__ import annotations

import pytest
import torch

from srt.layers.attention.invariant_triton_backend import check_shown
from srt.utils.errors import StartError
from tests.unit.layers.attention.attention_world import spec_of


@pytest.mark.parametrize(
    ("capability", "group", "dtype", "reason"),
    [
        ((8, 0), 4, torch.bfloat16, r"works on GPUs of compute capability 9.0 \(Hopper\), and this one has 8.0"),
        ((9, 0), 65, torch.bfloat16, "at most 64 query heads for each KV head, not 65"),
        ((9, 0), 17, torch.float32, "at most 16 query heads for each KV head, not 17"),
    ],
)
def test_what_was_not_shown_is_refused(
    capability: tuple[int, int], group: int, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(StartError, match=reason):
        check_shown(spec_of(group, 64, 16, dtype), capability)


def test_what_was_shown_is_served() -> None:
    check_shown(spec_of(16, 64, 16, torch.float32), (9, 0))

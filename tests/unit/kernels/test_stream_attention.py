"""That streamed attention compiles and finds room, on a machine without a GPU. What it computes: tests/gpu."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from srt.kernels.attention.stream_attention import AttentionVariant, is_streamed, shares_of
from srt.kernels.build.cuda_source import machine_code
from srt.kernels.build.hopper import ARCHITECTURE

PROCESSOR_BYTES = 228 * 1024  # of shared memory, of which each program takes one KiB more than it asks for
VARIANTS = [
    *(AttentionVariant(*shape) for shape in product((1, 2, 4, 5, 8), (64, 128), (16, 64))),
    *(AttentionVariant(group, 256, 16, is_fp8) for group in (1, 2, 4) for is_fp8 in (False, True)),
    *(AttentionVariant(group, 128, 16, is_fp8=True) for group in (1, 4, 8)),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_variant_compiles_for_hopper_and_as_many_programs_as_shares_count_on_find_room(
    variant: AttentionVariant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRT_CACHE_DIR", str(tmp_path))
    assert machine_code(variant.source, variant.constants, ARCHITECTURE).startswith(b"\x7fELF")
    programs = variant.constants["PROGRAMS"]
    assert programs * (variant.shared_bytes + 2048) <= PROCESSOR_BYTES < (programs + 1) * (variant.shared_bytes + 1024)
    assert programs * variant.num_threads <= 2048
    assert shares_of(8, 132) * 8 <= programs * 132


def test_a_ring_that_its_warps_do_not_share_evenly_is_not_compiled() -> None:
    constants = {**VARIANTS[0].constants, "SLOTS": 6}
    with pytest.raises(RuntimeError, match="a slot is always taken by the same warp"):
        machine_code(VARIANTS[0].source, constants, ARCHITECTURE)


def test_what_it_does_not_serve_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    assert is_streamed(cuda, torch.bfloat16, torch.bfloat16, 128, 4, 8, 16)
    assert is_streamed(cuda, torch.bfloat16, torch.float8_e4m3fn, 128, 4, 8, 16)
    assert not is_streamed(cuda, torch.bfloat16, torch.float8_e4m3fn, 64, 4, 8, 16), "half a line"
    assert not is_streamed(torch.device("cpu"), torch.bfloat16, torch.bfloat16, 128, 4, 8, 16)
    assert not is_streamed(cuda, torch.float16, torch.float16, 128, 4, 8, 16)
    assert not is_streamed(cuda, torch.float16, torch.float8_e4m3fn, 128, 4, 8, 16), "queries"
    assert is_streamed(cuda, torch.bfloat16, torch.bfloat16, 256, 4, 8, 16)
    assert not is_streamed(cuda, torch.bfloat16, torch.bfloat16, 256, 8, 8, 16), "results of two programs do not fit"
    assert not is_streamed(cuda, torch.bfloat16, torch.bfloat16, 512, 2, 8, 16)
    assert not is_streamed(cuda, torch.bfloat16, torch.bfloat16, 128, 16, 8, 16), (
        "more heads of a group than a product has columns"
    )
    assert not is_streamed(cuda, torch.bfloat16, torch.bfloat16, 128, 1, 133, 16), "more heads than processors"
    assert not is_streamed(cuda, torch.bfloat16, torch.bfloat16, 128, 4, 8, 1), "a load brings positions of one page"
    capability[0] = (10, 0)
    assert not is_streamed(cuda, torch.bfloat16, torch.bfloat16, 128, 4, 8, 16)

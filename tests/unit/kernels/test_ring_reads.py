"""That warps that read a ring of loads let a place be loaded again only when they have read it: in the machine code, without a GPU.

The compiler may have an arrival at a barrier overtake loads from shared memory. On a busy multiprocessor these then find what was loaded
next. No run of the threads on the host shows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from srt.kernels.attention.stream_attention import AttentionVariant
from srt.kernels.attention.stream_latents import LatentVariant
from srt.kernels.build.cuda_source import compile_source
from srt.kernels.build.hopper import ARCHITECTURE, Variant
from tests.support.hopper_code import instructions_of, reads_under_way_at_arrivals
from tests.unit.kernels.test_resident_layers import FORMS, SMALL, variant_of

FENCE = 'asm volatile("fence.acq_rel.cta;" ::: "memory");'
RESIDENT = [variant_of(SMALL), variant_of(SMALL, rows=2), *(variant_of(SMALL, form=form) for form in FORMS)]
LATENTS = [LatentVariant(16, cluster) for cluster in (1, 2, 4, 8)]
ATTENTION = [AttentionVariant(4, 128, 16), AttentionVariant(8, 64, 64), AttentionVariant(4, 128, 16, is_fp8=True)]
KINDS: list[Sequence[Variant]] = [[one for one in RESIDENT if one is not None], LATENTS, ATTENTION]


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(one, id=str(one), marks=[pytest.mark.full] if i else [])
        for kind in KINDS
        for i, one in enumerate(kind)
    ],
)
def test_places_are_given_back_when_they_have_been_read(variant: Variant, tmp_path: Path) -> None:
    assert variant.source.count(FENCE) == 1
    code = compile_source(variant.source, variant.constants, ARCHITECTURE)
    instructions = instructions_of(code, tmp_path)
    assert sum("SYNCS.ARRIVE.TRANS64.A1T0" in one.text for one in instructions) > 0
    assert reads_under_way_at_arrivals(instructions) == []


def test_an_arrival_before_the_end_of_reads_would_be_noticed(tmp_path: Path) -> None:
    source = LATENTS[0].source.replace(FENCE, "")
    code = compile_source(source, LATENTS[0].constants, ARCHITECTURE)
    assert reads_under_way_at_arrivals(instructions_of(code, tmp_path)) != []

"""Sections of plans, written down by hand."""

from __future__ import annotations

from typing import Any

from srt.protocol.messages import Admission, LogprobSpec, PageDelta, PlanSection, SamplingSpec, int32_array


def admission(slot: int, ids: list[int], cached: int = 0, **fields: Any) -> Admission:
    spec = fields.pop("sampling", SamplingSpec(9))
    return Admission(slot, int32_array(ids), len(ids), cached, 0, spec, fields.pop("logprobs", LogprobSpec()))


def section(
    admissions: list[Admission] | None = None,
    pages: list[tuple[int, list[int]]] | None = None,
    extends: list[tuple[int, int, int, int]] | None = None,
    decodes: list[int] | None = None,
) -> PlanSection:
    pages, extends = pages or [], extends or []
    delta = PageDelta(
        int32_array([slot for slot, _ in pages]),
        int32_array([len(numbers) for _, numbers in pages]),
        int32_array([number for _, numbers in pages for number in numbers]),
    )
    slots, starts, counts, samples = (int32_array([extend[i] for extend in extends]) for i in range(4))
    return PlanSection(admissions or [], [delta], slots, starts, counts, samples, int32_array(decodes or []))

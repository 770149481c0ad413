"""Run requests that make libraries and kernels do their work of first use before a client's request arrives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from srt.protocol.messages import Admission, Int32Array, LogprobSpec, PageDelta, PlanSection, SamplingSpec, int32_array
from srt.utils.page_groups import first_column

if TYPE_CHECKING:
    from srt.model_executor.model_runner import ModelRunner

CPU_TOKENS = 8
GPU_TOKENS = 64  # more than the kernels for few tokens serve
BATCHES = (2, 8, 32, *range(64, 209, 16), 240, 256)  # numbers of rows: one for each class with kernels of its own
BATCH_TOKENS = 4  # tokens of a row of such a batch
ADAPTED_CHUNKS = (8, 24, 64, 300, 1100, 4100)
SHORT_TOKENS = 8  # tokens of a short chunk after a prefix, which has kernels of its own
TRITON_SHORT_TOKENS = (24, 8, 2)
"""The same where Triton's attention serves prompts: it has a kernel each for up to 16, up to 64 and more pairs of a token and a query head
of a group."""


def warm_up(runner: ModelRunner) -> None:
    """Run requests through the whole model, prompt and next token, so that everything created at first use exists afterwards."""
    loaded, state = runner.loaded, runner.state
    with loaded.memory.region("buffers"), runner.warming_up():
        requests = warm_up_requests(
            loaded.device.type, state.max_request_tokens, state.page_size, short_chunks(loaded.attention.prefill)
        )
        run_requests(runner, requests)
        mask_something(runner)
        runner.graphs.forget_missed()


def mask_something(runner: ModelRunner) -> None:
    """Apply a mask of tokens to logits of each dtype that is masked, so that no step waits for the kernel."""
    import torch  # whoever has a runner has loaded it

    from srt.layers.token_masks import MaskBuffers, apply_token_masks

    device = runner.loaded.device
    masks = MaskBuffers(1, 64, device).upload([0])
    for dtype in {runner.loaded.dtype, torch.float32}:
        apply_token_masks(torch.zeros((1, 64), dtype=dtype, device=device), masks, 0)


def run_requests(runner: ModelRunner, requests: Iterator[list[PlanSection]]) -> None:
    """Run one request after the other, each on empty tables."""
    for sections in requests:
        for section in sections:
            run_to_the_end(runner, section)
        runner.reset()


def run_to_the_end(runner: ModelRunner, section: PlanSection) -> None:
    """Run a step, and wait until its ids are on the host. All page groups get the pages that the section has for the first."""
    state = runner.state
    runner.sample(runner.execute(with_windows(section, state.windows, state.page_size))).result()


def with_windows(section: PlanSection, windows: Sequence[int], page_size: int) -> PlanSection:
    """Return the section, which has the pages of one group, with the same pages in the groups of these windows."""
    (first,) = section.pages
    cached = {admission.slot: admission.cached for admission in section.admissions}
    deltas = [first]
    for window in windows:
        hidden = [first_column(cached.get(slot, 0), window, page_size) for slot in first.slots.tolist()]
        ends = np.cumsum(first.counts)
        pieces = [
            first.pages[end - count + behind : end]
            for end, count, behind in zip(ends.tolist(), first.counts.tolist(), hidden, strict=True)
        ]
        counts = int32_array([len(piece) for piece in pieces])
        deltas.append(PageDelta(first.slots, counts, np.concatenate([int32_array(), *pieces])))
    return structs.replace(section, pages=deltas)


def short_chunks(prefill: str) -> tuple[int, ...]:
    """Return the tokens of the short chunks after a prefix that have kernels of their own with this attention backend for prompts."""
    return TRITON_SHORT_TOKENS if prefill == "triton" else (SHORT_TOKENS,)


def warm_up_requests(
    device_type: str, max_request_tokens: int, page_size: int, short: Sequence[int] = (SHORT_TOKENS,)
) -> Iterator[list[PlanSection]]:
    """Yield the plan sections of one request after the other, each from its prompt to its second token, all in slot 0 and page 0.

    On a GPU the prompt ends with the `short` chunks, and there is one request with filters and one without. Yields nothing if a request
    has too little room.
    """
    is_cpu = device_type == "cpu"
    room = max_request_tokens - 1
    first = min(CPU_TOKENS if is_cpu else GPU_TOKENS, room)
    chunks: list[int] = []
    for wanted in (first, *(() if is_cpu else short)):
        count = min(wanted, room - sum(chunks))
        if count > 0:
            chunks.append(count)
    if chunks:
        for top_p in (0.9,) if is_cpu else (0.9, 1.0):
            yield _sections(chunks, page_size, top_p)


def batches(num_slots: int, max_request_tokens: int, page_size: int) -> Iterator[list[PlanSection]]:
    """Yield a batch for each number of rows that has kernels of its own on a GPU.

    All rows but the last run their prompts of one token. Then they decode beside the last row's prompt, and then all rows decode.
    """
    if max_request_tokens >= BATCH_TOKENS:
        for count in dict.fromkeys(min(rows, num_slots) for rows in BATCHES):
            yield _batch(count, page_size)


def adapted_requests(max_request_tokens: int, page_size: int, adapter: str) -> Iterator[list[PlanSection]]:
    """Yield the plan sections of a request with an adapter: prompt chunks of each size that has kernels of its own, then a token."""
    room, chunks = max_request_tokens - 1, []
    for wanted in ADAPTED_CHUNKS:
        count = min(wanted, room)
        if count > 0:
            chunks.append(count)
            room -= count
    if chunks:
        first, *others = _sections(chunks, page_size, 1.0)
        admissions = [structs.replace(admission, adapter=adapter) for admission in first.admissions]
        yield [structs.replace(first, admissions=admissions), *others]


def _batch(count: int, page_size: int) -> list[PlanSection]:
    empty, everyone = int32_array(), int32_array(range(count))
    first, last = (everyone[:-1], everyone[-1:]) if count > 1 else (empty, everyone)
    nothing = PageDelta(empty, empty, empty)
    sections = [_prompts(slots, decodes, page_size) for slots, decodes in ((first, empty), (last, first)) if len(slots)]
    return [*sections, PlanSection([], [nothing], empty, empty, empty, empty, everyone)]


def _prompts(slots: Int32Array, decodes: Int32Array, page_size: int) -> PlanSection:
    ones = np.ones(len(slots), np.int32)
    spec = SamplingSpec(max_new_tokens=BATCH_TOKENS, temperature=1.0)
    admissions = [Admission(slot, int32_array([0]), 1, 0, slot, spec, LogprobSpec()) for slot in slots.tolist()]
    num_pages = -(-BATCH_TOKENS // page_size) * ones
    pages = PageDelta(slots, num_pages, np.zeros(num_pages.sum(), np.int32))
    return PlanSection(admissions, [pages], slots, 0 * ones, ones, ones, decodes)


def _sections(chunks: list[int], page_size: int, top_p: float) -> list[PlanSection]:
    empty, slot, count = int32_array(), int32_array([0]), sum(chunks)
    spec = SamplingSpec(max_new_tokens=2, temperature=1.0, top_p=top_p)
    admission = Admission(0, int32_array([0] * count), count, 0, 0, spec, LogprobSpec())
    num_pages = -(-(count + 1) // page_size)
    pages = PageDelta(slot, int32_array([num_pages]), np.zeros(num_pages, np.int32))
    sections = []
    start = 0
    for chunk in chunks:
        news = ([], [PageDelta(empty, empty, empty)]) if start else ([admission], [pages])
        samples = int32_array([start + chunk == count])
        sections.append(PlanSection(*news, slot, int32_array([start]), int32_array([chunk]), samples, empty))
        start += chunk
    return [*sections, PlanSection([], [PageDelta(empty, empty, empty)], empty, empty, empty, empty, slot)]

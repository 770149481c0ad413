"""The plan of the step that needs the most memory. `profile_pages.py` runs it and gives the KV memory what it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from srt.protocol.messages import Admission, LogprobSpec, PageDelta, PlanSection, SamplingSpec, int32_array
from srt.sampling.sampling_params import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from srt.model_executor.loaded_model import LoadedModel

REPORTED_TOKENS = (
    64  # prompt tokens with logprobs: they are computed in blocks, and two blocks need as much memory as all
)


def largest_step(loaded: LoadedModel, reports: bool = True) -> tuple[PlanSection, int]:
    """Return the largest step that this worker's options allow, with or without logprobs of prompts, and its number of prompt tokens."""
    args, config = loaded.args, loaded.config
    longest = max(1, config.context_length - 1)
    prompt_tokens = longest if args.prefill_chunk == -1 else min(args.prefill_chunk, longest)
    section = peak_section(
        args.max_running_requests, prompt_tokens, longest, args.page_size, config.vocab_size, reports
    )
    return section, prompt_tokens


def peak_section(
    num_slots: int, prompt_tokens: int, longest: int, page_size: int, vocab_size: int, reports: bool = True
) -> PlanSection:
    """Return a step with `prompt_tokens` tokens of one request and one token of each other request, one of which is `longest` tokens long.

    Every row samples and uses every sampling parameter and, if it `reports`, logprobs of prompt tokens. All pages are page 0, so the
    results have no meaning.
    """
    lengths = [min(prompt_tokens, longest), longest, *([min(2, longest)] * num_slots)][:num_slots]
    cached = [0, *(length - 1 for length in lengths[1:])]
    counts = [length - done for length, done in zip(lengths, cached, strict=True)]
    num_pages = int32_array([-(-(length + 1) // page_size) for length in lengths])
    slots = int32_array(range(len(lengths)))
    admissions = [
        Admission(
            slot,
            int32_array([1] * length),
            length,
            done,
            slot,
            _all_sampling(vocab_size),
            _all_logprobs(length, reports),
        )
        for slot, (length, done) in enumerate(zip(lengths, cached, strict=True))
    ]
    return PlanSection(
        admissions=admissions,
        pages=[PageDelta(slots, num_pages, np.zeros(num_pages.sum(), np.int32))],
        extend_slots=slots,
        extend_starts=int32_array(cached),
        extend_counts=int32_array(counts),
        extend_samples=int32_array([1] * len(lengths)),
        decode_slots=int32_array(),
    )


def _all_sampling(vocab_size: int) -> SamplingSpec:
    one_id = int32_array([min(1, vocab_size - 1)])
    return SamplingSpec(
        max_new_tokens=8,
        temperature=1.0,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        repetition_penalty=1.1,
        min_new_tokens=4,
        stop_ids=one_id,
        bias_ids=one_id,
        bias_values=np.ones(1, np.float32),
    )


def _all_logprobs(length: int, reports: bool) -> LogprobSpec:
    first = max(0, length - REPORTED_TOKENS) if reports else -1
    return LogprobSpec(output=True, prompt_start=first, top=MAX_TOP_LOGPROBS)

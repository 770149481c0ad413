"""Find the number of pages of the KV memory. On a GPU the largest step is run to measure the memory that it takes.

`peak_step.py` builds that step, and `memory_profile.py` computes the number from what was measured.
"""

from __future__ import annotations

import torch

from srt.model_executor.loaded_model import LoadedModel
from srt.model_executor.memory.memory_profile import (
    FIRST_USE_BYTES,
    admission_bytes,
    check_pages,
    check_tables,
    graph_bytes,
    mlp_bytes,
    most_verified_tokens,
    out_of_step_memory,
    profile_max_num_token,
    table_bytes,
)
from srt.model_executor.startup.peak_step import largest_step
from srt.model_executor.startup.trial_runner import trial_runner
from srt.model_executor.startup.warm_up import run_to_the_end
from srt.protocol.messages import PlanSection
from srt.server_args import ServerArgs


def profile_num_pages(loaded: LoadedModel, num_tokens: int) -> list[int]:
    """Return the numbers of pages, by group, that all ranks can hold beside the largest step; StartError if that or a page does not fit.

    `num_tokens`, unless 0, is the number of tokens that the worker before this one had; it must fit again.
    """
    args, device, shares = loaded.args, loaded.device, loaded.memory_shares
    num_slots, page_size = args.max_running_requests, args.page_size
    if loaded.config.is_encoder:  # keeps nothing in its pages
        return [(num_tokens or args.max_total_tokens or num_slots * loaded.config.context_length) // page_size]
    with loaded.memory.region("buffers"):
        other_bytes = _measure_other_bytes(loaded) if device.type == "cuda" else 0
    most_tokens = profile_max_num_token(args, device, shares, other_bytes, num_tokens)
    num_pages = loaded.pipeline.min_int(loaded.tp.min_int(most_tokens // page_size))
    check_pages(num_pages, args, sum(shares.bytes_per_token), other_bytes)
    longest = min(loaded.config.context_length, num_pages * page_size)
    check_tables(num_slots, longest, page_size, device, loaded.page_groups.num)
    return shares.pages(num_pages * page_size)


def _measure_other_bytes(loaded: LoadedModel) -> int:
    """Return the bytes to keep free beside the KV memory."""
    num_slots, longest = loaded.args.max_running_requests, loaded.config.context_length
    return (
        measure_largest_step(loaded)
        + _num_logits(loaded.args) * _output_bytes(loaded)
        + table_bytes(num_slots, longest, loaded.args.page_size, loaded.page_groups.num)
        + admission_bytes(num_slots, longest)
        + (0 if loaded.head is None else 4 * num_slots * longest)  # its table of locations
        + graph_bytes(loaded.args, loaded.config)
    )


def _output_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of a decode row's logits, or of its hidden states before and behind a stage that is not the last."""
    if not loaded.stage.is_last:
        return 2 * loaded.config.hidden_size * loaded.dtype.itemsize
    return int(loaded.model.lm_head.shard_size * loaded.model.lm_head.weight.itemsize)


def _num_logits(args: ServerArgs) -> int:
    """Return how many tokens have logits in fixed memory: decode rows and, with drafts, the smaller model's rows and all drafts."""
    num_slots = args.max_running_requests
    return num_slots if args.speculative_algorithm is None else 2 * num_slots + most_verified_tokens(args)


def measure_largest_step(loaded: LoadedModel) -> int:
    """Run the largest step on tables of full size and a KV memory of one page, and return the bytes that it takes."""
    section, prompt_tokens = largest_step(loaded)
    num_slots = loaded.args.max_running_requests
    try:
        peak = _peak_of(loaded, section)
    except torch.OutOfMemoryError as error:
        raise out_of_step_memory(prompt_tokens, num_slots, loaded.device) from error
    finally:
        torch.cuda.empty_cache()
    # For some smaller numbers of tokens the MLP's activation is not fused with a product, so those steps need more.
    most_tokens = prompt_tokens + num_slots - 1
    plain_mlp = mlp_bytes(loaded.config, loaded.tp.size, most_tokens, loaded.dtype.itemsize)
    peak = max(peak, plain_mlp) + FIRST_USE_BYTES
    loaded.memory.record_activations(peak)
    return peak


def _peak_of(loaded: LoadedModel, section: PlanSection) -> int:
    with loaded.pipeline.alone():
        runner = trial_runner(loaded)
        return loaded.memory.peak_of(lambda: run_to_the_end(runner, section))

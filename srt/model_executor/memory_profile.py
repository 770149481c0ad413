"""How many tokens the KV memory holds: what is free, what was asked for, and what all ranks can keep."""

from __future__ import annotations

import torch

from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from srt.utils.host import available_memory_bytes

CPU_SHARE = 10  # one part in so many of the available memory, for each rank
CPU_MOST_BYTES = 4 << 30
CUDA_SHARE = 0.88  # of the device, for weights and KV; the rest is for activations, graphs and libraries


def profile_max_num_token(args: ServerArgs, device: torch.device, bytes_per_token: int) -> int:
    """The tokens that fit on this rank, weights already loaded: as many as --max-total-tokens says, or as memory allows."""
    if device.type == "cpu":
        available = available_memory_bytes()
        unasked = min(available // CPU_SHARE, CPU_MOST_BYTES)
        # Pages are taken as they are used, so the ranks do not see each other's yet.
        fits = (unasked if args.max_total_tokens is None else available // args.tp_size) // bytes_per_token
    else:
        fits = _free_cuda_bytes(args, device) // bytes_per_token
    if args.max_total_tokens is None:
        return max(0, fits)
    if args.max_total_tokens > fits:
        raise StartError(
            f"--max-total-tokens {args.max_total_tokens} needs {args.max_total_tokens * bytes_per_token / 1e9:.1f} GB for KV,"
            f" and memory for {max(0, fits)} tokens is left: choose fewer."
        )
    return args.max_total_tokens


def _free_cuda_bytes(args: ServerArgs, device: torch.device) -> int:
    """What is left of this server's share of the device; memory of other processes counts as used."""
    free, total = torch.cuda.mem_get_info(device)
    share = CUDA_SHARE if args.mem_fraction_static is None else args.mem_fraction_static
    return int(total * share) - (total - free)


def check_tables(num_slots: int, max_request_tokens: int, page_size: int, device: torch.device) -> None:
    """StartError where the tables of so many slots, an entry for each token and page, do not fit."""
    needed = 4 * num_slots * (max_request_tokens + max_request_tokens // page_size)
    available = available_memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > available:
        raise StartError(
            f"The tables of --max-running-requests {num_slots} take {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB of"
            " memory are left: choose fewer, or a shorter --context-length."
        )


def check_pages(num_pages: int, page_size: int) -> None:
    """StartError where the KV memory holds no page at all."""
    if num_pages < 1:
        raise StartError(
            f"There is no memory for even one KV page of {page_size} tokens: raise --max-total-tokens or"
            " --mem-fraction-static, or choose a smaller --page-size."
        )

"""How many tokens the KV memory holds: what is free, what was asked for, and what all ranks can keep."""

from __future__ import annotations

import torch

from srt.mem_cache.memory_pool import ADJUSTMENT_BYTES
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from srt.utils.host import available_memory_bytes
from srt.utils.model_config import ModelConfig

CPU_SHARE = 10  # one part in so many of the available memory, for each rank
CPU_MOST_BYTES = 4 << 30
CUDA_SLACK = 0.02  # of the device: what libraries load later, and what fragments
GRAPHS_BYTES = 1 << 30  # of graphs that are captured later, the driver's part included: so much, and for each layer
GRAPHS_BYTES_PER_CHANNEL = (
    3_000  # this times the hidden size. Seen on an H200: 0.3 GB for Qwen3-8B, 0.7 for long pieces of prompts
)
FIRST_USE_BYTES = (
    64 << 20
)  # of what the measured step does not need: tables of attention that reads otherwise, results not yet read
MOST_GRAPH_ROWS = 256  # that are worth a graph, unless asked for: steps of more take longer than their launch
ADMITTED_TOKENS = 1 << 24  # of all requests that one plan admits; each passes through the device as three int64


def profile_max_num_token(
    args: ServerArgs, device: torch.device, bytes_per_token: int, other_bytes: int = 0, num_tokens: int = 0
) -> int:
    """The tokens that fit on this rank, weights already loaded: as many as --max-total-tokens says, or as memory allows.

    On a GPU `other_bytes` are needed beside: for tables, graphs and the largest step. `num_tokens` have fitted before, and must again.
    """
    spare = 0  # that the first measurement left, for one that comes out a little smaller
    if device.type == "cpu":
        available = available_memory_bytes()
        unasked = min(available // CPU_SHARE, CPU_MOST_BYTES)
        is_asked = num_tokens or args.max_total_tokens is not None
        # Pages are taken as they are used, so the ranks do not see each other's yet.
        fits = (available // args.tp_size if is_asked else unasked) // bytes_per_token
    else:
        free, total = torch.cuda.mem_get_info(device)
        fits = kv_bytes(args, free, total, other_bytes) // bytes_per_token
        spare = int(total * CUDA_SLACK / 2) // bytes_per_token
    if num_tokens > fits + spare:
        raise StartError(
            f"The worker before this one had memory for {num_tokens} tokens, and for {max(0, fits)} is left: somebody else has taken some."
        )
    if num_tokens:
        return num_tokens
    if args.max_total_tokens is None:
        return max(0, fits)
    if args.max_total_tokens > fits:
        raise StartError(
            f"--max-total-tokens {args.max_total_tokens} needs {args.max_total_tokens * bytes_per_token / 1e9:.1f} GB for KV,"
            f" and memory for {max(0, fits)} tokens is left: choose fewer."
        )
    return args.max_total_tokens


def kv_bytes(args: ServerArgs, free: int, total: int, other_bytes: int) -> int:
    """What of a GPU's `free` bytes the KV memory may have, so that no step runs out: no more than --mem-fraction-static says."""
    left = free - other_bytes - int(total * CUDA_SLACK)
    if args.mem_fraction_static is None:
        return left
    return min(left, int(total * args.mem_fraction_static) - (total - free))


def most_graph_rows(args: ServerArgs) -> int:
    """Rows of the largest graph of decodes."""
    return max(args.cuda_graph_bs, default=min(args.cuda_graph_max_bs or MOST_GRAPH_ROWS, args.max_running_requests))


def mlp_bytes(config: ModelConfig, tp_size: int, num_tokens: int, item_size: int) -> int:
    """Held at once by an MLP whose product does not take its activation in: the stream, its norm, gates, ups, and both in one."""
    columns = 2 * config.hidden_size + 3 * (config.intermediate_size // tp_size)
    angles = 2 * 4 * (config.head_dim // 2)
    return num_tokens * (columns * item_size + angles)


def graph_bytes(args: ServerArgs, config: ModelConfig) -> int:
    """To be kept free for graphs."""
    if args.disable_cuda_graph:
        return 0
    # Rows with adjustments are sampled from a copy of their logits.
    copied_logits = 4 * config.vocab_size * most_graph_rows(args)
    return GRAPHS_BYTES + GRAPHS_BYTES_PER_CHANNEL * config.num_layers * config.hidden_size + copied_logits


def admission_bytes(num_slots: int, max_request_tokens: int) -> int:
    """Of the ids of all requests that one plan admits."""
    return 24 * min(ADMITTED_TOKENS, num_slots * max_request_tokens)


def check_weights(num_bytes: int, device: torch.device) -> None:
    """StartError, before a weight is read, where this rank's do not fit on its GPU."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if num_bytes > free - int(total * CUDA_SLACK):
        raise StartError(
            f"This rank's weights take {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} of {total / 1e9:.1f} GB are free on"
            f" {device}: choose a smaller model, a larger --tp, or --dtype bfloat16 if it is not that already."
        )


def out_of_step_memory(num_tokens: int, num_slots: int, device: torch.device) -> StartError:
    free, _ = torch.cuda.mem_get_info(device)
    return StartError(
        f"A step of {num_tokens} prompt tokens and {num_slots} requests needs more than the {free / 1e9:.1f} GB that the"
        " weights leave: choose a smaller --chunked-prefill-size or --max-running-requests, or a larger --tp."
    )


def table_bytes(num_slots: int, max_request_tokens: int, page_size: int) -> int:
    """Of the tables of so many slots: an entry for each token and page, and adjustments."""
    return num_slots * (4 * (max_request_tokens + max_request_tokens // page_size) + ADJUSTMENT_BYTES)


def check_tables(num_slots: int, max_request_tokens: int, page_size: int, device: torch.device) -> None:
    """StartError where the tables of so many slots do not fit."""
    needed = table_bytes(num_slots, max_request_tokens, page_size)
    available = available_memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > available:
        raise StartError(
            f"The tables of --max-running-requests {num_slots} take {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB of"
            " memory are left: choose fewer, or a shorter --context-length."
        )


def check_pages(num_pages: int, args: ServerArgs, bytes_per_token: int, other_bytes: int) -> None:
    """StartError where the KV memory holds no page at all."""
    if num_pages >= 1:
        return
    page = f"KV page of {args.page_size} tokens, {args.page_size * bytes_per_token / 1e6:.1f} MB"
    if args.max_total_tokens is not None and args.max_total_tokens < args.page_size:
        raise StartError(
            f"--max-total-tokens {args.max_total_tokens} is less than one {page}: choose more, or a smaller --page-size."
        )
    others = f" and {other_bytes / 1e9:.1f} GB for tables, graphs and the largest step" if other_bytes else ""
    fraction = args.mem_fraction_static
    larger = "" if fraction is None else f", a larger --mem-fraction-static than {fraction}"
    raise StartError(
        f"Beside the weights{others} there is no memory for even one {page}: choose a smaller --page-size,"
        f" --chunked-prefill-size, --max-running-requests or --context-length{larger}, or a larger --tp."
    )

"""Compute how many tokens the KV memory holds, from the free memory, the options and what `profile_pages.py` has measured.

A worker that replaces another must get as many tokens as that one had; otherwise the start fails.
"""

from __future__ import annotations

import torch

from srt.mem_cache.memory_pool import ADJUSTMENT_BYTES
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from srt.utils.host import available_memory_bytes
from srt.utils.layer_spec import FeedForward, LayerSpec
from srt.utils.model_config import ModelConfig
from srt.utils.page_groups import MemoryShares

CPU_SHARE = 10  # by default, each rank takes one part in 10 of the available memory
CPU_MOST_BYTES = 4 << 30  # but no more than this
CUDA_SLACK = 0.02  # share of the device kept free for libraries that load later, and for fragmentation
GRAPHS_BYTES = 1 << 30  # kept free for graphs that are captured later, the driver's part included
GRAPHS_BYTES_PER_CHANNEL = 3_000
"""Kept free for graphs as well, times the number of layers and the hidden size. On an H200 graphs took 0.3 GB for Qwen3-8B, and long
pieces of prompts 0.7 GB."""
FIRST_USE_BYTES = 64 << 20
"""Kept free for what the measured step does not use: tables of other ways to read the KV memory, and results that are not read yet."""
ADAPTED_GRAPHS_BYTES = 1 << 29  # kept free for graphs of steps with LoRA adapters, which come on top
MOST_VERIFIED_TOKENS = 256  # limit of the tokens, drafts included, of a step that verifies drafts on a GPU
MOST_GRAPH_ROWS = 256  # default limit of rows in a graph: larger steps take longer than their launch
ADMITTED_TOKENS = (
    1 << 24
)  # limit of the tokens of all requests that one plan admits; each is copied to the device as three int64


def profile_max_num_token(
    args: ServerArgs, device: torch.device, shares: MemoryShares, other_bytes: int = 0, num_tokens: int = 0
) -> int:
    """Return the number of tokens that fit on this rank after the weights are loaded: --max-total-tokens, else what memory allows.

    On a GPU `other_bytes` are kept free for tables, graphs and the largest step. `num_tokens`, unless 0, is the number that the worker
    before this one had; it must fit again. StartError if the tokens asked for do not fit.
    """
    if device.type == "cpu":
        available = available_memory_bytes()
        unasked = min(available // (CPU_SHARE * args.dp_size), CPU_MOST_BYTES)
        is_asked = num_tokens or args.max_total_tokens is not None
        # The kernel provides pages at first use, so the ranks do not see each other's yet.
        fits = shares.tokens_in(available // (args.num_ranks * args.dp_size) if is_asked else unasked)
        fitted_before = fits
    else:
        free, total = torch.cuda.mem_get_info(device)
        left = kv_bytes(args, free, total, other_bytes)
        fits = shares.tokens_in(left)
        # A later measurement may be a little smaller than the first.
        fitted_before = shares.tokens_in(left + int(total * CUDA_SLACK / 2))
    if num_tokens and num_tokens > fitted_before:
        raise StartError(
            f"The replaced worker had KV memory for {num_tokens} tokens, but only {max(0, fits)} fit now: another process has taken"
            " memory of this device. End that process, and start the server anew."
        )
    if num_tokens:
        return num_tokens
    if args.max_total_tokens is None:
        return max(0, fits)
    if args.max_total_tokens > fits:
        raise StartError(
            f"--max-total-tokens {args.max_total_tokens} needs {shares.bytes_of(args.max_total_tokens) / 1e9:.1f} GB of KV memory,"
            f" but only {max(0, fits)} tokens fit: choose fewer."
        )
    return args.max_total_tokens


def kv_bytes(args: ServerArgs, free: int, total: int, other_bytes: int) -> int:
    """Return how many of a GPU's `free` bytes the KV memory may take so that no step runs out, as --mem-fraction-static allows."""
    left = free - other_bytes - int(total * CUDA_SLACK)
    if args.mem_fraction_static is None:
        return left
    return min(left, int(total * args.mem_fraction_static) - (total - free))


def most_graph_rows(args: ServerArgs) -> int:
    """Return the number of rows of the largest graph of decode steps."""
    return max(args.cuda_graph_bs, default=min(args.cuda_graph_max_bs or MOST_GRAPH_ROWS, args.max_running_requests))


def most_verified_tokens(args: ServerArgs) -> int:
    """Return the most tokens of a step that verifies drafts on a GPU; 0 without speculation."""
    if not args.num_drafts:
        return 0
    return max(2, min(MOST_VERIFIED_TOKENS, args.max_running_requests * (1 + args.num_drafts)))


def mlp_bytes(config: ModelConfig, tp_size: int, num_tokens: int, item_size: int) -> int:
    """Return the bytes that an MLP holds at once if its activation is not fused: the stream, its norm, gates, ups, and their product.

    A mixture of experts holds the activations and results of all chosen experts, and those of the shared expert beside the sum. In steps
    of few tokens the shared expert may instead hold activations and results of its parts, which are some MB.
    """
    columns = 2 * config.hidden_size + max(_mlp_columns(config, layer, tp_size) for layer in config.layers)
    angles = 2 * 4 * max(layer.attention.rope_dim // 2 for layer in config.layers)
    return num_tokens * (columns * item_size + angles)


def _mlp_columns(config: ModelConfig, layer: LayerSpec, tp_size: int) -> int:
    """Return the elements of a token that the layer's MLP holds at once, beside the stream and its norm."""
    spec = layer.feed_forward
    if isinstance(spec, FeedForward):
        return 3 * (spec.size // tp_size)
    shared = 0 if spec.shared is None else 3 * (spec.shared.size // tp_size)
    return spec.routing.top_k * (spec.size // tp_size + config.hidden_size) + config.hidden_size + shared


def graph_bytes(args: ServerArgs, config: ModelConfig) -> int:
    """Return the bytes to keep free for graphs."""
    if args.disable_cuda_graph:
        return 0
    # Rows with adjustments are sampled from a copy of their logits.
    copied_logits = 4 * config.vocab_size * most_graph_rows(args)
    adapted = ADAPTED_GRAPHS_BYTES if args.serves_adapters else 0
    return GRAPHS_BYTES + GRAPHS_BYTES_PER_CHANNEL * config.num_layers * config.hidden_size + copied_logits + adapted


def admission_bytes(num_slots: int, max_request_tokens: int) -> int:
    """Return the bytes on the device for the ids of all requests that one plan admits."""
    return 24 * min(ADMITTED_TOKENS, num_slots * max_request_tokens)


def check_weights(num_bytes: int, device: torch.device) -> None:
    """Raise StartError if this rank's weights do not fit on its GPU. Called before any is read."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if num_bytes > free - int(total * CUDA_SLACK):
        raise StartError(
            f"This rank's weights take {num_bytes / 1e9:.1f} GB, but only {free / 1e9:.1f} of {total / 1e9:.1f} GB are free on"
            f" {device}: choose a smaller model, a larger --tp or --pp-size, or --dtype bfloat16 if it is not that already."
        )


def out_of_step_memory(num_tokens: int, num_slots: int, device: torch.device) -> StartError:
    """Return the error for a largest step that does not fit beside the weights."""
    free, _ = torch.cuda.mem_get_info(device)
    return StartError(
        f"A step of {num_tokens} prompt tokens and {num_slots} requests needs more than the {free / 1e9:.1f} GB that the"
        " weights leave: choose a smaller --chunked-prefill-size or --max-running-requests, or a larger --tp."
    )


def table_bytes(num_slots: int, max_request_tokens: int, page_size: int, num_groups: int = 1) -> int:
    """Return the bytes of the tables for `num_slots` slots: an entry for each token, and for each page in each group, and adjustments."""
    num_pages = num_groups * (max_request_tokens // page_size)
    return num_slots * (4 * (max_request_tokens + num_pages) + ADJUSTMENT_BYTES)


def check_tables(
    num_slots: int, max_request_tokens: int, page_size: int, device: torch.device, num_groups: int = 1
) -> None:
    """Raise StartError if the tables for `num_slots` slots do not fit."""
    needed = table_bytes(num_slots, max_request_tokens, page_size, num_groups)
    available = available_memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > available:
        raise StartError(
            f"The tables of --max-running-requests {num_slots} take {needed / 1e9:.1f} GB, but only {available / 1e9:.1f} GB of"
            " memory are left: choose fewer, or a shorter --context-length."
        )


def check_pages(num_pages: int, args: ServerArgs, bytes_per_token: int, other_bytes: int) -> None:
    """Raise StartError if not even one page fits."""
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
        f"After the weights{others} no memory is left for even one {page}: choose a smaller --page-size,"
        f" --chunked-prefill-size, --max-running-requests or --context-length{larger}, or a larger --tp or --pp-size."
    )

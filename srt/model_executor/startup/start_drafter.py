"""Create what guesses next tokens and verifies the guesses, as the options say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from srt.layers.attention.attention_spec import AttentionSpec
from srt.layers.attention.base import AttentionBackend
from srt.mem_cache.memory_pool import OUTPUT
from srt.model_executor.device_ngram import DeviceNgramDrafter
from srt.model_executor.graph_drafter import GraphDrafter
from srt.model_executor.graph_head_drafter import GraphHeadDrafter
from srt.model_executor.graph_speculation import GraphSpeculatingRunner
from srt.model_executor.graphs.cuda_graph_runner import Capture
from srt.model_executor.graphs.decode_runner import DecodeRunner
from srt.model_executor.graphs.draft_runner import DraftRunner
from srt.model_executor.graphs.head_runner import HeadRunner
from srt.model_executor.graphs.step_graphs import StepGraphs
from srt.model_executor.graphs.verify_runner import VerifyRunner
from srt.model_executor.head_drafter import HeadDrafter
from srt.model_executor.head_steps import HeadSteps
from srt.model_executor.loaded_head import LoadedHead
from srt.model_executor.loaded_model import LoadedModel, init_attention_backend, load_model, resolve_ops
from srt.model_executor.memory.device_state import DeviceState
from srt.model_executor.memory.memory_profile import most_verified_tokens
from srt.model_executor.model_drafter import ModelDrafter, drafting_state
from srt.model_executor.model_runner import ModelRunner
from srt.model_executor.speculating_runner import SpeculatingRunner
from srt.model_executor.step.step_sampler import StepSampler
from srt.model_loader.head_loader import load_eagle3_head, load_mtp_head
from srt.model_loader.loader import LoadConfig
from srt.speculative.drafter import DeviceDrafter, Drafter
from srt.speculative.ngram import NgramDrafter
from srt.utils.draft_model import draft_model_args
from srt.utils.eagle3_config import Eagle3Config, served_head
from srt.utils.model_config import ModelConfig
from srt.utils.mtp_config import served_mtp

VERIFY_SIZES = (16, 24, 32, 64, 96, 128, 192, 256)
"""Numbers of tokens to capture, beside those of one row and of two. Products have tiles of 16, 32 and 64 rows, so up to 64 tokens padding
costs them nothing. With up to 32 tokens, attention divides the keys of each token between several programs: the more tokens, the fewer
programs for each. With `LEAST_TOGETHER` tokens (verify_runner.py) or more, it reads the keys of a row once for all tokens of the row."""
DRAFT_SIZES = (1, 4, 8, 16, 32, 64, 128)
"""Numbers of rows to capture. One row has kernels of its own; two take as long as four."""


def load_drafter(loaded: LoadedModel) -> tuple[LoadedModel, LoadedModel | None]:
    """Load what drafts, if the options name it. Return the model, with the head that drafts, and the smaller model that does."""
    small = _load_small_model(loaded)
    if small is not None and loaded.device.type == "cuda":
        loaded = replace(loaded, drafting_bytes=small.memory_shares.bytes_per_token[0])
    if (head := _load_head(loaded)) is not None:
        loaded = replace(loaded, head=head, drafting_bytes=head.bytes_per_token)
    return loaded, small


def _load_small_model(loaded: LoadedModel) -> LoadedModel | None:
    args, folder = loaded.args, loaded.args.speculative_draft_model_path
    if folder is None or args.speculative_algorithm != "STANDALONE":
        return None
    draft_args = draft_model_args(args)
    config = replace(ModelConfig.served_from(folder, draft_args), context_length=loaded.config.context_length)
    return load_model(draft_args, config, folder, loaded.tp, loaded.device)


def _load_head(loaded: LoadedModel) -> LoadedHead | None:
    args, folder = loaded.args, loaded.args.speculative_draft_model_path
    if folder is None or args.speculative_algorithm not in ("EAGLE3", "NEXTN"):
        return None
    ops, load = resolve_ops(args, loaded.device), LoadConfig(load_format=args.load_format)  # type: ignore[arg-type]  # a checked choice
    shared = loaded.our_model.model.embed_tokens, loaded.our_model.lm_head
    if args.speculative_algorithm == "NEXTN":
        layer = served_mtp(loaded.config)
        backend = _head_backend(loaded, replace(loaded.attention_spec, page_size=1))
        with torch.inference_mode(), loaded.memory.region("weights"):
            mtp = load_mtp_head(layer, folder, load, *shared, loaded.tp, ops, loaded.dtype, loaded.device)
        return LoadedHead(layer, (OUTPUT,), mtp, backend, loaded.dtype, loaded.device)
    config = served_head(folder, loaded.config)
    backend = _head_backend(loaded, _attention_of_head(config, loaded.dtype))
    with torch.inference_mode(), loaded.memory.region("weights"):
        head = load_eagle3_head(config, folder, load, *shared, ops, loaded.dtype, loaded.device)
    return LoadedHead(config, config.taps(loaded.config.num_layers), head, backend, loaded.dtype, loaded.device)


def _attention_of_head(config: Eagle3Config, dtype: torch.dtype) -> AttentionSpec:
    spec = config.layer.layers[0].self_attention
    return AttentionSpec(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=1,
        max_context=config.layer.context_length,
        windows=(None,),
    )


def _head_backend(loaded: LoadedModel, spec: AttentionSpec) -> AttentionBackend:
    with loaded.memory.region("buffers"):
        own = "triton" if loaded.device.type == "cuda" else None  # its pages have one token
        head_args = replace(
            loaded.args,
            kv_cache_dtype="auto",
            attention_backend=own,
            prefill_attention_backend=None,
            decode_attention_backend=None,
        )
        _, backend = init_attention_backend(head_args, spec, loaded.device)
    return backend


def speculating_runner(
    loaded: LoadedModel, state: DeviceState, sampler: StepSampler, graphs: StepGraphs, small: LoadedModel | None
) -> SpeculatingRunner:
    """Create the runner of a server on a CPU that speculates."""
    drafter: Drafter
    if loaded.head is not None:
        is_compiled = graphs.decodes is not None and graphs.decodes.cpu_step is not None
        drafter = HeadDrafter(HeadSteps(loaded.head, state), state.num_slots, is_compiled)
    elif small is None:
        drafter = NgramDrafter(state.req_to_token_pool.token_table, *_match_windows(loaded))
    else:
        small_state = drafting_state(small, state)
        decodes = DecodeRunner.of(small, small_state, None, None)
        runner = ModelRunner(small, small_state, StepSampler(small, small_state), StepGraphs(small, decodes))
        drafter = ModelDrafter(runner)
    return SpeculatingRunner(loaded, state, sampler, graphs, drafter, loaded.args.num_drafts)


def graph_speculating_runner(
    loaded: LoadedModel,
    state: DeviceState,
    sampler: StepSampler,
    graphs: StepGraphs,
    small: LoadedModel | None,
    capture: Capture | None,
) -> GraphSpeculatingRunner:
    """Create the runner of a server on a GPU that speculates. Its graphs are added to `graphs`."""
    num_drafts, max_tokens = loaded.args.num_drafts, most_verified_tokens(loaded.args)
    verifier = VerifyRunner(
        loaded, state, max_tokens, 1 + num_drafts, verify_sizes(1 + num_drafts, max_tokens), capture
    )
    drafter: DeviceDrafter
    warming_up: Callable[[], AbstractContextManager[None]] = nullcontext
    sizes = draft_sizes(state.num_slots, max_tokens)
    if loaded.head is not None:
        head_steps = HeadSteps(loaded.head, state)
        head = HeadRunner(head_steps, num_drafts, loaded.device, sizes, capture)
        drafter = GraphHeadDrafter(head_steps, head, state.num_slots)
        head.run_padding(1)
        graphs.add(head)
    elif small is None:
        drafter = DeviceNgramDrafter(state.req_to_token_pool, *_match_windows(loaded), num_drafts)
        drafter.run_padding()
    else:
        small_state = drafting_state(small, state)
        steps = DraftRunner(small, small_state, state.req_to_token_pool.seq_lens, sizes, capture)
        drafter = GraphDrafter(
            ModelRunner(small, small_state, StepSampler(small, small_state), StepGraphs(small)), steps
        )
        warming_up = steps.shortened  # a head has one layer
        steps.run_padding(1)
        graphs.add(steps)
    verifier.run_padding(max_tokens)
    graphs.add(verifier)
    # A step of a smaller model or a head takes about as long for few rows as for some more.
    may_rest = small is None and loaded.head is None
    return GraphSpeculatingRunner(
        loaded, state, sampler, graphs, verifier, drafter, num_drafts, may_rest=may_rest, warming_up=warming_up
    )


def _match_windows(loaded: LoadedModel) -> tuple[int, int]:
    args = loaded.args
    return args.speculative_ngram_min_match_window_size, args.speculative_ngram_max_match_window_size


def verify_sizes(row_tokens: int, max_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture for steps that verify up to `row_tokens` tokens of a row.

    One row and two with all of their drafts have sizes of their own: beside much padding, few programs would read the keys of a long row.
    """
    return _sizes_up_to(max_tokens, (row_tokens, 2 * row_tokens, *VERIFY_SIZES))


def draft_sizes(num_slots: int, max_tokens: int) -> list[int]:
    """Return the numbers of rows to capture for what drafts. Of a step's `max_tokens` tokens, a row that drafts has two or more."""
    return _sizes_up_to(min(num_slots, max_tokens // 2), DRAFT_SIZES)


def _sizes_up_to(most: int, sizes: tuple[int, ...]) -> list[int]:
    return sorted({size for size in sizes if size < most} | {most})

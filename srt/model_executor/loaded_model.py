"""Load everything that does not depend on the size of the KV memory: weights, attention backend, staging buffers, draw store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from srt.distributed.parallel_state import TensorParallel
from srt.distributed.pipeline import Pipeline
from srt.distributed.rendezvous import open_device_links
from srt.layers.attention.attention_spec import AttentionSpec, LatentSizes
from srt.layers.attention.backend_choice import BackendChoice, choose_backends, make_backend
from srt.layers.attention.base import AttentionBackend
from srt.layers.batch_invariant_ops import batch_invariant_logits_processor, batch_invariant_ops
from srt.layers.logits_processor import LogitsProcessor
from srt.layers.ops import LayerOps
from srt.layers.ops_choice import layer_ops
from srt.mem_cache.memory_pool import KVHeads, MHATokenToKVPool, MLATokenToKVPool
from srt.model_executor.loaded_head import LoadedHead
from srt.model_executor.memory.device_memory import DeviceMemory
from srt.model_executor.memory.memory_profile import check_weights
from srt.model_executor.memory.releasable_memory import releasable_parts
from srt.model_executor.step.draw_store import DrawStore
from srt.model_executor.step.plan_arrays import Staging
from srt.model_loader.kv_scales import read_kv_scales
from srt.model_loader.loader import LoadConfig, ModelLoader, get_model_loader
from srt.model_loader.model_adapters import ModelAdapters
from srt.model_loader.sharded_state import ShardedStateLoader, cpu_layout
from srt.models.any_model import AnyModel
from srt.models.causal_lm import CausalLM
from srt.models.library.encoder import LibraryEncoder
from srt.models.library.library_model import LibraryCausalLM
from srt.server_args import ServerArgs
from srt.utils.checkpoint import is_sharded
from srt.utils.errors import StartError
from srt.utils.kv_scales_file import read_scales_file
from srt.utils.layer_spec import AttentionKind, FeedForward, LatentAttention, SelfAttention
from srt.utils.model_config import ModelConfig
from srt.utils.page_groups import MemoryShares, PageGroups
from srt.utils.pipeline_stage import Stage, stages_of
from srt.utils.sharded_state import check_sharded

logger = logging.getLogger(__name__)
NO_ATTENTION = SelfAttention(0, 1, 1, 1.0, None)
"""What attention backends have to compute for an encoder, which attends by itself."""
Progress = Callable[[int, int], None]
KVScales = tuple[list[float], list[float]]  # of keys and of values, one a layer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One rank's model, and everything else that does not depend on the size of the KV memory."""

    args: ServerArgs
    config: ModelConfig
    tp: TensorParallel
    pipeline: Pipeline
    stage: Stage
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_scales: KVScales | None
    memory: DeviceMemory
    attention_spec: AttentionSpec
    attention: BackendChoice
    attn_backend: AttentionBackend
    captures_prompts: bool  # whether graphs of prompts include their attention; the same on all ranks
    weights_per_layer: int  # on average; the same on all ranks
    logits_processor: LogitsProcessor
    staging: Staging
    draw_store: DrawStore
    model: AnyModel
    adapters: ModelAdapters | None = None  # None: the server has no LoRA adapters
    drafting_bytes: int = 0  # of a token in what drafts beside the model, whose pages have the same numbers
    head: LoadedHead | None = None  # what drafts from the model's hidden states

    @property
    def our_model(self) -> CausalLM:
        """The model, for what only layers of ours have, such as fast paths."""
        assert isinstance(self.model, CausalLM), f"{self.config.architecture} is run by the library's layers"
        return self.model

    @property
    def num_distinct_layers(self) -> int:
        """How many of the stage's first layers use all kernels of the stage."""
        return self.model.num_distinct_layers if isinstance(self.model, CausalLM) else self.config.num_layers

    @property
    def most_in_flight(self) -> int:
        """Steps that may be launched and not answered."""
        return most_in_flight(self.args, self.stage.num_stages)

    def on_all_ranks(self, is_true: bool) -> bool:
        """Return whether this is true on all ranks of the replica. All must call it."""
        return self.pipeline.min_int(self.tp.min_int(int(is_true))) == 1

    @contextmanager
    def naming_lost_peer(self) -> Iterator[None]:
        """Replace any exception inside by one that names the lost rank or stage, if the device has given up on one."""
        with self.tp.naming_lost_peer(), self.pipeline.naming_lost_peer():
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this rank run steps without other ranks and stages; what they would send is made up."""
        with self.tp.alone(), self.pipeline.alone():
            yield

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.model.parameters())

    @property
    def kv_heads(self) -> list[KVHeads]:
        """The KV heads of each layer on this rank: none for the layers of other stages."""
        heads = [_kv_heads(layer.attention, self.tp.size) for layer in self.config.layers]
        return [one if n in self.stage.layers else KVHeads(0, one.head_dim) for n, one in enumerate(heads)]

    @property
    def pool_type(self) -> type[MHATokenToKVPool]:
        return MHATokenToKVPool if self.attention_spec.latents is None else MLATokenToKVPool

    @property
    def page_groups(self) -> PageGroups:
        return PageGroups.of(self.config.layers)

    @property
    def memory_shares(self) -> MemoryShares:
        """How the KV memory is divided between the page groups."""
        groups, heads = self.page_groups, self.kv_heads
        layers = [
            [one for one, of in zip(heads, groups.of_layer, strict=True) if of == group] for group in range(groups.num)
        ]
        first, *others = (self.pool_type.bytes_per_token(some, self.kv_dtype) for some in layers)
        return MemoryShares(
            (first + self.drafting_bytes, *others),
            groups.windows,
            self.config.context_length,
            self.args.prefill_chunk,
            self.args.page_size,
        )


def load_model(
    args: ServerArgs,
    config: ModelConfig,
    folder: str,
    tp: TensorParallel,
    device: torch.device,
    report_weights: Progress = lambda done, total: None,
    pipeline: Pipeline | None = None,
) -> LoadedModel:
    """Load this rank's weights and report bytes done and in total. StartError, before any is read, if attention cannot serve the model.

    With a `pipeline` of several stages, these are the weights of its stage.
    """
    pipeline = pipeline or Pipeline(0, 1)
    torch.set_float32_matmul_precision("highest")  # float32 never becomes TF32, whatever the environment says
    dtype = resolve_dtype(args, config)
    kv_dtype = dtype if args.kv_cache_dtype == "auto" else torch.float8_e4m3fn
    memory = DeviceMemory(device, releasable_parts(device) if args.enable_memory_saver else {})
    library: LibraryCausalLM | LibraryEncoder | None = None
    if config.is_encoder:
        library = LibraryEncoder.build(config, folder, args.model_overrides(), tp, dtype)
    elif config.implementation == "transformers":
        library = LibraryCausalLM.build(config, folder, args.model_overrides(), tp, dtype, device)
        config = library.config
    stage = _stage_of(args, config, pipeline)
    with memory.region("buffers"):
        spec = _attention_spec(args, config, tp, dtype, kv_dtype)
        attention, attn_backend = init_attention_backend(args, spec, device)
        staging = Staging(device, most_in_flight(args, stage.num_stages))
        draw_store = DrawStore.allocate(device, args.max_running_requests, most_in_flight(args, stage.num_stages))
    kv_scales = None if kv_dtype == dtype else _read_kv_scales(args, config, folder, tp)
    with torch.inference_mode(), memory.region("weights"):
        loader = _loader_for(args, config, Path(folder))
        fits, ops = partial(check_weights, device=device), resolve_ops(args, device)
        with memory.releasable("weights"):
            model = loader.load_model(config, folder, tp, dtype, device, report_weights, fits, library, ops, stage)
    if library is not None:
        library.check()
    return LoadedModel(
        args=args,
        config=config,
        tp=tp,
        pipeline=pipeline,
        stage=stage,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        memory=memory,
        attention_spec=spec,
        attention=attention,
        attn_backend=attn_backend,
        captures_prompts=_all_capture_prompts(attn_backend, tp, pipeline),
        weights_per_layer=pipeline.min_int(model.weights_per_layer),
        logits_processor=_logits_processor(args, config, tp, device),
        staging=staging,
        draw_store=draw_store,
        model=model,
        adapters=_adapters_of(args, config, model, memory, dtype, device),
    )


def _loader_for(args: ServerArgs, config: ModelConfig, folder: Path) -> ModelLoader:
    """Return the loader of what the folder has; after an update that may be another form than --load-format says."""
    if is_sharded(folder):
        check_sharded(folder, args, config, cpu_layout())
        return ShardedStateLoader()
    return get_model_loader(LoadConfig(load_format=args.load_format))  # type: ignore[arg-type]  # a checked choice


def _all_capture_prompts(backend: AttentionBackend, tp: TensorParallel, pipeline: Pipeline) -> bool:
    """Return whether graphs can hold prompts on all ranks: each finds out by itself, but all must capture the same graphs."""
    return pipeline.min_int(tp.min_int(int(backend.prompt_graphs is not None))) == 1


def resolve_ops(args: ServerArgs, device: torch.device) -> LayerOps:
    """Return the operations that the options ask for, or those of the device."""
    return batch_invariant_ops(device) if args.enable_deterministic_inference else layer_ops(device)


def _adapters_of(
    args: ServerArgs,
    config: ModelConfig,
    model: AnyModel,
    memory: DeviceMemory,
    dtype: torch.dtype,
    device: torch.device,
) -> ModelAdapters | None:
    with memory.region("weights"):
        return ModelAdapters.of(args, config, model, dtype, device)


def _logits_processor(
    args: ServerArgs, config: ModelConfig, tp: TensorParallel, device: torch.device
) -> LogitsProcessor:
    if args.enable_deterministic_inference:
        return batch_invariant_logits_processor(tp, config.vocab_size, device)
    return LogitsProcessor(tp, config.vocab_size)


def _stage_of(args: ServerArgs, config: ModelConfig, pipeline: Pipeline) -> Stage:
    if pipeline.num_stages == 1:
        return Stage.whole(config.num_layers)
    return stages_of(config.num_layers, pipeline.num_stages, args.pp_layer_partition)[pipeline.stage]


def init_attention_backend(
    args: ServerArgs, spec: AttentionSpec, device: torch.device
) -> tuple[BackendChoice, AttentionBackend]:
    """Choose the attention kernels; warn if the default is not the fastest. StartError if the requested ones cannot serve."""
    choice = choose_backends(args, spec, device) if spec.num_heads else BackendChoice("torch_native", "torch_native")
    backend = make_backend(choice, spec, device)
    if choice.reason:
        logger.warning("%s", choice.reason)
    return choice, backend


def _attention_spec(
    args: ServerArgs, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype, kv_dtype: torch.dtype
) -> AttentionSpec:
    latents = [one.attention for one in config.layers if isinstance(one.attention, LatentAttention)]
    if latents:
        return _latent_spec(args, config, latents, tp, dtype, kv_dtype)
    attentions = [layer.self_attention for layer in config.layers] or [NO_ATTENTION]
    first = attentions[0]
    heads = {
        (one.num_heads, one.num_kv_heads, one.head_dim, one.scale, one.softcap, one.has_sinks) for one in attentions
    }
    assert len(heads) == 1, f"attention backends serve layers with equal heads only, not {heads}"
    return AttentionSpec(
        num_heads=first.num_heads // tp.size,
        num_kv_heads=first.kv_heads_per_rank(tp.size),
        head_dim=first.head_dim,
        scale=first.scale,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=args.page_size,
        max_context=config.context_length,
        windows=tuple(dict.fromkeys(one.window for one in attentions)),
        softcap=first.softcap,
        has_sinks=first.has_sinks,
    )


def _latent_spec(
    args: ServerArgs,
    config: ModelConfig,
    latents: Sequence[LatentAttention],
    tp: TensorParallel,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> AttentionSpec:
    first = latents[0]
    assert list(latents) == [first] * config.num_layers, "backends of latents serve layers with equal attention only"
    return AttentionSpec(
        num_heads=first.num_heads // tp.size,
        num_kv_heads=1,
        head_dim=first.head_dim,
        scale=first.scale,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=args.page_size,
        max_context=config.context_length,
        windows=(None,),
        latents=LatentSizes(first.latent_rank, first.latent_dim, first.value_dim),
    )


def _kv_heads(attention: AttentionKind, tp_size: int) -> KVHeads:
    if isinstance(attention, LatentAttention):
        return KVHeads(1, attention.latent_dim)  # every rank holds all of it
    return KVHeads(attention.kv_heads_per_rank(tp_size), attention.head_dim)


def _read_kv_scales(args: ServerArgs, config: ModelConfig, folder: str, tp: TensorParallel) -> KVScales | None:
    if args.quantization_param_path is not None:
        factors = read_scales_file(args.quantization_param_path, config.model_type, config.num_layers, tp.size)
        return factors[tp.rank], factors[tp.rank]
    scales = None
    if args.load_format != "dummy":
        scales = read_kv_scales(folder, config.num_layers)
    if scales is None:
        logger.warning(
            "--kv-cache-dtype fp8_e4m3: the checkpoint has no KV scales, so keys and values are stored unscaled, which may cost accuracy."
        )
        return None
    return scales.k, scales.v


def most_in_flight(args: ServerArgs, num_stages: int) -> int:
    """Return how many steps may be launched and not answered."""
    return args.window + num_stages - 1


def link_stages(args: ServerArgs, config: ModelConfig, pipeline: Pipeline, device: torch.device) -> None:
    """Let the stages of a pipeline on GPUs exchange steps through their memory. StartError if they cannot. On a CPU do nothing."""
    if pipeline.num_stages == 1 or device.type != "cuda":
        return
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.distributed.stage_memory import LinkSizes

    row_bytes = config.hidden_size * resolve_dtype(args, config).itemsize
    most_ids = args.max_running_requests
    sizes = LinkSizes(row_bytes, args.prefill_chunk + most_ids, most_ids, most_in_flight(args, pipeline.num_stages))
    open_device_links(pipeline, sizes, device, args.dist_timeout)


def most_sum_bytes(args: ServerArgs, config: ModelConfig) -> int:
    """Return the bytes of the hidden states of the largest step, which are the largest tensors that ranks add up."""
    prompt_tokens = config.context_length if args.prefill_chunk == -1 else args.prefill_chunk
    tokens = min(prompt_tokens, config.context_length) + args.max_running_requests
    return tokens * config.hidden_size * resolve_dtype(args, config).itemsize


def most_divided_bytes(args: ServerArgs, config: ModelConfig) -> int:
    """Return the bytes of the hidden states of the largest step whose rows two ranks may divide; 0 if they divide none of this model's."""
    is_dense = all(isinstance(layer.feed_forward, FeedForward) for layer in config.layers)
    if args.tp_size != 2 or args.pp_size > 1 or args.enable_deterministic_inference or not is_dense:
        return 0
    is_fused = "fused" in config.fast_paths and config.weight_formats.is_plain
    return most_sum_bytes(args, config) if is_fused else 0


def resolve_dtype(args: ServerArgs, config: ModelConfig) -> torch.dtype:
    """Return the type of weights and activations: that of --dtype, or the checkpoint's."""
    name = config.torch_dtype if args.dtype == "auto" else args.dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def resolve_device(args: ServerArgs, worker: int) -> torch.device:
    """Return the device of the server's worker with this number; StartError if it does not exist."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise StartError("PyTorch sees no GPU: check its build and CUDA_VISIBLE_DEVICES, or choose --device cpu.")
    index = args.base_gpu_id + worker % (args.dp_size * args.num_ranks // args.nnodes)  # its number on this host
    if index >= count:
        sizes = f"--tp {args.tp_size}" + (f" and --pp-size {args.pp_size}" if args.pp_size > 1 else "")
        sizes += f" and --dp-size {args.dp_size}" if args.dp_size > 1 else ""
        raise StartError(
            f"{sizes} with --base-gpu-id {args.base_gpu_id} needs CUDA device {index}, but only {count} are visible:"
            " choose a smaller --tp or --base-gpu-id, or check CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", index)

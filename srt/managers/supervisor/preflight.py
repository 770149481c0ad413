"""Checks before any process is started: they refuse a taken port, a broken checkpoint, a model that does not fit."""

from __future__ import annotations

import errno
import os
import resource
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from srt.lora.adapter_files import AdapterLimits, read_adapter
from srt.sampling.draw_checks import DRAW_CHECKS
from srt.sampling.parameter_checks import ParameterError
from srt.server_args import CPU_STALL, GPU_CHUNKS, GPU_STALL, ServerArgs
from srt.utils.checkpoint import estimate_weight_bytes, is_copy, is_sharded, read_headers, resolve_model_path
from srt.utils.deterministic import OPTION
from srt.utils.draft_model import draft_model_args, gpu_drafting_obstacle, gpu_speculation_obstacle
from srt.utils.eagle3_config import served_head
from srt.utils.errors import StartError
from srt.utils.gpus import gpu_memory
from srt.utils.host import available_memory_bytes, raise_descriptor_limit
from srt.utils.kv_scales_file import read_scales_file
from srt.utils.layer_spec import NO_SCALES, Experts
from srt.utils.lora_options import GPU_LORA_RANK
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from srt.utils.mtp_config import served_mtp
from srt.utils.page_groups import PageGroups
from srt.utils.pipeline_stage import stages_of
from srt.utils.quantization import QUANTIZING
from srt.utils.sharded_state import LOAD_FORMAT, check_sharded, read_part_headers

BACKLOG = 4096  # connections that may wait while frontends start or are replaced; the kernel may cap it
LEAST_DESCRIPTORS = 256  # a few dozen for links and libraries, the rest for clients
HEAD_MULTIPLE = 16  # elements: what the kernels of deterministic servers read at once
LARGEST_GPU_HEAD = 128


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A server that can be started: its options with the port actually taken, the checkpoint's folder and the listening socket."""

    args: ServerArgs
    model_folder: Path
    listener: socket.socket | None

    @property
    def num_http_frontends(self) -> int:
        return self.args.tokenizer_worker_num if self.listener else 0

    @property
    def url(self) -> str | None:
        if self.listener is None:
            return None
        host = "127.0.0.1" if self.args.host == "0.0.0.0" else "[::1]" if self.args.host == "::" else self.args.host
        scheme = "http" if self.args.ssl_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.args.port}"


def check_and_listen(args: ServerArgs, *, http: bool) -> ServerPlan:
    """Take the port, find the model and check that it can run here. StartError or ArgumentError say in a sentence why not."""
    check_surroundings()
    check_certificate(args)
    listener = listen(args.host, args.port) if http else None
    try:
        if listener:
            args = replace(args, port=listener.getsockname()[1])
        folder = check_model(args)
        args = with_draft_model(with_model_defaults(with_device_defaults(args), folder), folder)
        args = with_adapters(args, folder)
        return ServerPlan(args, folder, listener)
    except BaseException:
        if listener:
            listener.close()
        raise


def check_surroundings() -> None:
    """Raise StartError if no process could work here: too few open files, or a current folder that was deleted."""
    raise_descriptor_limit()
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < LEAST_DESCRIPTORS:
        raise StartError(f"Only {limit} files may be open at once: allow at least {LEAST_DESCRIPTORS} (ulimit -Hn).")
    try:
        os.getcwd()
    except OSError as error:
        raise StartError(f"The current folder cannot be used ({error.strerror}): change to another one.") from error


def check_certificate(args: ServerArgs) -> None:
    """Raise StartError for certificate files that cannot serve HTTPS."""
    if args.ssl_certfile is None:
        return
    import ssl  # here, since it takes 20 ms and most servers do not use it

    try:
        # Given no password for an encrypted key, OpenSSL would ask for it on the terminal.
        password = args.ssl_keyfile_password or ""
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password)
    except OSError as error:  # an SSLError is one too
        files = " with ".join(name for name in (args.ssl_certfile, args.ssl_keyfile) if name)
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise StartError(f"The certificate {files} cannot be used: {reason}.") from error


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartError(f"--host {host} is not an address of this machine ({error.strerror}).") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise StartError(f"--host {host} is not an address of this machine.") from error
        raise StartError(
            f"Port {port} of {host} cannot be taken ({error.strerror}): choose another one with --port (0 takes any free one)."
        ) from error
    return listener


def check_model(args: ServerArgs) -> Path:
    """Check that the model can be split as asked and that its weights fit. Returns its folder."""
    if args.mem_fraction_static is not None and runs_on_cpu(args):
        raise StartError(
            "--mem-fraction-static is a share of a GPU's memory: on a CPU, set the size of the KV memory with --max-total-tokens."
        )
    folder = resolve_model_path(args.model_path, args.revision, args.download_dir).resolve()
    config = ModelConfig.served_from(folder, args)
    config.check_tp(args.attention_ranks, args.ep_size, args.tp_size)
    if args.ep_size > 1:
        check_expert_groups(args, config, f"--ep-size {args.ep_size}")
    if args.enable_dp_attention:
        check_expert_groups(args, config, "--enable-dp-attention")
    if args.use_ray and not runs_on_cpu(args):
        raise StartError("--use-ray starts replicas that compute on CPUs only: add --device cpu.")
    if args.nnodes > args.dp_size and not runs_on_cpu(args):
        raise StartError(
            f"On GPUs each host has whole replicas: use --dp-size {args.nnodes} or more with --nnodes {args.nnodes}, or serve with"
            " --device cpu."
        )
    if args.pp_size > 1:
        check_pipeline(args, config)
    if config.is_encoder:
        check_encoder(args, config)
    if args.enable_torch_compile and config.pooling is not None:
        raise StartError("--enable-torch-compile compiles the steps that generate text: leave it out for this model.")
    if args.enable_torch_compile and "compiled" not in config.fast_paths:
        raise StartError(
            f"--enable-torch-compile cannot compile the{'' if config.weight_formats.is_plain else ' quantised'} layers of"
            f" {config.architecture}: leave the option out."
        )
    if args.enable_deterministic_inference:
        check_deterministic(args, config)
    if args.quantization_param_path is not None:
        check_kv_scales(args.quantization_param_path, args, config)
    if args.speculative_algorithm is not None:
        check_speculation(args, config)
    if args.sampling_defaults == "model":
        check_sampling_defaults(config)
    if is_sharded(folder) or args.load_format == LOAD_FORMAT:
        check_saved_by_rank(folder, config, args)
    elif args.load_format != "dummy":
        check_tied_head(folder, config)
    if args.load_format != "dummy":
        check_memory(folder, config, args)
    return folder


def check_saved_by_rank(folder: Path, config: ModelConfig, args: ServerArgs) -> None:
    """Raise StartError if the weights that save_sharded_model has saved cannot be loaded as the options say."""
    option = f"--load-format {LOAD_FORMAT}"
    if args.load_format != LOAD_FORMAT:
        raise StartError(f"The weights in {folder} are saved by rank: load them with {option}.")
    if not runs_on_cpu(args):
        raise StartError(f"{option} works on a CPU only: start from a checkpoint, or serve with --device cpu.")
    if args.nnodes > 1:
        raise StartError(f"{option} works on one host only: start from a checkpoint with --nnodes.")
    if args.speculative_algorithm == "NEXTN":
        raise StartError(
            f"{option} has no layer for NEXTN: start from a checkpoint, or leave --speculative-algorithm out."
        )
    if args.kv_cache_dtype != "auto" and args.quantization_param_path is None:
        raise StartError(
            f"{option} has no scales of keys and values: name them with --quantization-param-path, or leave --kv-cache-dtype out."
        )
    check_sharded(folder, args, config)
    for rank in range(args.num_ranks):
        read_part_headers(folder, rank)


def check_kv_scales(path: str, args: ServerArgs, config: ModelConfig) -> None:
    """Raise StartError if the file of scales is wrong, or has no effect. The layers of the library are not known yet."""
    if args.kv_cache_dtype == "auto":
        raise StartError(
            "--quantization-param-path has the scales of an fp8 KV memory: use it with --kv-cache-dtype fp8_e4m3."
        )
    if config.layers:
        read_scales_file(path, config.model_type, config.num_layers, args.attention_ranks)


def check_pipeline(args: ServerArgs, config: ModelConfig) -> None:
    """Raise StartError if the model cannot be divided into stages here."""
    option = f"--pp-size {args.pp_size}"
    if not runs_on_cpu(args) and args.prefill_chunk == -1:
        raise StartError(
            f"{option} on GPUs needs memory for the largest step, which --chunked-prefill-size -1 does not limit: choose a"
            " number, or leave it out."
        )
    if config.pooling is not None:
        raise StartError(f"{option} serves models that generate text, which this one does not: leave it out.")
    if config.implementation == "transformers":
        raise StartError(
            f"{option} needs layers of ours, but those of the library transformers run {config.architecture}: leave it out."
        )
    stages_of(config.num_layers, args.pp_size, args.pp_layer_partition)


def check_expert_groups(args: ServerArgs, config: ModelConfig, option: str) -> None:
    """Raise StartError if groups of ranks cannot divide or share the experts here, as this option says."""
    if not any(isinstance(layer.feed_forward, Experts) for layer in config.layers):
        raise StartError(
            f"{option} divides the experts of a model, but our layers of this one have none: leave it out."
        )
    if config.pooling is not None and args.enable_dp_attention:
        raise StartError(f"{option} serves models that generate text, which this one does not: leave it out.")


def check_encoder(args: ServerArgs, config: ModelConfig) -> None:
    """Raise StartError for options that an encoder has no use for: the library runs its layers, and nothing is kept of its tokens."""
    asked = {
        "--tp": args.tp_size > 1,
        "--attention-backend": args.attention_backend,
        "--prefill-attention-backend": args.prefill_attention_backend,
        "--decode-attention-backend": args.decode_attention_backend,
        "--kv-cache-dtype": args.kv_cache_dtype != "auto",
        "--mem-fraction-static": args.mem_fraction_static,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise StartError(f"{name} is not supported for encoders such as {config.architecture}: leave it out.")


def with_model_defaults(args: ServerArgs, folder: Path) -> ServerArgs:
    """Complete the options that depend on the model: one that pools embeds, and caches prefixes only if its vectors allow that."""
    pooling = ModelConfig.served_from(folder, args).pooling
    if pooling is None:
        return args
    return replace(
        args, is_embedding=True, disable_radix_cache=args.disable_radix_cache or not pooling.can_use_prefixes
    )


def with_device_defaults(args: ServerArgs) -> ServerArgs:
    """Complete --chunked-prefill-size and --max-decode-stall, whose defaults depend on the device."""
    on_cpu = runs_on_cpu(args)
    if args.max_decode_stall is None:
        args = replace(args, max_decode_stall=CPU_STALL if on_cpu else GPU_STALL)
    if args.chunked_prefill_size is not None or on_cpu:
        return args
    memory = gpu_memory(args.base_gpu_id)
    if memory is None:
        return args
    return replace(args, chunked_prefill_size=next(chunk for limit, chunk in GPU_CHUNKS if memory.total < limit))


def check_memory(folder: Path, config: ModelConfig, args: ServerArgs) -> None:
    """Raise StartError for weights that do not fit: on a CPU all ranks share the host's memory, else each GPU holds its rank's part."""
    dtype = config.torch_dtype if args.dtype == "auto" else args.dtype
    # This reads the headers, so a broken file is found here on any device.
    num_groups = args.dp_size if args.enable_dp_attention else 1
    needed = estimate_weight_bytes(folder, dtype, args.quantization in QUANTIZING, num_groups)
    if not runs_on_cpu(args):
        memory, num_gpus = gpu_memory(args.base_gpu_id), args.tp_size * args.pp_size
        if memory is not None and needed / num_gpus > memory.total:
            raise StartError(
                f"The weights take {needed / num_gpus / 1e9:.1f} GB on each of {num_gpus} GPUs as {dtype}, and one has"
                f" {memory.total / 1e9:.1f} GB: choose a smaller model, a larger --tp or --pp-size, or --dtype bfloat16 if it is not set"
                " already."
            )
        return
    if args.use_ray and args.node_rank == 0:
        return  # it computes nothing
    available = available_memory_bytes()
    num_copies = 1 if args.enable_dp_attention else args.dp_size  # groups are counted already
    num_hosts = args.dp_size if args.use_ray else args.nnodes  # that compute
    needed = needed * num_copies // num_hosts
    if needed > available:
        num_copies = args.dp_size // num_hosts
        copies, fewer = (f" in {num_copies} replicas", " a smaller --dp-size,") if num_copies > 1 else ("", "")
        raise StartError(
            f"The weights take {needed / 1e9:.1f} GB as {dtype}{copies}, and {available / 1e9:.1f} GB of memory are available:"
            f" choose{fewer} a smaller model, or --dtype bfloat16 if it is not set already."
        )


def check_deterministic(args: ServerArgs, config: ModelConfig) -> None:
    """Raise StartError if answers could depend on the batch here."""
    dtype = config.torch_dtype if args.dtype == "auto" else args.dtype
    if dtype not in ("float32", "bfloat16"):
        raise StartError(f"{OPTION} computes in float32 or bfloat16, not in {dtype}: choose one of them with --dtype.")
    if config.pooling is not None:
        raise StartError(f"{OPTION} is for models that generate text, which this one does not do: leave it out.")
    if not config.weight_formats.is_plain:
        raise StartError(f"{OPTION} does not support quantised weights: choose another checkpoint, or leave it out.")
    if "compiled" not in config.fast_paths:  # the layers whose operations are few and known
        raise StartError(
            f"{OPTION} serves dense models of the Llama, Mistral, Qwen2 and Qwen3 families only, not {config.architecture}:"
            " leave it out."
        )
    head_dim = config.layers[0].self_attention.head_dim
    if head_dim % HEAD_MULTIPLE:
        raise StartError(
            f"{OPTION} needs heads whose size is a multiple of {HEAD_MULTIPLE}, not {head_dim}: leave it out."
        )
    if not runs_on_cpu(args):
        check_deterministic_on_gpu(args, config)


def check_deterministic_on_gpu(args: ServerArgs, config: ModelConfig) -> None:
    """Raise StartError for what works in the deterministic mode on a CPU only. Workers check the kind of the GPU."""
    first = config.layers[0].self_attention
    if any(layer.self_attention.window is not None for layer in config.layers):
        raise StartError(
            f"{OPTION} does not serve models with sliding windows on a GPU: leave it out, or serve with --device cpu."
        )
    if first.head_dim > LARGEST_GPU_HEAD:
        raise StartError(
            f"{OPTION} serves heads of at most {LARGEST_GPU_HEAD} on a GPU, not {first.head_dim}: leave it out, or serve with"
            " --device cpu."
        )


def check_speculation(args: ServerArgs, config: ModelConfig) -> None:
    """Raise StartError if drafts cannot be verified here."""
    option = f"--speculative-algorithm {args.speculative_algorithm}"
    if config.pooling is not None:
        raise StartError(f"{option} speeds up the generation of text, which this model does not do: leave it out.")
    if args.enable_memory_saver:
        raise StartError("--enable-memory-saver does not support --speculative-algorithm: leave one of the two out.")
    if args.speculative_algorithm == "NEXTN":
        served_mtp(config)
    if runs_on_cpu(args):
        return
    obstacle = gpu_speculation_obstacle(args, config)
    if obstacle is not None:
        raise StartError(f"{option} does not support {obstacle} on a GPU: leave it out, or serve with --device cpu.")


def with_draft_model(args: ServerArgs, folder: Path) -> ServerArgs:
    """Return the options with the folder of the smaller model that drafts, if there is one. StartError if it does not fit the model."""
    path = args.speculative_draft_model_path
    if args.speculative_algorithm == "NEXTN":
        return replace(args, speculative_draft_model_path=str(folder))
    if path is None:
        return args
    draft_folder = resolve_model_path(path, None, args.download_dir).resolve()
    args = replace(args, speculative_draft_model_path=str(draft_folder))
    if args.speculative_algorithm == "EAGLE3":
        check_head(args, draft_folder, ModelConfig.served_from(folder, args))
        return args
    config, draft = ModelConfig.served_from(folder, args), ModelConfig.served_from(draft_folder, draft_model_args(args))
    draft.check_tp(args.tp_size, args.ep_size)
    option = f"--speculative-draft-model-path {path}"
    if draft.pooling is not None:
        raise StartError(f"{option} does not generate text: choose another model.")
    if draft.vocab_size != config.vocab_size:
        raise StartError(
            f"{option} has a vocabulary of {draft.vocab_size} tokens and the model one of {config.vocab_size}: choose a model with"
            " the same vocabulary."
        )
    if draft.max_position_embeddings < config.context_length:
        raise StartError(
            f"{option} knows {draft.max_position_embeddings} positions, fewer than the {config.context_length} that are served:"
            f" add --context-length {draft.max_position_embeddings}."
        )
    obstacle = None if runs_on_cpu(args) else gpu_drafting_obstacle(draft_model_args(args), draft)
    if obstacle is not None:
        raise StartError(
            f"{option}: {obstacle} cannot draft on a GPU. Choose another model, or serve with --device cpu."
        )
    if PageGroups.of(draft.layers).num > 1:
        raise StartError(f"{option} has layers with a window: choose a model whose layers all see every token.")
    check_memory(draft_folder, draft, draft_model_args(args))
    return args


def check_head(args: ServerArgs, head_folder: Path, config: ModelConfig) -> None:
    """Raise StartError or ModelError if a head cannot draft from this model's hidden states here."""
    option = "--speculative-algorithm EAGLE3"
    if config.implementation == "transformers":
        raise StartError(f"{option} does not support the layers of the library transformers: choose another algorithm.")
    if config.scales != NO_SCALES:
        raise StartError(
            f"{option} does not support {config.architecture}, which scales its embedding or its logits: choose another algorithm."
        )
    if args.enable_torch_compile:
        raise StartError(f"{option} does not support --enable-torch-compile: leave one of them out.")
    served_head(head_folder, config)


def with_adapters(args: ServerArgs, folder: Path) -> ServerArgs:
    """Return the options with whole paths of the LoRA adapters. StartError or ModelError if the server cannot serve one."""
    if not args.serves_adapters:
        return args
    config = ModelConfig.served_from(folder, args)
    if args.tp_size > 1 and not runs_on_cpu(args):
        raise StartError("--enable-lora on GPUs serves models on one each: leave out --tp, or serve with --device cpu.")
    if config.pooling is not None or config.implementation == "transformers":
        raise StartError(
            f"--enable-lora is not supported for {config.architecture} as it is served here: leave it out."
        )
    limits = AdapterLimits.of(args, config)
    assert limits is not None
    paths = {name: Path(given).expanduser().absolute() for name, given in args.adapter_paths().items()}
    ranks = []
    for name, path in paths.items():
        try:
            ranks += [layer.rank for layer in read_adapter(path, limits)]
        except ModelError as error:
            raise StartError(f"--lora-paths {name}: {error}") from error
    most_rank = args.max_lora_rank
    if most_rank is None and not runs_on_cpu(args):  # the memory for adapters is allocated at the start
        most_rank = max(ranks, default=GPU_LORA_RANK)
    return replace(args, lora_paths=tuple(f"{name}={path}" for name, path in paths.items()), max_lora_rank=most_rank)


def check_sampling_defaults(config: ModelConfig) -> None:
    """Raise ModelError for a default that no request may set: every request that relies on it would be refused."""
    for name, value in config.sampling_defaults.items():
        try:
            DRAW_CHECKS[name](name, value)
        except ParameterError as error:
            raise ModelError(
                f"generation_config.json: {error}. Use --sampling-defaults openai to serve the model without its own defaults."
            ) from error


def check_tied_head(folder: Path, config: ModelConfig) -> None:
    """Raise ModelError if the checkpoint has a head of its own and would be served without it."""
    if not config.tie_word_embeddings or config.pooling is not None:
        return
    headers = read_headers(folder)
    head, embedding = headers.get("lm_head.weight"), headers.get("model.embed_tokens.weight")
    if head is None or embedding is None or is_copy(head, embedding):
        return
    raise ModelError(
        f"The checkpoint {folder} has {head.name} and {embedding.name}, which differ, though tie_word_embeddings in config.json"
        " says that they are the same: use --json-model-override-args '{\"tie_word_embeddings\": false}' to serve both as stored."
    )


def runs_on_cpu(args: ServerArgs) -> bool:
    """Return whether the model will run on the CPU, as far as this can be known without torch; workers ask torch."""
    return args.device == "cpu" or (args.device is None and not Path("/dev/nvidiactl").exists())

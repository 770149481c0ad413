"""Options of the server: a dataclass with help texts, from which the command line, Runtime's keywords and the docs are derived."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from srt.utils.deterministic import option_obstacle
from srt.utils.host_options import HOSTS, HostOptions
from srt.utils.lora_options import LORA
from srt.utils.option import ArgumentError as ArgumentError
from srt.utils.option import option
from srt.utils.pipeline_stage import rank_obstacle
from srt.utils.quantization import QUANTIZATIONS
from srt.utils.rank_options import DEVICE
from srt.utils.speculation import DEFAULT_DRAFT_TOKENS, SPECULATIVE_ALGORITHMS, speculation_obstacle
from srt.version import __version__

NO_PARSER = "none"
TOOL_CALL_PARSERS = tuple(
    "hermes qwen qwen25 qwen3_coder llama3 llama3_json mistral pythonic deepseekv3 deepseek_v3 deepseekv31 deepseek_v31"
    " deepseekv32 glm45 glm47 kimi_k2 gpt-oss openai minimax-m2 minimax_m2 gemma4".split()
)
MODEL_IMPLS = ("auto", "srt", "transformers")
GRAMMAR_BACKENDS = ("llguidance", "none")
TOOL_STRICT_LEVELS = ("auto", "function", "parameter")
REASONING_PARSERS = tuple("qwen3 deepseek-r1 deepseek_r1 deepseek-v3 glm45 kimi gpt-oss openai_gptoss minimax".split())

MODEL, HTTP, MEMORY, LOG = "Model", "HTTP", "Memory and scheduling", "Logging"
SPECULATION = "Speculative decoding"
GROUPS = (MODEL, HTTP, MEMORY, SPECULATION, LORA, DEVICE, HOSTS, LOG)  # in the order of documents

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
MOST = (1 << 31) - 1  # of counts, sizes and seconds
MOST_SEED = (1 << 63) - 1
# Defaults of --max-decode-stall, and of --chunked-prefill-size: on a CPU, and for GPUs with less memory than this many bytes.
CPU_STALL, GPU_STALL, CPU_CHUNK = 300.0, 30.0, 2048
GPU_CHUNKS = ((20e9, 2048), (60e9, 4096), (160e9, 8192), (float("inf"), 16384))


@dataclass(frozen=True, slots=True)
class ServerArgs(HostOptions):
    """The options as the user gave them. `check()` refuses values that cannot work together; nothing is guessed here."""

    model_path: str = option(
        "", "checkpoint: an existing folder, a shipped name, or a hub id", group=MODEL, aliases=("--model",)
    )
    tokenizer_path: str | None = option(None, "folder of the tokenizer, if it is not the model's", group=MODEL)
    load_format: str = option(
        "auto",
        "how the weights are loaded; auto: safetensors, or else .bin; dummy: random ones; sharded_state: saved by rank",
        group=MODEL,
        choices=("auto", "safetensors", "dummy", "sharded_state"),
    )
    model_impl: str = option(
        "auto",
        "whose layers run the model; transformers: those of the library, slower and for more architectures; auto: ours where we"
        " have them",
        group=MODEL,
        choices=MODEL_IMPLS,
    )
    dtype: str = option(
        "auto", "data type of weights and activations", group=MODEL, choices=("auto", "float32", "bfloat16", "float16")
    )
    quantization: str | None = option(
        None,
        "fp8, int8: quantise the layers' weights while they are loaded; other values must be what the checkpoint is",
        group=MODEL,
        choices=QUANTIZATIONS,
    )
    context_length: int | None = option(
        None, "most tokens of prompt and output together (default: the model's own limit)", group=MODEL
    )
    is_embedding: bool = option(
        False,
        "embed texts instead of generating them; checkpoints of embedding models and classifiers do so in any case",
        group=MODEL,
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id", group=MODEL)
    download_dir: str | None = option(None, "cache folder for hub downloads", group=MODEL)
    json_model_override_args: str = option("{}", "JSON object whose members replace those of config.json", group=MODEL)
    served_model_name: tuple[str, ...] = option(
        (), "names that the OpenAI API answers to (default: the model path)", group=MODEL
    )
    chat_template: str | None = option(None, "file with a Jinja chat template, instead of the tokenizer's", group=MODEL)
    tool_call_parser: str | None = option(
        None,
        "form in which the model writes calls of tools; none: look for no calls (default: as its chat template shows)",
        group=MODEL,
        choices=(*TOOL_CALL_PARSERS, NO_PARSER),
    )
    reasoning_parser: str | None = option(
        None,
        "form in which the model marks its reasoning; none: leave it in the text (default: as its chat template shows)",
        group=MODEL,
        choices=(*REASONING_PARSERS, NO_PARSER),
    )
    tool_strict_level: str = option(
        "auto",
        "what is enforced of calls that the model makes by itself; auto: valid arguments of tools that are strict; function:"
        " the form of all calls, too; parameter: valid arguments of all calls",
        group=MODEL,
        choices=TOOL_STRICT_LEVELS,
    )
    grammar_backend: str = option(
        "llguidance",
        "what holds answers to a form; none: requests for one are refused",
        group=MODEL,
        choices=GRAMMAR_BACKENDS,
    )
    sampling_defaults: str = option(
        "model", "where unset sampling parameters come from", group=MODEL, choices=("model", "openai")
    )

    host: str = option("127.0.0.1", "address to listen on", group=HTTP)
    port: int = option(30000, "port to listen on", group=HTTP)
    api_key: str | None = option(None, "key that clients must send as a bearer token", group=HTTP)
    admin_api_key: str | None = option(
        None, "key for the routes that manage the server (cache, pauses, aborts, logs, traces)", group=HTTP
    )
    enable_metrics: bool = option(
        False, "serve /metrics without the API key, too; with the key it is always served", group=HTTP
    )
    cors_allow_origins: tuple[str, ...] = option(
        (), "origins of web pages that may use the API; * for all (default: none)", group=HTTP
    )
    ssl_certfile: str | None = option(None, "PEM file of the certificate chain: serve HTTPS", group=HTTP)
    ssl_keyfile: str | None = option(None, "PEM file of the private key, if it is not in --ssl-certfile", group=HTTP)
    ssl_keyfile_password: str | None = option(None, "password of the private key", group=HTTP)
    tokenizer_worker_num: int = option(1, "frontend processes that share the port", group=HTTP)
    stream_interval: int = option(1, "tokens between two chunks of a stream", group=HTTP)
    incremental_streaming_output: bool = option(
        False, "/generate streams only the new text of each chunk, not the whole text so far", group=HTTP
    )
    enable_response_store: bool = option(
        False,
        "store responses of /v1/responses in memory, for previous_response_id and background; with one frontend only",
        group=HTTP,
    )
    enable_cache_report: bool = option(False, "no effect: OpenAI answers always report cached_tokens", group=HTTP)

    mem_fraction_static: float | None = option(
        None,
        "share of a GPU's memory for weights and KV (default: what graphs and the largest step leave, less 2 %)",
        group=MEMORY,
    )
    max_total_tokens: int | None = option(
        None, "number of tokens that the KV memory holds (default: as many as fit)", group=MEMORY
    )
    max_running_requests: int = option(256, "most requests that run at the same time", group=MEMORY)
    max_queued_requests: int = option(
        4096, "most requests that wait; further ones are refused with status 429", group=MEMORY
    )
    request_waiting_timeout: float | None = option(
        None, "most seconds that a request waits before it runs; then it ends with status 503", group=MEMORY
    )
    request_running_timeout: float | None = option(
        None, "most seconds that a request runs, pauses included; then it ends with status 504", group=MEMORY
    )
    chunked_prefill_size: int | None = option(
        None, "most prompt tokens in one step; -1: no limit (default: by the device's memory)", group=MEMORY
    )
    max_decode_stall: float | None = option(
        None,
        "milliseconds by which prompts may lengthen a step that has streams beyond twice its time without them (default: 30;"
        f" on a CPU {CPU_STALL:.0f})",
        group=MEMORY,
    )
    page_size: int = option(16, "tokens in one page of KV memory", group=MEMORY)
    schedule_policy: str = option(
        "fcfs",
        "order of waiting requests; fcfs: first come, first served; lpm: longest cached prefix first",
        group=MEMORY,
        choices=("fcfs", "lpm", "priority"),
    )
    enable_priority_scheduling: bool = option(False, "the same as --schedule-policy priority", group=MEMORY)
    priority_scheduling_preemption_threshold: int = option(
        10, "a waiting request preempts a running one whose priority is lower by at least this", group=MEMORY
    )
    priority_aging_time: float = option(60.0, "seconds of waiting that raise a request's priority by 1", group=MEMORY)
    schedule_conservativeness: float = option(
        1.0,
        "above 1, answers are expected to be longer than earlier ones, so fewer requests run and fewer are preempted",
        group=MEMORY,
    )
    disable_radix_cache: bool = option(False, "do not reuse the KV of shared prefixes", group=MEMORY)
    radix_eviction_policy: str = option(
        "lru",
        "cached prefixes to evict first: lru: least recently used; lfu: least frequently used",
        group=MEMORY,
        choices=("lru", "lfu"),
    )
    disable_overlap_schedule: bool = option(
        False, "plan a step only when the result of the one before has come", group=MEMORY
    )

    speculative_algorithm: str | None = option(
        None,
        "draft several tokens and verify them in one step; NGRAM: what followed the same tokens earlier in the"
        " request; STANDALONE: what a smaller model draws; EAGLE3: what a head draws that reads the model's hidden states; NEXTN:"
        " what a layer for this draws that the model's own checkpoint has (MTP)",
        group=SPECULATION,
        choices=SPECULATIVE_ALGORITHMS,
    )
    speculative_draft_model_path: str | None = option(
        None,
        "checkpoint of the smaller model with the same vocabulary, or of the head: an existing folder, a shipped name, or a hub id",
        group=SPECULATION,
    )
    speculative_num_steps: int | None = option(
        None, "tokens that the smaller model or the head draws for each request in a step", group=SPECULATION
    )
    speculative_eagle_topk: int | None = option(
        None, "drafts for each place with EAGLE3 or NEXTN; only 1 is supported", group=SPECULATION
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        "tokens that a step verifies of each request, the one that is no draft included (default: 8; STANDALONE: 5; EAGLE3, NEXTN: 4)",
        group=SPECULATION,
    )
    speculative_ngram_min_match_window_size: int = option(
        2, "fewest last tokens that must have occurred before, for a draft of what followed", group=SPECULATION
    )
    speculative_ngram_max_match_window_size: int = option(
        12, "most last tokens that are compared; the occurrence that repeats most is chosen", group=SPECULATION
    )

    device: str | None = option(
        None, "where the model runs (default: cuda if present)", group=DEVICE, choices=("cpu", "cuda")
    )
    base_gpu_id: int = option(0, "first GPU to use", group=DEVICE)
    attention_backend: str | None = option(
        None,
        "attention kernels; fa3 serves prompts only, on Hopper (default: the quickest that can serve the model)",
        group=DEVICE,
        choices=("torch_native", "triton", "flashinfer", "fa3"),
    )
    prefill_attention_backend: str | None = option(
        None,
        "attention kernels for prompts (default: --attention-backend)",
        group=DEVICE,
        choices=("torch_native", "triton", "flashinfer", "fa3"),
    )
    decode_attention_backend: str | None = option(
        None,
        "attention kernels for decode steps (default: --attention-backend)",
        group=DEVICE,
        choices=("torch_native", "triton", "flashinfer"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of the KV memory; auto: the model's own; fp8_e4m3: half its size",
        group=DEVICE,
        choices=("auto", "fp8_e4m3"),
    )
    quantization_param_path: str | None = option(
        None, "JSON file with the scales of an fp8 KV memory, instead of the checkpoint's", group=DEVICE
    )
    disable_cuda_graph: bool = option(
        False, "launch each kernel of every decode step, without CUDA graphs: much slower", group=DEVICE
    )
    cuda_graph_max_bs: int | None = option(
        None, "most rows of a decode step that is captured as a CUDA graph (default: 256)", group=DEVICE
    )
    cuda_graph_bs: tuple[int, ...] = option(
        (),
        "numbers of rows to capture as CUDA graphs, even above 256 (default: 1 2 4 8 16 … up to the most)",
        group=DEVICE,
    )
    disable_cuda_graph_padding: bool = option(
        False, "use a CUDA graph only for a step with exactly its number of rows, never padded", group=DEVICE
    )
    piecewise_cuda_graph_max_tokens: int | None = option(
        None,
        "most tokens of a step with prompts that is captured as CUDA graphs: whole for few tokens, else all but attention;"
        " 0: none (default: as many as are computed in less time than their launch takes)",
        group=DEVICE,
    )
    enable_torch_compile: bool = option(
        False,
        "run decode steps of few rows as code that PyTorch compiles at the start; the first time this takes a minute",
        group=DEVICE,
    )
    torch_compile_max_bs: int = option(32, "most rows of a compiled decode step (--enable-torch-compile)", group=DEVICE)
    random_seed: int | None = option(None, "seed from which requests without a seed get theirs", group=DEVICE)
    enable_deterministic_inference: bool = option(
        False,
        "give a request the same ids and logprobs, to the bit, in any batch; on a CPU or on Hopper GPUs",
        group=DEVICE,
    )
    disable_custom_all_reduce: bool = option(
        False,
        "exchange the results of ranks through NCCL, not by writing to the other GPUs' memory",
        group=DEVICE,
    )
    enable_memory_saver: bool = option(False, "let /release_memory_occupation release memory", group=DEVICE)
    dist_timeout: int = option(300, "seconds that collective operations wait for a peer", group=DEVICE)
    watchdog_timeout: float = option(
        30.0, "seconds that a step may take before its worker counts as stuck", group=DEVICE
    )
    max_replacements: int = option(
        10,
        "most times within 5 minutes that a dead process is replaced; the next death ends the server",
        group=DEVICE,
    )

    log_level: str = option(
        "info", "least level that is logged", group=LOG, choices=("debug", "info", "warning", "error")
    )
    log_format: str = option(
        "text", "format of log lines; json: one object per line", group=LOG, choices=("text", "json")
    )
    log_requests: bool = option(False, "log each request when it comes and when it ends", group=LOG)
    log_requests_level: int = option(
        2,
        "0: names and counts; 1: also parameters; 2: also the first 2048 characters of texts; 3: whole texts",
        group=LOG,
    )
    decode_log_interval: int | None = option(
        None, "steps between two log lines about the engine's state (default: a line every 10 s)", group=LOG
    )

    def check(self) -> None:
        """Raise ArgumentError for values that can be refused without looking at the model."""
        if not self.model_path:
            raise ArgumentError("--model-path is missing: name a checkpoint folder, a shipped model or a hub id.")
        for name in (
            "tokenizer_worker_num",
            "stream_interval",
            "max_running_requests",
            "page_size",
            *("tp_size", "dp_size", "pp_size", "ep_size"),
            "torch_compile_max_bs",
            "dist_timeout",
        ):
            self._at_least(name, 1)
        self._check_http()
        for name in ("max_queued_requests", "base_gpu_id", "max_replacements"):
            self._at_least(name, 0)
        for name in ("context_length", "max_total_tokens", "decode_log_interval", "cuda_graph_max_bs"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        for f in dataclasses.fields(self):
            value, most = getattr(self, f.name), MOST_SEED if f.name == "random_seed" else MOST
            if type(value) is int and abs(value) > most:
                raise ArgumentError(f"--{f.name.replace('_', '-')} must be at most {most}, not {value}.")
        if not 0 <= self.log_requests_level <= 3:
            raise ArgumentError(f"--log-requests-level must lie between 0 and 3, not {self.log_requests_level}.")
        if self.piecewise_cuda_graph_max_tokens is not None:
            self._at_least("piecewise_cuda_graph_max_tokens", 0)
        if any(not 1 <= size <= MOST for size in self.cuda_graph_bs):
            raise ArgumentError(f"--cuda-graph-bs takes numbers of at least 1, not {min(self.cuda_graph_bs)}.")
        for name in ("max_running_requests", "cuda_graph_max_bs"):
            most, largest = getattr(self, name), max(self.cuda_graph_bs, default=0)
            if most is not None and largest > most:
                raise ArgumentError(f"--cuda-graph-bs {largest} is more than --{name.replace('_', '-')} {most}.")
        if self.chunked_prefill_size not in (None, -1):
            self._at_least("chunked_prefill_size", 1)
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise ArgumentError(f"--mem-fraction-static must lie between 0 and 1, not {self.mem_fraction_static}.")
        if not self.schedule_conservativeness > 0:
            raise ArgumentError(f"--schedule-conservativeness must be positive, not {self.schedule_conservativeness}.")
        self._at_least("priority_scheduling_preemption_threshold", 1)
        if not self.priority_aging_time > 0:
            raise ArgumentError(f"--priority-aging-time must be positive, not {self.priority_aging_time}.")
        if self.enable_priority_scheduling and self.schedule_policy == "lpm":
            raise ArgumentError("--enable-priority-scheduling cannot be combined with --schedule-policy lpm.")
        if self.max_decode_stall is not None and not self.max_decode_stall >= 0:
            raise ArgumentError(f"--max-decode-stall must be at least 0, not {self.max_decode_stall}.")
        for name in ("request_waiting_timeout", "request_running_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ArgumentError(f"--{name.replace('_', '-')} must be positive, not {value}.")
        if not self.watchdog_timeout > 0:
            raise ArgumentError(f"--watchdog-timeout must be positive, not {self.watchdog_timeout}.")
        self._check_capabilities()
        self.check_adapters(self)
        self.check_hosts(self)
        self.model_overrides()

    def _check_capabilities(self) -> None:
        for name, least in (
            ("speculative_num_steps", 1),
            ("speculative_num_draft_tokens", 2),
            ("speculative_ngram_min_match_window_size", 1),
        ):
            if getattr(self, name) is not None:
                self._at_least(name, least)
        values = dataclasses.asdict(self)
        obstacle = speculation_obstacle(values) or rank_obstacle(values) or option_obstacle(values)
        if obstacle is not None:
            raise ArgumentError(obstacle)

    def _check_http(self) -> None:
        for name in ("api_key", "admin_api_key"):
            key = getattr(self, name)
            if key is not None and (not key or key != key.strip()):
                raise ArgumentError(f"--{name.replace('_', '-')} must not be empty, nor begin or end with a space.")
        if not all(self.model_names()):
            raise ArgumentError("--served-model-name must not be empty.")
        for name in ("ssl_keyfile", "ssl_keyfile_password"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ArgumentError(f"--{name.replace('_', '-')} needs --ssl-certfile.")
        if not 0 <= self.port <= 65535:
            raise ArgumentError(f"--port must lie between 0 and 65535, not {self.port}.")
        if self.enable_response_store and self.tokenizer_worker_num > 1:
            raise ArgumentError(
                "--enable-response-store needs --tokenizer-worker-num 1: a frontend does not see what another one stores."
            )

    def model_overrides(self) -> dict[str, Any]:
        """Return the object given by --json-model-override-args."""
        try:
            overrides = json.loads(self.json_model_override_args)
        except ValueError as error:
            raise ArgumentError(f"--json-model-override-args is not JSON: {error}.") from error
        if not isinstance(overrides, dict):
            raise ArgumentError("--json-model-override-args must be a JSON object.")
        return overrides

    def model_names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model_path,)

    def command(self) -> str:
        """Return a command line with these options; secrets appear as `(set)`."""
        words = ["python", "-m", "srt.launch_server"]
        for f in dataclasses.fields(self):
            value = self.public_values()[f.name]
            if value != f.default:
                given = [] if value is True else value if isinstance(value, tuple) else [value]
                words += [f"--{f.name.replace('_', '-')}", *map(str, given)]
        return shlex.join(words)

    def public_values(self) -> dict[str, Any]:
        """Return the options by name; secrets appear as `(set)`."""
        values = dataclasses.asdict(self)
        return values | {name: "(set)" for name in SECRETS if values[name] is not None}

    @property
    def prefill_chunk(self) -> int:
        """Largest number of prompt tokens in one step; -1 for no limit. On a GPU, preflight.py sets the default from GPU_CHUNKS."""
        return CPU_CHUNK if self.chunked_prefill_size is None else self.chunked_prefill_size

    @property
    def decode_stall(self) -> float:
        return GPU_STALL if self.max_decode_stall is None else self.max_decode_stall

    @property
    def window(self) -> int:
        """Largest number of plans in flight."""
        return 1 if self.disable_overlap_schedule else 2

    @property
    def num_drafts(self) -> int:
        """Most drafts of a row in one step; 0 without speculative decoding."""
        if self.speculative_algorithm is None:
            return 0
        if self.speculative_num_steps is not None:
            return self.speculative_num_steps
        return (self.speculative_num_draft_tokens or DEFAULT_DRAFT_TOKENS[self.speculative_algorithm]) - 1

    @property
    def uses_priorities(self) -> bool:
        return self.enable_priority_scheduling or self.schedule_policy == "priority"

    def _at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ArgumentError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}.")


# Options of SGLang that are not supported yet: refused as such, rather than as unknown options.
UNSUPPORTED = frozenset(
    "attn_dp_size nccl_port tokenizer_mode skip_tokenizer_init"
    " trust_remote_code allow_auto_truncate max_prefill_tokens enable_mixed_chunk num_continuous_decode_steps"
    " sampling_backend max_loaded_loras lora_eviction_policy lora_backend"
    " disaggregation_mode ssl_ca_certs crash_dump_folder gpu_id_step"
    " detokenizer_worker_num skip_server_warmup".split()
)

_MAX_SHOWN_CHOICES = 6  # in the help; a wrong value is answered with all of them
_METAVARS = {str: "TEXT", int: "N", float: "X"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ArgumentError(message[0].upper() + message[1:].rstrip(".") + ".")


def parse_args(argv: Sequence[str]) -> ServerArgs:
    """Parse a command line; ArgumentError, with one sentence, for a wrong option."""
    parser = make_parser()
    namespace, rest = parser.parse_known_args(argv)
    for word in rest:
        name = word.partition("=")[0]
        if name.startswith("--") and name[2:].replace("-", "_") in UNSUPPORTED:
            raise ArgumentError(f"{name} is not supported yet.")
    if rest:
        kind = "Unknown option" if rest[0].startswith("-") else "Options begin with --, which is missing in"
        raise ArgumentError(f"{kind} {rest[0]} (see --help).")
    values = vars(namespace)
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return checked(ServerArgs(**values))


def from_keywords(keywords: dict[str, Any]) -> ServerArgs:
    """Build the options from `Runtime(**keywords)`: the names and checks of the command line, and checks of types."""
    hints = typing.get_type_hints(ServerArgs)
    values = dict(keywords)
    for name, value in keywords.items():
        if name in UNSUPPORTED:
            raise ArgumentError(f"{name} is not supported yet.")
        if name not in hints:
            raise ArgumentError(f"Unknown option {name}.")
        if typing.get_origin(hints[name]) is tuple:
            kind, word = (int, "number") if int in typing.get_args(hints[name]) else (str, "name")
            values[name] = (value,) if isinstance(value, kind) else value
            if not isinstance(values[name], list | tuple) or not all(type(one) is kind for one in values[name]):
                raise ArgumentError(f"{name} must be a {word} or a list of {word}s, not {value!r}.")
            values[name] = tuple(values[name])
            continue
        allowed = tuple(t for t in (typing.get_args(hints[name]) or (hints[name],)))
        fits = type(value) in allowed or (float in allowed and type(value) is int)
        if not fits:
            wanted = " or ".join("None" if t is type(None) else t.__name__ for t in allowed)
            raise ArgumentError(f"{name} must be {wanted}, not {type(value).__name__}.")
    args = ServerArgs(**values)
    for f in dataclasses.fields(args):
        choices, value = f.metadata["choices"], getattr(args, f.name)
        if choices and value is not None and value not in choices:
            raise ArgumentError(f"{f.name} must be one of {', '.join(choices)}, not {value!r}.")
    return checked(args)


def checked(args: ServerArgs) -> ServerArgs:
    args.check()
    return args


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m srt.launch_server",
        usage="%(prog)s --model-path MODEL [options]",
        description="Serve a large language model over HTTP.",
        epilog="The same options are keywords of srt.Runtime (page_size=16). srt doctor checks them without starting a server.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"srt {__version__}")
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    hints = typing.get_type_hints(ServerArgs)
    for f in dataclasses.fields(ServerArgs):
        _add_option(groups[f.metadata["group"]], f, hints[f.name])
    return parser


def _add_option(group: Any, f: dataclasses.Field[Any], hint: Any) -> None:
    names = [f"--{f.name.replace('_', '-')}", *f.metadata["aliases"]]
    default = "" if f.default in (None, "", ()) or f.default is False else f" (default: {f.default})"
    common = {"dest": f.name, "default": f.default, "help": (f.metadata["help"] + default).replace("%", "%%")}
    if hint is bool:
        group.add_argument(*names, action="store_true", **common)
    elif typing.get_origin(hint) is tuple:
        kind, metavar = (int, "N") if int in typing.get_args(hint) else (str, "NAME")
        group.add_argument(*names, nargs="+", type=kind, metavar=metavar, **common)
    else:
        kind = next((t for t in typing.get_args(hint) if t is not type(None)), hint)
        choices = f.metadata["choices"]
        shown = None if 0 < len(choices) <= _MAX_SHOWN_CHOICES else _METAVARS[kind]
        group.add_argument(*names, type=kind, choices=choices or None, metavar=shown, **common)

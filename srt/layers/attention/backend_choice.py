"""Choose the attention kernels: those that the options name, else the fastest that can serve. Impossible choices are refused by name.

The order of the defaults was measured (docs/performance.md): prompts by Hopper's kernels, decodes by our own, which need no
planning on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from srt.kernels.cpu.batch_invariant import BatchInvariantKernels
from srt.kernels.cpu.prompt_attention import PromptAttention
from srt.layers.attention.attention_spec import AttentionSpec
from srt.layers.attention.base import AttentionBackend
from srt.layers.attention.batch_invariant_backend import BatchInvariantBackend
from srt.layers.attention.split_backend import SplitBackend
from srt.layers.attention.torch_latent import TorchLatentBackend
from srt.layers.attention.torch_native import TorchNativeBackend
from srt.server_args import ServerArgs
from srt.utils.errors import StartError

FIRST_WITH_FP8 = (8, 9)  # compute capability
FLASHINFER_HEAD_DIMS = (64, 128, 256)
KERNELS = {"flashinfer": "fa2", "fa3": "fa3"}  # backend -> the flashinfer kernels that its prefill uses


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Names of the chosen backends, and the reason if a default is not the fastest that exists (else empty)."""

    prefill: str
    decode: str
    reason: str = ""
    is_prefill_asked_for: bool = False

    @property
    def name(self) -> str:
        return self.prefill if self.prefill == self.decode else f"{self.prefill} + {self.decode}"


def choose_backends(args: ServerArgs, spec: AttentionSpec, device: torch.device) -> BackendChoice:
    """Choose the backends of prompts and decodes. StartError if one that the options name cannot serve."""
    if args.enable_deterministic_inference:
        return BackendChoice("batch_invariant", "batch_invariant")
    if device.type == "cuda" and spec.kv_dtype == torch.float8_e4m3fn:
        _check_fp8(torch.cuda.get_device_capability(device))
    if spec.latents is not None and spec.kv_dtype != spec.dtype:
        raise StartError("--kv-cache-dtype fp8_e4m3 is not supported for latents (MLA): use --kv-cache-dtype auto.")
    prefill = args.prefill_attention_backend or args.attention_backend
    decode = args.decode_attention_backend or ("triton" if args.attention_backend == "fa3" else args.attention_backend)
    reason, is_asked_for = "", prefill is not None
    if prefill is None:
        prefill, reason = _best_prefill(spec, device)
    if decode is None:
        decode = "triton" if device.type == "cuda" else "torch_native"
    for name, role in ((prefill, "prefill"), (decode, "decode")):
        obstacle = _obstacle(name, role, spec, device)
        if obstacle is not None:
            raise StartError(
                f"The attention backend {name} cannot serve {role} here: {obstacle}. Choose another one with"
                f" --{role}-attention-backend or --attention-backend."
            )
    return BackendChoice(prefill, decode, reason, is_asked_for)


def _check_fp8(capability: tuple[int, int]) -> None:
    """Raise StartError if the GPU is too old for fp8. This holds for every backend, because our own kernels store keys and values."""
    if capability < FIRST_WITH_FP8:
        raise StartError(
            f"--kv-cache-dtype fp8_e4m3 needs a GPU of compute capability 8.9 or more, but this one has"
            f" {capability[0]}.{capability[1]}: use --kv-cache-dtype auto."
        )


def make_backend(choice: BackendChoice, spec: AttentionSpec, device: torch.device) -> AttentionBackend:
    """Create the backend. May compile flashinfer's kernels, if the options name them and they are not compiled yet."""
    prefill = _make(choice.prefill, spec, device)
    if choice.decode == choice.prefill:
        return prefill
    return SplitBackend(prefill, _make(choice.decode, spec, device), shares_prompts=not choice.is_prefill_asked_for)


def _prompt_attention(spec: AttentionSpec, device: torch.device) -> PromptAttention | None:
    if device.type != "cpu" or spec.softcap is not None or spec.has_sinks:
        return None
    return PromptAttention.load(spec.dtype, spec.kv_dtype, spec.head_dim)


def _make(name: str, spec: AttentionSpec, device: torch.device) -> AttentionBackend:
    # Imported where they are used, because Triton and flashinfer are not installed on every host.
    if name == "torch_native":
        return TorchNativeBackend(_prompt_attention(spec, device)) if spec.latents is None else TorchLatentBackend()
    if name == "batch_invariant" and device.type != "cuda":
        return BatchInvariantBackend(BatchInvariantKernels.load())
    if name == "batch_invariant":
        from srt.kernels.build.triton_support import require_triton

        require_triton(device.type)
        from srt.layers.attention.invariant_triton_backend import InvariantTritonBackend

        return InvariantTritonBackend(spec, device)
    if name == "triton":
        from srt.kernels.build.triton_support import require_triton

        require_triton(device.type)
        from srt.layers.attention.triton_backend import TritonAttentionBackend
        from srt.layers.attention.triton_latent import TritonLatentBackend

        if spec.latents is not None:
            return TritonLatentBackend(spec, device)
        return TritonAttentionBackend(spec, device)
    from srt.layers.attention.flashinfer_backend import FlashInferBackend

    needs_other = name == "fa3" or spec.kv_dtype != spec.dtype
    return FlashInferBackend(spec, device, KERNELS[name], _make("triton", spec, device) if needs_other else None)


def _best_prefill(spec: AttentionSpec, device: torch.device) -> tuple[str, str]:
    """Return the fastest backend for prompts that needs no compiling, and the reason why no faster one serves."""
    if device.type != "cuda":
        return "torch_native", ""
    if spec.latents is not None:
        return "triton", ""
    obstacle = uncompiled = None
    for name in ("fa3", "flashinfer"):
        obstacle = _obstacle(name, "prefill", spec, device)
        if obstacle is None and are_kernels_compiled(KERNELS[name], spec):
            return name, f"prompts are served by {name}, because {uncompiled}" if uncompiled else ""
        if obstacle is None:
            uncompiled = uncompiled or (
                f"flashinfer's kernels of {name} for this model are not compiled"
                f" (install flashinfer-jit-cache, or let --prefill-attention-backend {name} compile them once)"
            )
    return "triton", f"prompts are served by triton, because {uncompiled or obstacle}"


def _obstacle(name: str, role: str, spec: AttentionSpec, device: torch.device) -> str | None:
    """Return why a backend cannot serve; None if it can."""
    if name == "torch_native":
        return None
    if name == "triton":
        is_large = spec.latents is None and spec.head_dim > 256
        return f"Triton's kernels hold heads of at most 256, not {spec.head_dim}" if is_large else None
    if spec.latents is not None:
        return "it does not read latents (MLA)"
    if spec.has_sinks:
        return "it does not know the sinks of this model's heads"
    if spec.softcap is not None:
        return "it does not cap the products of queries and keys, as this model does"
    if device.type != "cuda":
        return "it needs a CUDA device"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not {_name(spec.dtype)}"
    if spec.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"it has kernels for heads of 64, 128 and 256, not {spec.head_dim}"
    major = torch.cuda.get_device_capability(device)[0]
    if name == "fa3" and major != 9:
        return f"its kernels are for Hopper GPUs, and this one has compute capability {major}"
    if major < 8:
        return f"its kernels need compute capability 8.0, and this GPU has {major}"
    if role == "decode" and spec.kv_dtype != spec.dtype:
        return f"its decode kernels read a KV memory in the model's own type, not {_name(spec.kv_dtype)}"
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    return None


def are_kernels_compiled(kernels: str, spec: AttentionSpec) -> bool:
    """Return whether these kernels of flashinfer are compiled. Compiling them takes about a minute."""
    from flashinfer.jit import env
    from flashinfer.jit.attention import get_batch_prefill_uri

    return all(
        any((folder / uri / f"{uri}.so").exists() for folder in (env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR))
        for uri in (
            get_batch_prefill_uri(
                kernels,
                spec.dtype,
                spec.dtype,
                spec.dtype,
                torch.int32,
                spec.head_dim,
                spec.head_dim,
                0,
                window is not None,
                False,
                False,
            )
            for window in spec.windows
        )
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

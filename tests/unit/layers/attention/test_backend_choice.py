"""Which attention kernels serve: what was asked for, the quickest that can, or a sentence that names what cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from srt.layers.attention import backend_choice
from srt.layers.attention.attention_spec import AttentionSpec, LatentSizes
from srt.layers.attention.backend_choice import BackendChoice, choose_backends, make_backend
from srt.layers.attention.torch_latent import TorchLatentBackend
from srt.layers.attention.torch_native import TorchNativeBackend
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from tests.support.recorder import NamesPromptGraphs

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
QWEN3 = AttentionSpec(32, 8, 128, 128**-0.5, torch.bfloat16, torch.bfloat16, 16, 40_960, (None,))
FP8 = replace(QWEN3, kv_dtype=torch.float8_e4m3fn)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`host(capability, installed, compiled)`: a host with such a GPU and such a flashinfer."""

    def build(
        capability: tuple[int, int] = (9, 0), installed: bool = True, compiled: tuple[str, ...] = ("fa2", "fa3")
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(backend_choice, "find_spec", lambda name: object() if installed else None)
        monkeypatch.setattr(backend_choice, "are_kernels_compiled", lambda kernels, spec: kernels in compiled)

    return build


def choose(spec: AttentionSpec = QWEN3, device: torch.device = CUDA, **options: Any) -> tuple[str, str]:
    choice = choose_backends(ServerArgs(model_path="x", **options), spec, device)
    return choice.prefill, choice.decode


def test_a_cpu_serves_with_plain_pytorch() -> None:
    assert choose(device=CPU) == ("torch_native", "torch_native")
    assert isinstance(make_backend(BackendChoice("torch_native", "torch_native"), QWEN3, CPU), TorchNativeBackend)


def test_latents_are_read_by_pytorch_and_by_triton_only(host: Any) -> None:
    host()
    latents = replace(QWEN3, head_dim=192, num_kv_heads=1, latents=LatentSizes(512, 576, 128))
    assert choose(latents, CPU) == ("torch_native", "torch_native")
    assert choose(latents) == ("triton", "triton")
    assert isinstance(make_backend(BackendChoice("torch_native", "torch_native"), latents, CPU), TorchLatentBackend)
    with pytest.raises(StartError, match=r"fa3 cannot serve prefill here: it does not read latents"):
        choose(latents, attention_backend="fa3")


@pytest.mark.parametrize(
    ("facts", "spec", "expected"),
    [
        ({}, QWEN3, ("fa3", "triton")),
        ({}, FP8, ("fa3", "triton")),
        ({"capability": (8, 0)}, QWEN3, ("flashinfer", "triton")),
        ({"capability": (10, 0)}, QWEN3, ("flashinfer", "triton")),
        ({"compiled": ("fa2",)}, QWEN3, ("flashinfer", "triton")),
        ({"compiled": ()}, QWEN3, ("triton", "triton")),
        ({"installed": False}, QWEN3, ("triton", "triton")),
        ({}, replace(QWEN3, dtype=torch.float32, kv_dtype=torch.float32), ("triton", "triton")),
        ({}, replace(QWEN3, head_dim=96), ("triton", "triton")),
    ],
)
def test_the_default_is_the_quickest_that_can(
    facts: dict[str, Any], spec: AttentionSpec, expected: tuple[str, str], host: Any
) -> None:
    host(**facts)
    assert choose(spec) == expected


def test_a_default_that_is_not_the_best_says_why(host: Any) -> None:
    host(installed=False)
    assert "flashinfer-python is not installed" in choose_backends(ServerArgs(model_path="x"), QWEN3, CUDA).reason
    host(compiled=())
    reason = choose_backends(ServerArgs(model_path="x"), QWEN3, CUDA).reason
    assert reason.startswith("prompts are served by triton, because flashinfer's kernels of fa3 ")
    assert "flashinfer-jit-cache, or let --prefill-attention-backend fa3 compile" in reason
    host(compiled=("fa2",))
    reason = choose_backends(ServerArgs(model_path="x"), QWEN3, CUDA).reason
    assert reason.startswith("prompts are served by flashinfer, because flashinfer's kernels of fa3 ")
    host((8, 0))
    assert not choose_backends(ServerArgs(model_path="x"), QWEN3, CUDA).reason, "whose kernels fa3 are not for"
    host()
    assert not choose_backends(ServerArgs(model_path="x"), QWEN3, CUDA).reason


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"attention_backend": "triton"}, ("triton", "triton")),
        ({"attention_backend": "flashinfer"}, ("flashinfer", "flashinfer")),
        ({"attention_backend": "fa3"}, ("fa3", "triton")),
        ({"prefill_attention_backend": "triton"}, ("triton", "triton")),
        ({"decode_attention_backend": "flashinfer"}, ("fa3", "flashinfer")),
        ({"attention_backend": "triton", "prefill_attention_backend": "fa3"}, ("fa3", "triton")),
        ({"attention_backend": "fa3", "decode_attention_backend": "torch_native"}, ("fa3", "torch_native")),
    ],
)
def test_prefill_and_decode_are_chosen_apart(options: dict[str, Any], expected: tuple[str, str], host: Any) -> None:
    host()
    assert choose(**options) == expected


@pytest.mark.parametrize(
    ("facts", "spec", "options", "words"),
    [
        ({}, replace(QWEN3, dtype=torch.float32), {"attention_backend": "fa3"}, "bfloat16 and float16, not float32"),
        ({}, replace(QWEN3, head_dim=80), {"attention_backend": "flashinfer"}, "not 80"),
        ({}, replace(QWEN3, head_dim=512), {"attention_backend": "triton"}, "at most 256, not 512"),
        ({}, FP8, {"decode_attention_backend": "flashinfer"}, "not float8_e4m3fn"),
        ({"capability": (8, 6)}, QWEN3, {"attention_backend": "fa3"}, "Hopper"),
        ({}, replace(QWEN3, softcap=50.0), {"attention_backend": "fa3"}, "does not cap"),
        ({}, replace(QWEN3, has_sinks=True), {"attention_backend": "fa3"}, "does not know the sinks"),
        ({"installed": False}, QWEN3, {"attention_backend": "flashinfer"}, "flashinfer-python is not installed"),
    ],
)
def test_what_cannot_serve_is_refused_by_name(
    facts: dict[str, Any], spec: AttentionSpec, options: dict[str, Any], words: str, host: Any
) -> None:
    host(**facts)
    with pytest.raises(StartError, match=words) as caught:
        choose(spec, **options)
    assert str(caught.value).startswith(f"The attention backend {next(iter(options.values()))} cannot serve ")


@pytest.mark.parametrize("options", [{}, *({"attention_backend": n} for n in ("triton", "fa3", "torch_native"))])
def test_a_memory_of_fp8_is_refused_by_name_where_the_gpu_lacks_the_type(options: dict[str, Any], host: Any) -> None:
    for capability in ((8, 0), (8, 6)):
        host(capability)
        with pytest.raises(StartError, match=rf"^--kv-cache-dtype fp8_e4m3 needs .* has 8\.{capability[1]}:"):
            choose(FP8, **options)
    host((8, 9))
    assert choose(FP8) == ("flashinfer", "triton")


def test_flashinfer_on_a_cpu_is_refused() -> None:
    with pytest.raises(StartError, match="needs a CUDA device"):
        choose(device=CPU, attention_backend="flashinfer")


def test_captured_prompts_are_left_to_the_decodes_backend_unless_theirs_was_asked_for(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str, spec: AttentionSpec, device: torch.device) -> TorchNativeBackend:
        return NamesPromptGraphs() if name == "triton" else TorchNativeBackend()

    host()
    monkeypatch.setattr(backend_choice, "_make", make)
    asked: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"decode_attention_backend": "triton"}, False),
        ({"prefill_attention_backend": "fa3"}, True),
        ({"attention_backend": "fa3"}, True),
    ]
    for options, is_asked_for in asked:
        choice = choose_backends(ServerArgs(model_path="x", **options), QWEN3, CUDA)
        assert (make_backend(choice, QWEN3, CUDA).prompt_graphs is None) == is_asked_for
    only_decodes = choose_backends(ServerArgs(model_path="x", decode_attention_backend="flashinfer"), QWEN3, CUDA)
    assert make_backend(only_decodes, QWEN3, CUDA).prompt_graphs is None

"""What is refused before any process is started."""

from __future__ import annotations

import json
import resource
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from srt.entrypoints.weight_saving import complete_folder
from srt.managers.supervisor import preflight
from srt.managers.supervisor.preflight import (
    ServerPlan,
    check_and_listen,
    check_model,
    check_surroundings,
    listen,
    with_adapters,
    with_draft_model,
)
from srt.server_args import ServerArgs
from srt.utils import checkpoint as checkpoint_files
from srt.utils.checkpoint import estimate_weight_bytes
from srt.utils.errors import StartError
from srt.utils.gpus import GpuMemory
from srt.utils.host import is_loopback
from srt.utils.lora_options import GPU_LORA_RANK
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from srt.utils.sharded_state import ShardedIndex
from tests.support.checkpoints import CheckpointFactory
from tests.support.eagle3_heads import make_head
from tests.support.random_adapter import AdapterSpec, write_adapter


def args_for(folder: Path) -> ServerArgs:
    return ServerArgs(model_path=str(folder), port=0, device="cpu")


def test_port_0_becomes_the_port_that_was_taken(qwen3_checkpoint: Path) -> None:
    plan = check_and_listen(args_for(qwen3_checkpoint), http=True)
    assert plan.listener is not None
    with plan.listener:
        assert plan.args.port == plan.listener.getsockname()[1] > 0
        assert plan.url == f"http://127.0.0.1:{plan.args.port}"
        assert plan.num_http_frontends == 1
        assert plan.model_folder == qwen3_checkpoint


def test_without_http_no_port_is_taken(qwen3_checkpoint: Path) -> None:
    plan = check_and_listen(args_for(qwen3_checkpoint), http=False)
    assert plan.listener is None
    assert plan.url is None
    assert plan.num_http_frontends == 0


def test_a_refused_model_gives_the_port_back(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(StartError, match=r"has no config\.json"):
        check_and_listen(replace(args_for(tmp_path), port=port), http=True)
    listen("127.0.0.1", port).close()


def test_weights_that_do_not_fit_are_refused_with_the_figures(
    qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_memory_bytes", lambda: 1000)
    with pytest.raises(StartError, match=r"GB as float32, and 0\.0 GB of memory are available"):
        preflight.check_model(args_for(qwen3_checkpoint))
    # Random ones are not read, so there is nothing to be measured.
    preflight.check_model(replace(args_for(qwen3_checkpoint), load_format="dummy"))


def test_layers_that_cannot_be_compiled_are_refused(checkpoint: CheckpointFactory) -> None:
    args = replace(args_for(checkpoint("gemma2")), enable_torch_compile=True)
    with pytest.raises(StartError, match=r"--enable-torch-compile cannot compile the layers of Gemma2ForCausalLM"):
        preflight.check_model(args)
    preflight.check_model(replace(args, model_path=str(checkpoint("qwen3"))))


def test_ranks_that_do_not_divide_the_heads_are_refused(qwen3_checkpoint: Path) -> None:
    with pytest.raises(StartError, match="--tp 3 does not divide"):
        preflight.check_model(replace(args_for(qwen3_checkpoint), tp_size=3))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0),
        ("top_k", 50.5),
        ("top_k", -2),
        ("min_p", 1.5),
        ("temperature", -0.5),
        ("repetition_penalty", 2.5),
    ],
)
def test_a_sampling_default_that_no_request_may_ask_for_is_refused_with_the_way_out(
    name: str, value: float, checkpoint: CheckpointFactory
) -> None:
    args = args_for(checkpoint("qwen3", generation_config={"do_sample": True, name: value}))
    with pytest.raises(
        ModelError, match=rf"^generation_config\.json: {name} must be .* not .*\. Use --sampling-defaults openai "
    ):
        preflight.check_model(args)
    preflight.check_model(replace(args, sampling_defaults="openai"))


def test_sampling_defaults_that_requests_may_ask_for_are_let_through(checkpoint: CheckpointFactory) -> None:
    generation = {"do_sample": True, "temperature": 0.0, "top_k": 50.0, "top_p": 1, "min_p": 0, "repetition_penalty": 2}
    preflight.check_model(args_for(checkpoint("qwen3", generation_config=generation)))


def with_head(folder: Path, target: Path, head: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a tied checkpoint with an output layer, made of its embedding, in a file of its own."""
    shutil.copytree(folder, target)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    (target / "model.safetensors").rename(target / "model-1.safetensors")
    save_file({"lm_head.weight": head(embedding)}, target / "model-2.safetensors")
    return target


def change_last(embedding: torch.Tensor) -> torch.Tensor:
    head = embedding.clone()
    head[-1, -1] += 1
    return head


@pytest.mark.parametrize("head", [change_last, torch.Tensor.bfloat16, lambda embedding: embedding[:-1].clone()])
def test_a_head_that_is_no_copy_of_the_embedding_is_refused_where_the_configuration_ties_them(
    head: Callable[[torch.Tensor], torch.Tensor],
    qwen3_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint_files, "COMPARED_BYTES", 1000)
    args = args_for(with_head(qwen3_checkpoint, tmp_path / "untied", head))
    with pytest.raises(ModelError, match=r"tie_word_embeddings in config\.json") as caught:
        preflight.check_model(args)
    override = json.dumps({"tie_word_embeddings": False})
    assert f"--json-model-override-args '{override}'" in str(caught.value)
    preflight.check_model(replace(args, json_model_override_args=override))
    preflight.check_model(replace(args, load_format="dummy"))


def test_a_head_that_is_a_copy_of_the_embedding_is_passed_over(
    qwen3_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "COMPARED_BYTES", 1000)
    preflight.check_model(args_for(with_head(qwen3_checkpoint, tmp_path / "tied", torch.Tensor.clone)))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("host.example", "http://host.example:8000"),
    ],
)
def test_the_url_is_one_that_can_be_opened(host: str, url: str) -> None:
    with socket.socket() as listener:
        assert ServerPlan(ServerArgs(host=host, port=8000), Path("/m"), listener).url == url


def test_a_host_that_is_none_is_refused() -> None:
    with pytest.raises(StartError, match="--host"):
        listen("no.such.host.invalid", 0)


def test_loopback_is_told_from_the_rest() -> None:
    assert [host for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost") if not is_loopback(host)] == []
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "host.example")))


def test_an_address_of_another_machine_is_refused_as_such() -> None:
    with pytest.raises(StartError, match=r"^--host 192\.0\.2\.1 is not an address of this machine\.$"):
        listen("192.0.2.1", 0)


def test_too_few_open_files_are_refused_with_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (20, 20))
    with pytest.raises(StartError, match=r"Only 20 files may be open at once"):
        check_surroundings()


def test_a_deleted_current_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StartError, match="The current folder cannot be used"):
        check_surroundings()
    monkeypatch.undo()


def test_a_share_of_the_gpu_is_refused_on_a_cpu(qwen3_checkpoint: Path) -> None:
    with pytest.raises(StartError, match=r"--mem-fraction-static .* --max-total-tokens"):
        check_and_listen(replace(args_for(qwen3_checkpoint), mem_fraction_static=0.5), http=False)


@pytest.mark.parametrize(("gigabytes", "chunk"), [(16, 2048), (24, 4096), (80, 8192), (141, 8192), (192, 16384)])
def test_a_larger_gpu_takes_more_prompt_tokens_in_a_step(
    gigabytes: int, chunk: int, qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "gpu_memory", lambda index: GpuMemory(gigabytes * 10**9, 10**9))
    args = replace(args_for(qwen3_checkpoint), device="cuda")
    assert check_and_listen(args, http=False).args.prefill_chunk == chunk
    told = replace(args, chunked_prefill_size=100)
    assert check_and_listen(told, http=False).args.prefill_chunk == 100


def test_a_cpu_and_a_silent_driver_keep_the_small_chunk(
    qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "gpu_memory", lambda index: None)
    for device in ("cpu", "cuda"):
        args = replace(args_for(qwen3_checkpoint), device=device)
        assert check_and_listen(args, http=False).args.prefill_chunk == 2048


def test_prompts_may_stall_streams_for_longer_on_a_cpu(qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpu_memory", lambda index: None)
    for device, stall in (("cpu", 300.0), ("cuda", 30.0)):
        args = replace(args_for(qwen3_checkpoint), device=device)
        assert check_and_listen(args, http=False).args.decode_stall == stall
        assert check_and_listen(replace(args, max_decode_stall=0.0), http=False).args.decode_stall == 0.0


def test_weights_larger_than_a_gpu_are_refused_before_anything_starts(
    qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "gpu_memory", lambda index: GpuMemory(100_000, 100_000))
    with pytest.raises(StartError, match=r"^The weights take .* GB on each of 1 GPUs as float32, and one has 0\.0 GB"):
        check_and_listen(replace(args_for(qwen3_checkpoint), device="cuda"), http=False)


def test_attention_groups_need_room_for_attention_weights_in_each(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("qwen3_moe")
    whole, twice = (estimate_weight_bytes(folder, "float32", num_groups=groups) for groups in (1, 2))
    monkeypatch.setattr(preflight, "gpu_memory", lambda index: GpuMemory(whole // 2 + 1, whole // 2 + 1))
    args = replace(args_for(folder), device="cuda", tp_size=2)
    preflight.check_model(args)
    groups = replace(args, dp_size=2, enable_dp_attention=True)
    with pytest.raises(StartError, match=r"^The weights take .* GB on each of 2 GPUs as float32"):
        preflight.check_model(groups)
    monkeypatch.setattr(preflight, "gpu_memory", lambda index: GpuMemory(twice // 2 + 1, twice // 2 + 1))
    preflight.check_model(groups)


def test_a_drafting_model_that_does_not_fit_is_refused(
    qwen3_checkpoint: Path, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    short = shutil.copytree(qwen3_checkpoint, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    for draft, reason in ((checkpoint("qwen3", vocab_size=511), "a vocabulary of 511"), (short, "--context-length 16")):
        args = args_for(qwen3_checkpoint)
        args = replace(args, speculative_algorithm="STANDALONE", speculative_draft_model_path=str(draft))
        with pytest.raises(StartError, match=reason):
            check_and_listen(args, http=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"layer_types": ["sliding_attention", "sliding_attention"]},
        {"layer_types": ["full_attention", "full_attention"], "accepted": True},
    ],
)
def test_a_drafting_model_with_windows_is_refused(
    qwen3_checkpoint: Path, checkpoint: CheckpointFactory, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Its pages have the numbers of the model's first group, which a window's pages do not."""
    is_accepted = changes.pop("accepted", False)
    draft = shutil.copytree(checkpoint("gemma3_text"), tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, **changes}))
    args = args_for(checkpoint("gemma3_text"))
    args = replace(args, speculative_algorithm="STANDALONE", speculative_draft_model_path=str(draft))
    if is_accepted:
        assert check_and_listen(args, http=False).args.speculative_draft_model_path == str(draft)
        return
    with pytest.raises(StartError, match="has layers with a window: choose a model whose layers all see every token"):
        check_and_listen(args, http=False)


def test_a_head_that_does_not_fit_is_refused(
    qwen3_checkpoint: Path, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    head = make_head(qwen3_checkpoint, tmp_path / "head")
    for model, given, reason in (
        (qwen3_checkpoint, {"speculative_draft_model_path": str(qwen3_checkpoint)}, "is no EAGLE-3 head"),
        (checkpoint("qwen3", hidden_size=128), {}, "and the model's have 128: choose the head of this model"),
        (checkpoint("granite"), {}, "does not support GraniteForCausalLM, which scales"),
        (qwen3_checkpoint, {"enable_torch_compile": True}, "does not support --enable-torch-compile"),
    ):
        options: dict[str, Any] = {"speculative_draft_model_path": str(head), **given}
        args = replace(args_for(model), speculative_algorithm="EAGLE3", **options)
        with pytest.raises((StartError, ModelError), match=reason):
            check_and_listen(args, http=False)
    plan = check_and_listen(
        replace(args_for(qwen3_checkpoint), speculative_algorithm="EAGLE3", speculative_draft_model_path=str(head)),
        http=False,
    )
    assert plan.args.num_drafts == 3


def test_drafts_are_refused_on_a_gpu_where_they_were_not_seen_right(
    qwen3_checkpoint: Path, checkpoint: CheckpointFactory
) -> None:
    def options_of(folder: Path, **options: Any) -> ServerArgs:
        return replace(args_for(folder), device="cuda", speculative_algorithm="NGRAM", **options)

    for reason, options in (
        ("the attention backend flashinfer for decodes", {"attention_backend": "flashinfer"}),
        ("--enable-torch-compile", {"enable_torch_compile": True}),
    ):
        with pytest.raises(StartError, match=f"--speculative-algorithm NGRAM does not support {reason} on a GPU"):
            check_model(options_of(qwen3_checkpoint, **options))
    check_model(options_of(qwen3_checkpoint, kv_cache_dtype="fp8_e4m3"))
    check_model(options_of(qwen3_checkpoint, quantization="fp8"))
    check_model(options_of(qwen3_checkpoint, tp_size=2))
    for family, reason in (
        ("gemma3_text", "layers with a window"),
        ("qwen3_moe", "layers of experts"),
        ("deepseek_v3", "layers of latent attention"),
    ):
        folder = checkpoint(family)
        check_model(options_of(folder))
        drafting: dict[str, Any] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
        with pytest.raises(StartError, match=f"{reason} cannot draft on a GPU"):
            with_draft_model(replace(args_for(folder), device="cuda", **drafting), folder)


def test_drafts_are_refused_beside_memory_that_is_released(qwen3_checkpoint: Path) -> None:
    args = replace(args_for(qwen3_checkpoint), speculative_algorithm="NGRAM", enable_memory_saver=True)
    with pytest.raises(StartError, match="--enable-memory-saver does not support --speculative-algorithm"):
        check_model(args)


def test_groups_of_experts_are_refused_without_experts(
    qwen3_checkpoint: Path, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    args = replace(args_for(checkpoint("qwen3_moe")), tp_size=2, ep_size=2)
    check_model(args)
    check_model(replace(args, device="cuda"))
    with pytest.raises(StartError, match="--ep-size 2 divides the experts of a model, but our layers of this one have"):
        check_model(replace(args, model_path=str(qwen3_checkpoint)))
    draft = Path(shutil.copytree(args.model_path, tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"num_experts": 9}))
    drafting = replace(args, speculative_algorithm="STANDALONE", speculative_draft_model_path=str(draft))
    with pytest.raises(ModelError, match="--ep-size 2 does not divide the model's 9 experts"):
        with_draft_model(drafting, Path(args.model_path))


def test_attention_groups_are_refused_without_experts(qwen3_checkpoint: Path, checkpoint: CheckpointFactory) -> None:
    args = replace(args_for(checkpoint("qwen3_moe")), tp_size=8, dp_size=2, enable_dp_attention=True)
    with pytest.raises(ModelError, match="--tp 16 does not divide the model's intermediate size, 40"):
        check_model(replace(args, tp_size=16, dp_size=8))
    check_model(args)
    check_model(replace(args, device="cuda"))
    with pytest.raises(StartError, match="--enable-dp-attention divides the experts of a model, but our layers of"):
        check_model(replace(args, model_path=str(qwen3_checkpoint)))


def test_scales_without_an_fp8_memory_or_for_another_model_are_refused(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text('{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 1.0}}}}')
    args = replace(args_for(qwen3_checkpoint), quantization_param_path=str(path))
    with pytest.raises(StartError, match="use it with --kv-cache-dtype fp8_e4m3"):
        preflight.check_model(args)
    with pytest.raises(StartError, match="factors for 1 layers of rank 0, but the model has"):
        preflight.check_model(replace(args, kv_cache_dtype="fp8_e4m3"))


def test_models_that_cannot_be_divided_into_stages_are_refused(qwen3_checkpoint: Path) -> None:
    def args(**options: Any) -> ServerArgs:
        return ServerArgs(model_path=str(qwen3_checkpoint), **{"device": "cpu", "pp_size": 2, **options})

    assert check_model(args()) == qwen3_checkpoint.resolve()
    for options, sentence in (
        ({"pp_size": 99}, "--pp-size 99 is more than the 2 layers of the model"),
        ({"device": "cuda", "chunked_prefill_size": -1}, "--pp-size 2 on GPUs needs memory for the largest step"),
        ({"model_impl": "transformers"}, "--pp-size 2 needs layers of ours"),
        ({"is_embedding": True}, "--pp-size 2 serves models that generate text"),
    ):
        with pytest.raises(StartError, match=f"^{sentence}"):
            check_model(args(**options))


def test_the_largest_rank_of_adapters_is_known_at_the_start_on_a_gpu(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    """Their memory is allocated then; on a CPU each takes what it needs."""
    write_adapter(tmp_path / "red", qwen3_checkpoint, AdapterSpec(ranks={"k_proj": 6}))
    args = ServerArgs(model_path="m", device="cuda", enable_lora=True)
    paths = (f"red={tmp_path / 'red'}",)
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({}, GPU_LORA_RANK),
        ({"lora_paths": paths}, 6),
        ({"lora_paths": paths, "max_lora_rank": 32}, 32),
        ({"lora_paths": paths, "device": "cpu"}, None),
    ]
    for options, expected in cases:
        assert with_adapters(replace(args, **options), qwen3_checkpoint).max_lora_rank == expected
    with pytest.raises(StartError, match="--enable-lora on GPUs serves models on one each"):
        with_adapters(replace(args, tp_size=2), qwen3_checkpoint)


def saved_by_rank(source: Path, folder: Path) -> ServerArgs:
    """The options of a server of two ranks, as which the folder was saved."""
    args = replace(args_for(folder), tp_size=2, load_format="sharded_state")
    folder.mkdir()
    complete_folder(source, folder, ShardedIndex.of(args, ModelConfig.served_from(source, args)))
    for rank in range(2):
        save_file({"weight": torch.zeros(4)}, folder / f"model-rank-{rank}-part-0.safetensors")
    return args


def test_weights_saved_by_rank_are_found_to_fit(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    args = saved_by_rank(qwen3_checkpoint, tmp_path / "saved")
    assert preflight.check_model(args) == tmp_path / "saved"
    preflight.check_model(replace(args, context_length=64, dp_size=2))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"load_format": "auto"}, r"are saved by rank: load them with --load-format sharded_state"),
        ({"tp_size": 1}, r"were saved with --tp 2, not 1"),
        ({"dtype": "bfloat16"}, r"were saved with --dtype float32, not bfloat16"),
        ({"quantization": "int8"}, r"were saved with --quantization none, not int8"),
        ({"json_model_override_args": '{"rms_norm_eps": 0.1}'}, r"were saved of another model"),
        ({"model_impl": "transformers"}, r"for layers of ours only"),
        ({"device": None}, r"works on a CPU only"),
        ({"kv_cache_dtype": "fp8_e4m3"}, r"has no scales of keys and values"),
        ({"speculative_algorithm": "NEXTN"}, r"has no layer for NEXTN"),
    ],
)
def test_a_mismatch_with_saved_weights_is_refused(
    options: dict[str, Any], sentence: str, qwen3_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = saved_by_rank(qwen3_checkpoint, tmp_path / "saved")
    monkeypatch.setattr(preflight, "runs_on_cpu", lambda args: args.device == "cpu")
    monkeypatch.setattr(preflight, "served_mtp", lambda config: None)
    with pytest.raises(StartError, match=sentence):
        preflight.check_model(replace(args, **options))


def test_a_folder_that_is_not_completely_saved_is_refused(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    args = saved_by_rank(qwen3_checkpoint, tmp_path / "saved")
    with pytest.raises(StartError, match=r"has no sharded_state\.json"):
        preflight.check_model(replace(args, model_path=str(qwen3_checkpoint)))
    (tmp_path / "saved" / "model-rank-1-part-0.safetensors").unlink()
    with pytest.raises(StartError, match=r"lacks model-rank-1-part-0\.safetensors"):
        preflight.check_model(args)
    index = tmp_path / "saved" / "sharded_state.json"
    for text, sentence in (
        ("{}", "is not an index"),
        ("[]", "is not an index"),
        ('{"format_version": 2}', "is of version 2 of the format"),
    ):
        index.write_text(text)
        with pytest.raises(StartError, match=sentence):
            preflight.check_model(args)

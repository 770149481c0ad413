"""ModelConfig: what it reads from old and new files, and what it refuses in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from srt.utils.families.registry import FAMILIES
from srt.utils.layer_spec import Experts, FeedForward, LayerSpec, NormSpec, SelfAttention
from srt.utils.model_config import READ_KEYS, ModelConfig, ModelError
from srt.utils.rope_config import RopeConfig

BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 500,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "dtype": "bfloat16",
    "eos_token_id": 7,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def write(folder: Path, changes: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> Path:
    """A folder with BASE and the changes; a change to ... removes the key."""
    config = {key: value for key, value in {**BASE, **(changes or {})}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def read(folder: Path, changes: dict[str, Any] | None = None, **more: Any) -> ModelConfig:
    return ModelConfig.from_folder(write(folder, changes), **more)


def rope_of(config: ModelConfig) -> RopeConfig:
    rope = config.layers[0].attention.rope
    assert rope is not None
    return rope


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(layer.attention.window for layer in config.layers)


def refusal(folder: Path, changes: dict[str, Any] | None = None, **more: Any) -> str:
    """The sentence."""
    with pytest.raises(ModelError) as caught:
        read(folder, changes, **more)
    return str(caught.value)


def test_a_config_is_read_whole(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.architecture, config.num_layers) == ("Qwen3ForCausalLM", 3)
    attention = SelfAttention(8, 4, 16, 0.25, RopeConfig("default", 1e6), norms="head")
    assert config.layers == (LayerSpec(attention, FeedForward(96), fast_paths=("fused", "compiled", "resident")),) * 3
    assert (config.torch_dtype, config.context_length, config.eos_token_ids) == ("bfloat16", 4096, (7,))


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    absent = dict.fromkeys(("num_key_value_heads", "head_dim", "rope_parameters", "dtype", "eos_token_id"), ...)
    config = read(tmp_path, absent)
    attention = config.layers[0].attention
    assert (attention.num_kv_heads, attention.head_dim) == (8, 128)
    assert attention.rope == RopeConfig("default", 10000.0)
    assert (config.torch_dtype, config.eos_token_ids, config.norm.eps) == ("float32", (), 1e-6)
    assert not config.tie_word_embeddings
    assert read(tmp_path, {**absent, "architectures": ["LlamaForCausalLM"]}).layers[0].attention.head_dim == 8


def test_the_old_and_the_new_style_read_alike(tmp_path: Path) -> None:
    new = read(tmp_path, {"rope_parameters": {**YARN, "rope_theta": 5e5}})
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    old = {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": scaling, "dtype": ..., "torch_dtype": "bfloat16"}
    assert read(tmp_path, old) == new
    assert read(tmp_path, {**old, "torch_dtype": "torch.bfloat16"}) == new


def test_generation_config_names_the_ends_and_the_sampling(tmp_path: Path) -> None:
    generation = {
        "do_sample": True,
        "eos_token_id": [5, 9, 5],
        "temperature": 0.6,
        "top_k": 0,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
    }
    config = ModelConfig.from_folder(write(tmp_path, generation=generation))
    assert config.eos_token_ids == (5, 9)
    assert config.sampling_defaults == {"temperature": 0.6, "top_k": -1, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.mark.parametrize(("stated", "top_k"), [(50, 50), (50.0, 50), (0.0, -1), (-1, -1)])
def test_a_whole_top_k_is_an_integer_however_it_is_written(stated: float, top_k: int, tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path, generation={"do_sample": True, "top_k": stated}))
    assert config.sampling_defaults == {"top_k": top_k}
    assert type(config.sampling_defaults["top_k"]) is int


def test_without_do_sample_only_the_penalty_is_a_default(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    config = ModelConfig.from_folder(write(tmp_path, generation=generation))
    assert config.sampling_defaults == {"repetition_penalty": 1.1}
    assert config.eos_token_ids == (7,)


def test_overrides_are_laid_over_the_file(tmp_path: Path) -> None:
    config = read(tmp_path, overrides={"num_hidden_layers": 1, "torch_dtype": "float16"})
    assert (config.num_layers, config.torch_dtype) == (1, "float16")
    assert "no_such_key" in refusal(tmp_path, overrides={"no_such_key": 1})
    assert "num_hidden_layers" in refusal(tmp_path, overrides={"num_hidden_layers": 0})


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "stated",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": ..., "rope_theta": 5e5},
        {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_an_overriding_scaling_keeps_the_theta_of_the_file(name: str, stated: dict[str, Any], tmp_path: Path) -> None:
    rope = rope_of(read(tmp_path, stated, overrides={name: YARN}))
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 5e5, 4.0)
    assert rope_of(read(tmp_path, stated, overrides={name: {**YARN, "rope_theta": 7.5}})).theta == 7.5
    assert rope_of(read(tmp_path, stated, overrides={name: None})) == RopeConfig("default", 5e5)
    assert rope_of(read(tmp_path, stated, overrides={"rope_theta": 8.5})).theta == 8.5


def test_the_context_is_what_the_model_states_unless_asked_for_less(tmp_path: Path) -> None:
    assert read(tmp_path, context_length=100).context_length == 100
    assert "--context-length 4097" in refusal(tmp_path, context_length=4097)
    assert "--context-length" in refusal(tmp_path, context_length=0)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({**YARN, "rope_theta": 1e6}, 8192),
        ({"rope_type": "linear", "factor": 3.0}, 12288),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            8192,
        ),
    ],
)
def test_a_longer_context_is_allowed_where_the_rope_was_made_for_it(
    rope: dict[str, Any], limit: int, tmp_path: Path
) -> None:
    changes = {"rope_parameters": rope}
    assert read(tmp_path, changes).context_length == 4096
    assert read(tmp_path, changes, context_length=limit).context_length == limit
    assert str(limit) in refusal(tmp_path, changes, context_length=limit + 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": []}, ["architectures"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["quantization_config", "bitsandbytes", "gptq"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "1 layers of 3"]),
        ({"layer_types": ["linear_attention"]}, ["linear_attention"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic", "batch"]),
        ({"rope_scaling": {"type": "longrope"}}, ["longrope"]),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, ["mrope"]),
        ({"rope_parameters": {"rope_type": "new-thing"}}, ["new-thing", "llama3"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["by layer type"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, ["rope_theta"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"hidden_size": ...}, ["hidden_size"]),
        ({"vocab_size": "many"}, ["vocab_size", "many"]),
        ({"num_key_value_heads": 3}, ["8 query heads", "3 KV heads"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    sentence = refusal(tmp_path, changes)
    for word in words:
        assert word in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


KV_SCHEME: dict[str, Any] = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
KV_ONLY: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {**KV_SCHEME, "group_size": None, "observer": "minmax"},
    "format": "dense",
    "ignore": [],
    "quantization_status": "compressed",
    "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
    "transform_config": {},
}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
INT4: dict[str, Any] = {
    "targets": ["Linear"],
    "format": "pack-quantized",
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
}


INT8: dict[str, Any] = {
    "targets": ["Linear"],
    "format": "int-quantized",
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
}
STATIC_INT8 = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}


def test_a_layer_has_the_format_of_its_group_unless_it_is_ignored(tmp_path: Path) -> None:
    eight = {**INT4, "targets": ["re:.*down_proj"], "weights": {**INT4["weights"], "num_bits": 8}}
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": INT4, "group_1": eight},
        "ignore": ["lm_head", "re:.*layers.0.*", "model.layers.1.mlp.down_proj"],
    }
    config = read(tmp_path, {"quantization_config": quantization})
    bits = {
        name: None if form is None else form.num_bits
        for name in ("0.mlp.up_proj", "1.mlp.up_proj", "1.mlp.down_proj", "2.mlp.down_proj")
        for form in [config.weight_formats.format_of(f"model.layers.{name}")]
    }
    assert bits == {"0.mlp.up_proj": None, "1.mlp.up_proj": 4, "1.mlp.down_proj": None, "2.mlp.down_proj": 8}
    assert config.fast_paths == {"fused", "resident"}, "compiled code reads plain matrices"


def test_the_option_must_name_what_the_checkpoint_is(tmp_path: Path) -> None:
    folder = write(tmp_path, {"quantization_config": GPTQ})
    assert ModelConfig.from_folder(folder, quantization="gptq") == ModelConfig.from_folder(folder)
    with pytest.raises(ModelError, match="--quantization awq: the checkpoint is quantised with gptq"):
        ModelConfig.from_folder(folder, quantization="awq")
    plain = write(tmp_path, {})
    with pytest.raises(ModelError, match="--quantization gptq: the checkpoint is not quantised"):
        ModelConfig.from_folder(plain, quantization="gptq")


@pytest.mark.parametrize("listed", [5, True, "mlp", [[1]], [["mlp", None]]])
def test_layers_to_quantise_that_are_no_names_are_refused(listed: Any, tmp_path: Path) -> None:
    quantization = {"quantization_config": {**GPTQ, "modules_in_block_to_quantize": listed}}
    assert "modules_in_block_to_quantize must be a list of names" in refusal(tmp_path, quantization)


def test_a_quantization_of_keys_and_values_alone_is_let_through(tmp_path: Path) -> None:
    plain = read(tmp_path)
    assert read(tmp_path, {"quantization_config": KV_ONLY}) == plain
    least = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}}
    assert read(tmp_path, {"quantization_config": least}) == plain


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "hqq"}, "quantization_config 'hqq'"),
        ({"config_groups": {"group_0": {"targets": ["Linear"]}}}, "config_groups"),
        ({"config_groups": {"group_0": INT4 | {"format": "nvfp4-pack-quantized"}}}, "'nvfp4-pack-quantized'"),
        ({"config_groups": {"group_0": INT4 | {"format": "int-quantized"}}}, "num_bits 4 in"),
        (
            {"config_groups": {"group_0": INT8 | {"weights": {**INT8["weights"], "symmetric": False}}}},
            "symmetric False in",
        ),
        (
            {"config_groups": {"group_0": INT8 | {"input_activations": STATIC_INT8}}},
            "with 8-bit integers, only strategy",
        ),
        ({"config_groups": {"group_0": INT4 | {"input_activations": {"num_bits": 8}}}}, "input_activations"),
        ({"ignore": ["re:("], "config_groups": {"group_0": INT4}}, "'re:(' in"),
        ({"ignore": ["re:a{99999999999}"], "config_groups": {"group_0": INT4}}, "'re:a{99999999999}' in"),
        ({"ignore": ["re:" + "(" * 3000], "config_groups": {"group_0": INT4}}, "((((... in"),
        ({**GPTQ, "bits": 3}, "bits 3 in"),
        ({**GPTQ, "group_size": 16}, "group_size 16 in"),
        ({**GPTQ, "lm_head": True}, "lm_head True in"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic {'+:.*down.*'"),
        ({**GPTQ, "quant_method": "awq", "version": "gemv"}, "version 'gemv' in"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "weight_block_size [64, 128] in"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' in"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"kv_cache_scheme": None}, "type None in kv_cache_scheme"),
        ({"kv_cache_scheme": {**KV_SCHEME, "num_bits": 4}}, "num_bits 4 in kv_cache_scheme"),
        ({"kv_cache_scheme": {**KV_SCHEME, "type": "int"}}, "type 'int' in kv_cache_scheme"),
        ({"kv_cache_scheme": {**KV_SCHEME, "strategy": "attn_head"}}, "strategy 'attn_head' in kv_cache_scheme"),
        ({"kv_cache_scheme": {**KV_SCHEME, "dynamic": True}}, "dynamic True in kv_cache_scheme"),
        ({"kv_cache_scheme": {**KV_SCHEME, "symmetric": False}}, "symmetric False in kv_cache_scheme"),
    ],
)
def test_any_other_quantization_is_refused_with_the_part_that_is_not_read(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    sentence = refusal(tmp_path, {"quantization_config": {**KV_ONLY, **changes}})
    assert words in sentence
    assert "quantization_config" in sentence


@pytest.mark.parametrize(
    ("architecture", "quantization", "option", "words"),
    [
        (
            "Qwen3MoeForCausalLM",
            {"quant_method": "mxfp4"},
            None,
            "'mxfp4' is supported for the experts of gpt-oss only",
        ),
        ("Qwen3ForCausalLM", {"quant_method": "mxfp4"}, None, "'mxfp4' is supported for the experts of gpt-oss only"),
        ("GptOssForCausalLM", GPTQ, None, "experts of gpt-oss are not supported in gptq"),
        ("GptOssForCausalLM", None, "fp8", "experts of gpt-oss are not supported in fp8"),
        ("GraniteMoeForCausalLM", {"quant_method": "fp8"}, "fp8", "one tensor for all are not supported in fp8"),
    ],
)
def test_experts_in_a_format_that_their_model_has_not_are_refused(
    architecture: str, quantization: dict[str, Any] | None, option: str | None, words: str, tmp_path: Path
) -> None:
    experts = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    changes = {"architectures": [architecture], "quantization_config": quantization, **experts}
    assert words in refusal(tmp_path, changes, quantization=option)


QWEN_SLIDES = {"use_sliding_window": True, "sliding_window": 128}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, (1024, 1024, 1024)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None, None)),
        ({**QWEN_SLIDES, "max_window_layers": 1}, (None, 128, 128)),
        ({**QWEN_SLIDES, "max_window_layers": 3}, (None, None, None)),
        ({**QWEN_SLIDES, "use_sliding_window": False}, (None, None, None)),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 64},
            (None, 64, None),
        ),
        ({"architectures": ["LlamaForCausalLM"], **QWEN_SLIDES, "max_window_layers": 0}, (None, None, None)),
        (
            {"architectures": ["LlamaForCausalLM"], "layer_types": ["sliding_attention"] * 3, "sliding_window": 64},
            (None, None, None),
        ),
    ],
)
def test_windows_are_those_of_transformers(
    changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert windows_of(read(tmp_path, changes)) == windows


def test_a_layer_has_the_fast_paths_that_its_kernels_support(tmp_path: Path) -> None:
    slides = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 64}
    config = read(tmp_path, slides)
    assert [layer.fast_paths for layer in config.layers] == [
        ("fused", "compiled", "resident"),
        ("fused", "compiled"),
        ("fused", "compiled", "resident"),
    ]
    assert config.fast_paths == {"fused", "compiled"}
    assert read(tmp_path, slides, context_length=64).fast_paths == {"fused", "compiled", "resident"}
    for changes in ({"architectures": ["Qwen2ForCausalLM"]}, {"architectures": ["LlamaForCausalLM"], "mlp_bias": True}):
        assert read(tmp_path, changes).fast_paths == {"fused", "compiled"}, "there are biases"


def test_a_window_that_the_context_never_fills_is_no_window(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    assert windows_of(read(tmp_path, mistral, context_length=1024)) == (None, None, None)


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


@pytest.mark.parametrize(
    ("changes", "has_experts"),
    [
        ({}, [True, True, True]),
        ({"decoder_sparse_step": 2}, [False, True, False]),
        ({"mlp_only_layers": [0]}, [False, True, True]),
    ],
)
def test_layers_have_experts_where_the_config_says_so(
    changes: dict[str, Any], has_experts: list[bool], tmp_path: Path
) -> None:
    config = read(tmp_path, {**QWEN3_MOE, **changes})
    assert [isinstance(layer.feed_forward, Experts) for layer in config.layers] == has_experts
    assert config.fast_paths == {"fused"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are only 8 experts"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers must be a list"),
        ({"num_experts": None}, "no num_experts"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv"),
    ],
)
def test_experts_that_cannot_be_right_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, {**QWEN3_MOE, **changes})


def test_ranks_must_share_the_features_of_every_expert(tmp_path: Path) -> None:
    config = read(tmp_path, {**QWEN3_MOE, "moe_intermediate_size": 49})
    with pytest.raises(ModelError, match="intermediate size, 49"):
        config.check_tp(2)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="is not JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="object"):
        ModelConfig.from_folder(tmp_path)
    write(tmp_path, generation={"do_sample": True, "temperature": "hot"})
    with pytest.raises(ModelError, match="temperature"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("tp_size", "changes", "words"),
    [
        (3, {}, "8 query heads"),
        (16, {}, "8 query heads"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "6 KV heads"),
        (8, {"intermediate_size": 100}, "intermediate size, 100"),
    ],
)
def test_a_tp_that_does_not_fit_is_refused(tp_size: int, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"--tp {tp_size}.*{words}"):
        read(tmp_path, changes).check_tp(tp_size)


def test_kv_heads_are_replicated_where_tp_exceeds_them(tmp_path: Path) -> None:
    config = read(tmp_path)
    for tp_size, heads in ((1, 4), (2, 2), (4, 1), (8, 1)):
        config.check_tp(tp_size)
        assert config.layers[0].self_attention.kv_heads_per_rank(tp_size) == heads


def test_the_hash_tells_models_apart_and_nothing_else(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    one = read(first)
    assert one.config_hash() == read(second).config_hash() == read(first, {"transformers_version": "9"}).config_hash()
    others = [
        read(first, {"num_hidden_layers": 4}),
        read(first, {"rope_parameters": {**YARN}}),
        read(first, context_length=100),
    ]
    assert len({config.config_hash() for config in [one, *others]}) == 4


def complaint(
    folder: Path, changes: dict[str, Any] | None = None, generation: dict[str, Any] | None = None
) -> str | None:
    """The sentence, or None if all is well."""
    try:
        config = ModelConfig.from_folder(write(folder, changes, generation))
    except ModelError as error:
        return str(error)
    config.config_hash()
    config.check_tp(1)
    return None


WRONG: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    3,
    10**400,
    0.5,
    1.0,
    float("nan"),
    float("inf"),
    "",
    "text",
    [],
    [None],
    [[1]],
    {},
    {"x": {}},
    {"rope_type": ["yarn"], "type": 3},
)
FAMILY_KEYS = (
    "layer_norm_eps",
    "hidden_activation",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
    "attention_multiplier",
    "no_rope_layers",
    "no_rope_layer_interval",
    "sliding_window_pattern",
    "rope_local_base_freq",
    "use_bidirectional_attention",
)
ROPE_KEYS = (
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
)


def test_no_value_in_a_config_raises_anything_but_a_sentence(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    changes = [{key: value} for key in sorted(READ_KEYS) for value in WRONG]
    changes += [
        {"rope_parameters": {**rope, "mscale": 1.0, "mscale_all_dim": 1.0, key: value}}
        for rope in (YARN, llama3)
        for key in ROPE_KEYS
        for value in WRONG
    ]
    for change in changes:
        for more in ({}, {"use_sliding_window": True}, {"architectures": ["MistralForCausalLM"]}):
            assert (complaint(tmp_path, {**more, **change}) or ".").endswith("."), change


@pytest.mark.parametrize("architecture", FAMILIES)
def test_no_value_of_a_familys_own_keys_raises_anything_but_a_sentence(architecture: str, tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}
    for key in (*FAMILY_KEYS, "head_dim", "sliding_window", "layer_types", "partial_rotary_factor", "rope_parameters"):
        for value in WRONG:
            for more in ({}, {"use_sliding_window": True, "rope_parameters": kinds}):
                change = {"architectures": [architecture], **more, key: value}
                assert (complaint(tmp_path, change) or ".").endswith("."), change
    for kind in kinds:
        for value in WRONG:
            change = {"architectures": [architecture], "rope_parameters": {**kinds, kind: value}}
            assert (complaint(tmp_path, change) or ".").endswith("."), change


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "longrope"),
        ("Phi3ForCausalLM", {"rope_parameters": YARN}, "RoPE type 'yarn' is not supported for Phi-3"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 of 16 is not an even number"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 2}, "partial_rotary_factor must be at most 1"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers must have 0 or 1 for each layer"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("GraniteForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_a_family_does_not_support_is_refused_by_name(
    architecture: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refusal(tmp_path, {"architectures": [architecture], **changes})


def test_what_old_files_of_a_family_leave_out_is_as_in_transformers(tmp_path: Path) -> None:
    def one(architecture: str, **changes: Any) -> ModelConfig:
        absent = dict.fromkeys(("head_dim", "rope_parameters"), ...)
        return read(tmp_path, {"architectures": [architecture], "num_hidden_layers": 4, **absent, **changes})

    smollm = one("SmolLM3ForCausalLM")
    assert [layer.attention.rope is None for layer in smollm.layers] == [False, False, False, True]
    assert (rope_of(smollm).theta, smollm.tie_word_embeddings) == (2e6, True)
    cohere = one("Cohere2ForCausalLM")
    assert windows_of(cohere) == (None,) * 4, "4096 positions are the whole context"
    assert windows_of(one("Cohere2ForCausalLM", sliding_window=64)) == (64, 64, 64, None)
    assert (cohere.scales.logits, cohere.norm) == (0.0625, NormSpec("layer", 1e-5))
    glm = one("Glm4ForCausalLM")
    assert (rope_of(glm).partial, glm.layers[0].self_attention.qkv_bias, glm.layers[0].self_attention.head_dim) == (
        0.5,
        True,
        128,
    )
    gemma = one("Gemma2ForCausalLM", sliding_window=64)
    assert (gemma.layers[0].self_attention.softcap, gemma.scales.logit_softcap, windows_of(gemma)[:2]) == (
        50,
        30,
        (64, None),
    )
    assert (gemma.layers[0].attention.head_dim, gemma.layers[0].attention.scale) == (256, 1 / 16)
    capless = one("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (capless.layers[0].self_attention.softcap, capless.scales.logit_softcap) == (None, None)
    newer = one("Gemma3ForCausalLM", sliding_window=64, num_hidden_layers=6)
    assert windows_of(newer) == (64, 64, 64, 64, 64, None)
    assert [layer.attention.rope for layer in newer.layers][4:] == [
        RopeConfig("default", 1e4),
        RopeConfig("default", 1e6),
    ]
    assert one("Olmo3ForCausalLM").layers[0].attention.rope == RopeConfig("default", 5e5)


def test_no_value_in_a_generation_config_raises_anything_but_a_sentence(tmp_path: Path) -> None:
    for key in ("do_sample", "eos_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        for value in WRONG:
            assert key in (complaint(tmp_path, generation={"do_sample": True, key: value}) or key)


def test_other_architectures_are_left_to_the_library_unless_an_option_forbids_it(tmp_path: Path) -> None:
    gpt = {"architectures": ["GPT2LMHeadModel"], "hidden_size": ..., "n_embd": 96, "max_position_embeddings": ...}
    config = read(tmp_path, {**gpt, "n_positions": 512})
    assert (config.implementation, config.layers, config.fast_paths) == ("transformers", (), set())
    assert (config.hidden_size, config.vocab_size, config.context_length) == (96, 500, 512)
    assert "n_positions" in refusal(tmp_path, gpt)
    sentence = refusal(tmp_path, gpt, model_impl="srt")
    assert all(name in sentence for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"))
    assert read(tmp_path).implementation == "srt"
    assert read(tmp_path, model_impl="transformers").implementation == "transformers"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_encoder_decoder": True}, "encoder beside its decoder"),
        ({"vision_config": {}}, "vision_config"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, "awq"),
        ({"vocab_size": ...}, "vocab_size"),
    ],
)
def test_the_library_is_not_asked_for_what_it_cannot_run(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, {"architectures": ["SomeForCausalLM"], **changes})

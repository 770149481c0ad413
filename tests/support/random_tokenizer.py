"""A small byte-level BPE tokenizer for random checkpoints, trained in a moment on the text below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

CHATML_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""

HEADER_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}"""


@dataclass(frozen=True, slots=True)
class FamilyTokens:
    """What distinguishes a family's tokenizer and configuration."""

    architecture: str
    special: tuple[str, ...]
    """All special tokens, in the order of their ids."""
    bos: str | None
    """Put before every text, if there is one."""
    eos: str
    pad: str
    ends: tuple[str, ...]
    """Every token that ends an answer, `eos` included."""
    chat_template: str
    names_head_dim: bool
    """Whether config.json has a head_dim that may differ from hidden size / heads."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of config.json, which show what is special about the family's layers."""
    norm_mean: float = 1.0
    """About what the norms' weights are drawn."""


_CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

FAMILY_TOKENS = {
    "llama": FamilyTokens(
        architecture="LlamaForCausalLM",
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad="<|end_of_text|>",
        ends=("<|eot_id|>", "<|end_of_text|>"),
        chat_template=HEADER_TEMPLATE,
        names_head_dim=True,
    ),
    "qwen2": FamilyTokens(
        architecture="Qwen2ForCausalLM",
        special=_CHATML_SPECIAL,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        ends=("<|im_end|>", "<|endoftext|>"),
        chat_template=CHATML_TEMPLATE,
        names_head_dim=False,
    ),
    "qwen3": FamilyTokens(
        architecture="Qwen3ForCausalLM",
        special=_CHATML_SPECIAL,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        ends=("<|im_end|>", "<|endoftext|>"),
        chat_template=CHATML_TEMPLATE,
        names_head_dim=True,
    ),
}


def _chatml_family(
    architecture: str, names_head_dim: bool = False, norm_mean: float = 1.0, **config: Any
) -> FamilyTokens:
    """A family of its own layers and of no tokenizer of its own."""
    return replace(
        FAMILY_TOKENS["qwen3"],
        architecture=architecture,
        names_head_dim=names_head_dim,
        norm_mean=norm_mean,
        config=config,
    )


FAMILY_TOKENS |= {
    "phi3": _chatml_family("Phi3ForCausalLM", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75}),
    "smollm3": _chatml_family("SmolLM3ForCausalLM"),
    "granite": _chatml_family(
        "GraniteForCausalLM",
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=1.5,
    ),
    "olmo2": _chatml_family("Olmo2ForCausalLM"),
    "olmo3": _chatml_family("Olmo3ForCausalLM", sliding_window=24),
    "glm4": _chatml_family("Glm4ForCausalLM", names_head_dim=True),
    "cohere2": _chatml_family("Cohere2ForCausalLM", sliding_window=24, logit_scale=0.5),
    "gemma2": _chatml_family(
        "Gemma2ForCausalLM",
        names_head_dim=True,
        norm_mean=0.0,
        sliding_window=24,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3_text": _chatml_family(
        "Gemma3ForCausalLM",
        names_head_dim=True,
        norm_mean=0.0,
        sliding_window=24,
        query_pre_attn_scalar=20,
        sliding_window_pattern=2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    ),
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}

FAMILY_TOKENS |= {
    "mixtral": _chatml_family(
        "MixtralForCausalLM", names_head_dim=True, num_local_experts=6, num_experts_per_tok=2, sliding_window=24
    ),
    "qwen2_moe": _chatml_family(
        "Qwen2MoeForCausalLM", **_EXPERTS, num_experts=8, shared_expert_intermediate_size=48, mlp_only_layers=[1]
    ),
    "qwen3_moe": _chatml_family(
        "Qwen3MoeForCausalLM",
        names_head_dim=True,
        **_EXPERTS,
        num_experts=8,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "olmoe": _chatml_family("OlmoeForCausalLM", num_experts=8, num_experts_per_tok=3),
    "glm4_moe": _chatml_family(
        "Glm4MoeForCausalLM",
        names_head_dim=True,
        **_EXPERTS,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        use_qk_norm=True,
    ),
    "gpt_oss": _chatml_family(
        "GptOssForCausalLM",
        names_head_dim=True,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=24,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "truncate": False,
        },
    ),
    "granitemoe": _chatml_family(
        "GraniteMoeForCausalLM",
        num_local_experts=6,
        num_experts_per_tok=2,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=1.5,
    ),
}
_LATENTS: dict[str, Any] = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_key_value_heads": None,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}

FAMILY_TOKENS |= {
    "deepseek_v2": _chatml_family(
        "DeepseekV2ForCausalLM",
        **_LATENTS,
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=4.0,
    ),
    "deepseek_v3": _chatml_family(
        "DeepseekV3ForCausalLM",
        **_LATENTS,
        q_lora_rank=32,
        first_k_dense_replace=2,
        n_shared_experts=1,
        routed_scaling_factor=1.7,
    ),
}

_NUM_BYTES = 256


def train_tokenizer(vocab_size: int, tokens: FamilyTokens) -> Any:
    """A tokenizer of at most `vocab_size` entries, with the special tokens last, as the families have them.

    It is smaller than `vocab_size` where the text holds no more words: real checkpoints have such rows too.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    least = _NUM_BYTES + len(tokens.special)
    if vocab_size < least:
        raise ValueError(f"a byte-level vocabulary has at least {least} entries with its special tokens: {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    if tokens.bos is None:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tokens.special),
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.add_special_tokens(list(tokens.special))
    if tokens.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens.bos} $A",
            pair=f"{tokens.bos} $A {tokens.bos} $B",
            special_tokens=[(tokens.bos, tokenizer.token_to_id(tokens.bos))],
        )
    return tokenizer


TEXT = """\
A river does not ask where the sea is. It goes down, around the stones, through the reeds, and under the old bridge
where the children throw sticks and run across to see which one comes out first. In spring the water is high and brown;
in summer you can walk over it without wetting your knees. The miller knew every hour of it. When he died, the wheel
stood still for eleven years, and then somebody bought the house and made bread again.

To bake a loaf, take flour, water, salt and time. Mix them in the evening, fold the dough twice, and let it rest until
morning. Heat the oven as hot as it will go. The crust should be dark, the crumb open, and the kitchen warm. If the
dough is too wet, do not add flour: wait. Most mistakes in baking, and in many other crafts, are mistakes of patience.

Computers count from zero. A list of five numbers has the places 0, 1, 2, 3 and 4, and whoever forgets it will read one
place too far. A program is a letter to two readers: the machine, which forgives nothing, and the next person, who has
to forgive a great deal. Good names help both. Write `total_price`, not `tp`; write `is_open`, not `flag`.

    def mean(values):
        if not values:
            raise ValueError("the mean of nothing")
        return sum(values) / len(values)

    for index, line in enumerate(open("notes.txt")):
        print(f"{index + 1:4d}  {line.rstrip()}")

Question: what is the capital of France? Answer: the capital of France is Paris. Question: what is the capital of Japan?
Answer: the capital of Japan is Tokyo. Question: how many legs does a spider have? Answer: a spider has eight legs,
and an insect has six. Question: which planet is the largest? Answer: Jupiter, which is larger than all the others
together.

Once upon a time there was a fox who could not sleep. She asked the owl, and the owl said: "Count the stars." She asked
the hare, and the hare said: "Run until you are tired." She asked the bear, but it was winter, and the bear was asleep
already, breathing slowly, like the sea on a quiet day. So the fox lay down beside the bear and listened. That was
enough.

The weather tomorrow: cloudy in the north with some rain, 12 degrees; sunny in the south, up to 21 degrees; strong wind
along the coast. On Wednesday the first snow is expected above 1,500 metres. Drivers in the mountains should take care.

Dear Anna, thank you for your letter of 14 March 2019. I was glad to hear that the garden is growing well, that the roof
has been repaired, and that your brother's leg is better. Here nothing has changed. We get up early, work, eat, talk,
and go to bed late. The library has a new room with large windows, and I often sit there in the afternoon reading
about the history of maps, ships, trade and money. Please write soon. With love from all of us, your friend Thomas.

An engine that serves many people at once is like a good waiter. It keeps every order in mind, brings what is ready,
never lets a plate grow cold because another table is slow, and tells a guest at the door honestly when the house is
full. The cook should never wait for the waiter, and the waiter should never stand and watch the cook.

In the year 1687 Newton described gravity: every body attracts every other body with a force proportional to the product
of the masses and inversely proportional to the square of the distance between them. F = G * m1 * m2 / r^2. It explained
the tides, the moon, the falling apple and the path of the comets; it did not explain the orbit of Mercury quite, and
that small difference, 43 seconds of arc in a century, waited for Einstein.

{"name": "Maria", "age": 37, "city": "Porto", "languages": ["Portuguese", "English"], "active": true, "score": 9.75}
<html><head><title>Home</title></head><body><p class="intro">Welcome!</p></body></html>
SELECT name, count(*) FROM orders WHERE price > 100 GROUP BY name ORDER BY 2 DESC LIMIT 10;

Café, naïve, façade, Zürich, smörgåsbord, jalapeño, coöperate, œuvre, straße, Łódź, crème brûlée.
你好，世界。今天天气很好，我们去公园散步吧。 こんにちは、元気ですか。 안녕하세요. Привет, как дела? Γειά σου Κόσμε.
One, two, three, four, five, six, seven, eight, nine, ten. 1 + 1 = 2; 2 * 3 = 6; 10 / 4 = 2.5; 7 - 9 = -2; 3.14159.
Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. January, February, March, April, May, June, July,
August. Red, orange, yellow, green, blue, violet, black, white, grey. North, south, east, west. Yes or no? Maybe! Who
knows...
"""

"""Checkpoints of heads that draft from hidden states (EAGLE-3), in both formats, for the models of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from srt.sampling.sampling_batch_info import SamplingKind
from srt.speculative.drafter import DraftRows, Ints


def make_head(
    target: Path,
    folder: Path,
    *,
    is_speculators: bool = False,
    draft_vocab: int | None = None,
    taps: list[int] | None = None,
    scale: float = 0.05,
    **flags: Any,
) -> Path:
    """Write a head of random weights for the model in `target`. Its taps are numbered as inputs of layers."""
    model = json.loads((target / "config.json").read_text())
    size, vocab = model["hidden_size"], model["vocab_size"]
    heads, kv_heads, width, inner = 2, 1, 32, 96
    draft = draft_vocab or vocab
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    at = "layers.0" if is_speculators else "midlayer"
    weights = {
        "fc.weight": random(size, 3 * size),
        f"{at}.self_attn.q_proj.weight": random(heads * width, 2 * size),
        f"{at}.self_attn.k_proj.weight": random(kv_heads * width, 2 * size),
        f"{at}.self_attn.v_proj.weight": random(kv_heads * width, 2 * size),
        f"{at}.self_attn.o_proj.weight": random(size, heads * width),
        f"{at}.mlp.gate_proj.weight": random(inner, size),
        f"{at}.mlp.up_proj.weight": random(inner, size),
        f"{at}.mlp.down_proj.weight": random(size, inner),
        "lm_head.weight": random(draft, size),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"{at}.{name}.weight"] = 1 + random(size)
    weights["norm.weight"] = 1 + random(size)
    if flags.get("norm_before_fc"):
        weights["input_norm.weight"] = 1 + random(3 * size)
    if draft != vocab:
        known = torch.randperm(vocab, generator=generator)[:draft].sort().values
        weights["d2t"] = known - torch.arange(draft)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    layer = {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "vocab_size": vocab,
    }
    ids = taps or [1, 1, 1]
    if is_speculators:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": draft,
            "eagle_aux_hidden_state_layer_ids": ids,
            "torch_dtype": "float32",
            **flags,
        }
    else:
        eagle = {"eagle_aux_hidden_state_layer_ids": [one - 1 for one in ids], "use_aux_hidden_state": True}
        config = {
            **layer,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": draft if draft != vocab else None,
            "eagle_config": {**eagle, **flags},
            "torch_dtype": "float32",
        }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The head's tensors, with the names of the first format."""
    stored = load_file(folder / "model.safetensors")
    return {name.replace("layers.0.", "midlayer."): weight for name, weight in stored.items()}


class Reference(Protocol):
    """A plain implementation of what drafts."""

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """Return the greedy drafts behind these tokens."""


class ReferenceHead:
    """A head as its format describes it, over whole sequences, with the model that the library transformers runs."""

    def __init__(self, target: Path, folder: Path, taps: list[int], **flags: bool) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(target, torch_dtype=torch.float32)
        self._weights = {
            name: weight.float() if weight.is_floating_point() else weight
            for name, weight in weights_of(folder).items()
        }
        self._taps, self._flags = taps, flags
        config = json.loads((folder / "config.json").read_text())
        self._layer = config.get("transformer_layer_config", config)

    @torch.inference_mode()
    def drafts(self, ids: list[int], count: int) -> list[int]:
        """Return the greedy drafts behind these tokens."""
        states = self._model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        inputs = torch.cat([states[tap][0] for tap in self._taps], dim=-1)
        if self._flags.get("norm_before_fc"):
            inputs = self._norm(inputs, "input_norm")
        features = inputs @ self._weights["fc.weight"].t()
        drafts: list[int] = []
        for _ in range(count):
            best, features = self._next([*ids[1:], *drafts], features)
            drafts.append(best + int(self._weights["d2t"][best]) if "d2t" in self._weights else best)
        return drafts

    def _next(self, tokens: list[int], features: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return the best place in the last token's logits, and the features with which a chain goes on."""
        hidden = self._hidden(tokens, features)[-1:]
        normed = self._norm(hidden, "norm")
        self.last_logits = (normed @ self._weights["lm_head.weight"].t())[0]
        last = normed if self._flags.get("norm_output") else hidden
        return int(self.last_logits.argmax()), torch.cat((features, last))

    @torch.inference_mode()
    def follow(self, ids: list[int], num_own: int) -> torch.Tensor:
        """Return the logits behind these tokens, where the model has run before all but the last `num_own` and one."""
        known = len(ids) - num_own
        states = self._model(torch.tensor([ids[: known - 1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[tap][0] for tap in self._taps], dim=-1) @ self._weights["fc.weight"].t()
        for end in range(known, len(ids) + 1):
            _, features = self._next(ids[1:end], features)
        return self.last_logits

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(
            x, x.shape[-1:], self._weights[f"{name}.weight"], self._layer["rms_norm_eps"]
        )

    def _product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._weights[f"midlayer.{name}.weight"].t()

    def _hidden(self, ids: list[int], features: torch.Tensor) -> torch.Tensor:
        embedded = self._model.get_input_embeddings()(torch.tensor(ids))
        normed = self._norm(features, "midlayer.hidden_norm")
        x = torch.cat((self._norm(embedded, "midlayer.input_layernorm"), normed), dim=-1)
        heads = [
            self._product(x, f"self_attn.{name}_proj").unflatten(-1, (-1, self._layer["head_dim"])) for name in "qkv"
        ]
        q, k = (self._turned(head) for head in heads[:2])
        v, group = heads[2], q.shape[1] // k.shape[1]
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1).repeat_interleave(group, 0),
            v.transpose(0, 1).repeat_interleave(group, 0),
            is_causal=True,
        )
        stream = normed if self._flags.get("norm_before_residual") else features
        stream = stream + self._product(attended.transpose(0, 1).flatten(1), "self_attn.o_proj")
        x = self._norm(stream, "midlayer.post_attention_layernorm")
        gated = torch.nn.functional.silu(self._product(x, "mlp.gate_proj")) * self._product(x, "mlp.up_proj")
        return stream + self._product(gated, "mlp.down_proj")

    def _turned(self, heads: torch.Tensor) -> torch.Tensor:
        half = heads.shape[-1] // 2
        frequencies = self._layer["rope_theta"] ** (-torch.arange(half).float() / half)
        angles = torch.arange(len(heads)).float()[:, None, None] * frequencies
        first, second = heads.chunk(2, dim=-1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
        )


class WatchedDrafts:
    """Compares each greedy draft with that of a plain implementation, which reads the tokens before it and nothing else."""

    def __init__(self, runner: Any, reference: Reference) -> None:
        self._drafter, self._tables = runner._drafter, runner.state.req_to_token_pool
        self._reference = reference
        self.num_compared = self.num_different = self.num_ahead = 0
        self._drafter.draft, self._draft = self._watch, self._drafter.draft
        if hasattr(self._drafter, "draft_ahead"):
            self._drafter.draft_ahead, self._draft_ahead = self._watch_ahead, self._drafter.draft_ahead

    def _watch(self, rows: DraftRows) -> Ints:
        counts: Ints = self._draft(rows)
        self._compare(rows.slots, counts)
        return counts

    def _watch_ahead(self, rows: DraftRows) -> Ints:
        counts: Ints = self._draft_ahead(rows)
        self.num_ahead += 1
        self._compare(rows.slots, counts)
        return counts

    def _compare(self, slots: Ints, counts: Ints) -> None:
        for slot, length, count in zip(
            slots.tolist(), self._tables.seq_lens[slots].tolist(), counts.tolist(), strict=True
        ):
            kind = self._drafter._sampling.kind_of(torch.tensor([slot]).numpy())
            if not count or kind is not SamplingKind.PLAIN or self._tables.draws.temperatures[slot] > 0:
                continue
            ids = self._tables.token_table[slot, : length + 1 + count].tolist()
            self.num_compared += 1
            self.num_different += self._reference.drafts(ids[: length + 1], count) != ids[length + 1 :]

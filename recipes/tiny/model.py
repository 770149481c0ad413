"""The Qwen3 architecture in plain PyTorch, for training. What it saves, `transformers` and srt load unchanged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recipes.tiny.tokenizer import CONTEXT_LENGTH, VOCAB_SIZE

HEAD_DIM = 64


@dataclass(frozen=True, slots=True)
class Shape:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    head_dim: int = HEAD_DIM
    vocab_size: int = VOCAB_SIZE
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def config(self, bos_id: int, end_id: int) -> dict[str, Any]:
        """config.json as `transformers` writes it."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos_id,
            "dtype": "bfloat16",
            "eos_token_id": end_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.num_layers,
            "max_position_embeddings": CONTEXT_LENGTH,
            "max_window_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }

    @staticmethod
    def from_config(config: dict[str, Any]) -> Shape:
        return Shape(
            config["hidden_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["intermediate_size"],
            config["head_dim"],
            config["vocab_size"],
            config["rope_theta"],
            config["rms_norm_eps"],
        )


TINY = Shape(hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=4, intermediate_size=640)
TINY_DRAFT = Shape(hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=288)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


def rope_tables(length: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [length, head_dim], float32."""
    steps = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
    angles = torch.outer(
        torch.arange(length, device=device, dtype=torch.float32), shape.rope_theta ** (-steps / shape.head_dim)
    )
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, -1, self.shape.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, length, -1, self.shape.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, -1, self.shape.head_dim).transpose(1, 2)
        group = self.shape.num_heads // self.shape.num_kv_heads
        k = rotate(k, cos, sin).to(v.dtype).repeat_interleave(group, dim=1)
        q, v = rotate(q, cos, sin).to(v.dtype), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return result


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Model(nn.Module):
    """Embedding, layers, norm; the embedding again as the output head. Parameters are named as in the saved file, less `model.`"""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def draw_weights(self, seed: int) -> None:
        """Fresh weights; the outputs of each layer start smaller, the more layers there are."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                spread = 0.02 if name.startswith("embed") else parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    spread /= (2 * self.shape.num_layers) ** 0.5
                drawn = torch.randn(parameter.shape, generator=generator) * spread
                with torch.no_grad():
                    parameter.copy_(drawn)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, ids: Tensor) -> Tensor:
        """[rows, length] → logits [rows, length, vocabulary]."""
        return F.linear(self.hidden(ids), self.embed_tokens.weight)

    def hidden(self, ids: Tensor) -> Tensor:
        cos, sin = rope_tables(ids.shape[1], self.shape, ids.device)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        result: Tensor = self.norm(x)
        return result


def save_checkpoint(model: Model, folder: Path, bos_id: int, end_id: int) -> None:
    """config.json, generation_config.json and model.safetensors in bfloat16. Ends of a text are `end_id` and `bos_id`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_config(model.shape, folder, bos_id, end_id)


def save_config(shape: Shape, folder: Path, bos_id: int, end_id: int) -> None:
    """config.json and generation_config.json. Ends of a text are `end_id` and `bos_id`."""
    _write_json(folder / "config.json", shape.config(bos_id, end_id))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": bos_id,
            "do_sample": True,
            "eos_token_id": [end_id, bos_id],
            "pad_token_id": bos_id,
            "temperature": 0.7,
            "top_p": 0.95,
        },
    )


def load_checkpoint(folder: Path) -> Model:
    """In float32."""
    model = Model(Shape.from_config(json.loads((folder / "config.json").read_text("utf-8"))))
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in tensors.items()})
    return model


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


@torch.inference_mode()
def generate_greedily(
    model: Model, prompts: list[list[int]], most_tokens: int, stop_ids: set[int], batch_rows: int = 256
) -> list[list[int]]:
    """What the model says, without a cache: simple, and quick enough for a model this small. Stop tokens are left out."""
    device = next(model.parameters()).device
    outputs: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(order), batch_rows):
        active = order[first : first + batch_rows]
        for _ in range(most_tokens):
            texts = [prompts[index] + outputs[index] for index in active]
            ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
            for row, text in enumerate(texts):
                ids[row, : len(text)] = torch.tensor(text)
            last = torch.tensor([len(text) - 1 for text in texts], device=device)
            states = model.hidden(ids.to(device))[torch.arange(len(texts), device=device), last]
            tokens = F.linear(states, model.embed_tokens.weight).argmax(-1).tolist()
            still = []
            for index, token in zip(active, tokens, strict=True):
                if token not in stop_ids:
                    outputs[index].append(token)
                    still.append(index)
            active = still
            if not active:
                break
    return outputs

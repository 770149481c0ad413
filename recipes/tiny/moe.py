"""Train tiny-moe, a mixture of experts that learns the same text as tiny, and from tiny: `python -m recipes.tiny.moe`.

tiny stays as it is. The architecture is that of Qwen3 with experts. Training multiplies every token with all experts of a layer, as one
wide MLP, and weighs the results of those that the router did not choose by 0, which is simple and little work for experts this small.
It takes two to three minutes on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.tiny.chat import END, END_OF_TEXT
from recipes.tiny.model import Layer, Model, Shape, load_checkpoint, rope_tables, save_config
from recipes.tiny.tokenizer import load_tokenizer, save_tokenizer, token_id
from recipes.tiny.train import Settings, batches

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "srt/assets/models"
RESULTS = Path(__file__).parent / "results"
SETTINGS = Settings(seed=5, steps=1200, long_steps=100, learning_rate=3e-3, warmup_steps=100)
IMITATION = 0.5
"""How much of the loss is the divergence from what tiny says; the rest is that of the text."""
BALANCE = 0.01
"""How much uneven use of the experts adds to the loss."""


@dataclass(frozen=True, slots=True)
class MixtureShape(Shape):
    """`intermediate_size` is that of one expert."""

    num_experts: int = 8
    top_k: int = 2

    def config(self, bos_id: int, end_id: int) -> dict[str, Any]:
        """config.json as `transformers` writes it."""
        return Shape.config(self, bos_id, end_id) | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.intermediate_size,
            "norm_topk_prob": True,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "output_router_logits": False,
            "router_aux_loss_coef": BALANCE,
        }


SHAPE = MixtureShape(hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, intermediate_size=112)


class Mixture(nn.Module):
    """The experts of a layer, side by side in three matrices."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.num_experts * shape.intermediate_size
        self.gate = nn.Linear(shape.hidden_size, shape.num_experts, bias=False)
        self.gate_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the weight of each expert, 0 for those that are not chosen; how unevenly tokens use them, 1 at best), in float32."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.gate.weight).softmax(-1)
        best, chosen = scores.topk(self.shape.top_k, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best)
        used = (weights > 0).float().flatten(0, -2).mean(0) / self.shape.top_k
        return weights, self.shape.num_experts * (used * scores.flatten(0, -2).mean(0)).sum()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the weighted sum of the chosen experts' results; how unevenly they are used)."""
        weights, balance = self.route(x)
        activated = F.silu(self.gate_proj(x)) * self.up_proj(x)
        activated = activated.unflatten(-1, (self.shape.num_experts, -1)) * weights.unsqueeze(-1).to(activated.dtype)
        return self.down_proj(activated.flatten(-2)), balance


class MixtureModel(Model):
    """The model with a mixture in the place of each MLP."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__(shape)
        for layer in self.layers:
            layer.mlp = Mixture(shape)

    @property
    def mixtures(self) -> list[Mixture]:
        """The mixture of each layer."""
        return [cast("Mixture", layer.mlp) for layer in self.layers]

    def logits_and_balance(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits [rows, length, vocabulary]; how unevenly experts are used, the mean over layers)."""
        cos, sin = rope_tables(ids.shape[1], self.shape, ids.device)
        x, balances = self.embed_tokens(ids), []
        for layer, mixture in zip(cast("list[Layer]", self.layers), self.mixtures, strict=True):
            x = x + layer.self_attn(layer.input_layernorm(x), cos, sin)
            mixed, balance = mixture(layer.post_attention_layernorm(x))
            x = x + mixed
            balances.append(balance)
        return F.linear(self.norm(x), self.embed_tokens.weight), torch.stack(balances).mean()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint: one for each matrix of each expert."""
        found: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            stored = value.detach().to("cpu", torch.bfloat16)
            parent, _, matrix = name.removesuffix(".weight").rpartition(".")
            if not matrix.endswith("_proj") or not parent.endswith(".mlp"):
                found[f"model.{name}"] = stored.contiguous()
                continue
            shape = cast("MixtureShape", self.shape)
            for expert, part in enumerate(stored.chunk(shape.num_experts, dim=1 if matrix == "down_proj" else 0)):
                found[f"model.{parent}.experts.{expert}.{matrix}.weight"] = part.contiguous()
        return found


def losses(model: MixtureModel, teacher: Model, ids: Tensor, learned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (what the model minimises, its loss on the text, how unevenly it uses its experts)."""
    targets = torch.where(learned, ids, -100)[:, 1:].reshape(-1)
    with torch.no_grad():
        taught = teacher(ids)[:, :-1].float().reshape(len(targets), -1).log_softmax(-1)
    logits, balance = model.logits_and_balance(ids)
    logits = logits[:, :-1].float().reshape(len(targets), -1)
    loss, chosen = F.cross_entropy(logits, targets), targets >= 0
    divergence = (taught.exp() * (taught - logits.log_softmax(-1))).sum(-1)
    divergence = (divergence * chosen).sum() / chosen.sum()
    return loss * (1 - IMITATION) + divergence * IMITATION + BALANCE * balance, loss, balance


def train(
    settings: Settings, device: torch.device, workers: int, compiled: bool
) -> tuple[MixtureModel, dict[str, Any]]:
    """Train to the end. Return the model and a report."""
    torch.set_float32_matmul_precision("high")
    model, teacher = MixtureModel(SHAPE), load_checkpoint(MODELS / "tiny").to(device).eval()
    model.draw_weights(settings.seed)
    model.to(device)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, settings.learning_rate, (0.9, 0.98), 1e-9, fused=device.type == "cuda")
    losses_of = torch.compile(losses, dynamic=False) if compiled else losses
    began, history = time.perf_counter(), []
    for step, (ids, learned) in enumerate(batches(settings, MODELS / "tiny", 0, workers, device)):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            total, loss, balance = losses_of(model, teacher, ids, learned)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * settings.rate_at(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % max(1, settings.steps // 24) == 0:
            history.append((step + 1, round(float(loss.detach()), 4), round(float(balance.detach()), 3)))
            spent = time.perf_counter() - began
            print(
                f"{step + 1}/{settings.steps}  loss {loss:.4f}  balance {balance:.3f}  {spent:.0f} s", file=sys.stderr
            )
    report = {
        "settings": asdict(settings),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - began, 1),
        "parameters": model.num_parameters,
        "loss_and_balance": history,
    }
    return model, report


def save(model: MixtureModel, out: Path) -> None:
    """Write the checkpoint, with tiny's tokenizer."""
    tokenizer = load_tokenizer(MODELS / "tiny")
    out.mkdir(parents=True, exist_ok=True)
    save_file(model.tensors(), out / "model.safetensors", metadata={"format": "pt"})
    save_config(model.shape, out, token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, END))
    save_tokenizer(tokenizer, out)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODELS / "tiny-moe", help="where the checkpoint goes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the report goes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that make text"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    for name, value in asdict(SETTINGS).items():
        if not name.startswith("draft"):
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args(argv)
    settings = Settings(**{name: getattr(args, name, value) for name, value in asdict(SETTINGS).items()})
    model, report = train(settings, torch.device(args.device), args.workers, args.compile)
    save(model, args.out)
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "moe.json").write_text(json.dumps(report) + "\n", "utf-8")
    print(
        json.dumps(
            {name: report[name] for name in ("seconds", "parameters")} | {"last": report["loss_and_balance"][-1:]}
        )
    )


if __name__ == "__main__":
    main()

"""Train the head tiny-eagle3, which drafts from tiny's hidden states (EAGLE-3): `python -m recipes.tiny.eagle3`.

tiny stays as it is. In each step the head drafts chains of `chain` tokens behind every token of some rows, each from its own hidden states
of the one before, as it does when it serves; it learns what tiny would say there. Takes two minutes on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.tiny.model import MLP, TINY, Model, RMSNorm, Shape, load_checkpoint, rope_tables, rotate
from recipes.tiny.packing import ROWS_PER_SHARD, ShardTask, stream_shards

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "srt/assets/models"
RESULTS = Path(__file__).parent / "results"
TAPS = (2, 4, 7)  # layers of tiny whose inputs the head reads
SHAPE = Shape(hidden_size=TINY.hidden_size, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=512)
DRAFT_VOCAB = 1024
COUNTED_TOKENS = 1 << 19  # from which the tokens that the head knows are chosen
HELD_OUT_SEED = 99
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run depends on."""

    seed: int = 3
    steps: int = 1200
    rows: int = 64
    row_tokens: int = 512
    chain: int = 4
    chain_decay: float = 0.8
    """How much less each further draft of a chain counts."""
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.02

    def rate_at(self, step: int) -> float:
        """Between 0 and 1: up in a straight line, then down to nearly nothing along a cosine."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


class Attention(nn.Module):
    """Attention of one draft of each chain: over entries that rest on tiny's hidden states, and those of its own chain."""

    def __init__(self) -> None:
        super().__init__()
        size, width = SHAPE.hidden_size, SHAPE.head_dim
        self.q_proj = nn.Linear(2 * size, SHAPE.num_heads * width, bias=False)
        self.k_proj = nn.Linear(2 * size, SHAPE.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(2 * size, SHAPE.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(SHAPE.num_heads * width, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, entries: list[Pair]) -> Tensor:
        """Append the keys and values of x [rows, length, 2 * size] to those of earlier drafts, and attend.

        Draft n at place p belongs to the chain that began at place p - n. It sees the entries of the text up to there, and behind them
        those of drafts 1 to n of its chain.
        """
        rows, length, _ = x.shape
        split = (rows, length, -1, SHAPE.head_dim)
        q, k, v = (one(x).view(split).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        group = SHAPE.num_heads // SHAPE.num_kv_heads
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        entries.append((k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)))
        number, (keys, values) = len(entries) - 1, entries[0]
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-number)
        scores = [(q @ keys.transpose(-1, -2)).masked_fill(~seen, -1e9)]
        chain = [tuple(_later(part, number - n, dim=2) for part in entries[n]) for n in range(1, number + 1)]
        scores += [(q * key).sum(-1, keepdim=True) for key, _ in chain]
        weights = (torch.cat(scores, dim=-1).float() * SHAPE.head_dim**-0.5).softmax(-1).to(v.dtype)
        attended = weights[..., :length] @ values
        for n, (_, value) in enumerate(chain):
            attended = attended + weights[..., length + n, None] * value
        result: Tensor = self.o_proj(attended.transpose(1, 2).reshape(rows, length, -1))
        return result


class HeadLayer(nn.Module):
    """The one layer, which reads a token's embedding and a vector for what precedes it."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(SHAPE.hidden_size, SHAPE.norm_eps)
        self.hidden_norm = RMSNorm(SHAPE.hidden_size, SHAPE.norm_eps)
        self.self_attn = Attention()
        self.post_attention_layernorm = RMSNorm(SHAPE.hidden_size, SHAPE.norm_eps)
        self.mlp = MLP(SHAPE)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, entries: list[Pair]) -> Tensor:
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        stream = hidden + self.self_attn(x, cos, sin, entries)
        result: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return result


class Head(nn.Module):
    """Parameters are named as in the saved file. The embedding is tiny's."""

    def __init__(self, tiny: Model, known: Tensor, seed: int) -> None:
        super().__init__()
        size = SHAPE.hidden_size
        self.fc = nn.Linear(len(TAPS) * size, size, bias=False)
        self.midlayer = HeadLayer()
        self.norm = RMSNorm(size, SHAPE.norm_eps)
        self.lm_head = nn.Linear(size, len(known), bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
            self.lm_head.weight.copy_(tiny.embed_tokens.weight[known])
            self.norm.weight.copy_(tiny.norm.weight)

    def chain(self, embedded: Tensor, features: Tensor, num_drafts: int) -> list[Tensor]:
        """Return the logits [rows, length, known tokens] of each draft. Place p has the embedding of token p + 1 and the features of p."""
        cos, sin = rope_tables(embedded.shape[1], SHAPE, embedded.device)
        hidden, entries, logits = self.fc(features), list[Pair](), list[Tensor]()
        for n in range(num_drafts):
            hidden = self.midlayer(embedded, hidden if n == 0 else _later(hidden, 1, dim=1), cos, sin, entries)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


def _later(x: Tensor, places: int, dim: int) -> Tensor:
    """Move x towards the end; what comes in at the front is its last elements, which no chain reads."""
    return x.roll(places, dim)


def tapped(tiny: Model, ids: Tensor) -> Pair:
    """Return the concatenated inputs of tiny's tapped layers, and its logits."""
    cos, sin = rope_tables(ids.shape[1], tiny.shape, ids.device)
    x, inputs = tiny.embed_tokens(ids), []
    for number, layer in enumerate(tiny.layers):
        if number in TAPS:
            inputs.append(x)
        x = layer(x, cos, sin)
    return torch.cat(inputs, dim=-1), F.linear(tiny.norm(x), tiny.embed_tokens.weight)


class Trainer:
    """Owns the head, its optimizer, and tiny, which does not change."""

    def __init__(self, settings: Settings, tiny: Model, known: Tensor, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self._tiny = tiny.to(device).requires_grad_(requires_grad=False)
        self.head = Head(tiny.cpu(), known, settings.seed)
        tiny.to(device)
        self.head.to(device)
        self._known = known.to(device)
        matrices = [parameter for parameter in self.head.parameters() if parameter.dim() == 2]
        vectors = [parameter for parameter in self.head.parameters() if parameter.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        is_cuda = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=is_cuda
        )

    def _drafted(self, ids: Tensor, learned: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each draft of the chains its logits, tiny's probabilities of the tokens that the head knows, and what counts."""
        with torch.no_grad():
            features, answers = tapped(self._tiny, ids)
            teacher = answers.float().softmax(-1)[:, 1:-1, self._known]  # of what comes behind token p + 1
            embedded = self._tiny.embed_tokens(ids)[:, 1:-1]
        chain = self.head.chain(embedded, features[:, :-2], self.settings.chain)
        for n, logits in enumerate(chain):
            counts = learned[:, 2:].clone()
            counts[:, :n] = False  # chains that would have begun before the text
            yield logits, teacher, counts

    def train_step(self, step: int, ids: Tensor, learned: Tensor) -> Tensor:
        settings, losses = self.settings, []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            for n, (logits, teacher, counts) in enumerate(self._drafted(ids, learned)):
                loss = -(teacher * logits.float().log_softmax(-1)).sum(-1)
                losses.append(settings.chain_decay**n * (loss * counts).sum() / counts.sum())
        total = torch.stack(losses).sum()
        total.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * settings.rate_at(step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return losses[0].detach()

    @torch.no_grad()
    def agreement(self, batches: Iterator[Pair]) -> list[float]:
        """Return for each draft of a chain the share of tokens that are tiny's own first choice."""
        right, of = torch.zeros(self.settings.chain), 0
        for ids, learned in batches:
            _, answers = tapped(self._tiny, ids)
            best = answers[:, 1:-1].argmax(-1)
            for n, (logits, _, counts) in enumerate(self._drafted(ids, learned)):
                right[n] += ((self._known[logits.argmax(-1)] == best) & counts).sum().cpu()
            of += int(learned[:, 2:].sum())
        return [round(float(value) / of, 4) for value in right]


def batches(settings: Settings, seed: int, num_steps: int, workers: int, device: torch.device) -> Iterator[Pair]:
    shards_a_step = math.ceil(settings.rows / ROWS_PER_SHARD)
    tasks = (ShardTask(seed, index, settings.row_tokens) for index in range(num_steps * shards_a_step))
    with closing(stream_shards(MODELS / "tiny", tasks, workers)) as shards:
        for _ in range(num_steps):
            parts = list(itertools.islice(shards, shards_a_step))
            ids = torch.from_numpy(np.concatenate([part.ids for part in parts])[: settings.rows].astype(np.int64))
            learned = torch.from_numpy(np.concatenate([part.learned for part in parts])[: settings.rows])
            yield ids.to(device), learned.to(device)


def known_tokens(settings: Settings, workers: int) -> tuple[Tensor, float]:
    """Return the tokens that answers have most often, in order, and their share of all."""
    counts = np.zeros(TINY.vocab_size, np.int64)
    num_shards = COUNTED_TOKENS // (ROWS_PER_SHARD * settings.row_tokens)
    tasks = (ShardTask(settings.seed + 1, index, settings.row_tokens) for index in range(num_shards))
    with closing(stream_shards(MODELS / "tiny", tasks, workers)) as shards:
        for shard in shards:
            counts += np.bincount(shard.ids[shard.learned], minlength=len(counts))
    known = np.sort(np.argsort(-counts, kind="stable")[:DRAFT_VOCAB])
    return torch.from_numpy(known), float(counts[known].sum() / counts.sum())


def save_head(head: Head, known: Tensor, folder: Path) -> None:
    """Write config.json and model.safetensors in bfloat16, in the form of LlamaForCausalLMEagle3."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    tensors["d2t"] = known - torch.arange(len(known))
    tensors["t2d"] = torch.zeros(TINY.vocab_size, dtype=torch.bool).index_fill_(0, known, value=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "draft_vocab_size": len(known),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS],
            "use_aux_hidden_state": True,
        },
        "head_dim": SHAPE.head_dim,
        "hidden_act": "silu",
        "hidden_size": SHAPE.hidden_size,
        "intermediate_size": SHAPE.intermediate_size,
        "max_position_embeddings": 2048,
        "num_attention_heads": SHAPE.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": SHAPE.num_kv_heads,
        "rms_norm_eps": SHAPE.norm_eps,
        "rope_theta": SHAPE.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": TINY.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def train(settings: Settings, device: torch.device, workers: int) -> tuple[Trainer, Tensor, dict[str, Any]]:
    """Train to the end. Return the trainer, the tokens that the head knows, and a report."""
    torch.set_float32_matmul_precision("high")
    known, share = known_tokens(settings, workers)
    trainer, began = Trainer(settings, load_checkpoint(MODELS / "tiny"), known, device), time.perf_counter()
    losses: list[tuple[int, float]] = []
    for step, (ids, learned) in enumerate(batches(settings, settings.seed, settings.steps, workers, device)):
        loss = trainer.train_step(step, ids, learned)
        if (step + 1) % max(1, settings.steps // 25) == 0:
            losses.append((step + 1, round(float(loss), 4)))
            print(f"{step + 1}/{settings.steps}  loss {losses[-1][1]:.4f}", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    held_out = batches(settings, HELD_OUT_SEED, 4, workers, device)
    report = {
        "settings": asdict(settings),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
        "parameters": sum(parameter.numel() for parameter in trainer.head.parameters()),
        "known_tokens": round(share, 5),
        "agreement": trainer.agreement(held_out),
        "loss": losses,
    }
    return trainer, known, report


def main(argv: list[str] | None = None) -> None:
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODELS / "tiny-eagle3", help="where the checkpoint goes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the report goes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that make text"
    )
    for name, value in asdict(default).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args(argv)
    settings = Settings(**{name: getattr(args, name) for name in asdict(default)})
    trainer, known, report = train(settings, torch.device(args.device), args.workers)
    save_head(trainer.head, known, args.out)
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "eagle3.json").write_text(json.dumps(report) + "\n", "utf-8")
    print(json.dumps({name: report[name] for name in ("seconds", "parameters", "known_tokens", "agreement")}))


if __name__ == "__main__":
    main()

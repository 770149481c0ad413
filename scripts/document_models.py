"""Writes docs/models.md from the families that `srt.utils.families` declares.  `--check` only compares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.generated_page import write_or_check
from srt.utils.families.registry import FAMILIES
from tests.support.library_models import SERVED

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
HEAD = """\
# Models

The families that load, by the architecture that config.json names. `make docs` writes this page from
`srt/utils/families/registry.py`. Other architectures are run by [the layers of transformers](#by-the-layers-of-transformers),
or refused by name at the start.

| what | how it was tested |
|---|---|
| logits, greedy tokens | equal to those of `transformers` in float32, in chunks, in batches, behind cached prefixes |
| layers | every kind that a family has, in small random checkpoints |
| two ranks (`--tp 2`) | the tokens of one rank |
| GPUs | families with fused kernels, and of those with experts Qwen3-MoE, OLMoE, gpt-oss, DeepSeek V2 and V3; the others were not tried |
| latent attention on GPUs | the tokens of a CPU in float32, on an H200; a Triton kernel serves prompts and decodes, in graphs |
| real checkpoints | not tried, for families without fused kernels |

Layers with a window keep only what it shows ([how](decisions/page-groups.md)).

| models | architecture | what its layers have | fused kernels |
|---|---|---|---|
"""
LIBRARY_HEAD = """
## By the layers of transformers

`--model-impl` says whose layers run a model. `auto`, the default, takes ours where the table above has the architecture,
and else those of the library `transformers`, over this server's attention, KV memory, loading and sampling. `transformers`
takes the library's for all architectures, `srt` refuses what is not ours. A line in the log says that the library's
layers run, which are slower.

| what | how it is |
|---|---|
| greedy tokens | equal to those of the library in float32, for the models below, in chunks, in batches, behind cached prefixes |
| `--tp` | by the library's own plan (products cut by outputs or inputs, experts); models without one are refused |
| windows, capped scores, factors | computed as the library's masks and arguments say; what our attention lacks is refused by name |
| sinks, biases of scores (ALiBi), chunked attention, values of another size than keys (MLA) | refused |
| encoders | [embed, score and rank texts](embeddings.md#encoders) |
| states instead of keys and values, mixing of tokens outside attention | refused |
| RoPE types `dynamic` and `longrope` | refused |
| code that comes with a checkpoint (`trust_remote_code`) | refused |
| quantised weights | refused |
| GPUs | tokens of a CPU for StarCoder2, StableLM, Cohere and Llama in float32; graphs in bfloat16, with experts too |
| speed | Llama-3.1-8B, decoding on an H100, beside our layers: 12.0 and 8.6 ms with 64 rows, 8.9 and 5.9 with 8, 7.9 and 5.2 with 1 |

At the start the model runs once on PyTorch's meta device, where attention is recorded instead of computed: this tells
windows, factors and sizes of every layer. A forward pass that reads values of tensors on the host fails there, and the
model is refused, since graphs could not capture it.

Other architectures than these may work. If one is refused, the sentence says why.

| `model_type` in config.json | tested with |
|---|---|
"""


def render() -> str:
    """Return the page."""
    rows = [
        f"| {family.title} | `{family.architecture}` | {family.layers} | {'no' if family.fast_paths is None else 'yes'} |\n"
        for family in FAMILIES.values()
    ]
    library = [f"| `{name}` | {_tested_with(SERVED[name])} |\n" for name in sorted(SERVED)]
    return HEAD + "".join(rows) + LIBRARY_HEAD + "".join(library)


def _tested_with(config: Mapping[str, Any]) -> str:
    attention = "windows" if "sliding_window" in config else "full attention"
    return f"{attention}, experts" if any("experts" in key for key in config) else attention


if __name__ == "__main__":
    raise SystemExit(write_or_check(PAGE, render(), "the families declare"))

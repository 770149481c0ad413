"""Writes docs/models.md from the families that `srt.utils.families` declares.  `--check` only compares."""

from __future__ import annotations

from pathlib import Path

from scripts.generated_page import write_or_check
from srt.utils.families.registry import FAMILIES

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
HEAD = """\
# Models

The families that load, by the architecture that config.json names. `make docs` writes this page from
`srt/utils/families/registry.py`. Every other architecture is refused by name at the start.

| what | how it was tested |
|---|---|
| logits, greedy tokens | equal to those of `transformers` in float32, in chunks, in batches, behind cached prefixes |
| layers | every kind that a family has, in small random checkpoints |
| two ranks (`--tp 2`) | the tokens of one rank |
| GPUs | families with fused kernels; the others run there without them, and were not tried on one |
| real checkpoints | not tried, for families without fused kernels |

Layers with a window keep only what it shows, if other layers of the model have none
([how](decisions/page-groups.md)).

| models | architecture | what its layers have | fused kernels |
|---|---|---|---|
"""


def render() -> str:
    """Return the page."""
    rows = [
        f"| {family.title} | `{family.architecture}` | {family.layers} | {'no' if family.fast_paths is None else 'yes'} |\n"
        for family in FAMILIES.values()
    ]
    return HEAD + "".join(rows)


if __name__ == "__main__":
    raise SystemExit(write_or_check(PAGE, render(), "the families declare"))

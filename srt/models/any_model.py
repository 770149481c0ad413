"""The type of whole models, whoever's layers run them."""

from __future__ import annotations

from srt.models.causal_lm import CausalLM
from srt.models.library.library_model import LibraryCausalLM

AnyCausalLM = CausalLM | LibraryCausalLM
"""A model of ours, or of the library transformers. Both are called alike and have the same head, pieces of weights and sizes."""

"""The type of whole models, whoever's layers run them."""

from __future__ import annotations

from srt.models.causal_lm import CausalLM
from srt.models.library.encoder import LibraryEncoder
from srt.models.library.library_model import LibraryCausalLM

AnyModel = CausalLM | LibraryCausalLM | LibraryEncoder
"""A model of ours, or of the library transformers. All are called alike and have a head, pieces of weights and sizes."""

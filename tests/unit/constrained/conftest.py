"""The vocabulary of the model that ships with the project, with padding as logits have it."""

from __future__ import annotations

import pytest

from srt.constrained.vocabulary import Vocabulary
from srt.utils.tokenizer import Tokenizer, load_tokenizer
from tests.support.server_process import ROOT

TINY = ROOT / "srt" / "assets" / "models" / "tiny"
EOS_IDS = (2, 0)
PADDED_SIZE = 2048 + 77


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TINY)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, PADDED_SIZE, EOS_IDS)

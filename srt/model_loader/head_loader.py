"""Load a head that drafts onto the device of the model that it belongs to. Every rank has all of it."""

from __future__ import annotations

from pathlib import Path

import torch

from srt.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from srt.layers.ops import LayerOps
from srt.model_loader.dummy_weights import DummyWeights
from srt.model_loader.loader import LoadConfig, clear_padding, finish, materialize
from srt.model_loader.safetensors_weights import check_checkpoint
from srt.model_loader.weight_copy import copy_weights
from srt.models.eagle3 import IGNORED, Eagle3Head
from srt.utils.checkpoint import read_headers
from srt.utils.eagle3_config import Eagle3Config


def load_eagle3_head(
    config: Eagle3Config,
    folder: str | Path,
    load: LoadConfig,
    embedding: VocabParallelEmbedding,
    target_head: ParallelLMHead,
    ops: LayerOps,
    dtype: torch.dtype,
    device: torch.device,
) -> Eagle3Head:
    """Return the head, ready to run; ModelError names what its checkpoint lacks. `embedding` and `target_head` are the model's."""
    with torch.device("meta"):
        head = Eagle3Head(config, embedding, target_head, ops)
    headers = None if load.load_format == "dummy" else read_headers(Path(folder))
    pieces = head.weight_pieces(headers)
    if headers is not None:
        check_checkpoint(Path(folder), config.layer, headers, pieces, IGNORED)
    materialize(head, dtype, device)
    clear_padding(pieces)
    if headers is None:
        DummyWeights(load.seed).fill([piece for piece in pieces if not piece.is_optional], lambda done, total: None)
    else:
        stored = [piece for piece in pieces if piece.name in headers]
        copy_weights(headers, stored, device, lambda done, total: None)
        head.check_vocabulary()
    finish(head, dtype, device)
    return head.eval()

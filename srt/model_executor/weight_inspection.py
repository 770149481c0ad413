"""Look at a rank's weights while the server runs: a hash of each, or the values of one tensor of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b

import torch
from torch import Tensor

from srt.layers.quantization.weight import LinearWeight, PlainWeight
from srt.layers.weights import WeightedModule, WeightPiece
from srt.model_executor.loaded_model import LoadedModel
from srt.models.causal_lm import CausalLM
from srt.protocol.engine_work import InspectWeights
from srt.protocol.messages import Scalar
from srt.utils.errors import UpdateError

HASH_BYTES = 16
BLOCK_ELEMENTS = 1 << 24  # copied from the device at a time


def inspect_weights(loaded: LoadedModel, work: InspectWeights, report: Callable[[], None]) -> dict[str, Scalar]:
    """Return what InspectWeights asks for; nothing of a tensor that this rank lacks. UpdateError if it cannot be read back."""
    if work.name:
        return _part_of(loaded, work.name, work.num_rows)
    hashes: dict[str, Scalar] = {}
    for name, weight in loaded.model.named_parameters():
        hashes[name] = _hash_of(weight.detach())
        report()
    return hashes


def _hash_of(weight: Tensor) -> str:
    digest = blake2b(f"{list(weight.shape)} {weight.dtype}".encode(), digest_size=HASH_BYTES)
    for block in weight.contiguous().view(-1).split(BLOCK_ELEMENTS):
        digest.update(block.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _part_of(loaded: LoadedModel, name: str, num_rows: int) -> dict[str, Scalar]:
    if not isinstance(loaded.model, CausalLM):
        raise UpdateError("Weights of models that the library transformers runs cannot be read back.")
    piece = next((one for one in _pieces(loaded.model) if one.name == name), None)
    if piece is None:
        return {}  # another stage or another group of ranks may have it
    is_packed = isinstance(piece.owner, LinearWeight) and not isinstance(piece.owner, PlainWeight)
    if is_packed or piece.index is not None or piece.step != 1:
        raise UpdateError(f"{name} is quantised or stacked with others, so it cannot be read back.")
    rows = piece.target()[:num_rows].float().tolist()
    return {"dim": piece.dim, "start": piece.start, "rows": json.dumps(rows)}


def _pieces(model: CausalLM) -> Iterator[WeightPiece]:
    for path, module in model.named_modules():
        if isinstance(module, WeightedModule):
            yield from module.weight_pieces(path)

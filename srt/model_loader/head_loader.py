"""Load a head that drafts onto the device of the model that it belongs to."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from srt.distributed.parallel_state import TensorParallel
from srt.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from srt.layers.ops import LayerOps
from srt.model_loader.dummy_weights import DummyWeights
from srt.model_loader.loader import LoadConfig, clear_padding, finish, materialize
from srt.model_loader.safetensors_weights import check_checkpoint
from srt.model_loader.weight_copy import copy_weights
from srt.models.eagle3 import IGNORED, Eagle3Head
from srt.models.mtp import MtpHead
from srt.utils.checkpoint import TensorHeader, read_headers
from srt.utils.eagle3_config import Eagle3Config
from srt.utils.model_config import ModelConfig
from srt.utils.mtp_config import COPIES, MtpConfig


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
    _load(head, folder, config.layer, headers, IGNORED, load, dtype, device)
    if headers is not None:
        head.check_vocabulary()
    return head.eval()


def load_mtp_head(
    config: MtpConfig,
    folder: str | Path,
    load: LoadConfig,
    embedding: VocabParallelEmbedding,
    target_head: ParallelLMHead,
    tp: TensorParallel,
    ops: LayerOps,
    dtype: torch.dtype,
    device: torch.device,
) -> MtpHead:
    """Return this rank's part of the layer that the model's checkpoint has for drafts; ModelError names what it lacks."""
    with torch.device("meta"):
        head = MtpHead(config, embedding, target_head, tp, ops)
    headers, ignored = None, [config.prefix + name for name in COPIES]
    if load.load_format != "dummy":
        stored = read_headers(Path(folder))
        headers = {name: header for name, header in stored.items() if name.startswith(config.prefix)}
        if tp.expert_groups > 1:  # the checkpoint has experts of other groups, too
            with torch.device("meta"):
                whole = MtpHead(config, embedding, target_head, TensorParallel(0, 1, None, torch.device("cpu")), ops)
            ignored += [piece.name for piece in whole.weight_pieces(headers)]
    _load(head, folder, config.layer, headers, ignored, load, dtype, device)
    return head.eval()


def _load(
    head: Eagle3Head | MtpHead,
    folder: str | Path,
    config: ModelConfig,
    headers: dict[str, TensorHeader] | None,
    ignored: Collection[str],
    load: LoadConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Fill a head that was built on the meta device with the tensors of these `headers`, or with random weights."""
    pieces = head.weight_pieces(headers)
    if headers is not None:
        check_checkpoint(Path(folder), config, headers, pieces, ignored)
    materialize(head, dtype, device)
    clear_padding(pieces)
    if headers is None:
        DummyWeights(load.seed).fill([piece for piece in pieces if not piece.is_optional], lambda done, total: None)
    else:
        stored = [piece for piece in pieces if piece.name in headers]
        copy_weights(headers, stored, device, lambda done, total: None)
    finish(head, dtype, device)

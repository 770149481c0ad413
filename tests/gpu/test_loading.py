"""Weights that are loaded onto a GPU are those that are loaded into the host's memory, before they are brought into their final form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from srt.distributed.parallel_state import TensorParallel
from srt.layers.ops_choice import layer_ops
from srt.model_loader import loader as loader_module
from srt.model_loader import weight_copy
from srt.model_loader.loader import CheckpointLoader
from srt.utils.model_config import ModelConfig
from tests.support.checkpoints import CheckpointFactory
from tests.support.quantised_checkpoint import WITH_INPUTS, write_quantised
from tests.support.ranks import CPU, idle_rank, single_rank

CUDA = torch.device("cuda", 0)


def loaded(folder: Path, tp: TensorParallel, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    config, ops = ModelConfig.from_folder(folder), layer_ops(CPU)
    with torch.inference_mode():
        model = CheckpointLoader().load_model(config, folder, tp, dtype, device, lambda done, total: None, ops=ops)
    return dict(model.state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("block_bytes", [1000, weight_copy.BLOCK_BYTES])
@pytest.mark.parametrize("form", ["bfloat16", "float32", *(name for name in WITH_INPUTS if name.startswith("fp8"))])
def test_the_same_bytes_arrive_as_on_a_cpu(
    form: str, block_bytes: int, checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("qwen3", vocab_size=509, tied=False, num_shards=2)
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    ranks = [idle_rank(rank, 2) for rank in range(2)]
    if form in WITH_INPUTS:
        ranks = [single_rank()]
        folder, _ = write_quantised(checkpoint("qwen3"), tmp_path, WITH_INPUTS[form])
    monkeypatch.setattr(loader_module, "finish", lambda *_: None)
    for tp in ranks:
        whole = loaded(folder, tp, dtype, CPU)
        with monkeypatch.context() as patch:
            patch.setattr(weight_copy, "BLOCK_BYTES", block_bytes)
            for _ in range(3):
                arrived = loaded(folder, tp, dtype, CUDA)
                assert arrived.keys() == whole.keys()
                for name, tensor in whole.items():
                    assert torch.equal(
                        arrived[name].cpu().view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
                    ), name

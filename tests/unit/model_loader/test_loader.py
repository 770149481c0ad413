"""Loading: every rank reads its own slices, and a checkpoint that does not fit is refused before a weight is read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from srt.distributed.parallel_state import TensorParallel
from srt.layers.weights import WeightPiece, model_weight_pieces
from srt.model_loader import loader as loader_module
from srt.model_loader import weight_copy
from srt.model_loader.kv_scales import KvScales, read_kv_scales
from srt.model_loader.loader import LoadConfig, Progress, get_model_loader
from srt.models.causal_lm import CausalLM
from srt.utils.checkpoint import TensorHeader
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from tests.support.checkpoints import CheckpointFactory
from tests.support.ranks import CPU, idle_rank, single_rank

Tensors = dict[str, Tensor]


def load(
    folder: Path,
    tp: TensorParallel | None = None,
    config: LoadConfig | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Progress = lambda done, total: None,
    **options: Any,
) -> CausalLM:
    model_config = ModelConfig.from_folder(folder, **options)
    loader = get_model_loader(config or LoadConfig())
    model = loader.load_model(model_config, folder, tp or single_rank(), dtype, CPU, progress)
    assert isinstance(model, CausalLM)
    return model


def altered(folder: Path, tmp_path: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy whose tensors went through `change`."""
    copy = Path(shutil.copytree(folder, tmp_path / "altered"))
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    return copy


def refusal(folder: Path, tp: TensorParallel | None = None, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, tp, **options)
    return str(caught.value)


def test_one_rank_holds_every_tensor_of_the_checkpoint(checkpoint: CheckpointFactory) -> None:
    for tied in (True, False):
        folder = checkpoint("qwen2", tied=tied)
        stored = load_file(folder / "model.safetensors")
        model = load(folder)
        pieces = model_weight_pieces(model)
        assert {piece.name for piece in pieces} == set(stored)
        for piece in pieces:
            assert torch.equal(piece.target(), stored[piece.name]), piece.name
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_together_hold_every_element_once_but_for_shared_kv_heads(
    size: int, checkpoint: CheckpointFactory
) -> None:
    folder = checkpoint("qwen3", vocab_size=509, tied=False, config={"attention_bias": True})
    stored = load_file(folder / "model.safetensors")
    rebuilt = {name: torch.full_like(tensor, float("nan")) for name, tensor in stored.items()}
    read = dict.fromkeys(stored, 0)
    for rank in range(size):
        for piece in model_weight_pieces(load(folder, idle_rank(rank, size))):
            rebuilt[piece.name].narrow(piece.dim, piece.start, piece.size).copy_(piece.target())
            read[piece.name] += piece.size
    for name, tensor in stored.items():
        assert torch.equal(rebuilt[name], tensor), name
        if ".k_proj." in name or ".v_proj." in name:
            assert read[name] == tensor.shape[0] * max(1, size // 2)
        elif "_proj.weight" in name or "embed" in name or "lm_head" in name:
            assert read[name] in tensor.shape, name


def test_rows_beyond_the_vocabulary_are_zero(checkpoint: CheckpointFactory) -> None:
    model = load(checkpoint("qwen3", vocab_size=509, tied=False), idle_rank(1, 2))
    for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
        assert weight.shape[0] == 255
        assert not weight[254:].any()
        assert weight[:254].any(dim=1).all()


def test_progress_counts_the_bytes_of_this_rank(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen2", num_shards=3)
    calls: list[tuple[int, int]] = []
    model = load(folder, idle_rank(0, 2), progress=lambda done, total: calls.append((done, total)))
    own = sum(piece.num_elements for piece in model_weight_pieces(model)) * 4
    assert calls[0] == (0, own)
    assert calls[-1] == (own, own)
    assert calls == sorted(calls)


def test_weights_take_the_type_asked_for(qwen3_checkpoint: Path) -> None:
    model = load(qwen3_checkpoint, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    stored = load_file(qwen3_checkpoint / "model.safetensors")["model.norm.weight"]
    assert torch.equal(model.get_parameter("model.norm.weight"), stored.bfloat16())


def test_missing_tensors_are_named(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.layers.1.self_attn.q_norm.weight"], tensors["model.norm.weight"]

    sentence = refusal(altered(qwen3_checkpoint, tmp_path, change))
    assert "lacks model.layers.1.self_attn.q_norm.weight, model.norm.weight (2 in all)" in sentence


def test_many_missing_tensors_are_counted(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.0." in name]:
            del tensors[name]

    sentence = refusal(altered(qwen3_checkpoint, tmp_path, change))
    assert "and 6 more (11 in all)" in sentence
    assert sentence.count("model.layers.0.") == 5


def test_surplus_tensors_are_named(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    folder = altered(qwen3_checkpoint, tmp_path, lambda tensors: tensors.update({"model.odd.weight": torch.ones(2)}))
    assert "does not use: model.odd.weight" in refusal(folder)


def test_an_untied_head_in_a_checkpoint_of_an_untied_model_is_needed(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = altered(checkpoint("qwen3", tied=False), tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks lm_head.weight" in refusal(folder)


def test_known_leftovers_are_passed_over(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    leftovers = (
        "lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.layers.2.self_attn.q_proj.weight",
        "mtp.layers.0.weight",
        "model.mtp_layers.0.weight",
    )
    folder = altered(
        qwen3_checkpoint, tmp_path, lambda tensors: tensors.update({name: torch.ones(3) for name in leftovers})
    )
    assert "does not use: model.layers.2.self_attn.q_proj.weight (1 in all)" in refusal(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    load(folder)


def test_misshapen_tensors_are_named_with_both_shapes(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    folder = altered(
        qwen3_checkpoint, tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3, 2)})
    )
    assert "wrong shape is model.norm.weight [3, 2] instead of [64]" in refusal(folder)
    # A vocabulary that the ranks' padding would hide.
    assert "model.embed_tokens.weight [512, 64] instead of [511, 64]" in refusal(
        qwen3_checkpoint, idle_rank(0, 2), overrides={"vocab_size": 511}
    )


def test_a_type_that_cannot_be_loaded_is_named(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    folder = altered(
        qwen3_checkpoint,
        tmp_path,
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
    )
    assert "model.norm.weight (I8)" in refusal(folder)


def test_nothing_is_read_or_allocated_for_a_checkpoint_that_does_not_fit(
    qwen3_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = altered(qwen3_checkpoint, tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    reached: list[str] = []
    for step in ("ParameterMemory", "copy_weights"):
        monkeypatch.setattr(loader_module, step, lambda *_, step=step: reached.append(step))
    assert "model.norm.weight" in refusal(folder)
    assert reached == []


def test_a_tp_that_does_not_divide_is_refused(qwen3_checkpoint: Path) -> None:
    assert "--tp 3 does not divide" in refusal(qwen3_checkpoint, idle_rank(0, 3))


def test_dummy_weights_need_no_files_and_follow_from_the_seed(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(qwen3_checkpoint / "config.json", tmp_path)
    calls: list[tuple[int, int]] = []

    def weights(seed: int) -> dict[str, Tensor]:
        model = load(
            tmp_path, config=LoadConfig("dummy", seed), progress=lambda done, total: calls.append((done, total))
        )
        return dict(model.state_dict())

    one, same, other = weights(1), weights(1), weights(2)
    assert calls[-1][0] == calls[-1][1] > 0
    assert one.keys() == {name for name, _ in load(qwen3_checkpoint).named_parameters(remove_duplicate=False)}
    for name, weight in one.items():
        assert torch.equal(weight, same[name])
        assert torch.equal(weight, other[name]) == name.endswith("norm.weight"), name
        assert torch.isfinite(weight).all()
        assert 0.0 < weight.abs().mean() < 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_of_the_ranks_are_parts_of_the_same_model(
    dtype: torch.dtype, checkpoint: CheckpointFactory
) -> None:
    folder = checkpoint("qwen2", vocab_size=509, tied=False)
    dummy = LoadConfig("dummy", seed=3)
    whole = {piece.name: piece.target() for piece in model_weight_pieces(load(folder, None, dummy, dtype))}
    for rank in range(4):
        for piece in model_weight_pieces(load(folder, idle_rank(rank, 4), dummy, dtype)):
            part = whole[piece.name].narrow(piece.dim, piece.start, piece.size)
            assert torch.equal(piece.target(), part), piece.name


def with_kv_scales(tensors: Tensors, *, layers: int = 2, value: float = 0.25) -> None:
    for layer in range(layers):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(value * (layer + 1))
        tensors[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = torch.tensor([2.0])


def test_scales_of_an_fp8_kv_memory_are_read_and_are_no_surplus(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    assert read_kv_scales(qwen3_checkpoint, 2) is None
    folder = altered(qwen3_checkpoint, tmp_path, with_kv_scales)
    assert read_kv_scales(folder, 2) == KvScales([0.25, 0.5], [2.0, 2.0])
    load(folder)


@pytest.mark.parametrize(("options", "words"), [({"layers": 1}, "no k_scale of layer 1"), ({"value": 0.0}, "positive")])
def test_scales_that_cannot_be_meant_are_refused(
    options: dict[str, Any], words: str, qwen3_checkpoint: Path, tmp_path: Path
) -> None:
    folder = altered(qwen3_checkpoint, tmp_path, lambda tensors: with_kv_scales(tensors, **options))
    with pytest.raises(ModelError, match=words):
        read_kv_scales(folder, 2)


def test_tensors_of_many_blocks_are_read_whole(checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns, by every rank, in blocks of a few rows and of one that is too long for a block."""
    folder = checkpoint("llama", num_shards=3)
    whole = [load(folder, idle_rank(rank, 2)).state_dict() for rank in range(2)]
    monkeypatch.setattr(weight_copy, "BLOCK_BYTES", 300)
    for rank in range(2):
        for name, tensor in load(folder, idle_rank(rank, 2)).state_dict().items():
            assert torch.equal(tensor, whole[rank][name]), name


@pytest.mark.parametrize("most_open", [0, 1, 64])
def test_files_are_closed_when_all_is_read(
    most_open: int, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there are more than stay open."""
    folder = checkpoint("qwen3", num_shards=3)
    opened, closed = [], []
    open_file, close_file = os.open, os.close

    def noted_open(*arguments: Any) -> int:
        opened.append(open_file(*arguments))
        return opened[-1]

    def noted_close(descriptor: int) -> None:
        closed.append(descriptor)
        close_file(descriptor)

    whole = load(folder).state_dict()
    monkeypatch.setattr(weight_copy, "BLOCK_BYTES", 300)
    monkeypatch.setattr(weight_copy, "MOST_OPEN_FILES", most_open)
    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr(os, "close", noted_close)
    loaded = load(folder).state_dict()
    monkeypatch.undo()
    assert sorted(opened) == sorted(closed)
    assert len(opened) == 3 if most_open == 64 else len(opened) > 3
    assert all(torch.equal(tensor, whole[name]) for name, tensor in loaded.items())


class Three(nn.Module):
    """Parameters for tensors that follow each other in a file, of which the second does not begin at a multiple of its elements' size."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
        self.numbers = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.halves = nn.Parameter(torch.zeros(4), requires_grad=False)


@pytest.fixture
def three(tmp_path: Path) -> tuple[Three, dict[str, TensorHeader], list[WeightPiece]]:
    file = tmp_path / "three"
    halves = np.arange(4, dtype=np.float16)
    file.write_bytes(bytes([1, 2, 3]) + np.arange(6, dtype=np.float32).tobytes() + halves.tobytes())
    headers = {
        "bytes": TensorHeader("bytes", "U8", (3,), file, 0, 3),
        "numbers": TensorHeader("numbers", "F32", (2, 3), file, 3, 24),
        "halves": TensorHeader("halves", "F16", (4,), file, 27, 8),
    }
    owner = Three()
    return owner, headers, [WeightPiece(n, h.shape, owner, n, 0, 0, h.shape[0], 0) for n, h in headers.items()]


@pytest.mark.parametrize("is_staged", [False, True])
def test_what_follows_in_a_file_is_read_at_once(
    is_staged: bool, three: tuple[Three, dict[str, TensorHeader], list[WeightPiece]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the memory would not be aligned. On a GPU all is read into a buffer first."""
    reads: list[int] = []
    read = weight_copy._Files.read

    def noted(files: weight_copy._Files, file: Path, offset: int, into: Sequence[Tensor]) -> None:
        reads.append(offset)
        read(files, file, offset, into)

    monkeypatch.setattr(weight_copy._Files, "read", noted)
    if is_staged:
        monkeypatch.setattr(weight_copy._Block, "is_stored_as_used", False)
    owner, headers, pieces = three
    weight_copy.copy_weights(headers, pieces, CPU, lambda done, total: None)
    assert owner.bytes.tolist() == [1, 2, 3]
    assert owner.numbers.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert owner.halves.tolist() == [0, 1, 2, 3]
    assert sorted(reads) == [0, 3]


def test_the_first_tensors_are_read_while_memory_for_others_is_allocated(
    qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(qwen3_checkpoint).state_dict()
    monkeypatch.setattr(weight_copy, "BLOCK_BYTES", 300)
    has_read, allocate = Event(), loader_module.ParameterMemory.allocate
    allocated: set[nn.Module] = set()

    def waits(memory: loader_module.ParameterMemory, module: nn.Module) -> None:
        if len(allocated) == 5:
            assert has_read.wait(timeout=100)
        allocated.add(module)
        allocate(memory, module)

    monkeypatch.setattr(loader_module.ParameterMemory, "allocate", waits)
    loaded = load(qwen3_checkpoint, progress=lambda done, total: has_read.set() if done else None)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in loaded.state_dict().items())


def test_memory_that_cannot_be_allocated_ends_loading(
    three: tuple[Three, dict[str, TensorHeader], list[WeightPiece]],
) -> None:
    _, headers, pieces = three

    def prepare(piece: WeightPiece) -> None:
        if piece.name == "halves":
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        weight_copy.copy_weights(headers, pieces, CPU, lambda done, total: None, prepare)


def test_a_file_that_shrinks_while_it_is_read_is_named(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen3_checkpoint, tmp_path / "shrinking"))
    file = folder / "model.safetensors"

    def shrink(done: int, total: int) -> None:
        if done == 0:
            with file.open("r+b") as stream:
                stream.truncate(file.stat().st_size // 2)

    with pytest.raises(ModelError, match=r"model\.safetensors was cut short while it was read"):
        load(folder, progress=shrink)

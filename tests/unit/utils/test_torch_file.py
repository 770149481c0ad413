"""Reading files of PyTorch without torch, and without running what is in them."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from srt.utils.model_error import ModelError
from srt.utils.torch_file import read_torch_file

TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "U8": torch.uint8}


def refusal(file: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_torch_file(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def saved(content: Any, tmp_path: Path, **options: Any) -> Path:
    file = tmp_path / "pytorch_model.bin"
    torch.save(content, file, **options)
    return file


def check_equal(content: dict[str, torch.Tensor], file: Path) -> None:
    found = read_torch_file(file)
    stored = file.read_bytes()
    assert [one.name for one in found] == list(content)
    for one in found:
        part = bytearray(stored[one.start : one.start + one.num_bytes])
        tensor = torch.frombuffer(part, dtype=TYPES[one.dtype]).view(one.shape)
        assert torch.equal(tensor, content[one.name].detach())


def test_every_tensor_is_found_with_its_type_and_place(tmp_path: Path) -> None:
    content = {name: torch.arange(24).view(2, 3, 4).to(dtype) for name, dtype in TYPES.items()}
    check_equal(content, saved(content, tmp_path))


def test_a_models_state_and_its_parameters_are_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    check_equal(model.state_dict(), saved(model.state_dict(), tmp_path))
    parameters = dict(model.named_parameters())
    check_equal({**parameters}, saved(parameters, tmp_path))


def test_parts_of_one_memory_are_read_where_they_are(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    check_equal(
        {"whole": whole, "part": whole[2:5], "again": whole},
        saved({"whole": whole, "part": whole[2:5], "again": whole}, tmp_path),
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"w": torch.randn(3, 2).t()}, "holds w not row by row"),
        ({"model": {"w": torch.randn(2)}}, "holds model (_Dict)"),
        ({"step": 3}, "holds step (int)"),
        ([torch.randn(2)], "holds a list"),
        ({"w": torch.randn(2, 2).to_sparse()}, "torch._utils._rebuild_sparse_tensor"),
        (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    ],
)
def test_what_is_no_tensor_stored_row_by_row_is_named(content: Any, words: str, tmp_path: Path) -> None:
    assert words.replace("_Dict", "dict") in refusal(saved(content, tmp_path)).replace("_Dict", "dict")


class Harmful:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    file = saved({"w": Harmful(tmp_path / "mark")}, tmp_path)
    assert "mkdir" in refusal(file)
    assert not (tmp_path / "mark").exists()


def test_a_file_cut_short_anywhere_is_named(tmp_path: Path) -> None:
    whole = saved({"w": torch.randn(64, 64)}, tmp_path).read_bytes()
    for length in (0, 10, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.bin").write_bytes(whole[:length])
        assert "cut.bin is cut short" in refusal(tmp_path / "cut.bin")


def test_the_format_before_archives_is_named(tmp_path: Path) -> None:
    old = saved({"w": torch.randn(2)}, tmp_path, _use_new_zipfile_serialization=False)
    assert "older than PyTorch 1.6" in refusal(old)


def repacked(file: Path, change: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """The archive with other members."""
    other = file.with_name("other.bin")
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(other, "w", compression) as copied:
        for name in archive.namelist():
            copied.writestr(name, change.get(name.partition("/")[2], archive.read(name)))
    return other


@pytest.mark.parametrize(
    ("change", "compression", "words"),
    [
        ({"byteorder": b"big"}, zipfile.ZIP_STORED, "another byte order"),
        ({"data/0": b"too short"}, zipfile.ZIP_STORED, "is damaged"),
        ({"data.pkl": b"no pickle"}, zipfile.ZIP_STORED, "is damaged"),
        ({"data.pkl": pickle.dumps({"w": 3.0})}, zipfile.ZIP_STORED, "holds w (float)"),
        ({}, zipfile.ZIP_DEFLATED, "is damaged"),
    ],
)
def test_damaged_archives_are_named(change: dict[str, bytes], compression: int, words: str, tmp_path: Path) -> None:
    file = saved({"w": torch.zeros(64, 64)}, tmp_path)
    assert words in refusal(repacked(file, change, compression))

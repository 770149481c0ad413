"""Finding a checkpoint, and reading the headers of its files."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import pytest
import torch
from safetensors.torch import load_file

from srt.utils import checkpoint as checkpoint_module
from srt.utils.checkpoint import estimate_weight_bytes, read_headers, read_parts, resolve_model_path, version_of
from srt.utils.model_error import ModelError
from tests.support.checkpoints import CheckpointFactory

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_headers(folder)
    return str(caught.value)


def test_headers_tell_what_the_files_hold(checkpoint: CheckpointFactory) -> None:
    for shards in (1, 3):
        folder = checkpoint("qwen2", num_shards=shards)
        tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
        headers = read_headers(folder)
        assert {name: header.shape for name, header in headers.items()} == {
            n: tuple(t.shape) for n, t in tensors.items()
        }
        assert {header.dtype for header in headers.values()} == {"F32"}
        assert len({header.file for header in headers.values()}) == shards


def test_a_version_is_that_of_all_files_that_are_read(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = copy(checkpoint("qwen2", num_shards=3), tmp_path)
    versions = [version_of(folder)]
    (folder / "notes.txt").write_text("not read")
    assert version_of(folder) == versions[0]
    weights = sorted(folder.glob("*.safetensors"))
    os.utime(weights[1], ns=(0, 0))
    versions.append(version_of(folder))
    weights[2].unlink()
    versions.append(version_of(folder))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    versions.append(version_of(folder))
    assert len(set(versions)) == 4


def test_weight_bytes_follow_from_the_headers(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen2", num_shards=3)
    elements = sum(t.numel() for file in folder.glob("*.safetensors") for t in load_file(file).values())
    assert estimate_weight_bytes(folder) == 4 * elements
    assert estimate_weight_bytes(folder, "float32") == 4 * elements
    assert estimate_weight_bytes(folder, "bfloat16") == 2 * elements


def test_weights_but_those_of_experts_count_for_each_attention_group(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("qwen2_moe")  # with a shared expert
    sizes = {name: t.nbytes for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    names = [name for name in sizes if ".mlp.experts." in name or ".mlp.shared_expert." in name]
    experts = sum(sizes[name] for name in names)
    assert 0 < len(names) < len(sizes)
    assert estimate_weight_bytes(folder, num_groups=2) == 2 * sum(sizes.values()) - experts
    assert estimate_weight_bytes(folder, "bfloat16", num_groups=3) == (3 * sum(sizes.values()) - 2 * experts) // 2


def test_files_without_an_index_are_all_read_but_for_the_authors_own(
    checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder = copy(checkpoint("qwen2", num_shards=3), tmp_path)
    expected = read_headers(folder).keys()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "consolidated.safetensors").write_bytes(b"other names for the same")
    assert read_headers(folder).keys() == expected


def test_a_missing_shard_is_named(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = copy(checkpoint("qwen2", num_shards=3), tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(folder)


def test_a_shard_that_lacks_what_the_index_promises_is_named(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = copy(checkpoint("qwen2", num_shards=3), tmp_path)
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors")
    assert "is in both model-00001-of-00003.safetensors and model-00002" in refusal(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shutil.copy(checkpoint("qwen2", num_shards=3) / "model-00002-of-00003.safetensors", folder)
    content["weight_map"]["model.extra"] = "model-00002-of-00003.safetensors"
    index.write_text(json.dumps(content))
    sentence = refusal(folder)
    assert "model-00002-of-00003.safetensors" in sentence
    assert "model.extra" in sentence


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}']
)
def test_a_broken_index_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json is not an index of tensors" in refusal(tmp_path)


def test_a_file_cut_short_anywhere_is_named(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    whole = (qwen3_checkpoint / "model.safetensors").read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    for length in (0, 5, 8, 100, header_end - 1, header_end, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        assert "model.safetensors" in refusal(tmp_path)


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b"3",
        b'{"w": 3}',
        json.dumps(entry(shape=[3])).encode(),
        json.dumps(entry(data_offsets=[0])).encode(),
        json.dumps(entry(data_offsets=["a", "b"])).encode(),
        json.dumps(entry(data_offsets=None)).encode(),
        json.dumps(entry(shape=["x"])).encode(),
        json.dumps(entry(shape=[-1, -2])).encode(),
        json.dumps(entry(dtype=None)).encode(),
        json.dumps(entry(dtype=[])).encode(),
    ],
)
def test_a_broken_header_is_named(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert "model.safetensors is not a safetensors file" in refusal(tmp_path)


def test_a_header_of_impossible_length_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "model.safetensors is not a safetensors file" in refusal(tmp_path)


def test_a_model_path_is_a_folder_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    assert resolve_model_path(str(tmp_path / "tiny")) == tmp_path / "tiny"
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("tiny") == Path("tiny")


def test_a_shipped_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "little").mkdir()
    (tmp_path / "little" / "config.json").write_text("{}")
    monkeypatch.setattr(checkpoint_module, "SHIPPED_MODELS", tmp_path)
    assert resolve_model_path("little") == tmp_path / "little"


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./models/x", "../x", "~/no-such-model", "~nobody-here/x", "a/b/c", "", "C:\\x"]
)
def test_a_path_that_does_not_exist_is_named(path: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model_path(path)
    assert f"--model-path {path}" in str(caught.value).replace("is empty", "")


def test_a_file_is_not_a_model_path(qwen3_checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="is a file"):
        resolve_model_path(str(qwen3_checkpoint / "model.safetensors"))


def fill_hub_cache(cache: Path, hub_id: str) -> Path:
    """The layout of the hub's own cache, with one snapshot that branch main points to."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_hub_id_is_found_in_the_cache_without_a_network(tmp_path: Path) -> None:
    snapshot = fill_hub_cache(tmp_path, "maker/model-1.5B")
    for revision in (None, "main", COMMIT):
        assert resolve_model_path("maker/model-1.5B", revision, str(tmp_path)) == snapshot


def test_a_hub_id_that_is_not_in_the_cache_is_named(tmp_path: Path) -> None:
    fill_hub_cache(tmp_path, "maker/model")
    for hub_id, revision in (("maker/other", None), ("maker/model", "v2"), ("no-such-model", None)):
        with pytest.raises(ModelError, match=f"{hub_id}.*HF_HUB_OFFLINE") as caught:
            resolve_model_path(hub_id, revision, str(tmp_path))
        assert (revision or "") in str(caught.value)


def hub_error(name: str) -> Exception:
    """An error of the hub's client, without the HTTP answer that it is usually made of."""
    kind: type[Exception] = getattr(huggingface_hub.errors, name)
    error = kind.__new__(kind)
    error.args = (f"{name}: the long story\nin several lines",)
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (hub_error("GatedRepoError"), ["gated", "HF_TOKEN"]),
        (hub_error("RepositoryNotFoundError"), ["neither a folder", "HF_TOKEN"]),
        (hub_error("RevisionNotFoundError"), ["no revision v2"]),
        (hub_error("HfHubHTTPError"), ["could not be downloaded"]),
        (OSError(28, "No space left on device"), ["No space left on device"]),
        (RuntimeError("certificate expired"), ["certificate expired"]),
    ],
)
def test_what_the_hub_answers_is_told_in_a_sentence(
    error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    with pytest.raises(ModelError) as caught:
        resolve_model_path("maker/model", "v2")
    for word in ["maker/model", *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hf_home_is_honoured_and_torch_is_not_imported(tmp_path: Path) -> None:
    snapshot = fill_hub_cache(tmp_path / "hub", "maker/model")
    program = (
        "import sys; from srt.utils.checkpoint import resolve_model_path; import srt.utils.model_config;"
        "assert 'huggingface_hub' not in sys.modules;"
        "print(resolve_model_path('maker/model')); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == str(snapshot), done.stderr


def as_torch_files(folder: Path) -> None:
    """Write the checkpoint's shards as files of PyTorch instead."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in folder.glob("*.safetensors"):
        torch.save(load_file(file), folder / f"pytorch_{file.stem}.bin")
        file.unlink()
    index["weight_map"] = {name: f"pytorch_{Path(file).stem}.bin" for name, file in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def test_files_of_pytorch_are_read_where_there_are_no_others(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    folder = copy(checkpoint("qwen2", num_shards=3), tmp_path)
    expected = {name: b"".join(read_parts(header)) for name, header in read_headers(folder).items()}
    as_torch_files(folder)
    headers = read_headers(folder)
    assert {name: b"".join(read_parts(header)) for name, header in headers.items()} == expected
    assert len({header.file for header in headers.values()}) == 3
    version = version_of(folder)
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    assert version_of(folder) != version
    assert "lacks pytorch_model-00002-of-00003.bin" in refusal(folder)


def test_a_hub_model_without_safetensors_is_downloaded_as_files_of_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(*_: object, allow_patterns: list[str], **__: object) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model_path("maker/model") == tmp_path
    assert ["pytorch_model*.bin" in patterns for patterns in asked] == [False, True]
    (tmp_path / "model.safetensors").write_bytes(b"")
    resolve_model_path("maker/model")
    assert "pytorch_model*.bin" not in asked[-1]

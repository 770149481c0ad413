"""Routes that replace weights: what they pass on, what they refuse, and that nothing of a body stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from srt.protocol.engine_work import LoadWeights
from tests.unit.entrypoints.fake_engine import World

GROUP = "/update_weights_from_distributed"
DISK, TENSORS = "/update_weights_from_disk", "/update_weights_from_tensor"
FILE = {"content-type": "application/octet-stream"}


def test_a_folder_is_passed_on_with_its_name(tmp_path: Path) -> None:
    world = World()
    body = {"model_path": str(tmp_path), "weight_version": "two", "abort_all_requests": True, "load_format": "auto"}
    answer = world.post(DISK, body)
    assert answer.json() == {
        "success": True,
        "message": f"The weights are those in {tmp_path}.",
        "num_paused_requests": 3,
    }
    assert world.engine.updates == [(LoadWeights(str(tmp_path)), "two", True)]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "model_path"),
        ({"model_path": "/absent"}, "is not a folder on the server's machine"),
        ({"model_path": "a\0b"}, "is not a folder on the server's machine"),
        ({"model_path": "/", "flush_cache": False}, "flush_cache must be true"),
        ({"model_path": "/", "load_format": "dummy"}, "load_format must be null, or auto"),
        ({"model_path": "/", "is_async": True}, "is_async is not supported"),
    ],
)
def test_what_an_update_from_disk_cannot_do_is_refused(body: dict[str, Any], sentence: str) -> None:
    world = World()
    answer = world.post(DISK, body)
    assert answer.status_code == 400 and sentence in answer.text
    assert world.engine.updates == []


def test_the_workers_sentence_is_told(tmp_path: Path) -> None:
    world = World()
    world.engine.why_not_updated = "It lacks a tensor."
    answer = world.post(DISK, {"model_path": str(tmp_path)})
    assert answer.status_code == 400 and "It lacks a tensor." in answer.text


def test_a_file_of_tensors_is_there_for_the_workers_and_gone_afterwards(tmp_path: Path) -> None:
    world = World()
    world.service.run_dir = tmp_path
    query = {"weight_version": "two", "abort_all_requests": "true"}
    assert world.call("POST", TENSORS, content=b"tensors", params=query, headers=FILE).status_code == 200
    ((work, version, aborts),) = world.engine.updates
    assert (Path(work.folder).parent, work.is_partial, version, aborts) == (tmp_path, True, "two", True)
    assert world.engine.update_files == {"model.safetensors": b"tensors"}
    world.engine.why_not_updated = "The checkpoint FOLDER does not fit: FOLDER/model.safetensors is none."
    answer = world.call("POST", TENSORS, content=b"tensors", headers=FILE)
    assert "The body does not fit: the body/model.safetensors is none." in answer.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({"json": {"serialized_named_tensors": []}}, 415),
        ({"content": b"tensors"}, 415),
        ({"content": b"", "headers": FILE, "params": {"load_format": "flattened_bucket"}}, 400),
        ({"content": b"", "headers": FILE, "params": {"abort_all_requests": "perhaps"}}, 400),
    ],
)
def test_other_forms_of_tensors_are_refused(request_: dict[str, Any], status: int) -> None:
    world = World()
    assert world.call("POST", TENSORS, **request_).status_code == status
    assert world.engine.updates == []


@pytest.mark.parametrize("aborts", [True, False])
def test_another_name_is_in_later_answers(aborts: bool) -> None:
    world = World()
    answer = world.post("/update_weight_version", {"new_version": "three", "abort_all_requests": aborts})
    assert answer.json()["new_version"] == "three"
    assert world.engine.aborted_labels == [""] * aborts
    assert world.post("/generate", {"text": "hi"}).json()["meta_info"]["weight_version"] == "three"
    assert world.get("/model_info").json()["weight_version"] == "three"


@pytest.mark.parametrize("shape", [[1 << 63, 0], [0, 1 << 40, 1 << 40], [(1 << 64) - 1]])
def test_shapes_that_no_tensor_can_have_are_refused(shape: list[int]) -> None:
    world = World()
    answer = world.post(GROUP, {"names": ["a"], "dtypes": ["uint8"], "shapes": [shape]})
    assert answer.status_code == 400 and "must have sizes whose product is below 2 ** 63" in answer.text
    assert world.engine.updates == []

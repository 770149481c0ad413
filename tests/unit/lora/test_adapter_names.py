"""The names of adapters in a file that frontends share, and the namespaces that keep adapters' prefixes apart."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.lora.adapter_files import AdapterLimits
from srt.lora.adapter_names import AdapterNames
from srt.lora.resource import AdapterContent, resource_of, with_adapter
from srt.managers.tokenizer_manager.request_ledger import digest_of
from srt.protocol.messages import GenerateRequest, LogprobSpec, SamplingSpec, int32_array
from srt.server_args import ServerArgs
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError
from tests.support.random_adapter import AdapterSpec, write_adapter


@pytest.fixture(scope="module")
def folders(qwen3_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    for number in range(2):
        write_adapter(root / str(number), qwen3_checkpoint, AdapterSpec(seed=number, modules=("q_proj",)))
    return [root / "0", root / "1"]


@pytest.fixture
def frontends(qwen3_checkpoint: Path, tmp_path: Path) -> list[AdapterNames]:
    """Two frontends' views of the names of one server."""
    limits = AdapterLimits.of(ServerArgs(model_path="m", enable_lora=True), ModelConfig.from_folder(qwen3_checkpoint))
    assert limits is not None
    return [AdapterNames(tmp_path, limits, lambda: 7.0) for _ in range(2)]


def test_what_one_frontend_changes_the_others_know_and_a_replaced_one_keeps(
    frontends: list[AdapterNames], folders: list[Path]
) -> None:
    first, second = frontends
    assert (second.find("red"), second.all()) == (None, {})
    first.begin({"red": str(folders[0])})
    red = second.find("red")
    assert red is not None
    second.add("blue", str(folders[1]))
    assert list(first.all()) == ["red", "blue"]
    assert first.find("blue") == second.find("blue") != red
    second.begin({"red": str(folders[0])})  # as a frontend that replaces a dead one does
    first.add("red", str(folders[1]))
    assert second.find("red") == first.find("blue")
    assert first.remove("blue") and not second.remove("blue")
    second.begin({"red": str(folders[0]), "blue": str(folders[1])})
    assert list(first.all()) == ["red"]


def test_adapters_are_pinned_until_they_are_loaded_again_or_unloaded(
    qwen3_checkpoint: Path, folders: list[Path], tmp_path: Path
) -> None:
    limits = AdapterLimits.of(ServerArgs(model_path="m", enable_lora=True), ModelConfig.from_folder(qwen3_checkpoint))
    assert limits is not None
    one, other = (AdapterNames(tmp_path, limits, lambda: 7.0, most_pinned=1) for _ in range(2))
    one.add("red", str(folders[0]), is_pinned=True)
    first = other.pinned()
    assert first.resources == [one.find("red")]
    with pytest.raises(ModelError, match="one of the 2 places"):
        other.add("blue", str(folders[1]), is_pinned=True)
    other.add("red", str(folders[1]), is_pinned=True)
    assert one.pinned().resources == [one.find("red")] != first.resources
    other.add("red", str(folders[0]))
    assert one.pinned().resources == []
    other.add("blue", str(folders[1]), is_pinned=True)
    assert other.remove("blue")
    last = one.pinned()
    assert last.resources == [] and last.version > first.version


def test_a_wrong_adapter_changes_nothing(frontends: list[AdapterNames], folders: list[Path], tmp_path: Path) -> None:
    first, second = frontends
    first.add("red", str(folders[0]))
    shutil.copytree(folders[1], tmp_path / "wrong")
    (tmp_path / "wrong" / "adapter_config.json").write_text("{}")
    for name, folder in (
        ("red", tmp_path / "wrong"),
        ("blue", tmp_path / "missing"),
        ("", folders[0]),
        ("a\n", folders[0]),
    ):
        with pytest.raises(ModelError):
            second.add(name, str(folder))
    assert {name: known.folder for name, known in first.all().items()} == {"red": str(folders[0])}


def _request(salt: str) -> GenerateRequest:
    ids = int32_array([1])
    return GenerateRequest(0, "", ids, int32_array([0]), [int32_array()], SamplingSpec(1), LogprobSpec(), 0, 0, salt)


SALTS = st.text(st.sampled_from("a:\0" + "0123456789abcdef"), max_size=40)


@settings(deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(("", "a", "b")), SALTS), min_size=2, max_size=6, unique=True))
def test_no_two_adapters_or_salts_share_a_namespace(pairs: list[tuple[str, str]]) -> None:
    """Also where a client's salt looks like another one's namespace."""
    resources = {name: resource_of(AdapterContent("folder", name)) for name in ("a", "b")}
    names = [with_adapter(_request(salt), resources.get(name)).cache_salt for name, salt in pairs]
    forged = [with_adapter(_request(salt), resources.get(name)).cache_salt for salt in names for name in ("", "a", "b")]
    assert len(set(names)) == len(names)
    own = [(name, salt) for salt in names for name in ("", "a", "b")]
    for (pair, one), (other_pair, other) in itertools.product(
        zip(pairs, names, strict=True), zip(own, forged, strict=True)
    ):
        assert (one == other) == (pair == other_pair)


def test_a_conviction_is_of_one_adapter_and_version() -> None:
    adapters = [None, *(resource_of(AdapterContent("folder", name)) for name in ("a", "b"))]
    assert len({digest_of(with_adapter(_request(""), adapter)) for adapter in adapters}) == 3
    assert resource_of(AdapterContent("elsewhere", "a")).key == resource_of(AdapterContent("folder", "a")).key

"""The script that reads request classes off the sources of other packages, on sources written here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from scripts import read_request_fields
from scripts.read_request_fields import NOT_FIXED, Module, fields_of, main, render

CLASSES = '''\
from enum import Enum
from pkg.values import MODEL as NAME
from pkg.bases import Base
from somewhere import BaseModel, Field, field

ALL = 1 << 30

class Kind(Enum):
    WHOLE = 2

class Request(Base):
    """A docstring."""
    _private: int = 3
    known: ClassVar[int] = 4
    required: str
    limit: int = 16
    scale: float = -1.0
    top: int = ALL
    name: str = Field(default=NAME, description="x")
    kind: Kind = Kind.WHOLE
    words: list = field(default_factory=list)
    id: str = Field(default_factory=random_uuid)
    seed: int | None = Field(None, ge=-MIN)
    must: int = Field(...)
    stop = []

    def method(self): ...
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "classes.py").write_text(CLASSES)
    (folder / "values.py").write_text('MODEL: str = "default"\n')
    (folder / "bases.py").write_text("class Base(BaseModel):\n    rid: str | None = None\n    limit: int = 0\n")
    return tmp_path


def test_fields_are_read_with_their_defaults_through_bases_and_imports(package: Path) -> None:
    assert fields_of(Module(package, "pkg/classes.py"), "Request") == {
        "rid": None,
        "limit": 16,
        "required": NOT_FIXED,
        "scale": -1.0,
        "top": 1 << 30,
        "name": "default",
        "kind": 2,
        "words": [],
        "id": NOT_FIXED,
        "seed": None,
        "must": NOT_FIXED,
    }


@pytest.mark.parametrize("field", ["x: int = compute()", "x: int = UNKNOWN", "x: Kind = Kind.ABSENT"])
def test_a_default_that_cannot_be_read_ends_the_script(package: Path, field: str) -> None:
    (package / "pkg" / "classes.py").write_text(f"class Kind: ...\nclass Request(BaseModel):\n    {field}\n")
    with pytest.raises(SystemExit, match="cannot read the default"):
        fields_of(Module(package, "pkg/classes.py"), "Request")


def test_a_base_from_elsewhere_is_not_taken_for_one_without_fields(package: Path) -> None:
    (package / "pkg" / "classes.py").write_text("from other import Base\nclass Request(Base):\n    x: int = 1\n")
    with pytest.raises(SystemExit, match="has no class Base"):
        fields_of(Module(package, "pkg/classes.py"), "Request")


def test_the_table_has_each_versions_defaults_and_is_only_compared_on_demand(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "newer"
    (other / "pkg").mkdir(parents=True)
    (other / "pkg" / "classes.py").write_text("class Request(BaseModel):\n    limit: int = 1\n")
    (package / "sglang-1.0.dist-info").mkdir()
    (other / "sglang-2.0.dist-info").mkdir()
    for name in ("vllm", "openai", "anthropic"):
        (package / f"{name}-1.0.dist-info").mkdir()
    monkeypatch.setattr(
        read_request_fields, "SOURCES", {"chat": {"sglang": ((("pkg/moved.py", "pkg/classes.py"), "Request"),)}}
    )
    text = render([("sglang", package), ("sglang", other)])
    namespace: dict[str, object] = {}
    exec(text, namespace)
    assert namespace["VERSIONS"] == {"sglang": ("1.0", "2.0")}
    fields = namespace["FIELDS"]
    assert isinstance(fields, dict)
    assert fields["chat"]["limit"] == {"sglang": (16, 1)}
    assert fields["chat"]["id"] == {"sglang": ()}

    table = tmp_path / "table.py"
    monkeypatch.setattr(read_request_fields, "TABLE", table)
    folders = [f"{name}={package}" for name in ("sglang", "vllm", "openai", "anthropic")]
    assert main(folders) == 0
    assert main([*folders, "--check"]) == 0
    table.write_text(table.read_text().replace("16", "17"))
    assert main([*folders, "--check"]) == 1
    assert main(folders[:2]) == 2


def test_the_table_in_the_package_is_as_the_script_writes_it() -> None:
    """By hand nothing is changed there: exceptions are in foreign_fields."""
    table = importlib.import_module("srt.sampling.foreign_table")
    assert read_request_fields.TABLE.read_text("utf-8") == read_request_fields.written(table.VERSIONS, table.FIELDS)

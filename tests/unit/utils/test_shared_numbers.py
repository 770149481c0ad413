"""Numbers in a file that several processes have mapped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from srt.utils.shared_numbers import NumberFiles, SharedNumbers
from tests.support.full_disk import fill_disk


@pytest.mark.parametrize("names", [(), ("a",), ("a", "bb"), tuple("abcdefg")])
def test_what_one_writes_the_other_reads(tmp_path: Path, names: tuple[str, ...]) -> None:
    mine = SharedNumbers.create(tmp_path / "n", names)
    theirs = SharedNumbers.open(tmp_path / "n")
    assert theirs is not None
    assert theirs.values() == dict.fromkeys(names, 0.0)
    for place, name in enumerate(names):
        mine.set(name, place + 0.5)
    assert theirs.values() == {name: place + 0.5 for place, name in enumerate(names)}
    assert theirs.get("unknown", -1.0) == -1.0


def test_another_process_reads_them_too(tmp_path: Path) -> None:
    SharedNumbers.create(tmp_path / "n", ["x"]).set("x", 0.1)
    script = "import sys, pathlib; from srt.utils.shared_numbers import SharedNumbers as S\n"
    script += "print(S.open(pathlib.Path(sys.argv[1])).get('x'))"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "n")], capture_output=True, text=True)
    assert done.stdout == "0.1\n", done.stderr


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    assert SharedNumbers.open(tmp_path / "n") is None
    (tmp_path / "empty").touch()
    assert SharedNumbers.open(tmp_path / "empty") is None
    assert SharedNumbers.private(["x"]).values() == {"x": 0.0}


def test_a_file_that_takes_the_place_of_another_is_found(tmp_path: Path) -> None:
    files = NumberFiles(tmp_path, "kind-")
    assert files.read() == {}
    first = SharedNumbers.create(tmp_path / "kind-a", ["x"])
    (tmp_path / "kind-b.part").touch()
    SharedNumbers.create(tmp_path / "other", ["y"])
    first.set("x", 1.0)
    assert files.read() == {"a": {"x": 1.0}}
    SharedNumbers.create(tmp_path / "kind-a", ["z"]).set("z", 2.0)
    first.set("x", 3.0)
    assert files.read() == {"a": {"z": 2.0}}


def test_where_there_is_no_room_for_a_new_file_the_older_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = NumberFiles(tmp_path, "kind-")
    SharedNumbers.create(tmp_path / "kind-a", ["x", "y"]).set("y", 1.0)
    files.read()
    fill_disk(monkeypatch)
    numbers = SharedNumbers.fresh(tmp_path / "kind-a", ["x", "y"])
    numbers.set("x", 2.0)
    assert files.read() == {"a": {"x": 2.0, "y": 0.0}}
    SharedNumbers.fresh(tmp_path / "kind-a", ["z"]).set("z", 3.0)
    SharedNumbers.fresh(tmp_path / "kind-b", ["x", "y"]).set("x", 3.0)
    assert files.read() == {"a": {"x": 2.0, "y": 0.0}}
    assert [path.name for path in tmp_path.iterdir()] == ["kind-a"]


def test_a_file_that_was_deleted_is_read_on_as_its_process_writes_on(tmp_path: Path) -> None:
    files = NumberFiles(tmp_path, "kind-")
    numbers = SharedNumbers.create(tmp_path / "kind-a", ["x"])
    files.read()
    (tmp_path / "kind-a").unlink()
    numbers.set("x", 1.0)
    assert files.read() == {"a": {"x": 1.0}}
    tmp_path.rename(tmp_path.with_name("gone"))
    assert files.read() == {"a": {"x": 1.0}}


def test_what_is_no_such_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "n").write_bytes(b"x" * 64)
    with pytest.raises(ValueError, match="not a file of shared numbers"):
        SharedNumbers.open(tmp_path / "n")

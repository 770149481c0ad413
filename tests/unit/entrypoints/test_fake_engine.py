"""The engine of the other tests here is called as the real one is."""

from __future__ import annotations

import inspect

from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from tests.unit.entrypoints.fake_engine import FakeEngine


def test_it_takes_what_the_real_one_takes() -> None:
    def parameters(kind: type, name: str) -> list[tuple[str, object]]:
        return [(each.name, each.default) for each in inspect.signature(getattr(kind, name)).parameters.values()]

    names = [name for name in vars(FakeEngine) if not name.startswith("_") and callable(vars(FakeEngine)[name])]
    shared = [name for name in names if hasattr(TokenizerManager, name)]
    assert "get_state" in shared
    for name in shared:
        assert parameters(FakeEngine, name) == parameters(TokenizerManager, name), name

"""Whatever JSON comes, the answer is one or a 4xx: never a mistake of ours."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.entrypoints.fake_engine import World
from tests.unit.entrypoints.wrong_inputs import ENDPOINTS, KINDS, OUT_OF_RANGE, Endpoint, sampling_fields

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
PLAUSIBLE = st.sampled_from([*KINDS, *[value for values in OUT_OF_RANGE.values() for value in values]])


def bodies(endpoint: Endpoint) -> st.SearchStrategy[Any]:
    """A valid body with some fields replaced, known ones as a rule."""
    names = [*endpoint.schema.model_fields, *endpoint.schema.UNSUPPORTED, *sorted(endpoint.schema.MEANINGLESS)]
    fields = st.dictionaries(st.sampled_from(names) | st.text(max_size=8), ANY_JSON | PLAUSIBLE, max_size=4)
    sampling = st.dictionaries(st.sampled_from([*sampling_fields()]), ANY_JSON | PLAUSIBLE, max_size=4)
    whole = st.builds(lambda more: {**endpoint.valid, **more}, fields)
    if endpoint.path == "/generate":
        whole |= st.builds(lambda params: {"text": "hi", "sampling_params": params}, sampling)
    return whole | ANY_JSON


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_any_json_is_answered_or_refused(endpoint: Endpoint) -> None:
    world = World(answer="ab")

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(bodies(endpoint))
    def ask(body: Any) -> None:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=world.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post(endpoint.path, content=json.dumps(body, ensure_ascii=True))

        response = asyncio.run(go())
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code != 200:
            assert response.json()["error"]["message"]

    ask()

"""Every wrong value of every parameter of every endpoint, against the fake engine, which has the real one's checks."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx

from tests.unit.entrypoints.fake_engine import World
from tests.unit.entrypoints.wrong_inputs import ENDPOINTS, broken_bodies, names_without_range, table


def test_every_wrong_value_is_refused_by_name_and_nothing_is_sent() -> None:
    world = World()

    async def go() -> None:
        transport = httpx.ASGITransport(app=world.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for case in table():
                response = await client.post(case.endpoint.path, content=case.content)
                assert response.status_code == case.status, f"{case}: {response.text}"
                error = response.json()["error"]
                assert case.parameter in error["message"], f"{case}: {error}"
                assert len(error["message"]) < 1000, f"{case}: {error}"
                if case.endpoint.path == "/v1/messages":
                    assert error.keys() == {"type", "message"}
                elif case.endpoint.path.startswith("/v1/"):
                    assert error.keys() == {"message", "type", "param", "code"}
                    top = case.parameter.partition(".")[0]
                    assert error["param"] is not None, f"{case}: {error}"
                    assert error["param"].startswith(top), f"{case}: {error}"
                else:
                    assert error.keys() == {"message"}
                assert world.engine.handles == [], f"{case} reached the engine"

    asyncio.run(go())


def test_bodies_that_are_no_object_are_refused() -> None:
    world = World()
    for endpoint in ENDPOINTS:
        for body in broken_bodies():
            response = world.call("POST", endpoint.path, content=body)
            assert response.status_code == 400, (endpoint.path, body[:100], response.text)
            assert response.json()["error"]["message"]
    assert world.engine.handles == []


def test_the_table_is_whole() -> None:
    """Each endpoint has many cases, and every parameter has values that are out of its range."""
    assert names_without_range() == set()
    counts = Counter(case.endpoint.path for case in table())
    assert min(counts[endpoint.path] for endpoint in ENDPOINTS[:3]) > 250, counts


def test_the_valid_bodies_are_valid() -> None:
    world = World()
    for endpoint in ENDPOINTS:
        assert world.post(endpoint.path, endpoint.valid).status_code == 200, endpoint.path

"""Who may ask for what, and which web pages may ask at all."""

from __future__ import annotations

import pytest

from tests.unit.entrypoints.fake_engine import World

PAGE = "https://chat.example"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_admin_key_opens_all_and_the_other_one_what_generates() -> None:
    world = World(api_key="user", admin_api_key="admin")
    assert world.get("/v1/models").status_code == 401
    for key in ("user", "admin"):
        assert world.get("/v1/models", headers=bearer(key)).status_code == 200
    assert world.post("/flush_cache", None).status_code == 401
    refused = world.post("/flush_cache", None, headers=bearer("user"))
    assert (refused.status_code, refused.json()["error"]["message"]) == (403, "/flush_cache needs the admin API key.")
    assert world.post("/flush_cache", None, headers=bearer("admin")).status_code == 200


def test_an_admin_key_alone_leaves_open_what_generates() -> None:
    world = World(admin_api_key="admin")
    assert world.get("/v1/models").status_code == 200
    assert world.post("/pause_generation", {}).status_code == 401
    assert world.post("/pause_generation", {}, headers=bearer("admin")).status_code == 200


def test_without_an_admin_key_the_other_one_opens_all() -> None:
    world = World(api_key="user")
    assert world.post("/flush_cache", None, headers=bearer("user")).status_code == 200


@pytest.mark.parametrize("is_open", [False, True])
def test_metrics_need_the_key_unless_they_are_asked_to_be_open(is_open: bool) -> None:
    world = World(api_key="user", enable_metrics=is_open)
    answer = world.get("/metrics")
    assert answer.status_code == (200 if is_open else 401)
    assert ("--enable-metrics opens /metrics to all" in answer.text) is not is_open
    assert world.get("/metrics", headers=bearer("user")).status_code == 200


def test_pages_of_other_origins_may_not_ask_unless_they_are_allowed() -> None:
    asked = {"origin": PAGE, "access-control-request-method": "POST"}
    world = World()
    for method, path in (("OPTIONS", "/generate"), ("GET", "/v1/models")):
        answer = world.call(method, path, headers=asked)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", [PAGE, "null", "http://test.example", "http://test:81", "x://[", "localhost"])
def test_what_a_page_sends_without_a_preflight_has_no_effect(origin: str) -> None:
    """A Blob without a type is sent without a Content-Type, and without asking first."""
    world = World()
    for path, body in (("/pause_generation", b'{"mode":"abort"}'), ("/abort_request", b'{"abort_all":true}')):
        answer = world.call("POST", path, headers={"origin": origin}, content=body)
        assert answer.status_code == 403
        sentence = f"Web pages of {origin} may not use this server: --cors-allow-origins does not name it."
        assert answer.json()["error"]["message"] == sentence
    assert world.call("POST", "/generate", headers={"origin": origin}, content=b'{"text":"x"}').status_code == 403
    assert (world.engine.paused, world.engine.aborted_labels, world.engine.handles) == ("", [], [])


@pytest.mark.parametrize("relation", ["cross-site", "same-site"])
def test_an_image_or_a_link_of_another_page_changes_nothing(relation: str) -> None:
    """Browsers send no Origin with these."""
    world = World()
    foreign = {"sec-fetch-site": relation}
    for path in ("/flush_cache", "/freeze_gc"):
        assert world.get(path, headers=foreign).status_code == 403
        assert world.get(path, headers={"sec-fetch-site": "none"}).status_code == 200
    assert world.service.control.gc_freezes == 1
    assert world.get("/", headers=foreign).status_code == 200  # a link to the page


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:30000", "host": "localhost:30000"},
        {"origin": "http://127.0.0.1:30000", "host": "127.0.0.1:30000"},
        {"origin": "http://[::1]:30000", "host": "[::1]:30000"},
        {"origin": "https://chat.example", "sec-fetch-site": "same-origin"},  # behind a proxy that tells another Host
        {"sec-fetch-site": "same-origin"},
        {},
    ],
)
def test_the_servers_own_page_and_programs_may_ask(headers: dict[str, str]) -> None:
    assert World().post("/pause_generation", {}, headers=headers).status_code == 200


@pytest.mark.parametrize("origins", [("*",), (PAGE, "http://localhost:3000")])
def test_an_allowed_page_may_ask_and_read_the_answer(origins: tuple[str, ...]) -> None:
    world = World(cors_allow_origins=origins, api_key="user")
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    preflight = world.call("OPTIONS", "/v1/chat/completions", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for key, status in (("user", 200), ("wrong", 401)):
        answer = world.get("/v1/models", headers={"origin": PAGE, **bearer(key)})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ("*" if origins == ("*",) else PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_a_name_that_its_owner_leads_to_this_host_is_not_ours() -> None:
    """The page and the server have the same name then. Where the server listens to others, that name may be its own."""
    for name in ("[", "[::1", "localhost.evil.example", ""):
        odd = {"origin": f"x://{name}", "host": name}
        assert World().post("/flush_cache", None, headers=odd).status_code == 403
    headers = {"origin": "http://evil.example:30000", "host": "evil.example:30000"}
    assert World().post("/pause_generation", {}, headers=headers).status_code == 403
    assert World(host="0.0.0.0").post("/pause_generation", {}, headers=headers).status_code == 200
    assert World(cors_allow_origins=(headers["origin"],)).post("/flush_cache", {}, headers=headers).status_code == 200


def test_where_some_pages_are_allowed_others_are_not() -> None:
    world = World(cors_allow_origins=(PAGE,))
    other = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    assert world.call("OPTIONS", "/generate", headers=other).status_code == 403
    answer = world.get("/v1/models", headers=other)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["vary"] == "origin"


def test_how_requests_are_logged_can_be_changed() -> None:
    world = World()
    assert world.service.control.request_log_level == -1
    assert world.post("/configure_logging", {"log_requests": True}).status_code == 200
    assert world.service.control.request_log_level == 2
    world.post("/configure_logging", {"log_requests_level": 0})
    assert world.service.control.request_log_level == 0
    world.post("/configure_logging", {"log_requests": False})
    assert world.service.control.request_log_level == -1
    assert world.post("/configure_logging", {"log_requests_level": 4}).status_code == 400
    assert world.post("/configure_logging", {"dump_requests_folder": "/x"}).status_code == 400


def test_garbage_collections_can_be_relieved() -> None:
    world = World()
    for method in ("GET", "POST"):
        assert world.call(method, "/freeze_gc").status_code == 200
    assert world.post("/freeze_gc", {"a": 1}).status_code == 400
    assert world.service.control.gc_freezes == 2


def test_who_asks_for_the_head_alone_changes_nothing() -> None:
    world = World()
    for path in ("/flush_cache", "/freeze_gc"):
        answer = world.call("HEAD", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST, OPTIONS")
    assert world.service.control.gc_freezes == 0
    assert world.call("HEAD", "/model_info").status_code == 200

"""Web pages of other origins: they may use the API only if --cors-allow-origins names them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from srt.entrypoints.errors import ApiError
from srt.entrypoints.exchange import Exchange, Header
from srt.utils.host import is_loopback

MAX_AGE_S = 600  # a browser need not ask again for so long
_METHODS = b"GET, HEAD, POST, PUT"
_USUAL_HEADERS = b"authorization, content-type, x-request-id"
_PORT = re.compile(r":\d+$")
_EXPOSED = b"x-request-id, retry-after"


class Cors:
    """`*` allows all origins. A browser keeps answers from pages that are not allowed, but sends some of their requests all the same:
    what those ask for would be done, on a server that the page could not reach by itself. So they are refused."""

    def __init__(self, origins: Sequence[str], is_local: bool = False) -> None:
        """`is_local`: the server listens on the loopback interface only."""
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)
        self._allows_all = b"*" in self._origins
        self._is_local = is_local

    def headers(self, origin: bytes | None) -> list[Header]:
        """What an answer to a page of this origin carries; nothing if it is not allowed, or no page asks."""
        if not self._origins:
            return []
        vary = [] if self._allows_all else [(b"vary", b"origin")]
        if origin is None or not (self._allows_all or origin in self._origins):
            return vary
        allowed = b"*" if self._allows_all else origin
        return [(b"access-control-allow-origin", allowed), (b"access-control-expose-headers", _EXPOSED), *vary]

    def check(self, exchange: Exchange, changes_something: bool) -> None:
        """Raise ApiError 403 where a page asks that is neither our own nor allowed. Links and images of any page may read, as they
        carry no origin and their answer shows nothing to the page, but not change something."""
        origin = exchange.header(b"origin")
        if self._allows_all or (origin is not None and origin in self._origins):
            return
        relation = exchange.header(b"sec-fetch-site")  # browsers tell it, if not on plain HTTP between hosts
        if relation is not None:
            is_own = relation in (b"same-origin", b"none")
        else:
            is_own = origin is None or self._is_own(origin, exchange.header(b"host") or b"?")
        if is_own or (origin is None and not changes_something):
            return
        who = "another origin" if origin is None else origin.decode("latin-1")[:200]
        sentence = f"A web page of {who} asks, which --cors-allow-origins does not name."
        raise ApiError(403, sentence, code="origin_not_allowed")

    def _is_own(self, origin: bytes, host: bytes) -> bool:
        """As far as names tell. Whose owner lets a name lead to 127.0.0.1 has a page with our Host, but no local name."""
        if origin.partition(b"://")[2].lower() != host.lower():
            return False
        name = _PORT.sub("", host.decode("latin-1")).strip("[]")
        return not self._is_local or is_loopback(name) or name.endswith(".localhost")

    def is_preflight(self, exchange: Exchange) -> bool:
        """Does a browser ask whether an allowed page may send a request?"""
        asks = exchange.method == "OPTIONS" and exchange.header(b"access-control-request-method") is not None
        origin = exchange.header(b"origin")
        return asks and bool(self._origins) and (self._allows_all or origin in self._origins)

    async def answer_preflight(self, exchange: Exchange) -> None:
        wanted = exchange.header(b"access-control-request-headers") or _USUAL_HEADERS
        await exchange.send(
            204,
            b"",
            [
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", wanted),
                (b"access-control-max-age", str(MAX_AGE_S).encode()),
            ],
        )

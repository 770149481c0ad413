"""Access by web pages of other origins: they may use the API only if --cors-allow-origins names them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from srt.entrypoints.errors import ApiError
from srt.entrypoints.exchange import Exchange, Header
from srt.utils.host import is_loopback

MAX_AGE_S = 600  # time for which a browser may reuse a preflight's answer
_METHODS = b"GET, HEAD, POST, PUT, DELETE"
_USUAL_HEADERS = b"authorization, content-type, x-api-key, x-request-id"
_PORT = re.compile(r":\d+$")
_EXPOSED = b"x-request-id, request-id, retry-after"


class Cors:
    """The policy for requests from web pages; the origin `*` allows all.

    A browser hides answers from pages that are not allowed, but still sends some of their requests. They would take effect, even on a
    server that only the browser's network can reach, so they are refused.
    """

    def __init__(self, origins: Sequence[str], is_local: bool = False) -> None:
        """Allow these origins. `is_local`: the server listens on the loopback interface only."""
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)
        self._allows_all = b"*" in self._origins
        self._is_local = is_local

    def headers(self, origin: bytes | None) -> list[Header]:
        """Return the CORS headers of an answer to a page of this origin; without a page, or if it is not allowed, at most `vary`."""
        if not self._origins:
            return []
        vary = [] if self._allows_all else [(b"vary", b"origin")]
        if origin is None or not (self._allows_all or origin in self._origins):
            return vary
        allowed = b"*" if self._allows_all else origin
        return [(b"access-control-allow-origin", allowed), (b"access-control-expose-headers", _EXPOSED), *vary]

    def check(self, exchange: Exchange, changes_something: bool) -> None:
        """Raise ApiError (403) for a request from a page that is neither the server's own nor allowed.

        Links and images of any page may read, but not change anything: they carry no origin, and the page does not see the answer.
        """
        origin = exchange.header(b"origin")
        if self._allows_all or (origin is not None and origin in self._origins):
            return
        relation = exchange.header(b"sec-fetch-site")  # sent by browsers, except over plain HTTP to another host
        if relation is not None:
            is_own = relation in (b"same-origin", b"none")
        else:
            is_own = origin is None or self._is_own(origin, exchange.header(b"host") or b"?")
        if is_own or (origin is None and not changes_something):
            return
        page = "another origin" if origin is None else origin.decode("latin-1")[:200]
        sentence = f"Web pages of {page} may not use this server: --cors-allow-origins does not name it."
        raise ApiError(403, sentence, code="origin_not_allowed")

    def _is_own(self, origin: bytes, host: bytes) -> bool:
        """Return whether the page is the server's own, judged by names.

        An attacker can point a domain name at 127.0.0.1, and then the page's origin equals the Host: so a local server also requires a
        local name.
        """
        if origin.partition(b"://")[2].lower() != host.lower():
            return False
        name = _PORT.sub("", host.decode("latin-1")).strip("[]")
        return not self._is_local or is_loopback(name) or name.endswith(".localhost")

    def is_preflight(self, exchange: Exchange) -> bool:
        """Return whether this is a browser's preflight request for an allowed page."""
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

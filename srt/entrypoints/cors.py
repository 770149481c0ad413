"""Web pages of other origins: a browser lets them use the API only if the answers say so."""

from __future__ import annotations

from collections.abc import Sequence

from srt.entrypoints.exchange import Exchange, Header

MAX_AGE_S = 600  # a browser need not ask again for so long
_METHODS = b"GET, HEAD, POST, PUT"
_USUAL_HEADERS = b"authorization, content-type, x-request-id"
_EXPOSED = b"x-request-id, retry-after"


class Cors:
    """`*` allows all origins. The key travels in a header that pages must set themselves, so no cookie can be abused."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)
        self._allows_all = b"*" in self._origins

    def headers(self, origin: bytes | None) -> list[Header]:
        """What an answer to a page of this origin carries; nothing if it is not allowed, or no page asks."""
        if not self._origins:
            return []
        vary = [] if self._allows_all else [(b"vary", b"origin")]
        if origin is None or not (self._allows_all or origin in self._origins):
            return vary
        allowed = b"*" if self._allows_all else origin
        return [(b"access-control-allow-origin", allowed), (b"access-control-expose-headers", _EXPOSED), *vary]

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

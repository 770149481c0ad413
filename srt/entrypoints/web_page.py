"""The web page at `/`: a chat, and a live view of the engine. Its files are in `page/`; counters come as server-sent events."""

from __future__ import annotations

from pathlib import Path

from srt.entrypoints.exchange import Exchange
from srt.entrypoints.service import Service
from srt.entrypoints.streaming import event

FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("server", "schema", "answer", "chat", "chart", "live")
# URL path -> (file, content type). Nothing else in the folder is served.
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/page/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in SCRIPTS},
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}

_POLICY = b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_FILE_HEADERS = [
    (b"cache-control", b"no-cache"),  # after an update, a browser must not mix files of two versions
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


async def file(exchange: Exchange, service: Service) -> None:
    """Send a file of the page. The files hold no secrets, so a browser may load them before it has the API key."""
    name, kind = FILES[exchange.path]
    await exchange.send(200, (FOLDER / name).read_bytes(), [(b"content-type", kind.encode()), *_FILE_HEADERS])


async def stats(exchange: Exchange, service: Service) -> None:
    """Stream the live feed's observations, one event a second, until the client leaves or the server drains."""
    await exchange.read_body()
    if exchange.method == "HEAD":
        await exchange.send(200, b"", [(b"content-type", b"text/event-stream; charset=utf-8")])
        return
    exchange.is_stream = True
    await exchange.run_while_connected(_stream(exchange, service))


async def _stream(exchange: Exchange, service: Service) -> None:
    async for observation in service.feed.follow():
        await exchange.write(event(observation))
    await exchange.end()

"""Messages as the other end of a link sees them."""

from __future__ import annotations

from srt.protocol.codec import decode_view, encode
from srt.protocol.messages import FromFrontend
from srt.protocol.views import FromFrontendView, RequestView


def at_scheduler(message: FromFrontend) -> FromFrontendView:
    """What the scheduler's link makes of a frontend's message."""
    return decode_view(encode(message, 0, 0)).message


def request_at_scheduler(message: FromFrontend) -> RequestView:
    received = at_scheduler(message)
    assert isinstance(received, RequestView)
    return received

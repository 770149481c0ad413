"""The text of one choice as it grows: incremental decoding, then stops. Pure state: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from srt.managers.tokenizer_manager.stop_matcher import StopMatcher
from srt.sampling.sampling_params import SamplingParams
from srt.utils.text_stream import TextStream


class TextDelta(Struct, frozen=True, gc=False):
    """The result of pushing tokens: text that may be shown, the number of tokens that count, and the stop that ended the text, if any.

    After a stop, the tokens behind the one that completed it do not count, and no more may be pushed.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class OutputText:
    """Owner of one choice's detokenizer and stop state. The texts of all deltas, end to end, are the answer."""

    __slots__ = ("_is_plain", "_matcher", "_silent_ids", "_stream", "_tokens_before_stops")

    def __init__(self, stream: TextStream, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        """Start with an empty text. `stop_ids` end the choice; they add no text unless `no_stop_trim` is set."""
        self._stream = stream
        self._matcher = StopMatcher(params.stop, params.stop_regex, params.no_stop_trim)
        self._silent_ids = frozenset() if params.no_stop_trim else stop_ids
        self._tokens_before_stops = params.min_new_tokens
        self._is_plain = not params.stop and not params.stop_regex  # there is nothing to search for

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Add the next tokens."""
        if self._is_plain and self._silent_ids.isdisjoint(ids):
            return TextDelta(self._stream.push_all(ids), len(ids))
        parts: list[str] = []
        for position, token_id in enumerate(ids):
            piece = "" if token_id in self._silent_ids else self._stream.push(token_id)
            if self._tokens_before_stops > 0:
                self._tokens_before_stops -= 1
                parts.append(self._matcher.pass_over(piece))
                continue
            shown, stop = self._matcher.push(piece)
            parts.append(shown)
            if stop is not None:
                return TextDelta("".join(parts), position + 1, stop)
        return TextDelta("".join(parts), len(ids))

    def finish(self) -> TextDelta:
        """Return the rest of the text, when no more tokens come. An unfinished character becomes U+FFFD; even that can complete a stop."""
        piece = self._stream.finish()
        if self._tokens_before_stops > 0:
            return TextDelta(self._matcher.pass_over(piece) + self._matcher.finish(), 0)
        shown, stop = self._matcher.push(piece)
        return TextDelta(shown + self._matcher.finish(), 0, stop)

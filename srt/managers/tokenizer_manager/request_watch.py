"""Metrics, log lines and traces of a frontend's requests: their arrival, their tokens and their end. Nothing is decided here."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from srt.managers.process.runtime_switches import NO_REQUEST_LOG, ControlWords
from srt.managers.process.tracer import BATCH, REQUEST, Tracer, batch_number, request_number
from srt.managers.tokenizer_manager.api_types import GenerateInput
from srt.managers.tokenizer_manager.frontend_metrics import FrontendMetrics
from srt.protocol.messages import GenerateRequest, Refused, TokenBatch
from srt.sampling.sampling_params import SamplingParams
from srt.utils.logs import REQUEST_ID, details, fields

SHORT_TEXT = 2048
# Request log levels. All log names and counts; these add parameters, then texts cut to SHORT_TEXT, then whole texts.
PARAMETERS, SHORT, WHOLE = 1, 2, 3

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # request logging has its own option: --log-level does not silence it


@dataclass(slots=True)
class Watched:
    """The watch's record of one request. Only RequestWatch reads or writes its fields."""

    rid: int
    label: str
    num_prompt: int
    began_s: float
    metrics: FrontendMetrics
    request_id: str = ""  # of the HTTP request
    first_s: float | None = None
    last_s: dict[int, float] = field(default_factory=dict)  # by choice
    num_tokens: int = 0
    cached: int = 0
    log_level: int = NO_REQUEST_LOG
    outputs: dict[int, list[int]] = field(default_factory=dict)  # by choice; kept only if texts are logged


class RequestWatch:
    """The record of all running requests. The TokenizerManager calls `began` once for each request, and `ended` at its end."""

    def __init__(
        self,
        frontend: int = 0,
        metrics: FrontendMetrics | None = None,
        control: ControlWords | None = None,
        tracer: Tracer | None = None,
        decode: Callable[[list[int]], str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a watch without requests; `decode` turns token ids into text for the log."""
        self.now = now
        self._frontend = frontend
        self._tracer = tracer or Tracer()
        self._metrics = metrics or FrontendMetrics()
        self._uncounted = FrontendMetrics()  # never reported
        self._control = control
        self._decode = decode
        self._watched: dict[int, Watched] = {}
        self._num_new_tokens = 0
        self._new_gaps: dict[float, int] = {}  # gap to its count, in the current message: usually few distinct gaps

    @property
    def num_watched(self) -> int:
        return len(self._watched)

    def began(self, request: GenerateInput, message: GenerateRequest, arrived_s: float) -> Watched | None:
        """Record a request that is about to be sent to the scheduler. Pass the result to `tokens`. None for health probes, which are not
        clients' requests."""
        if request.urgent:
            return None
        metrics = self._metrics if request.is_counted else self._uncounted
        one = Watched(message.rid, message.label, len(message.prompt_ids), arrived_s, metrics, REQUEST_ID.get())
        self._watched[message.rid] = one
        one.metrics.add("num_requests")
        one.metrics.add("prompt_tokens", one.num_prompt)
        if self._control is not None and request.is_logged:
            one.log_level = self._control.request_log_level
        if one.log_level != NO_REQUEST_LOG:
            self._log_beginning(one, request, message)
        return one

    def sent(self, message: GenerateRequest, tokenized_s: float) -> None:
        """Trace that the request was sent to the scheduler; its prompt was tokenized at `tokenized_s`."""
        if self._tracer.is_on and (one := self._watched.get(message.rid)) is not None:
            number = request_number(self._frontend, message.rid)
            label, request_id = one.label, one.request_id
            self._tracer.begin(REQUEST, number, "request", one.began_s, request=label, request_id=request_id)
            self._tracer.begin(REQUEST, number, "tokenize", one.began_s)
            self._tracer.end(REQUEST, number, "tokenize", tokenized_s)
            self._tracer.slice("submit", tokenized_s, request=label, prompt_tokens=one.num_prompt)
            self._tracer.arrow("s", REQUEST, number, tokenized_s)

    def received(self, message: TokenBatch | Refused, received_s: float, replica: int = 0) -> None:
        """Record that a message of this replica has been handled: its tokens are text now. Handling began at `received_s`."""
        if self._num_new_tokens:
            self._metrics.add("generation_tokens", self._num_new_tokens)
            self._num_new_tokens = 0
            for gap_s, times in self._new_gaps.items():
                self._metrics.between_tokens_s.record(gap_s, times)
            self._new_gaps.clear()
        if self._tracer.is_on and isinstance(message, TokenBatch):
            self._tracer.slice("detokenize", received_s, batch=message.number, num_tokens=len(message.ids))
            self._tracer.arrow("f", BATCH, batch_number(self._frontend, message.number, replica), received_s)

    def tokens(self, one: Watched, choice: int, ids: list[int], now: float) -> None:
        """Record tokens that came at `now`. A call of `received` for their message follows."""
        if not ids:
            return
        count = len(ids)
        last_s = one.last_s.get(choice)
        one.last_s[choice] = now
        if one.first_s is None:
            one.first_s = now
            one.metrics.first_token_s.record(now - one.began_s)
            if self._tracer.is_on:
                self._tracer.mark(REQUEST, request_number(self._frontend, one.rid), "first token", now)
        elif last_s is not None and one.metrics is self._metrics:
            gap_s = (now - last_s) / count
            self._new_gaps[gap_s] = self._new_gaps.get(gap_s, 0) + count
        one.num_tokens += count
        if one.metrics is self._metrics:
            self._num_new_tokens += count
        if one.log_level >= SHORT:
            one.outputs.setdefault(choice, []).extend(ids)

    def cached(self, rid: int, num_tokens: int) -> None:
        """Record the number of prompt tokens that came from the prefix cache."""
        one = self._watched.get(rid)
        if one is not None:
            one.cached = max(one.cached, num_tokens)

    def ended(self, rid: int, how: str) -> None:
        """Record a request's end; `how` is stop, length, abort, refused or error. A second call does nothing."""
        one = self._watched.pop(rid, None)
        if one is None:
            return
        one.metrics.add("cached_tokens", one.cached)
        if how in ("stop", "length"):
            one.metrics.whole_s.record(self.now() - one.began_s)
        elif how == "abort":
            one.metrics.add("num_aborted_requests")
        else:
            one.metrics.add("num_refused_requests" if how == "refused" else "num_failed_requests")
        if self._tracer.is_on:
            number, now = request_number(self._frontend, rid), self.now()
            self._tracer.end(REQUEST, number, "request", now, how=how, num_tokens=one.num_tokens)
            self._tracer.slice("end", now, now, request=one.label)
            self._tracer.arrow("f", REQUEST, number, now)
        if one.log_level != NO_REQUEST_LOG:
            context = REQUEST_ID.set(one.request_id)
            self._log_end(one, how)
            REQUEST_ID.reset(context)

    # ---- Log lines

    def _log_beginning(self, one: Watched, request: GenerateInput, message: GenerateRequest) -> None:
        more: dict[str, Any] = {}
        if one.log_level >= PARAMETERS:
            more["sampling_params"] = _shown(request.params)
        if one.log_level >= SHORT:
            more["prompt"] = _cut(self._text(message.prompt_ids.tolist(), request.text), one.log_level)
        self._log(
            f"Request {_name(one.label)} arrived: {one.num_prompt} prompt tokens.", more, rid=one.label, event="began"
        )

    def _log_end(self, one: Watched, how: str) -> None:
        now = self.now()
        first = None if one.first_s is None else round(one.first_s - one.began_s, 4)
        more: dict[str, Any] = {}
        if one.log_level >= SHORT:
            more["output"] = [_cut(self._text(ids, None), one.log_level) for _, ids in sorted(one.outputs.items())]
        first_text = "" if first is None else f", the first after {first:.3f} s"
        self._log(
            f"Request {_name(one.label)} ended ({how}): {one.num_tokens} tokens{first_text}, {now - one.began_s:.3f} s in all,"
            f" {one.num_prompt} prompt tokens, {one.cached} of them cached.",
            more,
            rid=one.label,
            event="ended",
            how=how,
            prompt_tokens=one.num_prompt,
            cached_tokens=one.cached,
            completion_tokens=one.num_tokens,
            first_token_s=first,
            whole_s=round(now - one.began_s, 4),
        )

    def _log(self, sentence: str, more: dict[str, Any], **values: object) -> None:
        logger.info("%s", sentence, extra=fields(**values) | details(**more))

    def _text(self, ids: list[int], text: str | None) -> str:
        if text is None:
            return self._decode(ids) if self._decode else str(ids)
        return text


def _name(label: str) -> str:
    """Return the label as a log line may show it: a client's line feed must not begin a new line."""
    return label if label.isprintable() else repr(label)


def _cut(text: str, level: int) -> str:
    return text if level >= WHOLE or len(text) <= SHORT_TEXT else text[:SHORT_TEXT] + "…"


def _shown(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from their defaults."""
    values = {one.name: (getattr(params, one.name), one.default) for one in dataclasses.fields(params)}
    return {name: value for name, (value, default) in values.items() if value != default and name != "may_shorten"}

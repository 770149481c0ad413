"""What the terminal programs `srt.chat` and `srt.generate` share: their options, and an engine to talk to over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from srt.runtime import Runtime
from srt.utils.checkpoint import DEFAULT_MODEL

API_KEY_VARIABLE = "SRT_API_KEY"
CONNECT_TIMEOUT_S = 10.0


class AnswerError(Exception):
    """The server cannot be reached, refused the request or broke off. The text is for the person at the terminal."""


class Client:
    """Streams of a server, one connection each. Leaving the loop over a stream aborts its request."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            self._port = parts.port
        except ValueError:
            parts = parts._replace(scheme="")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AnswerError(f"{url} is not the address of a server: it should look like http://localhost:30000.")
        self._parts = parts
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of `POST path`, up to the end. AnswerError with the server's own words if it refuses."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a long prompt may take its time; Ctrl-C ends the wait
            connection.request(
                "POST", self._parts.path.rstrip("/") + path, json.dumps(body | {"stream": True}), self._headers
            )
            response = connection.getresponse()
            if response.status != 200:
                raise AnswerError(_reason(response.read(), response.status))
            yield from _events(response)
        except (OSError, http.client.HTTPException) as error:
            raise AnswerError(
                f"The connection to {self._parts.netloc} failed: {str(error) or type(error).__name__}."
            ) from error
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise AnswerError(event["error"]["message"])
            yield event
    raise AnswerError("The server broke off in the middle of the answer.")


def _reason(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered with status {status}."


def add_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("Where the model runs").add_mutually_exclusive_group()
    where.add_argument("--url", help="a running server, such as http://localhost:30000")
    where.add_argument(
        "--model-path",
        "--model",
        help=f"start an engine for this model (default: {DEFAULT_MODEL}, which ships with srt)",
    )
    group = parser.add_argument_group("Where the model runs, further")
    group.add_argument(
        "--api-key", default=os.environ.get(API_KEY_VARIABLE), help=f"of the server (default: ${API_KEY_VARIABLE})"
    )
    group.add_argument("--device", choices=("cpu", "cuda"), help="of an engine that is started")
    sampling = parser.add_argument_group("Sampling; what is not given is the model's own default")
    sampling.add_argument("--max-new-tokens", "--max-tokens", type=int, default=512, help="default: 512")
    sampling.add_argument("--temperature", type=float, help="0 takes the likeliest token each time")
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--seed", type=int, help="the same seed gives the same answer")


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, by their names in the OpenAI API."""
    values = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "seed")}
    return {"max_tokens": options.max_new_tokens} | {name: value for name, value in values.items() if value is not None}


@contextlib.contextmanager
def engine(options: argparse.Namespace) -> Iterator[Client]:
    """A client of the server that was named, or of an engine that runs as long as the block."""
    if options.url:
        yield Client(options.url, options.api_key)
        return
    with Runtime(model_path=options.model_path or DEFAULT_MODEL, device=options.device, port=0) as runtime:
        yield Client(str(runtime.url), None)

"""Code that `srt chat` and `srt generate` share: options, an HTTP client of a server or started engine, and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

from srt.managers.tokenizer_manager.api_types import RequestError
from srt.runtime import Runtime
from srt.sampling.parameter_checks import is_unicode
from srt.server_args import ArgumentError
from srt.utils.checkpoint import DEFAULT_MODEL
from srt.utils.errors import StartError

API_KEY_VARIABLE = "SRT_API_KEY"
CONNECT_TIMEOUT_S = 10.0
FAILED, INTERRUPTED, NOBODY_READS = 1, 130, 141  # exit codes; the last two are a shell's for SIGINT and SIGPIPE
_IN_HTTP = re.compile("[!-~]*")  # characters that hosts and paths may have


class AnswerError(Exception):
    """Raised when a server cannot be reached, refuses a request or breaks off, or a request cannot be sent. The text is for the user."""


class Client:
    """Client of a server, with one connection per request. Leaving the loop over a stream, or closing it, aborts its request."""

    def __init__(self, url: str, api_key: str | None) -> None:
        wrong = AnswerError(f"{url} is not the address of a server: it should look like http://localhost:30000.")
        try:
            self._parts = urlsplit(url if "//" in url else f"http://{url}")
            self._host = (self._parts.hostname or "").encode("idna").decode()
            self._port = self._parts.port
        except ValueError as error:
            raise wrong from error
        is_writable = _IN_HTTP.fullmatch(self._host + self._parts.path)
        if self._parts.scheme not in ("http", "https") or not self._host or not is_writable:
            raise wrong
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise AnswerError(
                    "The API key has a character that is not printable ASCII, so it cannot be sent in a header."
                )
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """Return the name of the model that the server serves."""
        with self._response("GET", "/v1/models", None) as response:
            return str(json.loads(response.read())["data"][0]["id"])

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to `POST path`. AnswerError, with the server's own words, if it refuses."""
        with self._response("POST", path, json.dumps(body)) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the events of `POST path` up to the end. AnswerError, with the server's own words, if it refuses."""
        with self._response("POST", path, json.dumps(body | {"stream": True})) as response:
            yield from _events(response)

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: str | None) -> Iterator[http.client.HTTPResponse]:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a long prompt may take long; Ctrl-C ends the wait
            connection.request(method, self._parts.path.rstrip("/") + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise AnswerError(_reason(response.read(), response.status))
            yield response
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


# Options passed on unchanged, by their names in the OpenAI API, with type and help.
_SAMPLING = {
    "temperature": (float, "0 always takes the most likely token; higher values are more random"),
    "top_p": (float, "sample among the most likely tokens that together have this probability"),
    "top_k": (int, "sample among this many most likely tokens"),
    "min_p": (float, "sample among tokens with at least this share of the most likely token's probability"),
    "frequency_penalty": (float, "make tokens less likely each time they occur"),
    "presence_penalty": (float, "make tokens less likely once they occur"),
    "repetition_penalty": (float, "above 1, make tokens of prompt and answer less likely"),
    "seed": (int, "the same seed gives the same answer (default: random)"),
}


def make_parser(usage: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=usage.partition(" [")[0],
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both programs have, in groups."""
    group = parser.add_argument_group("Where the model runs")
    where = group.add_mutually_exclusive_group()
    where.add_argument("--url", help="talk to this running server, such as http://localhost:30000")
    where.add_argument(
        "--model-path",
        "--model",
        metavar="MODEL",
        help=f"start an engine for this folder, shipped model or hub id (default: {DEFAULT_MODEL}, shipped with srt)",
    )
    group.add_argument(
        "--api-key", metavar="KEY", help=f"API key of the server at --url (default: ${API_KEY_VARIABLE})"
    )
    group.add_argument(
        "--device", choices=("cpu", "cuda"), help="device of an engine that is started (default: cuda if present)"
    )
    sampling = parser.add_argument_group("Sampling", "Parameters that are not given have the model's own defaults.")
    sampling.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        type=int,
        default=512,
        metavar="N",
        help="most tokens to generate (default: 512)",
    )
    for name, (kind, words) in _SAMPLING.items():
        metavar = "N" if kind is int else "X"
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=words)
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given several times"
    )


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given, by their names in the OpenAI API."""
    values = {name: getattr(options, name) for name in (*_SAMPLING, "stop")}
    return {"max_tokens": options.max_new_tokens} | {name: value for name, value in values.items() if value is not None}


@contextlib.contextmanager
def engine(options: argparse.Namespace) -> Iterator[Client]:
    """Yield a client of the server at --url, or of an engine that runs for the duration of the block.

    AnswerError, before an engine is started, for options that no request can carry.
    """
    _check_options(options)
    if options.url:
        yield Client(options.url, options.api_key or os.environ.get(API_KEY_VARIABLE))
        return
    model = options.model_path or DEFAULT_MODEL
    _show_waiting(f"Starting {model} …")
    with Runtime(model_path=model, device=options.device, port=0) as runtime:
        _show_waiting("")
        yield Client(str(runtime.url), None)


def _check_options(options: argparse.Namespace) -> None:
    """Raise AnswerError for options that JSON cannot carry: bytes that are not text, and infinite numbers."""
    for name, value in vars(options).items():
        named = "The prompt" if name == "prompt" else f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and not is_unicode(one):
                raise AnswerError(f"{named} is not valid {sys.getfilesystemencoding()}.")
            if isinstance(one, float) and not math.isfinite(one):
                raise AnswerError(f"{named} must be a finite number, not {one}.")


def not_text() -> AnswerError:
    """Return the error to raise if reading standard input raises UnicodeDecodeError."""
    return AnswerError(f"Standard input is not valid {sys.stdin.encoding}.")


def _show_waiting(words: str) -> None:
    """Show a text on the terminal until the next one replaces it; without a terminal, nothing."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{words}")
        sys.stderr.flush()


def exit_code_of(work: Callable[[], None]) -> int:
    """Run the program and return its exit code. An error is printed as one sentence on standard error."""
    _set_error_handlers()
    try:
        work()
        sys.stdout.flush()
    except (AnswerError, StartError, ArgumentError, RequestError) as error:
        _show_waiting("")
        sys.stderr.write(f"{error}\n")
        return FAILED
    except KeyboardInterrupt:
        _show_waiting("")
        return INTERRUPTED
    except BrokenPipeError:
        # Else the interpreter reports the error again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    return 0


def _set_error_handlers() -> None:
    """Write unencodable characters as `?`, and refuse input that is not text, whatever the locale."""
    for stream, errors in ((sys.stdout, "replace"), (sys.stdin, "strict")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors != errors:
            stream.reconfigure(errors=errors)

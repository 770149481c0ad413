"""Log lines, as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import threading
import warnings
from collections.abc import Iterator

import pytest

from srt.utils.logs import REQUEST_ID, details, fields, set_up_logging, show_lines_of


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    hook, raises = threading.excepthook, logging.raiseExceptions
    yield io.StringIO()
    threading.excepthook, logging.raiseExceptions = hook, raises
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_json_line_holds_the_process_the_request_and_the_values(output: io.StringIO) -> None:
    set_up_logging("worker 3", "info", "json", output)
    token = REQUEST_ID.set("abc")
    logging.getLogger("x").info("One\nsentence %d.", 1, extra=fields(rid="r", nothing=None) | details(text="é"))
    REQUEST_ID.reset(token)
    logging.getLogger("x").debug("Not asked for.")
    line = json.loads(output.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "process": "worker 3",
        "message": "One\nsentence 1.",
        "logger": "x",
        "request_id": "abc",
        "rid": "r",
        "text": "é",
    }


def test_a_text_line_holds_them_too_but_not_what_its_sentence_says(output: io.StringIO) -> None:
    set_up_logging("worker 3", "debug", "text", output)
    token = REQUEST_ID.set("abc")
    logging.getLogger("x").debug("A sentence.", extra=fields(rid="r") | details(text="é"))
    REQUEST_ID.reset(token)
    assert output.getvalue().endswith(" worker 3 DEBUG x: A sentence. text='é' [abc]\n")


def test_an_error_in_json_is_one_line_with_its_traceback(output: io.StringIO) -> None:
    set_up_logging("worker 3", "info", "json", output)
    try:
        raise ValueError("3 pages")
    except ValueError:
        logging.getLogger("x").exception("It failed.")
    assert output.getvalue().count("\n") == 1
    assert "ValueError: 3 pages" in json.loads(output.getvalue())["traceback"]


def test_a_thread_that_ends_by_an_error_is_one_line_too(output: io.StringIO) -> None:
    set_up_logging("worker 3", "info", "json", output)
    thread = threading.Thread(target=lambda: [][0], name="link")
    thread.start()
    thread.join()
    line = json.loads(output.getvalue())
    assert line["message"] == "The thread link has ended."
    assert "IndexError" in line["traceback"]


def test_warnings_of_libraries_are_lines_too(output: io.StringIO) -> None:
    set_up_logging("worker 3", "info", "json", output)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", stacklevel=1)
    assert "old" in json.loads(output.getvalue())["message"]


def test_in_another_program_lines_go_to_standard_error_unless_it_has_set_up_logging(
    output: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    root.handlers[:] = [logging.StreamHandler(output)]
    show_lines_of("someone.else", "frontend 1", "text")
    assert not logging.getLogger("someone.else").handlers
    root.handlers[:] = []
    for _ in range(2):  # one Runtime after the other
        show_lines_of("someone", "frontend 1", "text")
    logging.getLogger("someone").warning("A sentence.")
    assert capsys.readouterr().err.endswith(" frontend 1 WARNING someone: A sentence.\n")
    assert len(logging.getLogger("someone").handlers) == 1

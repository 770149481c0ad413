"""Every message survives the wire, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.protocol import messages
from srt.protocol.codec import DecodeError, decode, encode, protocol_hash
from srt.protocol.messages import MESSAGE_TYPES, Abort, Message, Progress, StepResult, int32_array
from tests.unit.protocol.generated import MESSAGES, objects_of, same

EXAMPLE = StepResult(5, int32_array([1, 1]), int32_array([7, 8]), 2**63, [], 1200)


@pytest.mark.parametrize("cls", MESSAGE_TYPES.values(), ids=lambda cls: cls.__name__)
def test_every_message_comes_back_as_it_was_sent(cls: type[Message]) -> None:
    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(objects_of(cls), st.integers(0, 2**40), st.integers(0, 2**40))
    def check(message: Message, generation: int, sequence: int) -> None:
        envelope = decode(encode(message, generation, sequence))
        assert (envelope.generation, envelope.sequence) == (generation, sequence)
        assert same(envelope.message, message)

    check()


def test_every_message_class_has_a_number() -> None:
    assert set(MESSAGE_TYPES.values()) == set(typing.get_args(messages.Message))


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(MESSAGES)
def test_a_message_cut_short_is_refused(message: Message) -> None:
    data = encode(message, 1, 2)
    for end in range(len(data)):
        with pytest.raises(DecodeError):
            decode(data[:end])


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(MESSAGES, st.randoms(use_true_random=False))
def test_changed_bytes_are_a_message_or_refused_and_nothing_else(message: Message, random: Any) -> None:
    data = encode(message, 1, 2)
    for _ in range(200):
        changed = bytearray(data)
        for _ in range(random.randint(1, 3)):
            changed[random.randrange(len(changed))] = random.randrange(256)
        decoded_or_refused(bytes(changed))


@settings(max_examples=500, deadline=None, database=None, derandomize=True)
@given(st.binary(max_size=64))
def test_random_bytes_are_refused(data: bytes) -> None:
    decoded_or_refused(data)


def decoded_or_refused(data: bytes) -> None:
    try:
        envelope = decode(data)
    except DecodeError:
        return
    assert type(envelope.message) in MESSAGE_TYPES.values()


@pytest.mark.parametrize(
    "parts",
    [
        None,
        {},
        [],
        [0, 0],
        [0, 0, 3],
        [0, 0, []],
        [0, 0, [999]],
        [0, 0, [True, 1, 2]],
        [0, 0, ["3", 1, 2]],
        [0, 0, [[3], 1, 2]],
        [None, 0, [3, 1, 2]],
        [0, 1.0, [3, 1, 2]],
        [0, 0, [3, 1, 2], 0],
        [0, 0, [3, 1]],
        [0, 0, [3, 1, 2, 3]],
        [0, 0, [3, 1, "2"]],
        [0, 0, [3, True, 2]],
        [0, 0, [3, 1, None]],
        [0, 0, [61, 5, b"123", b"", 0, [], 0]],
        [0, 0, [61, 5, "1234", b"", 0, [], 0]],
        [0, 0, [61, 5, [1], b"", 0, [], 0]],
        [0, 0, [61, 5, msgspec.msgpack.Ext(2, b"1234"), b"", 0, [], 0]],
        [0, 0, [61, 5, msgspec.msgpack.Ext(9, b"1234"), b"", 0, [], 0]],
        [0, 0, [61, 5, b"", b"", 0, [1], 0]],
        [0, 0, [61, 5, b"", b"", 0, {}, 0]],
        [0, 0, [91, {"a": [1]}]],
        [0, 0, [91, {1: 1}]],
        [0, 0, [91, [["a", 1]]]],
    ],
)
def test_fields_of_the_wrong_number_or_type_are_refused(parts: object) -> None:
    with pytest.raises(DecodeError):
        decode(msgspec.msgpack.encode(parts))


def test_text_that_is_not_utf8_is_refused() -> None:
    data = encode(Progress("weights", 0, 0, 0.0), 0, 0)
    with pytest.raises(DecodeError):
        decode(data.replace(b"weights", b"weight\xff"))


def test_bytes_after_the_message_are_refused() -> None:
    with pytest.raises(DecodeError):
        decode(encode(Abort(1, 2), 0, 0) + b"\x00")


def test_arrays_arrive_in_their_type_and_cannot_be_changed() -> None:
    received = decode(encode(EXAMPLE, 0, 0)).message
    assert isinstance(received, StepResult)
    assert received.ids.dtype == np.int32
    assert received.ids.tolist() == [7, 8]
    with pytest.raises(ValueError):
        received.ids[0] = 1


def test_arrays_that_are_not_contiguous_or_of_another_type_are_sent_by_value() -> None:
    ids = np.arange(10, dtype=np.int64)[::3]
    received = decode(encode(StepResult(5, int32_array(), ids, 0, [], 0), 0, 0)).message  # type: ignore[arg-type]
    assert isinstance(received, StepResult)
    assert received.ids.tolist() == [0, 3, 6, 9]


def test_a_whole_number_may_stand_for_a_float() -> None:
    received = decode(encode(Progress("weights", 0, 0, 3), 0, 0)).message
    assert isinstance(received, Progress)
    assert received.at_s == 3.0
    assert type(received.at_s) is float


def test_the_protocol_hash_is_the_same_in_every_process() -> None:
    print_it = "from srt.protocol.codec import protocol_hash; print(protocol_hash())"
    command = [sys.executable, "-c", print_it]
    other = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == protocol_hash()

"""A view is the message that it is a view of: field by field, and byte by byte."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from srt.protocol.codec import DecodeError, decode, decode_view, encode
from srt.protocol.messages import (
    Admission,
    GenerateRequest,
    LogprobSpec,
    SamplingSpec,
    StepResult,
    int32_array,
)
from srt.protocol.views import AdmissionView, LogprobView, RequestView, SamplingView

REQUEST = GenerateRequest(
    rid=1,
    label="mine",
    prompt_ids=int32_array([1, 2, -3]),
    choices=int32_array([0, 1]),
    output_ids=[int32_array(), int32_array([7])],
    sampling=SamplingSpec(9, bias_ids=int32_array([4]), bias_values=np.array([0.5], np.float32)),
    logprobs=LogprobSpec(top=2, ids=int32_array([5])),
    seed=1 << 63,
    cache_salt="a",
    stream=True,
)


@pytest.mark.parametrize(
    ("message", "view"),
    [
        (GenerateRequest, RequestView),
        (Admission, AdmissionView),
        (SamplingSpec, SamplingView),
        (LogprobSpec, LogprobView),
    ],
)
def test_a_view_has_the_fields_of_its_message_in_their_order(
    message: type[msgspec.Struct], view: type[msgspec.Struct]
) -> None:
    assert message.__struct_fields__ == view.__struct_fields__


def test_a_view_is_encoded_as_the_message_was() -> None:
    data = encode(REQUEST, 3, 4)
    seen = decode_view(data)
    assert isinstance(seen.message, RequestView)
    assert msgspec.msgpack.encode(seen) == data
    again = decode(msgspec.msgpack.encode(seen)).message
    assert isinstance(again, GenerateRequest) and again.prompt_ids.tolist() == [1, 2, -3]


def test_what_no_frontend_says_has_no_view() -> None:
    with pytest.raises(DecodeError, match="not a message of a frontend"):
        decode_view(encode(StepResult(1, int32_array(), int32_array(), 0, [], 0), 0, 0))

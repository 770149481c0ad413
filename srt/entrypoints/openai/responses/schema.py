"""The request body of /v1/responses: OpenAI's parameters, and those of SGLang's and vLLM's that chats have too."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import orjson
from pydantic import BaseModel, ConfigDict

from srt.entrypoints.openai.messages import MAX_MESSAGES
from srt.entrypoints.openai.responses.input_items import ITEM_SCHEMA
from srt.entrypoints.openai.responses.members import Members
from srt.entrypoints.openai.schema import EFFORTS, SAMPLING_NAMES
from srt.entrypoints.openai.tools import MAX_NAME, MAX_TOOLS
from srt.entrypoints.request_schema import (
    LABEL,
    MODEL_NAME,
    NAME,
    PRIORITY,
    REPLICA,
    ROUTED_ALIAS_TEXT,
    ROUTED_TEXT,
    RequestBody,
    bad_parameter,
    cache_namespace,
    described,
)

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
# Data of tools and of images that no answer here can have; and the encryption of what is in reasoning items in clear.
INCLUDABLE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
)
TOOL = Members(
    {
        "type": {"const": "function", "description": "The kind of tool."},
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "description": "The tool's name."},
        "description": {"type": "string", "description": "What it does."},
        "parameters": {"type": "object", "description": "The JSON Schema of its arguments."},
        "strict": {"type": "boolean", "description": "Hold the arguments to the schema."},
    },
    ("type", "name"),
    {"allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,), "output_schema": ()},
)
CHOICE = Members(
    {
        "type": {"const": "function", "description": "The kind of tool."},
        "name": {"type": "string", "description": "The tool's name."},
    },
    ("type", "name"),
)
FORMAT = Members(
    {
        "type": {"enum": ["text", "json_object", "json_schema"], "description": "The kind of form."},
        "name": {"type": "string", "description": "The schema's name."},
        "description": {"type": "string", "description": "What it is for."},
        "schema": {"type": "object", "description": "The JSON Schema of the answer, for the type json_schema."},
        "strict": {"type": "boolean", "description": "A schema is enforced in any case."},
    },
    ("type",),
)
TEXT = Members(
    {"format": FORMAT.schema("The form of the answer.")},
    off={"verbosity": ("medium",)},
)
REASONING = Members(
    {"effort": {"enum": list(EFFORTS), "description": "How much the model reasons, as reasoning_effort of chats."}},
    off={"summary": (), "generate_summary": (), "context": ("auto",), "mode": ("standard",)},
)


class StreamOptions(BaseModel):
    """Options of a stream; refused without stream."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_obfuscation: bool | None = described("Must be false: events are not padded against eavesdropping.")


class ResponsesBody(RequestBody):
    """POST /v1/responses."""

    FAMILY: ClassVar[str] = "responses"
    SAMPLING: ClassVar[Mapping[str, str]] = MappingProxyType({**SAMPLING_NAMES, "max_output_tokens": "max_new_tokens"})

    model: str | None = described(
        "One of the server's model names (/v1/models); its first one if absent or `default`.", string=MODEL_NAME
    )
    input: str | list[dict[str, Any]] = described(
        "A text of the user, or items: messages, calls of tools, what they returned, and reasoning.",
        ...,
        array={"minItems": 1, "maxItems": MAX_MESSAGES, "items": ITEM_SCHEMA},
    )
    instructions: str | None = described("A system message before the input.")
    previous_response_id: str | None = described(
        "A stored response, which the input continues. Its instructions are not carried over.", string=NAME
    )
    store: bool | None = described(
        "Store the response (default: true). Without --enable-response-store nothing is stored, and the answer says so."
    )
    background: bool = described(
        "Answer at once, and generate the response for GET /v1/responses/{response_id}.", False
    )
    stream: bool = described("Send the response as server-sent events, as it is generated.", False)
    stream_options: StreamOptions | None = described("Options of a stream. Needs stream.")
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] = described("The form of the answer.", {}, **TEXT.schema())
    reasoning: dict[str, Any] = described("How the model reasons.", {}, **REASONING.schema())
    tools: list[dict[str, Any]] = described(
        "Functions that the model may call.", [], maxItems=MAX_TOOLS, items=TOOL.schema()
    )
    tool_choice: str | dict[str, Any] = described(
        "auto: the model decides on calls; none: it is told of no tools; required: the answer is at least one call; an"
        " object: it is one call of this tool.",
        "auto",
        string={"enum": ["auto", "none", "required"]},
        object=CHOICE.schema(),
    )
    parallel_tool_calls: bool = described("If false, an answer has one call at most.", True)
    metadata: dict[str, Any] = described(
        "Up to 16 texts by name, for the client's own use.",
        {},
        maxProperties=MAX_METADATA,
        propertyNames={"maxLength": MAX_KEY},
        additionalProperties={"type": "string", "maxLength": MAX_VALUE},
    )
    include: list[str] = described(
        "Only values that ask for nothing: reasoning comes in clear, and no answer has the other data.",
        [],
        string={"enum": list(INCLUDABLE)},
    )

    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: int | list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    seed: int | None = None
    request_id: str | None = described(
        "A name for the request, for /abort_request, and the id of the answer.", string=NAME
    )
    cache_salt: str = described("Prefixes are shared only between requests with the same salt.", "", string=LABEL)
    extra_key: str = described("The same as cache_salt; both may be given.", "", string=LABEL)
    priority: int = described("Higher runs first, if the server schedules by priority.", 0, integer=PRIORITY)
    routed_dp_rank: int | None = described(ROUTED_TEXT, integer=REPLICA)
    data_parallel_rank: int | None = described(ROUTED_ALIAS_TEXT, integer=REPLICA)
    chat_template_kwargs: dict[str, Any] = described("Variables for the model's chat template.", {})

    def check(self) -> None:
        """Raise RequestError (400) for a value that is of the right type, and wrong."""
        cache_namespace(self.cache_salt, self.extra_key)
        for number, one in enumerate(self.include):
            if one not in INCLUDABLE:
                raise bad_parameter(f"include[{number}]", f"({one[:50]}) is not supported yet")
        if self.stream_options is not None:
            if not self.stream:
                raise bad_parameter("stream_options", "may be given only with stream: true")
            if self.stream_options.include_obfuscation:
                raise bad_parameter("stream_options.include_obfuscation", "is not supported yet")
        if self.background and self.stream:
            raise bad_parameter("background", "and stream exclude each other: ask for the response when it is done")
        if self.background and self.store is False:
            raise bad_parameter("background", "needs store: the response is asked for later")
        if self.request_id == "":
            raise bad_parameter("request_id", "must not be empty")
        for name in ("tools", "text"):
            try:
                orjson.dumps([[[[[[getattr(self, name)]]]]]])  # in an event they stand six levels deep at most
            except orjson.JSONEncodeError as error:
                raise bad_parameter(name, "is nested too deeply: the answer repeats it") from error
        self._check_metadata()

    def _check_metadata(self) -> None:
        if len(self.metadata) > MAX_METADATA:
            raise bad_parameter("metadata", f"may have at most {MAX_METADATA} members, not {len(self.metadata)}")
        for name, value in self.metadata.items():
            if len(name) > MAX_KEY or not isinstance(value, str) or len(value) > MAX_VALUE:
                reason = f"must have names of at most {MAX_KEY} characters and texts of at most {MAX_VALUE}"
                raise bad_parameter("metadata", reason)

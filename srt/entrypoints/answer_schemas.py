"""JSON Schemas of the routes' answers. Every field is listed: the routes' tests validate their answers against them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
ANY: Schema = {}
IDS: Schema = {"type": "array", "items": COUNT}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def fields(_optional: str = "", /, **described: tuple[Schema, str]) -> Schema:
    """Return the schema of an object with these fields and no others; those in `_optional` may be absent."""
    return {
        "type": "object",
        "properties": {name: {**schema, "description": text} for name, (schema, text) in described.items()},
        "required": [name for name in described if name not in _optional.split()],
        "additionalProperties": False,
    }


# ---- Errors

OPENAI_ERROR = fields(
    error=(
        fields(
            message=(TEXT, "One sentence that says what is wrong."),
            type=(TEXT, "The kind of error."),
            param=(optional(TEXT), "The parameter at fault, if it is one."),
            code=(optional(TEXT), "A word for programs, such as model_not_found."),
        ),
        "Why there is no answer.",
    )
)
NATIVE_ERROR = fields(
    error=(fields(message=(TEXT, "One sentence that says what is wrong.")), "Why there is no answer.")
)

DONE = fields(message=(TEXT, "What was done, in a sentence."), status=({"const": "ok"}, "That it was."))

# ---- /v1

_CACHED_DETAILS = fields(
    device=(COUNT, "Those that were in the device's memory."), host=(COUNT, "Those that were in the host's.")
)
_SGLEXT = (
    fields(cached_tokens_details=(_CACHED_DETAILS, "Where the cached tokens of the prompts were.")),
    "If return_cached_tokens_details asks for it; in a stream, in a chunk behind the choices.",
)
_PROMPT_LOGPROBS = (
    array(
        optional(
            {
                "type": "object",
                "additionalProperties": fields(
                    logprob=(NUMBER, "Its logprob."),
                    rank=(optional(COUNT), "Its place among the likeliest; null behind those that were asked for."),
                    decoded_token=(TEXT, "The token as text."),
                ),
            }
        )
    ),
    "If asked for: for each token of the prompt, by token id, the token itself and the likeliest ones; null for the first.",
)
_TOKEN_IDS = (IDS, "If return_token_ids asks for them: the ids of the output; in a stream, of what is new.")
_PROMPT_TOKEN_IDS = (IDS, "If return_token_ids asks for them; in a stream, in the first chunk of a choice.")
USAGE = fields(
    prompt_tokens=(COUNT, "Of all prompts; each counts once, however many choices it has."),
    completion_tokens=(COUNT, "Of all choices."),
    total_tokens=(COUNT, "Both together."),
    prompt_tokens_details=(
        fields(cached_tokens=(COUNT, "Of the prompts' tokens, those that the prefix cache had.")),
        "More about the prompts.",
    ),
)
_ENDS: dict[str, tuple[Schema, str]] = {
    "finish_reason": (
        {"enum": ["stop", "length", "abort", None]},
        "Why the output ended: at a stop, at its limit, or by /abort_request; null while it goes on.",
    ),
    "matched_stop": ({"type": ["integer", "string", "null"]}, "The stop token id, string or expression that ended it."),
    "seed": ({"type": "integer"}, "The seed that draws this choice again."),
}
_HEAD: dict[str, tuple[Schema, str]] = {
    "id": (TEXT, "The rid, or a name that was drawn."),
    "object": (TEXT, "The kind of object."),
    "created": (COUNT, "Seconds since the epoch."),
    "model": (TEXT, "The name that the request was sent to."),
}
_COMPLETION_LOGPROBS = fields(
    tokens=(array(TEXT), r"The tokens as text; those that are not whole characters as bytes:\xe6\x97."),
    token_logprobs=(array(optional(NUMBER)), "Their logprobs; null for the first token of a prompt."),
    top_logprobs=(
        array(optional({"type": "object", "additionalProperties": NUMBER})),
        "The likeliest tokens at each position, and the chosen one.",
    ),
    text_offset=(
        array(COUNT),
        "Where each token begins in the choice's text, in characters; tokens of one character begin where it does.",
    ),
)
COMPLETION = fields(
    "sglext",
    **_HEAD,
    choices=(
        array(
            fields(
                "token_ids prompt_token_ids prompt_logprobs",
                index=(COUNT, "Choice c of prompt p of n choices each has p * n + c."),
                text=(TEXT, "The output; in a stream, what is new."),
                logprobs=(optional(_COMPLETION_LOGPROBS), "If asked for."),
                **_ENDS,
                token_ids=_TOKEN_IDS,
                prompt_token_ids=_PROMPT_TOKEN_IDS,
                prompt_logprobs=_PROMPT_LOGPROBS,
            )
        ),
        "One for each prompt and choice; in a stream, the one that has news.",
    ),
    usage=(USAGE, "The tokens of the whole call."),
    sglext=_SGLEXT,
)
_TOKEN: dict[str, tuple[Schema, str]] = {
    "token": (TEXT, "The token as text."),
    "logprob": (optional(NUMBER), "Its logprob."),
    "bytes": (IDS, "The bytes that it stands for, which need not be whole characters."),
}
_CHAT_LOGPROBS = fields(
    content=(
        array(fields(**_TOKEN, top_logprobs=(array(fields(**_TOKEN)), "The likeliest tokens at this position."))),
        "One for each token.",
    ),
    refusal=(NULL, "Always null."),
)
CHAT_COMPLETION = fields(
    "prompt_token_ids prompt_logprobs sglext",
    **_HEAD,
    choices=(
        array(
            fields(
                "token_ids",
                index=(COUNT, "Which of the n choices it is."),
                message=(
                    fields(
                        role=({"const": "assistant"}, "Who says it."),
                        content=(TEXT, "What is said."),
                        refusal=(NULL, "Always null."),
                    ),
                    "The next message.",
                ),
                logprobs=(optional(_CHAT_LOGPROBS), "If asked for."),
                **_ENDS,
                token_ids=_TOKEN_IDS,
            )
        ),
        "One for each choice.",
    ),
    usage=(USAGE, "The tokens of the whole call."),
    prompt_token_ids=_PROMPT_TOKEN_IDS,
    prompt_logprobs=_PROMPT_LOGPROBS,
    sglext=_SGLEXT,
)
_CHUNK_USAGE = (optional(USAGE), "Only where stream_options ask for it; null but in the chunks that they ask for.")
COMPLETION_CHUNK = {
    **COMPLETION,
    "properties": {**COMPLETION["properties"], "usage": {**_CHUNK_USAGE[0], "description": _CHUNK_USAGE[1]}},
    "required": [*_HEAD, "choices"],
}
CHAT_CHUNK = fields(
    "usage prompt_token_ids sglext",
    **_HEAD,
    choices=(
        array(
            fields(
                "token_ids",
                index=(COUNT, "Which of the n choices it is."),
                delta=(
                    fields(
                        "role content",
                        role=({"const": "assistant"}, "In the first chunk."),
                        content=(TEXT, "What is new."),
                    ),
                    "What the message goes on with.",
                ),
                logprobs=(optional(_CHAT_LOGPROBS), "If asked for."),
                **_ENDS,
                token_ids=_TOKEN_IDS,
            )
        ),
        "The choice that has news; none in the chunks with sglext and the usage.",
    ),
    usage=_CHUNK_USAGE,
    prompt_token_ids=_PROMPT_TOKEN_IDS,
    sglext=_SGLEXT,
)
_MODEL = fields(
    id=(TEXT, "A name that requests may be sent to."),
    object=({"const": "model"}, "The kind of object."),
    created=(COUNT, "Seconds since the epoch."),
    owned_by=(TEXT, "Who serves it."),
    root=(TEXT, "The checkpoint."),
    parent=(NULL, "Always null."),
    max_model_len=(COUNT, "Most tokens of a prompt and its output together."),
)
MODEL = _MODEL
MODELS = fields(object=({"const": "list"}, "The kind of object."), data=(array(_MODEL), "All names of the server."))
TOKENS = fields(
    tokens=({"anyOf": [IDS, array(IDS)]}, "The ids; a list of lists for a list of texts."),
    count=({"anyOf": [COUNT, array(COUNT)]}, "How many they are."),
    max_model_len=(COUNT, "Most tokens of a prompt and its output together."),
)
TEXTS = fields(text=({"anyOf": [TEXT, array(TEXT)]}, "The text; a list of texts for a list of lists."))

# ---- The native API

_ROW: Schema = {
    "type": "array",
    "prefixItems": [optional(NUMBER), COUNT, optional(TEXT)],
    "minItems": 3,
    "maxItems": 3,
}
_FINISH: Schema = {
    "anyOf": [
        NULL,
        fields(
            "matched", type=({"const": "stop"}, "A stop ended it."), matched=({"type": ["integer", "string"]}, "Which.")
        ),
        fields(type=({"const": "length"}, "It reached its limit."), length=(COUNT, "In tokens.")),
        fields(
            type=({"const": "abort"}, "It was aborted."),
            message=(TEXT, "By whom or why."),
            status_code=(optional(COUNT), "Always null."),
            err_type=(optional(TEXT), "Always null."),
        ),
    ]
}
META_INFO = fields(
    "e2e_latency first_token_latency decode_throughput queue_time forward_entry_time prefill_finished_time"
    " request_received_ts request_finished_ts response_sent_to_client_ts"
    " input_token_logprobs output_token_logprobs output_token_logprobs_length input_top_logprobs output_top_logprobs"
    " input_token_ids_logprobs output_token_ids_logprobs",
    id=(TEXT, "The rid, or a name that was drawn."),
    finish_reason=(_FINISH, "Why the output ended; null while it goes on."),
    prompt_tokens=(COUNT, "Tokens of the prompt."),
    completion_tokens=(COUNT, "Tokens of the output so far."),
    cached_tokens=(COUNT, "Of the prompt's tokens, those that the prefix cache had."),
    cached_tokens_details=(optional(_CACHED_DETAILS), "Where they were; null where there are none."),
    reasoning_tokens=(COUNT, "Always 0."),
    weight_version=(TEXT, "Of the weights that answered."),
    num_retractions=(COUNT, "How often the request lost its place to others, and was resumed."),
    dp_rank=(NULL, "Always null."),
    seed=({"type": "integer"}, "The seed that draws this choice again."),
    e2e_latency=(NUMBER, "Seconds from the request to the end."),
    first_token_latency=(optional(NUMBER), "Seconds from the request to the first token."),
    decode_throughput=(optional(NUMBER), "Tokens per second behind the first."),
    queue_time=(
        optional(NUMBER),
        "Seconds that it waited in the scheduler; null if it never ran, and where a stop string or expression ended it.",
    ),
    forward_entry_time=(optional(NUMBER), "When that was over, in seconds since the epoch."),
    prefill_finished_time=(optional(NUMBER), "When the first token was here, in seconds since the epoch."),
    request_received_ts=(NUMBER, "Seconds since the epoch."),
    request_finished_ts=(NUMBER, "Seconds since the epoch."),
    response_sent_to_client_ts=(NUMBER, "Seconds since the epoch."),
    input_token_logprobs=(
        array(_ROW),
        "[logprob, token id, text or null] for each prompt token from logprob_start_len on.",
    ),
    output_token_logprobs=(array(_ROW), "The same for each token of the output."),
    output_token_logprobs_length=(COUNT, "How many there are of them so far."),
    input_top_logprobs=(array(optional(array(_ROW))), "The likeliest tokens at each position of the prompt."),
    output_top_logprobs=(array(optional(array(_ROW))), "And of the output."),
    input_token_ids_logprobs=(
        array(optional(array(_ROW))),
        "The tokens that were asked for, at each position of the prompt.",
    ),
    output_token_ids_logprobs=(array(optional(array(_ROW))), "And of the output."),
)
_GENERATED = fields(
    "prompt_token_ids index",
    text=(TEXT, "The output; in a stream all of it so far, or with --incremental-streaming-output what is new."),
    output_ids=(IDS, "The same as token ids."),
    prompt_token_ids=(IDS, "If asked for."),
    meta_info=(META_INFO, "All that is known of the request."),
    index=(COUNT, "In a stream of many outputs, which of them it is."),
)
GENERATED: Schema = {"anyOf": [_GENERATED, array(_GENERATED)]}

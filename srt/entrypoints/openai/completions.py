"""/v1/completions: continue a text, for one prompt or many."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from srt.entrypoints.answers import Completion, CompletionChoice, CompletionTextChunk, PromptFields
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.native_shapes import MAX_BATCH, check_num_choices
from srt.entrypoints.openai.models import find_model
from srt.entrypoints.openai.parts import CompletionLogprobs, Identity, Usage, finish_fields, last_chunks
from srt.entrypoints.openai.prompt_facts import PromptFacts
from srt.entrypoints.openai.refusals import refuse_agent_fields
from srt.entrypoints.openai.schema import COMPLETION_MAX_TOKENS, CompletionBody
from srt.entrypoints.request_schema import bad_parameter, checked_sampling_params, renamed
from srt.entrypoints.service import Service
from srt.entrypoints.streaming import TextEvent, answer_call, event
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, GenerateInput, RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager

_KIND = "text_completion"
_NO_PROMPT: PromptFields = {}


async def complete(exchange: Exchange, service: Service) -> None:
    given = await exchange.read_json()
    refuse_agent_fields(given)
    body = CompletionBody.parse(given)
    model, adapter = find_model(body.model, body.lora_path, service)
    engine = service.engine()
    identity = Identity.new("cmpl-", body, model)
    inputs = [dataclasses.replace(one, adapter=adapter) for one in parse_inputs(body, identity, engine)]
    usage = Usage(body)
    try:
        if body.echo and body.truncate_prompt_tokens is not None:
            inputs = await _tokenized(inputs, engine)
        echoes = await _echoes(inputs, engine) if body.echo else [""] * len(inputs)
        answer = CompletionAnswer(body, identity, usage, engine, inputs, echoes)
        await answer_call(exchange, engine, inputs, answer, stream=body.stream, interval=service.args.stream_interval)
    except RequestError as error:
        raise renamed(error, body.written_as("prompt")) from error


def parse_inputs(body: CompletionBody, identity: Identity, engine: TokenizerManager) -> list[GenerateInput]:
    if body.best_of is not None and body.best_of != body.n:
        raise bad_parameter("best_of", f"is {body.best_of}, but must equal n ({body.n}) or be left out")
    params = checked_sampling_params(
        body.sampling(),
        lambda given: engine.sampling_params(given, COMPLETION_MAX_TOKENS),
        body.written_as("prompt"),
    )
    params = dataclasses.replace(params, constraint=body.constraint())
    logprobs = body.logprob_request()
    prompts = _prompts(body.prompt)
    inputs = [
        GenerateInput(
            params=params,
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            rid=rid,
            logprobs=logprobs,
            cache_salt=body.salt,
            priority=body.priority,
            replica=body.replica,
            stream=body.stream,
            is_logged=not body.no_logs,
            is_counted=body.log_metrics,
            wants_prompt_ids=logprobs.output or body.return_token_ids,
            add_special_tokens=body.add_special_tokens,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        for prompt, rid in zip(prompts, identity.rids(len(prompts)), strict=True)
    ]
    check_num_choices("prompt", inputs)
    return inputs


def _prompts(prompt: Any) -> list[Any]:
    """Return the prompts of a field that holds a string, a list of token ids, or a list of either."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise bad_parameter("prompt", "must not be an empty list")
    if len(prompt) > MAX_BATCH:
        raise bad_parameter("prompt", f"may have at most {MAX_BATCH} entries, not {len(prompt)}")
    return list(prompt)


async def _tokenized(inputs: Sequence[GenerateInput], engine: TokenizerManager) -> list[GenerateInput]:
    """Return the inputs with token ids in place of their texts, so that a truncated prompt is echoed as truncated."""
    tokenized = []
    for one in inputs:
        tokenized.append(await engine.tokenized(one))
        await asyncio.sleep(0)  # let other tasks run between the prompts of a large batch
    return tokenized


async def _echoes(inputs: Sequence[GenerateInput], engine: TokenizerManager) -> list[str]:
    """Return the prompts as text."""
    texts = []
    for one in inputs:
        if one.text is not None:
            texts.append(one.text)
            continue
        texts.append(engine.text.detokenize(one.input_ids or [], one.params.skip_special_tokens))
        await asyncio.sleep(0)  # let other tasks run between the prompts of a large batch
    return texts


class CompletionAnswer:
    """The writer of a call's answer as text_completion objects."""

    def __init__(
        self,
        body: CompletionBody,
        identity: Identity,
        usage: Usage,
        engine: TokenizerManager,
        inputs: Sequence[GenerateInput],
        echoes: list[str],
    ) -> None:
        self._n = body.n
        self._identity = identity
        self._usage = usage
        self._echoes = echoes
        count = len(echoes) * body.n
        self._logprobs: list[CompletionLogprobs] | None = None
        if body.logprobs is not None:
            prompts = zip(inputs, echoes, strict=True)
            self._logprobs = [
                CompletionLogprobs(engine, body, one, echo) for one, echo in prompts for _ in range(body.n)
            ]
        self._facts = PromptFacts(body, engine.text.token_text)
        self._whole: dict[int, CompletionChoice] = {}
        self._began = [False] * count
        # By choice, a template for events that differ only in text. None before the first event, or if more than the text changes.
        self._text_events: list[TextEvent | None] = [None] * count

    # ---- Whole

    def add(self, prompt: int, update: ChoiceUpdate) -> None:
        """Add a choice; `update` is all of it."""
        self._usage.add(prompt, update)
        index = prompt * self._n + update.index
        text = self._echoes[prompt] + update.text
        self._whole[index] = self._choice(index, text, update, self._facts.of_prompt(update))

    def result(self) -> Completion:
        return {
            **self._identity.head(_KIND),
            "choices": [self._whole[index] for index in sorted(self._whole)],
            "usage": self._usage.write(),
            **self._usage.sglext(),
        }

    # ---- Streamed

    def events(self, prompt: int, update: ChoiceUpdate) -> bytes:
        index = prompt * self._n + update.index
        text, fast = update.text, self._text_events[index]
        if fast is not None and update.finish is None:
            return fast.write(text) if text else b""
        self._usage.add(prompt, update)
        of_prompt: PromptFields = {}
        if not self._began[index]:
            self._began[index] = True
            text, of_prompt = self._echoes[prompt] + text, self._facts.of_prompt(update)
        has_logprobs = self._logprobs is not None and (update.output_logprobs or update.prompt_logprobs)
        has_more = has_logprobs or of_prompt or (self._facts.has_ids and update.ids)
        if not text and not has_more and update.finish is None:
            return b""
        is_plain = self._logprobs is None and not self._facts.has_ids and not self._usage.in_every_chunk
        if is_plain and update.finish is None:
            self._text_events[index] = TextEvent(lambda text: self._chunk(self._choice(index, text, update)))
        return event(self._chunk(self._choice(index, text, update, of_prompt)))

    def last_events(self) -> bytes:
        return last_chunks(self._identity.head(_KIND), self._usage)

    def _chunk(self, choice: CompletionChoice) -> CompletionTextChunk:
        return {**self._identity.head(_KIND), "choices": [choice], **self._usage.in_chunk()}

    def _choice(
        self, index: int, text: str, update: ChoiceUpdate, of_prompt: PromptFields = _NO_PROMPT
    ) -> CompletionChoice:
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs[index].write(update)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            **finish_fields(update.finish),
            "seed": update.seed,
            **self._facts.of_output(update),
            **of_prompt,
        }

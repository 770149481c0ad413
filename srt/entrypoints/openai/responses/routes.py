"""The routes under /v1/responses. A response is a chat: it takes the path to the model that /v1/chat/completions takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from srt.entrypoints.exchange import Exchange
from srt.entrypoints.openai.chat import ChatCall, parse_call
from srt.entrypoints.openai.responses.answer import ResponseAnswer
from srt.entrypoints.openai.responses.chat_form import chat_fields, renamed
from srt.entrypoints.openai.responses.input_items import Message, check_calls_have_outputs, messages_of
from srt.entrypoints.openai.responses.output_items import new_id
from srt.entrypoints.openai.responses.response_types import DeletedResponse, Response
from srt.entrypoints.openai.responses.schema import ResponsesBody
from srt.entrypoints.openai.responses.store import OPTION, ResponseStore, not_found
from srt.entrypoints.request_schema import bad_parameter
from srt.entrypoints.request_schema import renamed as with_api_names
from srt.entrypoints.service import Service
from srt.entrypoints.streaming import answer_call
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.managers.tokenizer_manager.tokenizer_manager import RequestHandle

PATH = "/v1/responses"
Handler = Callable[[Exchange, Service], Awaitable[None]]
_log = logging.getLogger(__name__)


async def create(exchange: Exchange, service: Service) -> None:
    body = ResponsesBody.parse(await exchange.read_json())
    body.check()
    store = _store_for(body, service)
    response_id = body.request_id or new_id("resp")
    if store is not None:
        store.check_new(response_id, body.background)
    messages = [*_earlier(body, service), *messages_of(body.input)]
    check_calls_have_outputs(messages)
    try:
        call = parse_call(chat_fields(body, messages, response_id), service, "resp")
    except RequestError as error:
        raise renamed(error) from error
    engine = service.engine()

    def keep(response: Response) -> None:
        if store is not None:
            store.put(response, [*messages, *_output_messages(response)])

    answer = ResponseAnswer(body, call, engine, is_stored=store is not None, on_end=keep)
    try:
        if body.background and store is not None:
            (handle,) = await engine.submit_all([call.request])
            response = answer.in_progress()
            task = asyncio.create_task(_generate(handle, answer))
            task.add_done_callback(lambda _: handle.abort())  # also if it is cancelled before its first step
            store.put(response, messages, task)
            await exchange.send_json(response)
            return
        await answer_call(
            exchange, engine, [call.request], answer, stream=body.stream, interval=service.args.stream_interval
        )
    except RequestError as error:
        refusal = _in_our_names(error, call)
        if not exchange.is_started:
            raise refusal from error
        await exchange.write(answer.failed_events(refusal))
        await exchange.end()


async def retrieve(exchange: Exchange, service: Service) -> None:
    """Return a stored response."""
    for name, value in exchange.query().items():
        if value not in ("", "false"):
            raise bad_parameter(name, "is not supported here: the whole response is returned")
    await exchange.send_json(_store_of(service).get(_id_in(exchange.path)))


async def delete(exchange: Exchange, service: Service) -> None:
    """Delete a stored response. One that is still generated ends."""
    response_id = _id_in(exchange.path)
    _store_of(service).delete(response_id)
    answer: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
    await exchange.send_json(answer)


async def cancel(exchange: Exchange, service: Service) -> None:
    """End a response that is generated in the background. One that has ended is returned as it is."""
    await exchange.send_json(_store_of(service).cancel(_id_in(exchange.path).removesuffix("/cancel")))


def methods(path: str) -> Mapping[str, Handler] | None:
    """Return the handlers of a path under /v1/responses/ by method; None for an unknown path."""
    response_id, _, rest = _id_in(path).partition("/")
    if not response_id or rest not in ("", "cancel"):
        return None
    return {"POST": cancel} if rest else {"GET": retrieve, "DELETE": delete}


def _id_in(path: str) -> str:
    return path.removeprefix(PATH + "/")


def _store_of(service: Service) -> ResponseStore:
    if service.responses is None:
        raise not_found(f"This server stores no responses: start it with {OPTION}.")
    return service.responses


def _store_for(body: ResponsesBody, service: Service) -> ResponseStore | None:
    """Return where the response will be stored; None if it will not be. Raise RequestError (400) if it has to be stored and cannot be."""
    if service.responses is None and body.background:
        raise bad_parameter("background", f"needs a server with {OPTION}")
    return None if body.store is False else service.responses


def _earlier(body: ResponsesBody, service: Service) -> list[Message]:
    """Return the conversation that the input continues."""
    if body.previous_response_id is None:
        return []
    if service.responses is None:
        raise bad_parameter(
            "previous_response_id", f"needs a server with {OPTION}: send the whole conversation as input"
        )
    return service.responses.conversation(body.previous_response_id)


def _output_messages(response: Response) -> list[Message]:
    return messages_of(response["output"]) if response["output"] else []


def _in_our_names(error: RequestError, call: ChatCall) -> RequestError:
    return renamed(with_api_names(error, call.body.written_as("messages")))


async def _generate(handle: RequestHandle, answer: ResponseAnswer) -> None:
    """Generate a response in the background, and let it be stored, whatever happens."""
    try:
        for update in await handle.collect():
            answer.add(0, update)
        answer.result()
    except RequestError as error:
        answer.failed(error)
    except Exception:
        _log.exception("A response in the background failed.")
        answer.failed(RequestError(500, "The server failed with an internal error: its log has the details."))

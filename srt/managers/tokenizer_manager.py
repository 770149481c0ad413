"""Text in, text out: a frontend's link to the scheduler. Used by the HTTP server and, in process, by `Runtime`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from srt.managers.io_struct import ChoiceUpdate, GenerateInput
from srt.protocol.messages import Scalar, SchedulerHello
from srt.sampling.sampling_params import SamplingParams
from srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the APIs may say about the model."""

    folder: str
    architectures: tuple[str, ...]
    model_type: str
    context_length: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    sampling_defaults: dict[str, float | int]
    has_chat_template: bool


class RequestHandle:
    """One request that was sent. Use it as `with handle:`: leaving the block aborts what is not finished.

        with await manager.submit(request) as handle:
            async for updates in handle:  # list[ChoiceUpdate]: all that came since the last round
                …

    Iteration ends after the last choice's finish. It raises RequestError if the scheduler refuses the request, and EngineDied if
    the engine ends. Cancelling a waiting `anext(handle)` loses nothing: the next one continues. A handle that is dropped aborts too.
    """

    rid: str
    """The client's label, or the one that was drawn."""
    seed: int
    prompt_ids: tuple[int, ...]

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> list[ChoiceUpdate]:
        raise NotImplementedError

    async def collect(self) -> list[ChoiceUpdate]:
        """Wait for the end: one whole update per choice, in order. Cheaper than iterating; instead of it."""
        raise NotImplementedError

    def abort(self) -> None:
        """End what runs of it. Twice, or after the end: nothing. Iteration then ends without further updates."""
        raise NotImplementedError

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class TokenizerManager:
    """Owner of the tokenizer, the link to the scheduler and all live requests of this frontend. One event loop only."""

    model: ModelFacts
    limits: SchedulerHello
    """Only after `wait_ready`."""

    @classmethod
    async def connect(
        cls, *, index: int, generation: int, run_dir: str, model_folder: str, args: ServerArgs
    ) -> TokenizerManager:
        """Load tokenizer and model facts, connect, say hello. StartError for what the user must change."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """The scheduler has answered and the link is whole."""
        raise NotImplementedError

    async def wait_ready(self) -> None:
        """Return when the scheduler takes requests; EngineDied if it never will."""
        raise NotImplementedError

    async def wait_broken(self) -> str:
        """Return, with the reason, when the engine has died. A server ends then."""
        raise NotImplementedError

    def sampling_params(self, given: Mapping[str, Any], default_max_new_tokens: int | None = 128) -> SamplingParams:
        """`given` over the model's defaults, checked; ParameterError names what is wrong. Without max_new_tokens in `given` a request
        gets `default_max_new_tokens`, or less where less fits; None: all that fits."""
        raise NotImplementedError

    async def submit(self, request: GenerateInput) -> RequestHandle:
        """Check the request and send it. RequestError (4xx, naming the parameter) if it cannot be served; then nothing was sent."""
        raise NotImplementedError

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """One token by itself, as logprobs show it."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """The same as the bytes it stands for, which need not be whole characters."""
        raise NotImplementedError

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, special tokens included: submit it with add_special_tokens=False. RequestError 400 if the template refuses."""
        raise NotImplementedError

    async def flush_cache(self) -> tuple[bool, str]:
        """(done?, sentence)."""
        raise NotImplementedError

    async def get_state(self, deep: bool = False) -> tuple[bool, str, dict[str, Scalar]]:
        """(ok?, sentence, the scheduler's counters). `deep` compares the workers' tables too."""
        raise NotImplementedError

    async def abort_label(self, label: str) -> int:
        """Abort the live requests of this label, whichever frontend has them; the empty label means all. Returns how many."""
        raise NotImplementedError

    def stats(self) -> dict[str, Scalar]:
        """Counters for /server_info and leak checks; all that begin with `live_` are 0 when nothing runs."""
        raise NotImplementedError

    def engine_died(self, reason: str) -> None:
        """Tell it what the link cannot: every pending call raises EngineDied."""
        raise NotImplementedError

    async def close(self) -> None:
        """Abort everything and let go of the link."""
        raise NotImplementedError

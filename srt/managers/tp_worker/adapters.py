"""LoRA adapters as resources of a worker: loaded in a thread beside its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srt.lora.resource import KIND, read_content
from srt.managers.tp_worker.resources import PrepareError
from srt.utils.model_error import ModelError

if TYPE_CHECKING:
    from srt.model_loader.model_adapters import ModelAdapters


class AdapterLoader:
    """Loads adapters into a rank's model."""

    kind = KIND

    def __init__(self, adapters: ModelAdapters) -> None:
        self._adapters = adapters

    def prepare(self, key: str, content: bytes) -> None:
        try:
            self._adapters.load(key, read_content(content))
        except ModelError as error:
            raise PrepareError(f"The adapter cannot be loaded: {error}") from error

    def maintain(self) -> None:
        """Do nothing: what is loaded stays as it is."""

    def release(self, key: str) -> None:
        self._adapters.step.release(key)

"""The LoRA adapters of one rank's model: which layers they may change, and the loading of their tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import safe_open

from srt.layers.adapters import AdaptedLayer, StepAdapters, adapt_layers, adapted_layers
from srt.layers.host_adapters import HostAdapters
from srt.lora.adapter_files import AdapterLimits, content_hash, read_adapter
from srt.lora.resource import AdapterContent
from srt.models.any_model import AnyModel
from srt.server_args import ServerArgs
from srt.utils.errors import StartError
from srt.utils.host import available_memory_bytes
from srt.utils.model_config import ModelConfig
from srt.utils.model_error import ModelError

COPIES_SHARE = 8  # all ranks together keep copies of adapters in one part in 8 of the host's available memory


class ModelAdapters:
    """Makes a model's layers ready for adapters, and loads adapters for them."""

    def __init__(
        self, args: ServerArgs, limits: AdapterLimits, model: AnyModel, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._limits = limits
        layers = adapted_layers(model, limits.layers, limits.modules)
        self.step = _step_adapters(args, layers, dtype, device)
        adapt_layers(model, layers, self.step)

    @classmethod
    def of(
        cls, args: ServerArgs, config: ModelConfig, model: AnyModel, dtype: torch.dtype, device: torch.device
    ) -> ModelAdapters | None:
        """Return the adapters of a server's model; None if it serves none."""
        limits = AdapterLimits.of(args, config)
        return None if limits is None else cls(args, limits, model, dtype, device)

    def load(self, key: str, content: AdapterContent) -> None:
        """Load an adapter, in any thread, so that rows may have it under this key.

        ModelError, with a sentence for clients, if its files are not those that the server has checked.
        """
        if self.step.recall(key):
            return
        adapted = read_adapter(content.folder, self._limits)
        matrices: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        with safe_open(adapted[0].a.file, framework="pt") as file:
            for layer in adapted:
                a, b = file.get_tensor(layer.a.name), file.get_tensor(layer.b.name)
                matrices[layer.path] = a.float(), b.float() * layer.scale
        # After the tensors were read: a file that is written meanwhile is noticed.
        if content_hash(content.folder) != content.content_hash:
            raise ModelError(f"The files in {content.folder} have changed since the adapter was loaded: load it again.")
        self.step.hold(key, matrices)


def _step_adapters(
    args: ServerArgs, layers: Mapping[str, AdaptedLayer], dtype: torch.dtype, device: torch.device
) -> StepAdapters:
    if device.type != "cuda":
        return HostAdapters(layers, dtype, device)
    # Imported here because Triton is installed only with PyTorch for CUDA.
    from srt.layers.device_adapters import DeviceAdapters

    assert args.max_lora_rank is not None, "on a GPU the largest rank is known at the start"
    sizes = args.max_loras_per_batch, args.max_lora_rank, args.max_running_requests
    num_ranks = args.tp_size * args.pp_size * args.dp_size
    copy_bytes = available_memory_bytes() // (COPIES_SHARE * num_ranks)
    try:
        return DeviceAdapters(layers, *sizes, dtype, device, copy_bytes)
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"The GPU has too little memory beside the weights for {sizes[0]} LoRA adapters of rank {sizes[1]}: choose a smaller"
            " --max-loras-per-batch or --max-lora-rank."
        ) from error

"""The options of LoRA adapters, and what cannot be combined with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from srt.utils.option import ArgumentError, option

LORA = "LoRA adapters"
TARGET_MODULES = tuple("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj qkv_proj gate_up_proj".split())
"""Names of the layers that adapters may change. The last two are those of models that store them as one."""
ALL_MODULES = "all"
GPU_LORA_RANK = 64
"""Largest rank on GPUs if no option says another one: memory for adapters of this rank is allocated at the start."""


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The options of LoRA adapters as the user gave them; a part of ServerArgs."""

    enable_lora: bool = option(False, "serve LoRA adapters; --lora-paths says so too", group=LORA)
    lora_paths: tuple[str, ...] = option(
        (),
        "adapters that are served from the start, each as name=folder, or as a folder that is its own name",
        group=LORA,
    )
    max_loras_per_batch: int = option(
        8, "most adapters in the workers' memory, and so in one step; the least recently used makes room", group=LORA
    )
    max_lora_rank: int | None = option(
        None,
        "largest rank of an adapter; others are refused (default: any on a CPU, and on GPUs the largest of --lora-paths, or"
        f" {GPU_LORA_RANK} without them)",
        group=LORA,
    )
    lora_target_modules: tuple[str, ...] = option(
        (),
        "layers that adapters may change, such as q_proj; adapters that change others are refused (default: all)",
        group=LORA,
    )

    @property
    def serves_adapters(self) -> bool:
        return self.enable_lora or bool(self.lora_paths)

    @property
    def adapter_modules(self) -> tuple[str, ...]:
        """The names of the layers that adapters may change."""
        given = self.lora_target_modules
        return given if given and ALL_MODULES not in given else TARGET_MODULES

    def adapter_paths(self) -> dict[str, str]:
        """Return the folders of the adapters of --lora-paths by name. ArgumentError for a name that is there twice."""
        paths: dict[str, str] = {}
        for given in self.lora_paths:
            name, is_named, folder = given.partition("=")
            folder = folder if is_named else name
            if not name or not folder:
                raise ArgumentError(f"--lora-paths takes adapters as name=folder, not {given}.")
            if name in paths:
                raise ArgumentError(f"--lora-paths has two adapters of the name {name}: give each its own name.")
            paths[name] = folder
        return paths

    def check_adapters(self, args: Any) -> None:
        """Raise ArgumentError for options that contradict each other. `args` are all options of the server."""
        if self.max_loras_per_batch < 1:
            raise ArgumentError(f"--max-loras-per-batch must be at least 1, not {self.max_loras_per_batch}.")
        if self.max_lora_rank is not None and self.max_lora_rank < 1:
            raise ArgumentError(f"--max-lora-rank must be at least 1, not {self.max_lora_rank}.")
        for name in self.lora_target_modules:
            if name not in (*TARGET_MODULES, ALL_MODULES):
                raise ArgumentError(
                    f"--lora-target-modules {name} is none of {', '.join(TARGET_MODULES)} and {ALL_MODULES}."
                )
        if not self.serves_adapters:
            for name in ("max_lora_rank", "lora_target_modules"):
                if getattr(self, name):
                    raise ArgumentError(f"--{name.replace('_', '-')} needs --enable-lora.")
            return
        served = set(args.model_names())
        for name in self.adapter_paths():
            if name in served:
                raise ArgumentError(f"--lora-paths has an adapter of the model's own name, {name}: choose another one.")
        for name in ("enable_torch_compile", "speculative_algorithm", "is_embedding", "enable_deterministic_inference"):
            if getattr(args, name):
                raise ArgumentError(f"--enable-lora cannot be combined with --{name.replace('_', '-')}: leave one out.")

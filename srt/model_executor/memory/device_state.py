"""The device's state for all requests: tables, keys and values, and the sampler that reads the tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from srt.layers.batch_invariant_ops import batch_invariant_sampler
from srt.layers.sampler import Sampler
from srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool

if TYPE_CHECKING:
    from srt.model_executor.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Everything whose size depends on the number of pages. Created once, for serving or for a trial before it, and never resized."""

    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: MHATokenToKVPool
    sampler: Sampler
    max_request_tokens: int

    @property
    def num_slots(self) -> int:
        return self.req_to_token_pool.num_slots

    @property
    def num_pages(self) -> int:
        return self.req_to_token_pool.num_pages

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of the page groups after the first."""
        return self.req_to_token_pool.windows

    @property
    def window_pages(self) -> tuple[int, ...]:
        """The numbers of pages of these groups."""
        return self.req_to_token_pool.window_pages

    @property
    def page_size(self) -> int:
        return self.req_to_token_pool.page_size

    @property
    def max_total_num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def kv_bytes(self) -> int:
        return self.token_to_kv_pool.nbytes


def init_memory_pool(loaded: LoadedModel, nums_pages: list[int], max_request_tokens: int) -> DeviceState:
    """Allocate the tables and the KV memory, with so many pages in each group, for requests of up to `max_request_tokens` tokens."""
    args, config, device = loaded.args, loaded.config, loaded.device
    groups, (num_pages, *window_pages) = loaded.page_groups, nums_pages
    tables = ReqToTokenPool(
        args.max_running_requests, max_request_tokens, num_pages, args.page_size, device, groups.windows, window_pages
    )
    with loaded.memory.releasable("kv_cache"):
        kv_pool = init_kv_pool(loaded, num_pages, window_pages)
    if loaded.head is not None:
        kv_pool.features = loaded.head.new_features((num_pages + 1) * args.page_size)
    shard_start = loaded.model.lm_head.shard_start if loaded.stage.is_last else 0  # other stages draw nothing
    new_sampler = batch_invariant_sampler if args.enable_deterministic_inference else Sampler
    sampler = new_sampler(loaded.tp, config.vocab_size, shard_start, tables)
    return DeviceState(tables, kv_pool, sampler, max_request_tokens)


def init_kv_pool(loaded: LoadedModel, num_pages: int, window_pages: list[int]) -> MHATokenToKVPool:
    """Allocate the KV memory of a model's layers, with so many pages in the first group and in each of the others."""
    page_size, latents = loaded.args.page_size, loaded.attention_spec.latents
    if latents is not None:
        dims = [latents.dim * heads.num_heads for heads in loaded.kv_heads]  # none for the layers of other stages
        return MLATokenToKVPool(num_pages, page_size, dims, latents.rank, loaded.kv_dtype, loaded.device)
    return MHATokenToKVPool(
        num_pages,
        page_size,
        loaded.kv_heads,
        loaded.kv_dtype,
        loaded.device,
        loaded.kv_scales,
        loaded.page_groups.of_layer,
        window_pages,
    )

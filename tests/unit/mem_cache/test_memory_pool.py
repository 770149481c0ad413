"""The tables and the KV memory: where a position lies, and that nobody writes anywhere else."""

from __future__ import annotations

import torch

from srt.mem_cache.memory_pool import KVHeads, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from srt.mem_cache.tables_hash import tables_hash

CPU = torch.device("cpu")


def test_a_position_lies_where_its_page_says() -> None:
    tables = ReqToTokenPool(num_slots=3, max_request_tokens=10, num_pages=20, page_size=4, device=CPU)
    tables.write_pages(torch.tensor([1, 1, 2]), torch.tensor([0, 1, 0]), torch.tensor([7, 3, 19]))
    slots, positions = torch.tensor([1, 1, 1, 1, 2]), torch.tensor([0, 3, 4, 7, 1])
    assert tables.locations(slots, positions).tolist() == [28, 31, 12, 15, 77]
    assert tables.locations(torch.tensor([[1], [2]]), torch.arange(2).unsqueeze(0)).tolist() == [[28, 29], [76, 77]]


def test_there_is_room_for_the_longest_request_and_the_token_behind_it() -> None:
    tables = ReqToTokenPool(num_slots=1, max_request_tokens=8, num_pages=2, page_size=4, device=CPU)
    tables.write_tokens(torch.tensor([0]), torch.tensor([8]), torch.tensor([5]))
    assert tables.tokens(torch.tensor([0]), torch.tensor([8])).tolist() == [5]
    assert tables.max_pages * 4 > 8


def test_the_dummy_slot_points_to_the_dummy_page_only() -> None:
    tables = ReqToTokenPool(num_slots=2, max_request_tokens=10, num_pages=5, page_size=2, device=CPU)
    memory = MHATokenToKVPool(5, 2, [KVHeads(1, 4)], torch.float32, CPU)
    locations = tables.locations(torch.tensor([tables.dummy_slot]), torch.arange(10))
    assert set(locations.tolist()) == {10, 11}
    assert len(memory.k_buffer[0]) == 12


def test_keys_and_values_of_a_layer_go_where_they_are_told() -> None:
    memory = MHATokenToKVPool(4, 2, [KVHeads(2, 3), KVHeads(2, 3)], dtype=torch.bfloat16, device=CPU)
    k, v = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    where = torch.tensor([6, 1, 4])
    memory.set_kv(1, where, k, v)
    k_buffer, v_buffer = memory.get_kv(1)
    assert torch.equal(k_buffer[where], k.bfloat16())
    assert torch.equal(v_buffer[where], v.bfloat16())
    others = [i for i in range(10) if i not in where.tolist()]
    assert not k_buffer[others].any()
    assert not memory.k_buffer[0].any()
    assert MHATokenToKVPool.bytes_per_token([KVHeads(2, 3)] * 2, torch.bfloat16) * 10 == sum(
        t.numel() * t.element_size() for t in (*memory.k_buffer, *memory.v_buffer)
    )


def test_values_are_the_first_part_of_latents_and_take_no_memory() -> None:
    pool = MLATokenToKVPool(4, 2, [6, 6], latent_rank=4, dtype=torch.bfloat16, device=CPU)
    latents, where = torch.randn(3, 1, 6), torch.tensor([6, 1, 4])
    pool.set_kv(1, where, latents, latents[..., :4])
    keys, values = pool.get_kv(1)
    assert torch.equal(keys[where], latents.bfloat16())
    assert torch.equal(values[where], latents.bfloat16()[..., :4])
    assert values.data_ptr() == keys.data_ptr()
    assert not pool.k_buffer[0].any()
    assert pool.nbytes == 10 * MLATokenToKVPool.bytes_per_token([KVHeads(1, 6)] * 2, torch.bfloat16) == 10 * 2 * 6 * 2


def test_clear_leaves_the_tables_as_new() -> None:
    tables = ReqToTokenPool(num_slots=1, max_request_tokens=4, num_pages=2, page_size=2, device=CPU)
    tables.write_pages(torch.tensor([0]), torch.tensor([0]), torch.tensor([1]))
    tables.write_tokens(torch.tensor([0]), torch.tensor([0]), torch.tensor([9]))
    tables.seq_lens[0] = 3
    tables.clear()
    new = ReqToTokenPool(num_slots=1, max_request_tokens=4, num_pages=2, page_size=2, device=CPU)
    for name in ("page_table", "token_table", "seq_lens"):
        assert torch.equal(getattr(tables, name), getattr(new, name))


def test_the_tables_digest_knows_slots_pages_and_their_order_but_not_the_order_of_slots() -> None:
    digest = tables_hash({1: [4, 5], 0: [2]})
    assert digest == tables_hash({0: [2], 1: [4, 5]})
    others = [{0: [2], 1: [5, 4]}, {0: [2, 4], 1: [5]}, {0: [2], 2: [4, 5]}, {0: [2], 1: [4, 5], 2: []}, {}]
    assert len({digest, *(tables_hash(other) for other in others)}) == 6

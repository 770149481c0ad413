"""The order of 4-bit numbers for tensor cores, and that each lane of the CUDA kernels finds its own: their addresses, lane by lane."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from srt.layers.quantization.int_weight import order_operands, pack_halves

LINE = 128  # bytes of a row in a block, of 256 numbers
SUMMED = 128  # columns whose products `resident_layers.cu` sums up before they are scaled


def random_numbers(rows: int, columns: int) -> Tensor:
    return torch.randint(16, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))


def in_order(numbers: Tensor) -> Tensor:
    return order_operands(pack_halves(numbers))


def test_every_word_has_the_columns_that_its_description_says() -> None:
    columns = torch.arange(96)
    digits = [in_order((columns // size % 10).to(torch.uint8)[None])[0].tolist() for size in (1, 10)]
    for word in range(24):
        ones, tens = (of_all[2 * word] | of_all[2 * word + 1] << 8 for of_all in digits)
        found = [(ones >> 4 * i & 15) + 10 * (tens >> 4 * i & 15) for i in range(4)]
        assert found == [word // 8 * 32 + word % 8 + more for more in (0, 16, 8, 24)]


def in_shared_memory(numbers: Tensor) -> Tensor:
    """8 rows of 256 numbers as a block in memory: 16 bytes are exchanged by the row's number."""
    chunks = in_order(numbers).view(8, 8, 16)
    return torch.stack([chunks[row, torch.arange(8) ^ row] for row in range(8)]).flatten()


def word_at(memory: Tensor, address: int) -> int:
    return int.from_bytes(bytes(memory[address : address + 4].tolist()), "little")


def test_lanes_of_streamed_products_load_operands_without_bank_conflicts() -> None:
    """`convert` of stream_gemm.cu."""
    numbers = random_numbers(8, 256)
    memory = in_shared_memory(numbers)
    for chunk in range(8):
        banks = set()
        for lane in range(32):
            t, row = lane % 4, lane // 4
            address = row * LINE + 4 * t + (chunk * 16 ^ row * 16)
            banks.add(address // 4 % 32)
            word = word_at(memory, address)
            for step, register, place in ((0, 0, 0), (0, 2, 8), (1, 0, 4), (1, 2, 12)):
                column = 32 * chunk + 16 * step + 4 * register + 2 * t
                pair = [word >> place & 15, word >> 16 + place & 15]
                assert pair == numbers[row, column : column + 2].tolist()
        assert len(banks) == 32


def permuted(low: int, high: int, selector: int) -> int:
    """The instruction `prmt`."""
    both = low | high << 32
    return sum((both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i for i in range(4))


def place_of_pair(pair: int) -> int:
    return pair // 8 * 8 + pair % 4 * 2 + pair // 4 % 2


def test_lanes_of_one_row_multiply_numbers_by_their_own_inputs() -> None:
    """`place_of_pair`, `place_columns` and `multiply` of resident_layers.cu, with unsigned bytes as the low and the high bytes of x."""
    numbers = random_numbers(8, 256)
    memory, x = in_shared_memory(numbers), torch.arange(256) * 7 % 251
    words = [0] * 128
    for pair in range(128):  # as programs send their results
        words[place_of_pair(pair)] = pair
    placed = torch.zeros(256, dtype=torch.int64)
    for i in range(64):  # as a thread takes two words
        first, second = words[2 * i], words[2 * i + 1]
        assert 2 * first == i // 4 * 16 + i % 4 * 2 and second == first + 4, (
            "the norm's weights are those of its columns"
        )
        a, b, c, d = (int(x[column]) * 257 for column in (2 * first, 2 * first + 1, 2 * second, 2 * second + 1))
        ac, bd = permuted(a, c, 0x5140), permuted(b, d, 0x5140)
        low_bytes, high_bytes = permuted(ac, bd, 0x5410), permuted(ac, bd, 0x7632)
        assert low_bytes == high_bytes
        placed[4 * i : 4 * i + 4] = torch.tensor([low_bytes >> 8 * j & 255 for j in range(4)])
    for half in range(2):
        for row in range(8):
            total = 0
            for t in range(4):
                for turn in range(2):
                    address = row * LINE + ((2 * t + turn) * 16 ^ row * 16)
                    of_w = memory[address : address + 16].long()
                    of_x = placed[t * 64 + turn * 32 :][:32]
                    if t // 2 == half:
                        total += int((of_w % 16 * of_x[:16] + of_w // 16 * of_x[16:]).sum())
            columns = slice(half * SUMMED, (half + 1) * SUMMED)
            assert total == int((numbers[row, columns].long() * x[columns]).sum())


@pytest.mark.parametrize(("place", "factor"), [(0, 0x7F00), (4, 0x7D00)])
def test_numbers_where_they_are_in_a_byte_minus_zero_points_are_exact(place: int, factor: int) -> None:
    """`from_halves` of stream_gemm.cu: bits that are taken as bfloat16, a factor, and zero points in the last bits of 128."""

    def meaning(bits: Tensor) -> Tensor:
        return bits.to(torch.int16).view(torch.bfloat16).double()

    numbers, zeros = torch.arange(16)[:, None], torch.arange(18)[None]
    subtracted = meaning(torch.tensor([0xBC80 - (1 << 16)])) * meaning(0x4300 + zeros) + meaning(torch.tensor([0x4000]))
    found = meaning(numbers << place) * meaning(torch.tensor([factor])) + subtracted
    assert torch.equal(found, found.bfloat16().double()) and torch.equal(subtracted, subtracted.bfloat16().double())
    assert torch.equal(found * 64, (numbers - zeros).double())

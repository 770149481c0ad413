"""The integers are Philox4x32-10's, and the noise is a function of seed, position and token alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from srt.layers import philox
from srt.layers.philox import gumbel_noise, philox4x32
from tests.support import oracle


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = [torch.tensor([word]) for word in (*counter, *key)]
    drawn = philox4x32((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    assert tuple(int(word) for word in drawn) == expected


def test_noise_equals_the_slow_one_for_every_kind_of_seed() -> None:
    seeds = [0, 1, (1 << 64) - 1, 1 << 63, 0x123456789ABCDEF0]
    positions = [0, 1, 5, 100_000, 1 << 31]
    noise = gumbel_noise(signed(seeds), torch.tensor(positions), 0, 103)
    expected = np.stack([oracle.gumbel_noise(s, p, 103) for s, p in zip(seeds, positions, strict=True)])
    assert np.array_equal(noise.numpy(), expected.astype(np.float32))


def test_noise_of_a_token_is_the_same_bits_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = signed(range(7, 20)), torch.arange(13)
    whole = gumbel_noise(seeds, positions, 0, 259)
    for first, count in ((0, 130), (130, 129), (3, 1), (258, 1), (17, 61)):
        assert torch.equal(gumbel_noise(seeds, positions, first, count), whole[:, first : first + count])
    for row in (0, 4, 12):
        assert torch.equal(gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 0, 259), whole[row : row + 1])
    monkeypatch.setattr(philox, "BLOCK_ELEMENTS", 1000)
    assert torch.equal(gumbel_noise(seeds, positions, 0, 259), whole)


@pytest.mark.gpu
def test_noise_on_a_gpu_is_that_of_the_cpu_but_for_rounding() -> None:
    seeds, positions = signed(range(64)), torch.arange(64) * 1000
    there = gumbel_noise(seeds.cuda(), positions.cuda(), 5, 3001).cpu()
    torch.testing.assert_close(there, gumbel_noise(seeds, positions, 5, 3001), rtol=2e-7, atol=1e-9)


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise(signed(range(200)), torch.arange(200), 0, 2000).numpy()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.02
    assert np.isfinite(noise).all()


def signed(seeds: object) -> torch.Tensor:
    return torch.from_numpy(np.array(list(seeds), np.uint64).view(np.int64))  # type: ignore[call-overload]

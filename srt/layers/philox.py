"""Random numbers as a function of where they are used: Philox4x32-10 in integer tensor operations.

Every device computes the same integers. Each element of the output depends only on its own seed and counter.
"""

from __future__ import annotations

import torch

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
LANES = 4
MASK_32 = 0xFFFFFFFF
BLOCK_ELEMENTS = 1 << 22  # elements of noise computed at once, which bounds the float64 temporaries


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return four words for every counter and key. All are int64 tensors of 32-bit values that broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # An int64 product wraps to the same bits as the unsigned one; the mask after the shift drops the copied sign.
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = ((product_1 >> 32) & MASK_32) ^ (c1 ^ k0)
        c2 = ((product_0 >> 32) & MASK_32) ^ (c3 ^ k1)
        c1, c3 = product_1 & MASK_32, product_0 & MASK_32
        k0, k1 = (k0 + WEYL_0) & MASK_32, (k1 + WEYL_1) & MASK_32
    return c0, c1, c2, c3


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, first_token: int, num_tokens: int) -> torch.Tensor:
    """Return the noise [rows, num_tokens] float32 of token first_token + j at `positions[i]` under `seeds[i]`.

    Seeds are 64 bits in an int64, positions int64. The counter is (token // 4, position, 0, 0), the key is the seed, the lane is
    token % 4. The uniform number is in (0, 1), both ends excluded, so the noise is finite: between -3.2 and 23.
    """
    rows_at_once = max(1, BLOCK_ELEMENTS // max(1, num_tokens))
    if len(seeds) <= rows_at_once:
        return _gumbel_block(seeds, positions, first_token, num_tokens)
    noise = torch.empty((len(seeds), num_tokens), dtype=torch.float32, device=seeds.device)
    for begin in range(0, len(seeds), rows_at_once):
        rows = slice(begin, begin + rows_at_once)
        noise[rows] = _gumbel_block(seeds[rows], positions[rows], first_token, num_tokens)
    return noise


def _gumbel_block(seeds: torch.Tensor, positions: torch.Tensor, first_token: int, num_tokens: int) -> torch.Tensor:
    first_group = first_token // LANES
    num_groups = -(-(first_token + num_tokens) // LANES) - first_group
    groups = torch.arange(first_group, first_group + num_groups, device=seeds.device).unsqueeze(0)
    zero = torch.zeros((1, 1), dtype=torch.int64, device=seeds.device)
    key = ((seeds & MASK_32).unsqueeze(1), ((seeds >> 32) & MASK_32).unsqueeze(1))
    words = torch.stack(philox4x32((groups, positions.unsqueeze(1), zero, zero), key), dim=-1)
    offset = first_token - first_group * LANES
    words = words.view(len(seeds), num_groups * LANES)[:, offset : offset + num_tokens]
    # Logarithms in float64, rounded once. Vector and scalar code may differ in the last bit of a logarithm, and the element's place in
    # memory decides which one computes it. After rounding from float64 the difference is gone.
    uniform = (words.to(torch.float64) + 0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)

"""Stochastic rounding of fp32 to bf16 with counter-based random numbers.

The random numbers are Philox 4x32 with 10 rounds. The counter is (group of 8 elements, step, number of the tensor, 0),
the key is the seed. Each of the four words serves two elements, the low half first. The same seed, step and element
therefore give the same bits on every device, for every sharding, and after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements per counter.
NUM_HALVES = 8
_NUM_ROUNDS = 10
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def random_halves(
    shape: Sequence[int], *, seed: int, step: int | torch.Tensor, number: int, first: int
) -> torch.Tensor:
    """Return one random number of 16 bits per element.

    Args:
        shape: Shape of the result.
        seed: From 0 to 2^63 - 1.
        step: Number of the step; a tensor of shape () stays on its device.
        number: Number of the tensor.
        first: Index of the first element in its whole tensor, a multiple of 8.

    Returns:
        Numbers from 0 to 65535. int32, on the device of step.

    Source:
        Philox, Salmon et al., SC11.

    Example:
        >>> whole = random_halves((24,), seed=1, step=2, number=3, first=0)
        >>> bool((whole[8:] == random_halves((16,), seed=1, step=2, number=3, first=8)).all())
        True
    """
    device = step.device if isinstance(step, torch.Tensor) else torch.device("cpu")
    num_values = torch.Size(shape).numel()
    groups_N = torch.arange(-(-num_values // NUM_HALVES), device=device) + first // NUM_HALVES
    steps_N = torch.zeros_like(groups_N) + step
    words = philox((groups_N, steps_N.long(), torch.full_like(groups_N, number), torch.zeros_like(groups_N)), seed=seed)
    words_N4 = torch.stack(words, dim=1)
    halves = torch.stack([words_N4 & 0xFFFF, words_N4 >> 16], dim=2)
    return halves.flatten()[:num_values].to(torch.int32).view(torch.Size(shape))


def philox(counter: Sequence[torch.Tensor], *, seed: int) -> tuple[torch.Tensor, ...]:
    """Return the four words of Philox 4x32-10 for each counter; words are int64 tensors from 0 to 2^32 - 1.

    Example:
        >>> zeros = [torch.zeros(1, dtype=torch.int64)] * 4
        >>> [hex(word.item()) for word in philox(zeros, seed=0)]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    one, two, three, four = (word & _MASK for word in counter)
    keys = seed & _MASK, seed >> 32
    for _ in range(_NUM_ROUNDS):
        # A product wraps around in 64 bits, which keeps both of its halves.
        low, high = one * _FACTORS[0], three * _FACTORS[1]
        one, two = ((high >> 32) & _MASK) ^ two ^ keys[0], high & _MASK
        three, four = ((low >> 32) & _MASK) ^ four ^ keys[1], low & _MASK
        keys = (keys[0] + _KEY_STEPS[0]) & _MASK, (keys[1] + _KEY_STEPS[1]) & _MASK
    return one, two, three, four


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round each value up or down to bf16 at random, so that the expected result is the value.

    Args:
        values: Any shape, fp32. Values of bf16, NaN and infinity do not change.
        noise: Uniform from 0 to 65535. Shape of values, int32.

    Example:
        >>> round_stochastically(torch.full((2,), 1.0 + 2**-9), torch.tensor([0, 65535], dtype=torch.int32)).tolist()
        [1.0, 1.0078125]
    """
    bits = values.view(torch.int32) + noise
    rounded = (bits & -65536).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values).to(torch.bfloat16)

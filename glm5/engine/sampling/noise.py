"""Noise that a row's tokens race with: a hash, not a generator's state.

    e[w] = -log(1 - u[w])   u[w] = hash(seed, position, w) in (0, 1), so e[w] ~ Exp(1)

argmax over w of p[w] / e[w] is then an exact draw from p. The hash sees nothing but seed, position and token id: the
same token comes out in any batch, at any speculation depth, after any preemption. (seed, position) become a key of
64 bits by splitmix64; the key's halves drive murmur3's 32-bit finalizer over token ids, one before, one inside. 31
bits of it are kept: a token of probability 1e-6 comes with the right frequency to 2e-4 of it, and none below 2**-33
ever comes.
"""

import torch
from torch import Tensor

_GOLDEN_64 = 0x9E3779B97F4A7C15 - (1 << 64)  # as the signed integers that torch holds; products wrap alike
_MIX_64 = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_GOLDEN_32 = 0x9E3779B1 - (1 << 32)
_MIX_32 = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))


def log_exponential(seed_T: Tensor, position_T: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """log of the Exp(1) noise, float32 [T, W], for int64 seeds and positions; of W token ids from `first` on."""
    key_T = mix(mix(seed_T) + position_T)
    low_T1, high_T1 = key_T.int()[:, None], (key_T >> 32).int()[:, None]
    ids_W = torch.arange(first, first + vocab_size, dtype=torch.int32, device=seed_T.device)
    x_TW = ids_W * _GOLDEN_32 + low_T1
    x_TW ^= (x_TW >> 16) & 0xFFFF  # shifts keep the sign: the mask makes them logical
    x_TW *= _MIX_32[0]
    x_TW ^= high_T1
    x_TW ^= (x_TW >> 13) & 0x7FFFF
    x_TW *= _MIX_32[1]
    x_TW ^= (x_TW >> 16) & 0xFFFF
    x_TW &= 0x7FFFFFFF
    # At half-integers u is never 0; float32 may round the largest to 1, whose logarithm would be infinite.
    u_TW = x_TW.float().add_(0.5).mul_(2.0**-31).clamp_max_(1 - 2.0**-24)
    return u_TW.neg_().log1p_().neg_().log_()


def mix(x: Tensor) -> Tensor:
    """splitmix64's output function on int64."""
    x = x + _GOLDEN_64
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_64[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_64[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))

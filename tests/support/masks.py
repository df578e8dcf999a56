"""Sampling masks of given token ids, as an engine records them, and a list of them as a trainer gets them."""

from collections.abc import Iterable, Sequence

import torch

from glm5.kernels.sampled_logprobs import Kept, bits_of, recorded


def recorded_mask(ids: Iterable[int], vocab_size: int) -> bytes:
    is_kept_TW = torch.zeros(1, vocab_size, dtype=torch.bool)
    is_kept_TW[0, list(ids)] = True
    return recorded(bits_of(is_kept_TW).numpy())[0]


def kept_of(masks: Sequence[bytes], device: torch.device | str = "cpu") -> Kept:
    words_N = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.int32)
    return Kept(words_N.to(device), torch.tensor([len(mask) // 4 for mask in masks], device=device))

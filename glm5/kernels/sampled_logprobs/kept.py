"""The vocabularies that top_k, top_p and min_p left to draw each token from: sampling masks.

A mask is recorded as 32-bit words (little-endian): its token ids, ascending; or, where bits are fewer words, -1 and one
bit a token, from the lowest on. So it never takes more than 4 + W / 8 bytes, and no more than 4 a token id.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

_BITS = -1  # no token id: bits follow


def bits_of(is_kept_TW: Tensor) -> Tensor:
    """One bit a token, int32 [T, ceil(W / 32)]."""
    padded_TW = F.pad(is_kept_TW, (0, -is_kept_TW.shape[1] % 32))
    if padded_TW.device.type == "cpu":  # 40 times as fast
        return torch.from_numpy(np.packbits(padded_TW.numpy(), axis=1, bitorder="little")).view(torch.int32)
    place_8 = torch.arange(8, dtype=torch.uint8, device=padded_TW.device)
    bits_TU8 = padded_TW.unflatten(1, (-1, 8)).to(torch.uint8) << place_8
    return bits_TU8.sum(dim=-1, dtype=torch.uint8).view(torch.int32)


def recorded(bits_TU: NDArray[np.int32]) -> list[bytes]:
    """The masks of `bits_of` as they are recorded."""
    count_T = np.bitwise_count(bits_TU.view(np.uint32)).sum(axis=1, dtype=np.int64)
    has_ids_T = count_T <= bits_TU.shape[1]
    ids, size_T = _set_bits(bits_TU[has_ids_T]).astype("<i4").tobytes(), 4 * count_T * has_ids_T
    stop_T = size_T.cumsum()
    masks = [ids[start:stop] for start, stop in zip((stop_T - size_T).tolist(), stop_T.tolist(), strict=True)]
    for row in np.flatnonzero(~has_ids_T).tolist():
        masks[row] = np.concatenate([[_BITS], bits_TU[row]]).astype("<i4").tobytes()
    return masks


def kept_ids(mask: bytes) -> NDArray[np.int32]:
    """The token ids of a recorded mask, ascending."""
    words = np.frombuffer(mask, "<i4")
    return _set_bits(words[None, 1:]) if len(words) and words[0] == _BITS else words


def _set_bits(bits_TU: NDArray[np.int32]) -> NDArray[np.int32]:
    """Places of the bits that are set in each row, one row after the other."""
    row, word = np.nonzero(bits_TU)
    bits = np.unpackbits(bits_TU[row, word].astype("<i4").view(np.uint8), bitorder="little").reshape(-1, 32)
    found, bit = np.nonzero(bits)
    return (word[found] * 32 + bit).astype(np.int32)


class Kept(NamedTuple):
    """`words_N`: the recorded masks (int32) of all rows, one row after the other. `count_T`: words of each row (int64),
    0 for all tokens."""

    words_N: Tensor
    count_T: Tensor

    @classmethod
    def of(cls, masks: Sequence[bytes], device: torch.device | str = "cpu") -> "Kept":
        """Of recorded masks, b"" for all tokens."""
        words_N = torch.from_numpy(np.frombuffer(b"".join(masks), "<i4").astype(np.int32))
        count_T = torch.tensor([len(mask) // 4 for mask in masks], dtype=torch.int64)
        return cls(words_N.to(device), count_T.to(device))

    def take(self, row_G: Tensor) -> "Kept":
        """The vocabularies of some rows (int64 [G], on the device of the words)."""
        count_G = self.count_T[row_G]
        start_G = (self.count_T.cumsum(0) - self.count_T)[row_G]
        offset_N = torch.arange(int(count_G.sum()), device=row_G.device)
        first_G = count_G.cumsum(0) - count_G
        return Kept(self.words_N[offset_N + torch.repeat_interleave(start_G - first_G, count_G)], count_G)

    def rows(self, start: int, stop: int) -> "Kept":
        """The vocabularies of consecutive rows."""
        skipped, taken = int(self.count_T[:start].sum()), int(self.count_T[start:stop].sum())
        return Kept(self.words_N[skipped : skipped + taken], self.count_T[start:stop])

    def dropped(self, vocab_size: int) -> Tensor:
        """Mask [T, W] of the tokens that a row does not have."""
        is_cut_T, start_T = self.count_T > 0, self.count_T.cumsum(0) - self.count_T
        has_bits_T = is_cut_T.clone()
        has_bits_T[is_cut_T] = self.words_N[start_T[is_cut_T]] == _BITS
        row_N = torch.repeat_interleave(torch.arange(len(start_T), device=start_T.device), self.count_T)
        in_bits_N = has_bits_T[row_N]
        dropped_TW = is_cut_T[:, None].expand(-1, vocab_size).clone()
        dropped_TW[row_N[~in_bits_N], self.words_N[~in_bits_N].long()] = False
        bits_RU = self.words_N[in_bits_N].view(-1, 1 - (-vocab_size // 32))[:, 1:].contiguous().view(torch.uint8)
        place_8 = torch.arange(8, dtype=torch.uint8, device=start_T.device)
        dropped_TW[has_bits_T] = ((bits_RU[..., None] >> place_8) & 1).flatten(1)[:, :vocab_size] == 0
        return dropped_TW

"""Per-slot tables: what each sequence asks of the sampler, and what it has written so far.

A sequence takes a slot (`place`): tables that its parameters use are written anew, the others made neutral, since a
batch that needs some work does it for all of its rows. So nothing of the slot's last sequence shows. On the host only
flags are kept: they say which work a batch needs. Tables have one slot more than there are sequences, for padding rows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.engine.sampling.params import (
    CUTS,
    LOGIT_NUMBERS,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_IDS,
    Feature,
    SamplingParams,
)
from glm5.kernels.upload import upload

NO_TOKEN = -1  # before the first output token
ANY_TOKEN = -2  # in front of a bad word shorter than the longest
_FOREVER = torch.iinfo(torch.int64).max

# Columns, one value a slot: the numbers that act on logits, min_p as its logarithm, and the seed.
_FLOATS = [name for name, number in LOGIT_NUMBERS.items() if float in number.types]
_INTS = [name for name in LOGIT_NUMBERS if name not in _FLOATS]
_values_of = attrgetter(*LOGIT_NUMBERS)


class Numbers(NamedTuple):
    """Columns of a sequence, and the features that they need."""

    floats: tuple[float, ...]
    ints: tuple[float, ...]
    features: int


@dataclass(frozen=True)
class Placement:
    """A sequence that takes a slot.

    `seed`: of 64 bits, signed or not. `output_ids`: what it has written already, when it comes back from preemption.
    `stop_ids`: tokens that would end it, barred until min_tokens. `bad_words`: token sequences (`words.bad_word_ids`).
    `sampling_mask`: report the token ids that were left to draw from.
    """

    slot: int
    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = ()
    stop_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    sampling_mask: bool = False

    @property
    def numbers(self) -> Numbers:
        return _numbers(_values_of(self.params), is_greedy=self.params.greedy)

    @property
    def features(self) -> int:
        params, features = self.params, self.numbers.features
        features |= 0 if params.logprobs is None else Feature.LOGPROBS
        features |= Feature.MASK if self.sampling_mask else 0
        features |= Feature.BIASES if params.logit_bias or (params.min_tokens > 0 and self.stop_ids) else 0
        features |= Feature.BAD_WORDS if self.bad_words else 0
        permitted = params.allowed_token_ids is not None or params.constrained
        return features | (Feature.PERMITTED if permitted else 0)


class SlotTables:
    """Tables [S, ...] on `device`, S = num_slots + 1. `num_rows`: rows of logits a sequence may have, 1 + drafts."""

    def __init__(self, num_slots: int, vocab_size: int, num_rows: int, device: torch.device) -> None:
        S, tail_len = num_slots + 1, MAX_BAD_WORD_LEN - 1
        self.num_slots, self.vocab_size, self.num_rows, self.device = num_slots, vocab_size, num_rows, device

        def table(*shape: int, dtype: torch.dtype, fill: float = 0) -> Tensor:
            # Zeros of a CPU take no memory before they are written: only penalized sequences pay for counts.
            if fill == 0:
                return torch.zeros(S, *shape, dtype=dtype, device=device)
            return torch.full((S, *shape), fill, dtype=dtype, device=device)

        self._floats = table(len(_FLOATS), dtype=torch.float32)
        self._ints = table(len(_INTS) + 1, dtype=torch.int64)
        columns = (*self._floats.unbind(dim=1), *self._ints.unbind(dim=1))
        self._column_Y = dict(zip((*_FLOATS, *_INTS, "seed"), columns, strict=True))
        self.counts_YW = table(vocab_size, dtype=torch.int32)
        self.in_prompt_YW = table(vocab_size, dtype=torch.bool)
        self.bias_ids_YU = table(MAX_LOGIT_BIASES + MAX_STOP_IDS, dtype=torch.int64)
        self.biases_YU = table(MAX_LOGIT_BIASES + MAX_STOP_IDS, dtype=torch.float32)
        self.bias_ends_YU = table(MAX_LOGIT_BIASES + MAX_STOP_IDS, dtype=torch.int64)
        self.bad_last_YU = table(MAX_BAD_WORDS, dtype=torch.int64)
        self.bad_heads_YUU = table(MAX_BAD_WORDS, tail_len, dtype=torch.int32)
        self.is_bad_word_YU = table(MAX_BAD_WORDS, dtype=torch.bool)
        self.tail_YU = table(tail_len, dtype=torch.int32, fill=NO_TOKEN)
        self.bitmask_Y = table(num_rows, -(-vocab_size // 32), dtype=torch.int32, fill=-1)
        self._features = np.zeros(S, dtype=np.int64)
        self._cached: tuple[NDArray[np.int64], int] | None = None
        self._num_biases = np.zeros(S, dtype=np.int64)
        self._num_bad_words = np.zeros(S, dtype=np.int64)
        self._bad_word_len = np.zeros(S, dtype=np.int64)
        self._num_logprobs = np.zeros(S, dtype=np.int64)
        self._allowed: dict[int, NDArray[np.int32]] = {}

    def features_of(self, slots: NDArray[np.int64]) -> int:
        """Work that any of the slots needs: bits of `Feature`."""
        if self._cached is None or self._cached[0] is not slots:  # decoding asks of the same slots, step after step
            self._cached = slots, int(np.bitwise_or.reduce(self._features[slots], initial=0))
        return self._cached[1]

    def num_logprobs_of(self, slots: NDArray[np.int64]) -> int:
        return int(self._num_logprobs[slots].max(initial=0))

    def num_biases_of(self, slots: NDArray[np.int64]) -> int:
        return int(self._num_biases[slots].max(initial=0))

    def bad_words_of(self, slots: NDArray[np.int64]) -> tuple[int, int]:
        """Most bad words of any of the slots, and the length of their longest."""
        return int(self._num_bad_words[slots].max(initial=0)), int(self._bad_word_len[slots].max(initial=0))

    def numbers_of(self, slot_T: Tensor) -> Callable[[str], Tensor]:
        """Of each row [T], by name: the numbers that act on logits, min_p as its logarithm, and the seed."""
        return lambda name: self._column_Y[name].index_select(0, slot_T)

    def place(self, placements: Sequence[Placement]) -> None:
        """Sequences take their slots. What they need is copied to the device; work enqueued before is unaffected."""
        if not placements:
            return
        slots = np.array([placement.slot for placement in placements])
        assert len(set(slots.tolist())) == len(slots), f"{slots=}"
        assert ((slots >= 0) & (slots < self.num_slots)).all(), f"{slots=} {self.num_slots=}"
        for placement in placements:
            self._neutralize(placement.slot)
        features = [placement.features for placement in placements]
        self._features[slots] = features
        self._cached = None
        self._num_logprobs[slots] = [placement.params.logprobs or 0 for placement in placements]
        index = self._upload(slots)
        numbers = [placement.numbers for placement in placements]
        floats = np.array([one.floats for one in numbers], dtype=np.float32)
        self._floats.index_copy_(0, index, self._upload(floats))
        ints = [(*one.ints, _signed(placement.seed)) for one, placement in zip(numbers, placements, strict=True)]
        self._ints.index_copy_(0, index, self._upload(np.array(ints, dtype=np.int64)))
        for placement, work in zip(placements, features, strict=True):
            if work & Feature.PENALTIES:
                self._write_counts(placement)
            if work & Feature.BIASES:
                self._write_biases(placement)
            if work & Feature.BAD_WORDS:
                self._write_bad_words(placement)
            if work & Feature.PERMITTED:
                self._write_permitted(placement)

    def permit(self, slots: Sequence[int], bitmasks: Tensor) -> None:
        """What grammars leave for the next step's rows: one bit a token, int32 [len(slots), J, ceil(W / 32)]."""
        masks = bitmasks.numpy()
        for row, slot in enumerate(slots):
            if slot in self._allowed:
                masks[row] &= self._allowed[slot]
        self.bitmask_Y.index_copy_(0, self._upload(np.asarray(slots, dtype=np.int64)), self._upload(masks))

    def record(self, tokens_Y: Tensor, count_Y: Tensor, features: int) -> None:
        """The first `count_Y[s]` of slot s's new tokens are its own now."""
        num_new = tokens_Y.shape[1]
        if features & Feature.PENALTIES:
            new_Y = torch.arange(num_new, device=self.device) < count_Y[:, None]
            slot_Y1 = torch.arange(self.num_slots + 1, device=self.device)[:, None]
            place_of_drafts_Y = slot_Y1 * self.vocab_size + tokens_Y.clamp_min(0)
            self.counts_YW.view(-1).index_add_(0, place_of_drafts_Y.flatten(), new_Y.flatten().int())
        if features & Feature.BAD_WORDS:
            tail_len = self.tail_YU.shape[1]
            both = torch.cat([self.tail_YU, tokens_Y.int()], dim=1)
            self.tail_YU.copy_(both.gather(1, count_Y[:, None] + torch.arange(tail_len, device=self.device)))

    def _neutralize(self, slot: int) -> None:
        """Undo what the slot's last sequence wrote, except numbers that every sequence writes and counts: penalties
        that are neutral do not see them."""
        if self._num_biases[slot]:
            self.bias_ends_YU[slot] = 0
        if self._num_bad_words[slot]:
            self.is_bad_word_YU[slot] = False
        if self._features[slot] & Feature.PERMITTED:
            self.bitmask_Y[slot] = -1
        self._num_biases[slot] = self._num_bad_words[slot] = self._bad_word_len[slot] = 0
        self._allowed.pop(slot, None)

    def _write_counts(self, placement: Placement) -> None:
        slot, vocab_size = placement.slot, self.vocab_size
        counts = np.bincount(np.asarray(placement.output_ids, dtype=np.int64), minlength=vocab_size)
        self.counts_YW[slot] = self._upload(counts.astype(np.int32))
        in_prompt = np.zeros(vocab_size, dtype=bool)
        in_prompt[np.asarray(placement.prompt_ids, dtype=np.int64)] = True
        self.in_prompt_YW[slot] = self._upload(in_prompt)

    def _write_biases(self, placement: Placement) -> None:
        slot, params = placement.slot, placement.params
        barred_until = len(placement.prompt_ids) + params.min_tokens
        entries = [(token_id, bias, _FOREVER) for token_id, bias in (params.logit_bias or {}).items()]
        if params.min_tokens > 0:
            entries += [(token_id, -math.inf, barred_until) for token_id in dict.fromkeys(placement.stop_ids)]
        ids, biases, ends = zip(*entries, strict=True)
        self._num_biases[slot] = n = len(entries)
        assert n <= self.bias_ids_YU.shape[1], f"{n} biases and stop tokens"
        self.bias_ids_YU[slot, :n] = self._upload(np.array(ids, dtype=np.int64))
        self.biases_YU[slot, :n] = self._upload(np.array(biases, dtype=np.float32))
        self.bias_ends_YU[slot, :n] = self._upload(np.array(ends, dtype=np.int64))

    def _write_bad_words(self, placement: Placement) -> None:
        slot, words, tail_len = placement.slot, placement.bad_words, self.tail_YU.shape[1]
        self._num_bad_words[slot] = n = len(words)
        self._bad_word_len[slot] = longest = max(map(len, words))
        assert n <= MAX_BAD_WORDS, f"{n} bad words"
        assert longest <= MAX_BAD_WORD_LEN, f"a bad word of {longest} tokens"
        heads = np.full((n, tail_len), ANY_TOKEN, dtype=np.int32)
        for row, word in enumerate(words):
            if len(word) > 1:
                heads[row, -len(word) + 1 :] = word[:-1]
        self.bad_heads_YUU[slot, :n] = self._upload(heads)
        self.bad_last_YU[slot, :n] = self._upload(np.array([word[-1] for word in words], dtype=np.int64))
        self.is_bad_word_YU[slot, :n] = True
        written = list(placement.output_ids[-tail_len:])
        tail = [NO_TOKEN] * (tail_len - len(written)) + written
        self.tail_YU[slot] = self._upload(np.array(tail, dtype=np.int32))

    def _write_permitted(self, placement: Placement) -> None:
        allowed = placement.params.allowed_token_ids
        if allowed is None:  # a grammar: its first mask is yet to come
            return
        bits = np.zeros(self.bitmask_Y.shape[2] * 32, dtype=bool)
        bits[list(allowed)] = True
        mask = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        self._allowed[placement.slot] = mask
        self.bitmask_Y[placement.slot] = self._upload(mask)

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        return upload(array, self.device)


@lru_cache(maxsize=1024)
def _numbers(values: tuple[float, ...], *, is_greedy: bool) -> Numbers:
    """Of the values of LOGIT_NUMBERS: the same for all values that mean the same."""
    given = dict(zip(LOGIT_NUMBERS, values, strict=True))
    given["temperature"] = 0.0 if is_greedy else given["temperature"]
    given["top_k"] = max(given["top_k"], 0)
    features = 0
    for name, value in given.items():
        features |= LOGIT_NUMBERS[name].bounds.feature if value != LOGIT_NUMBERS[name].default else 0
    features = features & ~(CUTS | Feature.TEMPERED) if is_greedy else features | Feature.RANDOM
    given["min_p"] = math.log(given["min_p"]) if given["min_p"] > 0 else -math.inf
    return Numbers(tuple([given[name] for name in _FLOATS]), tuple([given[name] for name in _INTS]), features)


def _signed(seed: int) -> int:
    """A seed of 64 bits as torch holds it."""
    seed %= 2**64
    return seed - 2**64 if seed >> 63 else seed

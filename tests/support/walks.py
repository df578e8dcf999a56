"""What a model writes that knows nothing but the grammar: a random walk through what is allowed."""

import random
from collections.abc import Mapping, Sequence

import torch

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.sampling.grammar import Matcher


def walk(
    matcher: Matcher,
    tokenizer: Tokenizer,
    rng: random.Random,
    *,
    closers: Mapping[int, float],
    limit: int = 2000,
) -> list[int]:
    """Tokens up to the end token, which is left out. `closers`: tokens and how they are liked, more so
    the longer it gets."""
    width = tokenizer.vocab_size
    mask, written = torch.zeros(1, -(-width // 32) + 1, dtype=torch.int32), list[int]()
    while True:
        matcher.fill((), mask)
        bits = (mask[0, :, None] >> torch.arange(32)) & 1
        allowed: Sequence[int] = bits.flatten()[:width].nonzero().flatten().tolist()
        assert allowed, f"stuck after {tokenizer.decode(written)!r}"
        weights = [1 + closers.get(token_id, 0) * (1 + len(written)) for token_id in allowed]
        [token_id] = rng.choices(allowed, weights)
        if token_id in tokenizer.eos_ids:
            return written
        assert matcher.advance([token_id])
        written.append(token_id)
        assert len(written) < limit, tokenizer.decode(written)

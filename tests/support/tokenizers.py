"""A tokenizer small enough for the tiny model: bytes, GLM's special tokens and a few merges."""

from functools import cache

from glm5.chat.tokenizer import Tokenizer, train_bpe

_TEXT = "the weather in Paris is fine, the answer is: Berlin and the rest of the question. " * 4


@cache
def tiny_tokenizer() -> Tokenizer:
    """At most 320 tokens, as many as `tiny` has embeddings."""
    return train_bpe([_TEXT], 320)

"""A small tokenizer with GLM's special tokens, and the same one without those of an answer's markup."""

import json

import pytest
from tokenizers import Tokenizer as Backend

from glm5.chat import Tokenizer, train_bpe
from glm5.chat.special import MARKUP_TOKENS

TEXTS = [
    "The weather in Beijing and in Shanghai: get_weather city date. I will check it for you, one moment please.",
    "Hello world, this is a reasoning section. Let me think about the question first. 你好世界 🎉 Zoë",
    "calculate operation add send_message recipient todo_write configure enabled true false null",
] * 4


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 480)


@pytest.fixture(scope="session")
def bare_tokenizer(tokenizer, tmp_path_factory) -> Tokenizer:
    """No tokens for think and call tags: there the spelling counts."""
    folder = tmp_path_factory.mktemp("bare")
    tokenizer.save(folder)
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["added_tokens"] = [t for t in definition["added_tokens"] if t["content"] not in MARKUP_TOKENS]
    return Tokenizer(Backend.from_str(json.dumps(definition)))

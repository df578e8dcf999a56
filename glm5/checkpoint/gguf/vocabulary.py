"""A checkpoint's tokenizer and chat template as GGUF's keys.

GGUF holds tokens, merges and kinds of tokens, but not how text is split before merging: it names one of the ways that
llama.cpp knows. The name is found by splitting a text in each of these ways and in the tokenizer's own.
"""

import logging
from pathlib import Path
from typing import Any

from tokenizers import Regex, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import ConfigError
from glm5.common.extras import require

logger = logging.getLogger(__name__)

# A word with one leading character that is no letter, up to three digits, other signs with the line ends behind them.
_GLM_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WAYS: dict[str, PreTokenizer] = {
    "glm4": Sequence([Split(Regex(_GLM_4), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "gpt-2": ByteLevel(add_prefix_space=False),
}
"""Ways to split text, by llama.cpp's names: published GLM tokenizers, and those of small models that glm5 trains."""
_PROBE = "It's 12345 o'clock,\n\n  isn'T it?!\t Größe_7: x2 =\t3.14; 北京 2024年…\r\n\r\n    end\n 🙂🙂  )(  1st"
_NAMED = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}
"""What llama.cpp's converter gives these roles in GLM's vocabularies."""


def check_vocabulary(directory: Path, vocab_size: int) -> None:
    """Raise ConfigError for a tokenizer that GGUF cannot hold."""
    if (directory / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_dir(directory)
        _split_name(tokenizer)
        if tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"{directory / 'tokenizer.json'}: has {tokenizer.vocab_size} tokens, and vocab_size is {vocab_size}; "
                "allowed: at most as many"
            )


def add_vocabulary(writer: Any, directory: Path, vocab_size: int) -> None:
    """Add tokenizer and chat template of a checkpoint to a GGUFWriter; of one without a tokenizer, only that."""
    gguf = require("gguf", "gguf")
    if not (directory / "tokenizer.json").is_file():
        logger.warning("%s: has no tokenizer.json, so the GGUF has no tokenizer", directory)
        writer.add_tokenizer_model("none")
        return
    tokenizer = Tokenizer.from_dir(directory)
    spelling = {token_id: token for token, token_id in tokenizer.spellings.items()}
    added = tokenizer.backend.get_added_tokens_decoder()

    def kind(token_id: int) -> Any:
        if token_id not in spelling:
            return gguf.TokenType.UNUSED
        if token_id not in added:
            return gguf.TokenType.NORMAL
        looks_special = spelling[token_id].startswith("<|") and spelling[token_id].endswith("|>")
        return gguf.TokenType.CONTROL if added[token_id].special or looks_special else gguf.TokenType.USER_DEFINED

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_name(tokenizer))
    writer.add_token_list([spelling.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)])
    writer.add_token_types([kind(token_id) for token_id in range(vocab_size)])
    special = gguf.SpecialVocab(directory, load_merges=True, n_vocab=vocab_size)
    for role, token in _NAMED.items():
        if (token_id := tokenizer.id_of(token)) is not None:
            special.special_token_ids.setdefault(role, token_id)
    special.add_special_token.setdefault("bos", False)  # prompts begin with it already
    special.add_to_gguf(writer, quiet=True)


def _split_name(tokenizer: Tokenizer) -> str:
    """llama.cpp's name for how a tokenizer splits text."""
    backend = tokenizer.backend
    own = backend.pre_tokenizer
    if own is not None and backend.normalizer is None and isinstance(backend.model, models.BPE):
        pieces = own.pre_tokenize_str(_PROBE)
        for name, way in _WAYS.items():
            if way.pre_tokenize_str(_PROBE) == pieces:
                return name
    raise ConfigError(
        "tokenizer.json: splits text in a way that llama.cpp has no name for; allowed: byte-level BPE that splits as "
        "GLM's tokenizers do, as GPT-2's, or as GPT-2's with single digits"
    )

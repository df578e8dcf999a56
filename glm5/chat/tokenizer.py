"""Byte-level BPE tokenizer, read from `tokenizer.json`.

Special tokens are looked up by name (`id_of`). A rendered prompt contains its special tokens, so encoding
adds none.
"""

import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from glm5.chat.detokenizer import TextStream, byte_alphabet
from glm5.chat.special import CONTROL_TOKENS, END_OF_TEXT, END_TOKENS, GLM_TOKENS
from glm5.common.atomic import atomic_write
from glm5.common.bounded import SETTINGS, TABLES, read_bounded, read_bounded_text
from glm5.common.errors import CheckpointError, ConfigError, RequestError

_NUM_BYTES = 256
_MAX_ID = 2**32  # limit of the backend


class Tokenizer:
    """A tokenizer with its settings.

    `eos_ids`: tokens that end an answer, `pad_id`: the padding token or None. Unknown ids decode to
    nothing: models have more rows than their tokenizer has tokens.
    """

    def __init__(
        self, backend: Backend, settings: dict[str, Any] | None = None, eos_ids: Sequence[int] | None = None
    ) -> None:
        """`settings` is the content of `tokenizer_config.json`; `eos_ids` overrides what its tokens say."""
        self._backend = backend
        self.settings = dict(settings or {})
        if not self._is_byte_level():
            raise CheckpointError(
                "tokenizer.json: the decoder is not ByteLevel; GLM tokenizers are byte-level BPE, "
                "other kinds are not supported"
            )
        added = backend.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._added_ids = frozenset(added)
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self.pad_id = self._id_named("pad_token")
        self.eos_ids = tuple(eos_ids) if eos_ids is not None else self._default_eos_ids()
        self._alphabet = byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[bool, dict[int, str]] = {True: {}, False: {}}  # by `skip_special`, for `TextStream`

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> Self:
        """The tokenizer of a checkpoint folder.

        EOS ids come from `generation_config.json`, else `config.json`, else the tokenizer's own tokens.
        Raises CheckpointError when `tokenizer.json` is missing or a file cannot be read.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"no tokenizer.json in {folder}: copy the tokenizer files of the checkpoint's origin there"
            )
        try:
            backend = Backend.from_buffer(read_bounded(file, TABLES))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
        # Many files have these settings from training; prompts must not be truncated or padded.
        backend.no_truncation()
        backend.no_padding()
        sources = (read_json(folder / name) for name in ("generation_config.json", "config.json"))
        eos = next((ids for source in sources if (ids := _as_ids(source.get("eos_token_id")))), None)
        return cls(backend, read_json(folder / "tokenizer_config.json"), eos)

    def save(self, path: str | os.PathLike[str], chat_template: str | None = None) -> None:
        """Write the files from which this class and transformers' AutoTokenizer load the same tokenizer."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        files = {
            "tokenizer.json": self._backend.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n",
        }
        if chat_template is not None:
            files["chat_template.jinja"] = chat_template
        for name, text in files.items():
            with atomic_write(folder / name) as handle:
                handle.write(text)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id: the minimum rows of an embedding for this tokenizer."""
        return max(self.spellings.values()) + 1

    def first_difference(self, other: "Tokenizer") -> str | None:
        """The smallest token id that stands for something else in another tokenizer, in words; None where none does."""
        own, others = ({token_id: token for token, token_id in one.spellings.items()} for one in (self, other))
        wrong = next((i for i in sorted({*own, *others}) if own.get(i) != others.get(i)), None)
        return None if wrong is None else f"token {wrong} is {own.get(wrong)!r} here and {others.get(wrong)!r} there"

    @property
    def backend(self) -> Backend:
        """The object of the package tokenizers, for writers of other formats."""
        return self._backend

    @property
    def spellings(self) -> dict[str, int]:
        """Ids by the tokens' spellings in tokenizer.json."""
        return self._backend.get_vocab(with_added_tokens=True)

    def id_of(self, token: str) -> int | None:
        """Id of a special token by its spelling, None where this tokenizer has no such token."""
        return self._added.get(token)

    @cached_property
    def control_spellings(self) -> list[str]:
        """Texts that `encode` turns into one added token each, except words and white space that were added as text."""
        words = [token for token, token_id in self._added.items() if token_id not in self._special_ids]
        plain = {token for token in words if token.isspace() or token.isidentifier()}
        return [token for token in self._added if token not in plain and len(token) > 1]

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Ids of `text`, with nothing added.

        Special tokens spelled in the text become those tokens, as in every engine that encodes rendered
        prompts. With `allow_special=False` they are encoded as the plain text they are spelled with.
        Raises RequestError for text that has no UTF-8 form (half of a surrogate pair).
        """
        backend = self._backend if allow_special else self._plain
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds an unpaired surrogate {text[error.start]!r} at character {error.start}: "
                "it is not valid Unicode, remove it"
            ) from error
        # The batch call, unlike the single one, releases the GIL.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def least_tokens(self, text: str) -> int:
        """A quick lower bound of `len(encode(text))`, from the length of the longest token."""
        return -(-len(text) // self._longest_token) if self._longest_token else 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`. `skip_special` leaves out the control tokens (roles, end of text), not the markup."""
        stream = self.stream(skip_special=skip_special)
        return stream.feed_all(ids) + stream.finish()

    def stream(self, *, skip_special: bool = False) -> TextStream:
        """An incremental `decode`: feed it ids one by one."""
        return TextStream(self.bytes_unless_special if skip_special else self.bytes_of, self._texts[skip_special])

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens with a name, such as roles and tags."""
        return self._added_ids

    def is_markup(self, token_id: int) -> bool:
        """Whether it is a token with a name that carries text, such as a tag: not a control token."""
        return token_id in self._added_ids and token_id not in self._special_ids

    def bytes_unless_special(self, token_id: int) -> bytes:
        """The bytes of a token; empty for control tokens and unknown ids."""
        return b"" if token_id in self._special_ids else self.bytes_of(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token, which may be part of a character; empty for unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._look_up_bytes(token_id)
            if known:  # unknown ids are not cached: there may be any number
                self._bytes[token_id] = known
        return known

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < _MAX_ID else None
        if token is None:
            return b""
        if token in self._added or any(char not in self._alphabet for char in token):
            return token.encode()
        return bytes(self._alphabet[char] for char in token)

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token; 0 if tokens may match more text than they contain."""
        added = self._backend.get_added_tokens_decoder().values()
        if self._backend.normalizer is not None or any(token.lstrip or token.rstrip for token in added):
            return 0
        return max(len(token.encode()) for token in self._backend.get_vocab(with_added_tokens=True))

    @cached_property
    def _plain(self) -> Backend:
        """The same tokenizer without special tokens, so that no text can become one."""
        definition = json.loads(self._backend.to_str())
        return Backend.from_str(json.dumps(definition | {"added_tokens": [], "post_processor": None}))

    def _is_byte_level(self) -> bool:
        decoder = json.loads(self._backend.decoder.__getstate__()) if self._backend.decoder else {}
        return "ByteLevel" in [decoder.get("type"), *(part["type"] for part in decoder.get("decoders", []))]

    def _id_named(self, setting: str) -> int | None:
        token = self.settings.get(setting)
        return self.id_of(token["content"] if isinstance(token, dict) else token) if token else None

    def _default_eos_ids(self) -> tuple[int, ...]:
        ids = [self.id_of(token) for token in END_TOKENS]
        if None in ids:  # not a GLM tokenizer: it defines only its own end of text
            ids = [self._id_named("eos_token")]
        return tuple(token_id for token_id in ids if token_id is not None)


def train_bpe(texts: Iterable[str], vocab_size: int, digits_per_token: int = 1) -> Tokenizer:
    """A byte-level BPE learnt from `texts`, with GLM's special tokens after its vocabulary.

    A number is cut every `digits_per_token` digits, from the left. `vocab_size` counts all tokens; the result is
    smaller if `texts` have too few pairs to merge. The same texts give the same tokenizer.
    """
    smallest = _NUM_BYTES + len(GLM_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small: {_NUM_BYTES} bytes and {len(GLM_TOKENS)} special tokens "
            f"need at least {smallest}"
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf"\p{{N}}{{1,{digits_per_token}}}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(GLM_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(token, special=token in CONTROL_TOKENS, normalized=False) for token in GLM_TOKENS])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(CONTROL_TOKENS[1:]),
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    return Tokenizer(backend, settings)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if the file is missing. Raises CheckpointError for anything else."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(read_bounded_text(file, SETTINGS))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def _as_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    return tuple(token_id for token_id in ids if isinstance(token_id, int))

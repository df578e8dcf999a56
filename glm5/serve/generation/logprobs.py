"""Log-probabilities in the formats of OpenAI's two completions APIs, and prompt log-probabilities in vLLM's."""

from collections.abc import Sequence
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.serve.generation.job import LogprobRow


class TokenTexts:
    """Texts of tokens, or bytes for a token that is part of a character. `as_ids`: "token_id:n" instead."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False):
        self.tokenizer, self.as_ids = tokenizer, as_ids

    def name(self, token_id: int) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        token_bytes = self.tokenizer.bytes_of(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def token_bytes(self, token_id: int) -> list[int]:
        return list(self.tokenizer.bytes_of(token_id))


def chat_logprobs(
    rows: Sequence[LogprobRow], num_logprobs: int, formatter: TokenTexts, *, with_bytes: bool = True
) -> dict[str, Any]:
    """A chat choice's `logprobs`."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        named = {"token": formatter.name(token_id), "logprob": logprob}
        return {**named, "bytes": formatter.token_bytes(token_id)} if with_bytes else named

    content: list[dict[str, Any]] = []
    for row in rows:
        token_id, found = next(iter(row.items()))
        best = sorted(row.items(), key=lambda item: item[1].rank)[:num_logprobs]
        best.sort(key=lambda item: -item[1].logprob)  # another order than that of ranks if they are processed
        likeliest = [entry(other, other_found.logprob) for other, other_found in best]
        content.append({**entry(token_id, found.logprob), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def prompt_logprobs(rows: Sequence[LogprobRow]) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: one entry per token; that of the first token is None."""
    token_bytes = [
        {
            str(token_id): {"logprob": found.logprob, "rank": found.rank, "decoded_token": found.decoded_token}
            for token_id, found in row.items()
        }
        for row in rows
    ]
    return [None, *token_bytes]


class CompletionLogprobs:
    """A text choice's `logprobs`, built incrementally. Offsets count characters from the start of the choice's text."""

    def __init__(self, num_logprobs: int, formatter: TokenTexts, *, skip_special: bool):
        self.num_logprobs, self.formatter = num_logprobs, formatter
        self._stream = formatter.tokenizer.stream(skip_special=skip_special)
        self._offset = 0

    def of(self, token_ids: Sequence[int], rows: Sequence[LogprobRow | None]) -> dict[str, Any]:
        """The entries of the next tokens. The first token of a prompt has no row."""
        tokens, values, offsets, likeliest = list[str](), list[float | None](), list[int](), list[Any]()
        for token_id, row in zip(token_ids, rows, strict=True):
            tokens.append(self.formatter.name(token_id))
            offsets.append(self._offset)
            self._offset += len(self._stream.feed(token_id))
            values.append(None if row is None else row[token_id].logprob)
            likeliest.append(None if row is None else self._likeliest(token_id, row))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": likeliest}

    def _likeliest(self, token_id: int, row: LogprobRow) -> dict[str, float]:
        """The likeliest tokens, and the sampled token if it is not among them."""
        best = sorted(row.items(), key=lambda item: item[1].rank)
        kept = [item for item in best if item[1].rank <= self.num_logprobs or item[0] == token_id]
        return {self.formatter.name(other): found.logprob for other, found in kept}

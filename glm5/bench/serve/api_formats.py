"""Request bodies and response chunks of OpenAI's two routes and of SGLang's own.

Chunk shapes differ between servers and versions, so a chunk is read by its content:

    carries   it has text, reasoning or a tool call. A chunk with only a role or only a finish reason carries nothing.
    total     tokens of the answer up to and including this chunk, if the server reports them: usage in every chunk,
              `token_ids`, SGLang's `meta_info`
    usage     the final count, with the last chunk or in one of its own without choices
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from glm5.bench.serve.failure import BAD_ANSWER, IN_STREAM, RequestFailed
from glm5.common.errors import ConfigError

Message = dict[str, Any]
Prompt = str | list[int] | list[Message]
"""Text, token ids, or messages of a conversation."""


class Usage(NamedTuple):
    """Counts reported by the server; None if not reported. `num_steps`: SGLang's verification steps of drafts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    num_steps: int | None = None


class Piece(NamedTuple):
    """One chunk of an answer. `added`, `total`: tokens in it, and up to it, if reported; `finish`: the finish
    reason."""

    text: str = ""
    reasoning: str = ""
    carries: bool = False
    finish: str | None = None
    added: int | None = None
    total: int | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class RequestParams:
    """Parameters of every request of a run. `extra` is merged over the body, objects one level deep."""

    model: str
    temperature: float
    top_p: float | None
    ignore_eos: bool
    extra: Mapping[str, Any]


class ApiFormat(Protocol):
    """The API format of a streamed request."""

    path: str

    def body(self, prompt: Prompt, max_tokens: int, tools: Sequence[Message] = ()) -> bytes:
        """The body of a request, in JSON."""
        ...

    def read(self, data: bytes) -> Piece:
        """Parse one event of the stream. Raises `RequestFailed` for an error and for anything but a chunk."""
        ...

    def join(self, so_far: str, text: str) -> str:
        """Append the text of a chunk to the answer so far."""
        ...


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    def as_usage(self) -> Usage:
        details = self.prompt_tokens_details
        return Usage(self.prompt_tokens, self.completion_tokens, details.cached_tokens if details else None)


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


_NO_DELTA = _Delta()


class _OpenAI:
    """Common parts of OpenAI's two routes."""

    def __init__(self, asking: RequestParams) -> None:
        self._asking = asking
        self._decoder = msgspec.json.Decoder(_Chunk)

    def join(self, so_far: str, text: str) -> str:
        return so_far + text

    def _common(self) -> dict[str, Any]:
        asking = self._asking
        body = {"stream": True, "stream_options": {"include_usage": True}, "model": asking.model}
        return body | _given(temperature=asking.temperature, top_p=asking.top_p, ignore_eos=asking.ignore_eos or None)

    def _chunk(self, data: bytes) -> _Chunk:
        try:
            chunk = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise RequestFailed(BAD_ANSWER, f"{_start(data)} is no chunk: {error}") from None
        if chunk.error is not None or chunk.object == "error":
            raise RequestFailed(IN_STREAM, message_of(chunk.error or chunk.message))
        return chunk

    def _counts(self, chunk: _Chunk, choice: _Choice) -> tuple[int | None, int | None]:
        added = len(choice.token_ids) if choice.token_ids is not None else None
        return added, chunk.usage.completion_tokens if chunk.usage else None


class OpenAIChat(_OpenAI):
    """/v1/chat/completions."""

    path = "/v1/chat/completions"

    def body(self, prompt: Prompt, max_tokens: int, tools: Sequence[Message] = ()) -> bytes:
        if isinstance(prompt, str):
            messages: list[Any] = [{"role": "user", "content": prompt}]
        elif prompt and isinstance(prompt[0], int):
            raise ConfigError("token ids cannot be sent to a chat route; use --backend openai or sglang")
        else:
            messages = list(prompt)
        body = self._common() | {"messages": messages, "max_completion_tokens": max_tokens}
        return _encode(body | ({"tools": list(tools)} if tools else {}), self._asking.extra)

    def read(self, data: bytes) -> Piece:
        chunk = self._chunk(data)
        usage = chunk.usage.as_usage() if chunk.usage is not None else None
        if not chunk.choices:
            return Piece(usage=usage)
        choice = chunk.choices[0]
        delta = choice.delta or _NO_DELTA
        text = delta.content if isinstance(delta.content, str) else ""
        reasoning = delta.reasoning_content or delta.reasoning or ""
        added, total = self._counts(chunk, choice)
        carries = bool(delta.content or reasoning or delta.tool_calls or delta.refusal)
        return Piece(text, reasoning, carries, _checked(choice.finish_reason), added, total, usage)


class OpenAICompletions(_OpenAI):
    """/v1/completions. A chunk without text still counts: its token is part of an unfinished UTF-8 character."""

    path = "/v1/completions"

    def body(self, prompt: Prompt, max_tokens: int, tools: Sequence[Message] = ()) -> bytes:
        return _encode(self._common() | {"prompt": plain(prompt), "max_tokens": max_tokens}, self._asking.extra)

    def read(self, data: bytes) -> Piece:
        chunk = self._chunk(data)
        usage = chunk.usage.as_usage() if chunk.usage is not None else None
        if not chunk.choices:
            return Piece(usage=usage)
        choice = chunk.choices[0]
        finish = _checked(choice.finish_reason)
        added, total = self._counts(chunk, choice)
        return Piece(choice.text or "", "", bool(choice.text) or not finish, finish, added, total, usage)


class _Meta(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    spec_verify_ct: int | None = None
    finish_reason: Any = None


class _Generated(msgspec.Struct):
    text: str | None = None
    meta_info: _Meta | None = None
    error: Any = None


class SGLang:
    """/generate: every event holds the text so far (or, in some configurations, only new text) and a token count."""

    path = "/generate"

    def __init__(self, asking: RequestParams) -> None:
        self._asking = asking
        self._decoder = msgspec.json.Decoder(_Generated)

    def body(self, prompt: Prompt, max_tokens: int, tools: Sequence[Message] = ()) -> bytes:
        asking, content = self._asking, plain(prompt)
        given = _given(temperature=asking.temperature, top_p=asking.top_p, ignore_eos=asking.ignore_eos or None)
        body = {"input_ids" if isinstance(content, list) else "text": content, "stream": True}
        return _encode(body | {"sampling_params": {"max_new_tokens": max_tokens} | given}, asking.extra)

    def read(self, data: bytes) -> Piece:
        try:
            event = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise RequestFailed(BAD_ANSWER, f"{_start(data)} is no event of /generate: {error}") from None
        if event.error is not None:
            raise RequestFailed(IN_STREAM, message_of(event.error))
        meta = event.meta_info or _Meta()
        reason: Any = meta.finish_reason
        if isinstance(reason, dict):
            reason = _checked(str(reason.get("type")), reason.get("message"))
        usage = Usage(meta.prompt_tokens, meta.completion_tokens, meta.cached_tokens, meta.spec_verify_ct)
        carries = bool(event.text) or bool(meta.completion_tokens)
        return Piece(event.text or "", "", carries, reason, None, meta.completion_tokens, usage)

    def join(self, so_far: str, text: str) -> str:
        return text if text.startswith(so_far) else so_far + text


DIALECTS: dict[str, type[OpenAIChat] | type[OpenAICompletions] | type[SGLang]] = {
    "openai-chat": OpenAIChat,
    "openai": OpenAICompletions,
    "vllm": OpenAICompletions,
    "sglang": SGLang,
}


def plain(prompt: Prompt) -> str | list[int]:
    """The prompt for a route without messages. Raises ConfigError for messages, which need the server's chat
    template."""
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
        raise ConfigError("messages can be sent to a chat route only; use --backend openai-chat")
    return cast("str | list[int]", prompt)


def message_of(error: Any) -> str:
    """The text in an error of any shape, cut to a line."""
    while isinstance(error, dict):
        error = next((error[key] for key in ("message", "error", "detail") if error.get(key)), str(error))
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _checked(finish: str | None, message: Any = None) -> str | None:
    """The finish reason. Raises `RequestFailed` if the server aborted the request."""
    if finish in ("abort", "error"):
        raise RequestFailed(IN_STREAM, message_of(message or f"the answer ended with finish reason {finish}"))
    return finish


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _encode(body: dict[str, Any], extra: Mapping[str, Any]) -> bytes:
    for name, value in extra.items():
        old = body.get(name)
        body[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return msgspec.json.encode(body)


def _start(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace"))

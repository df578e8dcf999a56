"""Turns a conversation with tools into a prompt, a reader of its answer, and the grammar that constrains the answer.

tool_choice auto        no grammar, except if a tool is strict, only some tools are allowed, or only one call is
tool_choice required    tool calls, and nothing else after the reasoning
structured output       the constrained answer after the reasoning, or tool calls if there are tools
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from glm5.chat.guard import Guard
from glm5.chat.message import normalize_messages, normalize_tools
from glm5.chat.parser import CALL, THINK_END, Functions
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import RequestError
from glm5.engine.frontend.request_builder import Options
from glm5.engine.sampling.params import StructuredOutputsParams
from glm5.rl.gateway.session import Session
from glm5.serve.generation.call_grammar import CallGrammar
from glm5.serve.generation.job import Reader
from glm5.serve.generation.sampling_fields import context_exceeded
from glm5.serve.generation.value_grammar import either
from glm5.serve.http.call import current
from glm5.serve.http.errors import ApiError, named
from glm5.serve.service.service import Service
from glm5.serve.service.sessions import NO_SESSIONS, Recording

Format = dict[str, Any]
B = TypeVar("B")
T = TypeVar("T")
_MAX_WHITESPACE = 64  # between two JSON tokens
_SHORT = 1 << 13  # bytes of a body, which take a millisecond or two


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools may, must or must not be called. `names`: the tools that are allowed, None for all."""

    mode: Literal["auto", "required", "none"] = "auto"
    names: Sequence[str] | None = None
    parallel: bool = True


@dataclass(frozen=True)
class Conversation:
    """The input of a prompt. `messages` and `tools` in OpenAI's format; `wanted`: the constraint of the answer.

    `continues`: the last message is the assistant's, and the answer continues it.
    """

    messages: Any
    tools: Any = None
    choice: ToolChoice = ToolChoice()
    template: Mapping[str, Any] = field(default_factory=dict)
    wanted: StructuredOutputsParams | None = None
    generates: bool = True
    continues: bool = False

    def wanting(self, wanted: StructuredOutputsParams | None) -> "Conversation":
        """A copy with this constraint of the answer."""
        return replace(self, wanted=wanted)


@dataclass(frozen=True)
class Prompt:
    """Token ids, the reader of the answers, and the constraints of the answers."""

    ids: list[int]
    reader: Reader
    structured: StructuredOutputsParams | None
    starts_after: int | None
    not_before: tuple[int, ...]
    recording: Recording | None = None

    def options(self, **more: Any) -> Options:
        return Options(starts_after=self.starts_after, not_before=self.not_before, **more)


async def prepared(prepare: Callable[[B, Service], T], body: B, service: Service) -> T:
    """What `prepare` makes of a body, on a thread: templates and tokenizers take a second for a million tokens. Of a
    trainer's agent it is made at once if it is short, since the thread takes a third as long as the work."""
    call, sessions = current(), service.sessions
    if call is not None and sessions is not None and call.num_bytes <= _SHORT and service.template.is_ours:
        session = sessions.find(call.tenant.name, call.session)
        if session is not None and session.ruled is not None:
            return prepare(body, service)
    return await asyncio.to_thread(prepare, body, service)


def build_prompt(
    conversation: Conversation, service: Service, *, field: str = "messages", is_asked: bool = True
) -> Prompt:
    """Build the prompt of a conversation. Takes a second for a million tokens: do not call it on the event loop.

    `field`: the API's name of its messages. `is_asked`: it will be answered, so that a session keeps it. Raises
    RequestError, or ApiError for a prompt longer than the context.
    """
    tokenizer, choice = service.tokenizer, conversation.choice
    tools = _prompt_tools(conversation)
    ids, recording = _prompt_ids(conversation, tools, service, field, is_asked=is_asked)
    reasoning = service.template.starts_in_reasoning(ids)
    structured = _constraint(tools or [], choice, conversation.wanted, tokenizer)
    starts_after: int | None = None
    not_before: tuple[int, ...] = ()
    if reasoning and (end := tokenizer.id_of(THINK_END)) is not None:
        starts_after = end
        if structured is not None and (call := tokenizer.id_of(CALL)) is not None:
            not_before = (call,)  # a call would end the reasoning before the grammar starts
    elif reasoning and structured is not None:
        raise RequestError(
            f"this model's tokenizer has no token {THINK_END}: structured output needs thinking switched off",
            "structured_outputs",
        )
    only_offered = service.only_offered_tools
    reader = Reader(
        tokenizer, Functions(tools), reasoning=reasoning, parse_tools=tools is not None, only_offered=only_offered
    )
    return Prompt(ids, reader, structured, starts_after, not_before, recording)


def _prompt_tools(conversation: Conversation) -> list[dict[str, Any]] | None:
    """The tools in the prompt."""
    tools, choice = normalize_tools(conversation.tools), conversation.choice
    names = [tool["function"]["name"] for tool in tools or ()]
    if choice.mode == "required" and not names:
        raise RequestError("tool_choice requires a call, but there are no tools", "tool_choice")
    if missing := [name for name in choice.names or () if name not in names]:
        raise RequestError(f"tool_choice names {missing[0]!r:.80}, which is not one of the tools", "tool_choice")
    return None if choice.mode == "none" else tools


def _prompt_ids(
    conversation: Conversation, tools: list[dict[str, Any]] | None, service: Service, field: str, *, is_asked: bool
) -> tuple[list[int], Recording | None]:
    """The prompt's tokens; of a request of a session those that its tree has, and where its answers go."""
    session = session_of(service, is_asked=is_asked)
    if session is not None and conversation.generates and not conversation.continues:
        messages = normalize_messages(conversation.messages)
        _check_length(" ".join(_texts(messages)), service, field)
        try:
            placed = session.place(messages, tools, conversation.template)
        except RequestError as error:
            raise RequestError(str(error), field) from None
        return placed.ids, Recording(session, placed)
    guard = service.template.guard()
    ids = _encoded(_rendered(conversation, tools, service, guard), service, guard, field)
    return ids, None if session is None else Recording(session, session.aside(ids))


def session_of(service: Service, *, is_asked: bool = True) -> Session | None:
    """The session of the current request, if it has one and will be answered. Raises ApiError where it names one in its
    path and the server keeps none."""
    call, sessions = current(), service.sessions
    if sessions is None and call is not None and call.is_session_path:
        raise ApiError(404, NO_SESSIONS, code="no_sessions")
    if is_asked and sessions is not None and call is not None and call.session:
        return sessions.of(call.tenant.name, call.session)
    return None


def _rendered(conversation: Conversation, tools: list[dict[str, Any]] | None, service: Service, guard: Guard) -> str:
    template, options = service.template, conversation.template
    if not conversation.continues:
        generates = conversation.generates
        return template.render_marked(guard, conversation.messages, tools, add_generation_prompt=generates, **options)
    messages = normalize_messages(conversation.messages)
    last = guard.marked(messages[-1])
    content, reasoning = last["content"], last.get("reasoning_content")
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(content, str):
        raise RequestError(
            "continue_final_message needs a last message of the assistant, with text and without calls",
            "continue_final_message",
        )
    text = template.render_marked(guard, messages, tools, add_generation_prompt=False, **options)
    if content.strip():
        begun, written = content.strip(), content[len(content.rstrip()) :]  # templates strip the content of a message
    elif reasoning and text.endswith(THINK_END):
        text, begun, written = text.removesuffix(THINK_END), reasoning.strip(), ""
    else:
        raise RequestError("continue_final_message: the last message has no text to go on from", "messages")
    if not text.rstrip().endswith(begun):
        raise RequestError(
            f"continue_final_message: the chat template {template.name} writes something after the last message",
            "continue_final_message",
        )
    return text.rstrip() + written if content.strip() else text


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        yield from [content] if isinstance(content, str) else (part.get("text", "") for part in content)


def _check_length(text: str, service: Service, field: str) -> None:
    """Refuse a text that is too long without encoding it, which takes half a minute for a body of 32 MiB."""
    most = service.engine.max_model_len
    if (least := service.tokenizer.least_tokens(text)) > most:
        raise context_exceeded(most, f"at least {least}", param=field)


def _encoded(text: str, service: Service, guard: Guard, field: str) -> list[int]:
    _check_length(guard.text(text), service, field)
    try:
        return guard.encode(text)
    except RequestError as error:
        raise RequestError(str(error), field) from None


def _constraint(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, wanted: StructuredOutputsParams | None, tokenizer: Tokenizer
) -> StructuredOutputsParams | None:
    """The constraint of the answer after its reasoning; None if there is none."""
    if not tools or choice.mode == "none":
        return wanted
    try:
        return _constraint_with_tools(tools, choice, wanted, tokenizer)
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        raise RequestError(f"tools have a schema with a keyword of a wrong type ({error})", "tools") from None


def _constraint_with_tools(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, wanted: StructuredOutputsParams | None, tokenizer: Tokenizer
) -> StructuredOutputsParams | None:
    callable_tools = [tool for tool in tools if choice.names is None or tool["function"]["name"] in choice.names]
    if choice.mode == "required":
        grammar = CallGrammar(tokenizer)
        return _tag(grammar.calls(callable_tools, parallel=choice.parallel, strict=True))
    if wanted is not None:
        calls = CallGrammar(tokenizer).calls(callable_tools, parallel=choice.parallel, strict=False)
        return _tag({"type": "or", "elements": [calls, _format(wanted)]})
    is_strict = any(tool["function"].get("strict") for tool in callable_tools)
    if is_strict or choice.names is not None or not choice.parallel:
        return _tag(CallGrammar(tokenizer).text_with_calls(callable_tools, parallel=choice.parallel))
    return None


def _tag(form: Format) -> StructuredOutputsParams:
    with named({"structured_outputs": "tools"}, "structural_tag"):
        return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})


def _format(wanted: StructuredOutputsParams) -> Format:
    """A constraint of the answer, as part of a structural tag."""
    text = wanted.text
    match wanted.kind:
        case "regex":
            return {"type": "regex", "pattern": text}
        case "grammar":
            return {"type": "grammar", "grammar": text}
        case "choice":
            texts = [{"type": "const_string", "value": value} for value in json.loads(text)]
            return either(texts)
        case "json" | "json_object":
            if wanted.disable_any_whitespace:  # a structural tag cannot say so
                raise RequestError(
                    "disable_any_whitespace is true beside tools, where whitespace cannot be fixed; leave one of the "
                    "two out",
                    "structured_outputs",
                )
            schema = _parsed(text) if wanted.kind == "json" else {"type": "object"}
            return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_WHITESPACE}
        case _:
            return _parsed(text).get("format", {})


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs is not JSON: {error}", "structured_outputs") from None

"""The body of POST /v1/chat/completions: OpenAI's fields, and those that vLLM, SGLang and Z.ai add."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from glm5.common.errors import RequestError
from glm5.engine.sampling.params import Bounds
from glm5.serve.generation.logprobs import TokenTexts
from glm5.serve.generation.openapi_schemas import MESSAGES, TOOL_CHOICE, TOOLS
from glm5.serve.generation.prompting import ToolChoice
from glm5.serve.generation.sampling_fields import MEANINGLESS, REFUSED, SamplingFields
from glm5.serve.generation.thinking import Thinking
from glm5.serve.http.body import Body, StrictModel
from glm5.serve.service.service import Service


class StreamOptions(StrictModel):
    """`include_usage`: count the tokens in a last chunk. `continuous_usage_stats`: in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _request_id(value: str) -> str:
    if not _ID.fullmatch(value):
        raise ValueError("1 to 128 visible ASCII characters, so no spaces")
    return value


_ID = re.compile(r"[\x21-\x7e]{1,128}")
RequestId = Annotated[
    str, AfterValidator(_request_id), Field(json_schema_extra={"maxLength": 128, "pattern": r"^[\x21-\x7e]+$"})
]


class StreamFields(Body):
    """How an answer is sent, and what it says besides."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: RequestId | None = None
    """The id of the answer is made of it."""
    return_token_ids: bool = False
    """Say the token ids of prompt and answer."""

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        return (
            self.includes_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options are for streams; allowed: with stream true", "stream_options")


class AnswerFields(SamplingFields, StreamFields):
    """What the answers of chat and text completions have in common."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED
    meaningless: ClassVar[frozenset[str]] = MEANINGLESS

    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens "token_id:n", so that none are confused. Default: if the server says so."""

    def formatter(self, service: Service) -> TokenTexts:
        """What names the tokens of log-probabilities."""
        wanted = self.return_tokens_as_token_ids
        return TokenTexts(service.tokenizer, as_ids=service.tokens_as_ids if wanted is None else wanted)


class ChatBody(AnswerFields):
    """POST /v1/chat/completions. Messages and tools are checked by those who use them."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **REFUSED,
        "best_of": (1,),
        "functions": (),
        "function_call": (),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
        "documents": ([],),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "echo": (False,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
    }

    messages: Annotated[list[Any], Field(json_schema_extra=MESSAGES)]
    tools: Annotated[list[Any], Field(json_schema_extra=TOOLS)] | None = None
    tool_choice: Annotated[Any, Field(json_schema_extra=TOOL_CHOICE)] = None
    """auto, none, required, one function by name, or allowed_tools."""
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Bounds(0)] | None = None
    max_tokens: Annotated[int, Bounds(1)] | None = None
    max_completion_tokens: Annotated[int, Bounds(1)] | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] = {}
    include_reasoning: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @property
    def limit(self) -> str:
        """The field that says how long the answer may be."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """For `SamplingParams.logprobs`. Raises RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs}; allowed: only with logprobs true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def budget(self) -> tuple[int | None, str]:
        """Tokens of thinking, and which of two fields says so. Raises RequestError where they do not agree."""
        nested = None if self.thinking is None else self.thinking.budget_tokens
        own = self.thinking_token_budget
        if nested is not None and own is not None and nested != own:
            raise RequestError(
                f"thinking_token_budget is {own} and thinking.budget_tokens {nested}: say it once",
                "thinking_token_budget",
            )
        return (own, "thinking_token_budget") if nested is None else (nested, "thinking.budget_tokens")

    def choice(self) -> ToolChoice:
        """What `tool_choice` says. Raises RequestError."""
        return tool_choice(self.tool_choice, parallel=self.parallel_tool_calls)


def tool_choice(given: Any, *, parallel: bool) -> ToolChoice:
    """OpenAI's `tool_choice` in all its forms. Raises RequestError."""
    match given:
        case None | "auto":
            return ToolChoice("auto", parallel=parallel)
        case "none" | "required":
            return ToolChoice(given, parallel=parallel)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            # A named function requires exactly one call of it, without parallel calls.
            return ToolChoice("required", (name,), parallel=False)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            names = tuple(_name_of(tool) for tool in tools)
            if names:
                return ToolChoice(mode, names, parallel=parallel)
        case _:
            pass
    allowed = 'auto, none, required, {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}'
    raise RequestError(f"tool_choice is {given!r:.80}; allowed: {allowed}", "tool_choice")


def _name_of(tool: Any) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
        case _:
            raise RequestError(f"tool_choice.allowed_tools.tools holds {tool!r:.60}; allowed: functions", "tool_choice")

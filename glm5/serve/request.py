"""The body of a chat request: what is understood, what is refused by name, what is ignored.

A field that this server knows and cannot honour is refused unless it says what happens anyway; ignoring it would
give an answer that the client did not ask for. A field that it does not know is ignored and logged once.
"""

import json
import logging
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from glm5.config.refusal import first_error
from glm5.engine.defaults import GenerationDefaults
from glm5.engine.sampling.params import SamplingParams
from glm5.serve.errors import ApiError
from glm5.serve.service import Service

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20  # a million tokens of text is about 5 MB
MAX_LOGGED_FIELDS = 100  # different unknown names of fields; a client may invent any number

# Fields that are known and not supported, with the values that change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "parallel_tool_calls": (True,),
    "functions": (),
    "function_call": (),
    "modalities": (["text"],),
    "audio": (),
    "echo": (False,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
# Fields for OpenAI's own service that say nothing about the answer.
_MEANINGLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# What the server itself tells the template.
_NOT_FOR_TEMPLATES = {"messages", "tools", "add_generation_prompt", "literal_content"}

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
)


class StreamOptions(BaseModel):
    """`include_usage`: count the tokens in a last chunk."""

    model_config = ConfigDict(strict=True)
    include_usage: bool = False


class ChatRequest(BaseModel):
    """POST /v1/chat/completions. Messages, tools and values of sampling are checked by those who use them."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: Any = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Any = None
    stop_token_ids: Any = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def parses_tools(self) -> bool:
        """Whether tools are shown to the model and its calls read."""
        return bool(self.tools) and self.tool_choice != "none"

    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template is told. `reasoning_effort` "none" is OpenAI's way to switch thinking off."""
        kwargs = dict(self.chat_template_kwargs)
        if self.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
        elif self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return kwargs

    def sampling(self, defaults: GenerationDefaults, *, num_prompt: int, max_context: int) -> SamplingParams:
        """Sampling parameters, every field explicit; ApiError when prompt and answer do not fit the context."""
        room = max_context - num_prompt
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        wanted: int | None = getattr(self, name)
        if wanted is not None and wanted < 1:
            raise ApiError(400, f"{name} is {wanted}; allowed: at least 1", param=name)
        if room < 1 or (wanted or 0) > room:
            asked = "" if wanted is None else f" and {name} is {wanted}"
            raise context_exceeded(max_context, f"{num_prompt}{asked}", param="messages" if room < 1 else name)
        given = {field: value for field in _SAMPLING if (value := getattr(self, field)) is not None}
        # The parser finds tags in the text, so special tokens stay in it.
        params = defaults.params(**given, max_tokens=wanted, skip_special_tokens=False)
        longest = defaults.sampling.get("max_tokens", room)
        return params if wanted is not None else params.but(max_tokens=min(room, longest))


def context_exceeded(max_context: int, found: str, *, param: str) -> ApiError:
    """The refusal of a prompt that is too long, alone or with the answer that was asked for."""
    return ApiError(
        400,
        f"the context holds {max_context} tokens, prompt and answer together; the prompt has {found}; "
        "shorten the conversation or ask for fewer tokens",
        param=param,
        code="context_length_exceeded",
    )


async def read_chat_request(request: Request) -> ChatRequest:
    """FastAPI dependency: the body, checked as far as it can be without a model."""
    service: Service = request.app.state.service
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps web pages of other origins out: browsers ask before they send this type, and are not let in.
        raise ApiError(415, f"content-type is {kind!r:.60}; allowed: application/json", code="unsupported_media_type")
    try:
        raw = json.loads(await _read_body(request))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body is a JSON {type(raw).__name__}; expected an object", code="invalid_json")
    given = {name: value for name, value in raw.items() if value is not None}
    for name, harmless in _UNSUPPORTED.items():
        if name in given and given[name] not in harmless:
            allowed = f"; allowed: {json.dumps(harmless[0])}" if harmless else ""
            raise ApiError(400, f"{name} is not supported by this server: leave it out{allowed}", param=name)
    try:
        body = ChatRequest.model_validate(given)
    except ValidationError as error:
        path, value, allowed = first_error(error)
        param = ".".join(path)
        got = "is missing" if allowed == "it must be given" else f"is {value!r:.60}; allowed: {allowed}"
        raise ApiError(400, f"{param} {got}", param=param) from None
    _check_tools_and_template(body)
    if body.model is not None and body.model not in service.model_names:
        names = ", ".join(service.model_names)
        message = f"the model {body.model!r:.200} does not exist; allowed: {names}"
        raise ApiError(404, message, param="model", code="model_not_found")
    unknown = (body.model_extra or {}).keys() - _UNSUPPORTED.keys() - _MEANINGLESS
    for name in sorted(unknown - service.logged_fields)[: MAX_LOGGED_FIELDS - len(service.logged_fields)]:
        service.logged_fields.add(name)
        logger.warning("requests have a field %r, which this server does not know and ignores", name[:100])
    return body


def _check_tools_and_template(body: ChatRequest) -> None:
    if body.tool_choice not in (None, "auto", "none"):
        shown = json.dumps(body.tool_choice)[:60]
        raise ApiError(400, f"tool_choice is {shown}; allowed: auto, none", param="tool_choice")
    if taken := sorted(_NOT_FOR_TEMPLATES & body.chat_template_kwargs.keys()):
        param = f"chat_template_kwargs.{taken[0]}"
        raise ApiError(400, f"{param} is not for chat_template_kwargs: leave it out", param=param)


async def _read_body(request: Request) -> bytes:
    """The whole body; 413 as soon as it is known to be too large."""
    too_large = ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    return bytes(body)

"""The body of POST /v1/responses: OpenAI's fields, and those of sampling that vLLM adds."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from glm5.common.budget import least_chars
from glm5.common.errors import RequestError
from glm5.engine.sampling.params import Bounds, StructuredOutputsParams
from glm5.serve.chat.body import tool_choice
from glm5.serve.generation.openapi_schemas import FUNCTION, ITEMS, NAMESPACE, TOOL_CHOICE, JsonDict
from glm5.serve.generation.prompting import ToolChoice
from glm5.serve.generation.sampling_fields import MEANINGLESS, REFUSED, SamplingFields
from glm5.serve.http.body import StrictModel
from glm5.serve.http.errors import named
from glm5.serve.responses.tools import HOSTED, OfferedTools, offered

LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_LEFT_OUT: JsonDict = {"type": "object", "properties": {"type": {"enum": [*HOSTED]}}, "required": ["type"]}
_TOOLS: JsonDict = {"items": {"anyOf": [FUNCTION, NAMESPACE, _LEFT_OUT]}}
MAX_REPEATED = 1 << 14  # characters of a field that comes back in the response and in events
# What may be included of tools that this server does not run: there never is any.
_OF_OTHER_TOOLS = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


class Reasoning(StrictModel):
    """`effort`: none switches it off. `context`: whether reasoning of earlier turns is kept. Reasoning is returned
    in full; there is no `summary` of it."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class TextConfig(StrictModel):
    """`format`: text, json_object or json_schema."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class StreamOptions(StrictModel):
    """Events are never padded."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(SamplingFields):
    """POST /v1/responses."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **REFUSED,
        "n": (1,),
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "moderation": (),
        "access_programs": (),
        "image": (),
        "truncation": ("disabled",),
        "response_format": (),
        "prompt_logprobs": (),
        "messages": (),
    }
    meaningless: ClassVar[frozenset[str]] = MEANINGLESS | {"prompt_cache_options", "max_tool_calls", "client_metadata"}

    input: Annotated[Any, Field(json_schema_extra=ITEMS)]
    """A text of the user, or items of a conversation."""
    instructions: str | None = None
    """What the system says, before all items; of this response alone."""
    previous_response_id: str | None = None
    """A stored response of the caller's, after whose conversation this one goes on."""
    store: bool = True
    """Keep the response, in memory, until newer ones need its room."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[Any], Field(json_schema_extra=_TOOLS)] = []
    tool_choice: Annotated[Any, Field(json_schema_extra=TOOL_CHOICE)] = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[Any] = []
    top_logprobs: Annotated[int, Bounds(0)] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def check(self) -> None:
        """RequestError for values of `include` without support, and for fields that every answer would repeat."""
        known = (LOGPROBS, ENCRYPTED_REASONING, *_OF_OTHER_TOOLS)
        if unknown := [one for one in self.include if one not in known]:
            raise RequestError(f"include holds {unknown[0]!r:.60}; allowed: {', '.join(known)}", "include")
        for name in ("metadata", "user", "tool_choice"):
            if least_chars(getattr(self, name), MAX_REPEATED) > MAX_REPEATED:
                raise RequestError(
                    f"{name} has more than {MAX_REPEATED} characters, too many to be repeated in the response", name
                )

    @property
    def num_logprobs(self) -> int | None:
        """For `SamplingParams.logprobs`."""
        return self.top_logprobs or 0 if self.top_logprobs or LOGPROBS in self.include else None

    @property
    def encrypts_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in self.include

    def wanted(self) -> tuple[StructuredOutputsParams | None, str]:
        """What the answer must look like, and the field that says so. Raises RequestError where two do."""
        form = None if self.text is None else self.text.format
        other, other_name = self.constraint()
        if form is None or form.get("type") == "text":
            return other, other_name
        if other is not None:
            raise RequestError(f"text.format and {other_name} both say what the answer must look like", "text.format")
        if form.get("type") == "json_object":
            return StructuredOutputsParams(json_object=True), "text.format"
        if form.get("type") != "json_schema" or not isinstance(form.get("schema"), Mapping):
            allowed = "the type text, json_object, or json_schema with a schema"
            raise RequestError(f"text.format is {form!r:.80}; allowed: {allowed}", "text.format")
        with named({"structured_outputs": "text.format.schema"}, "json"):
            return StructuredOutputsParams(json=form["schema"]), "text.format.schema"

    def choice(self) -> ToolChoice:
        """What `tool_choice` says. Raises RequestError."""
        given = self.tool_choice
        if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
            given = {"type": "allowed_tools", "allowed_tools": {key: given.get(key) for key in ("mode", "tools")}}
        return tool_choice(given, parallel=self.parallel_tool_calls)

    @cached_property
    def offered(self) -> OfferedTools:
        """The tools, as the model sees them. Raises RequestError."""
        return offered(self.tools)

"""The bodies of POST /v1/messages and /v1/messages/count_tokens: Anthropic's fields, those in beta included.

Thinking is off unless a request enables it, as in Anthropic's own service: other clients read the first block of an
answer as its text. (A model that always thinks does so here too.)
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from glm5.common.errors import RequestError
from glm5.serve.generation.openapi_schemas import BLOCK_MESSAGES, BLOCK_TOOLS, TEXT_OR_BLOCKS
from glm5.serve.generation.prompting import ToolChoice
from glm5.serve.http.body import Body, StrictModel

CLEAR_THINKING = "clear_thinking_20251015"
INTERLEAVED = "interleaved-thinking"  # begins the name of a beta


class ThinkingConfig(StrictModel):
    """`adaptive` thinks without a budget. `display` "omitted": what is thought is not shown, and travels in the
    signature. `clear_thinking`: Z.ai's; drop the reasoning of earlier turns."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None
    clear_thinking: bool | None = None


class ChoiceConfig(StrictModel):
    """Whether and which tools are used. `name`: with the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Format(StrictModel):
    """What the text of the answer must look like."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    """`effort`: of thinking, where the model's template has one."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None
    task_budget: None = None


class PromptFields(Body):
    """Fields that determine the prompt."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mcp_servers": ([],),
        "container": (),
        "speed": ("standard",),
        "compaction": (),
        "fallbacks": ([],),
        "thread": (),
        "service_tier": ("auto", "standard_only"),
    }
    # Anthropic's client then sends the whole conversation without a thread.
    refusal_codes: ClassVar[Mapping[str, str]] = {"thread": "thread_unsupported_request"}
    meaningless: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "betas",
            "cache_control",  # prefixes are cached by themselves
            "inference_geo",
            "diagnostics",
            "user_profile_id",
            "workspace_id",
            "billing_policy",
            "fallback_credit_token",
        }
    )

    messages: Annotated[list[Any], Field(min_length=1, json_schema_extra=BLOCK_MESSAGES)]
    system: Annotated[Any, Field(json_schema_extra=TEXT_OR_BLOCKS)] = None
    tools: Annotated[list[Any], Field(json_schema_extra=BLOCK_TOOLS)] = []
    tool_choice: ChoiceConfig | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    """The older name of output_config.format."""
    context_management: dict[str, Any] = {}

    def choice(self) -> ToolChoice:
        """What `tool_choice` says. Raises RequestError."""
        given = self.tool_choice or ChoiceConfig(type="auto")
        parallel = not given.disable_parallel_tool_use
        if given.type == "tool":
            if not given.name:
                raise RequestError('tool_choice.name is missing; the type "tool" names one', "tool_choice.name")
            return ToolChoice("required", (given.name,), parallel=False)
        modes: dict[str, Literal["auto", "required", "none"]] = {"any": "required", "none": "none"}
        return ToolChoice(modes.get(given.type, "auto"), parallel=parallel)

    def wanted(self) -> tuple[Format | None, str]:
        """The format of the answer, and the field that says so: tools, where none does. Raises RequestError where two
        do."""
        new = None if self.output_config is None else self.output_config.format
        if new is not None and self.output_format is not None:
            raise RequestError("output_format and output_config.format say the same; allowed: one", "output_format")
        if self.output_format is not None:
            return self.output_format, "output_format"
        return new, "tools" if new is None else "output_config.format"

    def clears_thinking(self) -> bool | None:
        """Whether the reasoning of earlier turns is dropped; None leaves it to the chat template. Raises
        RequestError for other ways to manage the context."""
        clears = None if self.thinking is None else self.thinking.clear_thinking
        edits = self.context_management.get("edits") or []
        for number, edit in enumerate(edits if isinstance(edits, list) else [edits]):
            match edit:
                case {"type": "clear_thinking_20251015", "keep": "all" | {"type": "all"}}:
                    clears = False
                case {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}:
                    clears = True
                case {"type": "clear_thinking_20251015"} if edit.keys() == {"type"}:
                    clears = True
                case _:
                    where = f"context_management.edits[{number}]"
                    allowed = f'{CLEAR_THINKING} that keeps "all" or one turn'
                    raise RequestError(f"{where} is {edit!r:.80}; allowed: {allowed}", where)
        return clears


class MessagesBody(PromptFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: list[Any] = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def check_budget(self, betas: str) -> None:
        """RequestError for a budget of thinking that leaves no room for an answer, as Anthropic has it. `betas`: the
        header; thinking between tool calls has a budget of all of them together, which may be larger."""
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens and INTERLEAVED not in betas:
            raise RequestError(
                f"`max_tokens` must be greater than `thinking.budget_tokens`; got {self.max_tokens} and {budget}",
                "thinking.budget_tokens",
            )


class CountBody(PromptFields):
    """POST /v1/messages/count_tokens."""

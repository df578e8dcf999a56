"""The body of POST /v1/completions: OpenAI's fields, and those that vLLM adds."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.config import JsonDict

from glm5.common.errors import RequestError
from glm5.engine.sampling.params import Bounds
from glm5.serve.chat.body import AnswerFields
from glm5.serve.generation.openapi_schemas import TOKEN_IDS
from glm5.serve.generation.sampling_fields import REFUSED

MAX_PROMPTS = 1024
_IDS: JsonDict = {"type": "array", "minItems": 1, **TOKEN_IDS}
_PROMPT: JsonDict = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}

TextOrIds = str | Sequence[int]


class CompletionBody(AnswerFields):
    """POST /v1/completions."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {**REFUSED, "suffix": ("",)}

    prompt: Annotated[Any, Field(json_schema_extra=_PROMPT)]
    """A text, token ids, or a list of either. Special tokens spelled in a text are special tokens."""
    max_tokens: Annotated[int, Bounds(0)] = 16
    """0 with `echo`: the prompt alone, with its log-probabilities."""
    logprobs: Annotated[int, Bounds(0)] | None = None
    echo: bool = False
    best_of: int | None = None

    def prompts(self) -> list[TextOrIds]:
        """Each by itself. Raises RequestError."""
        prompt = self.prompt
        if isinstance(prompt, str) or _are_ids(prompt):
            return [prompt]
        if isinstance(prompt, list) and prompt and all(isinstance(one, str) or _are_ids(one) for one in prompt):
            if len(prompt) > MAX_PROMPTS:
                raise RequestError(f"prompt is a list of {len(prompt)}; allowed: up to {MAX_PROMPTS}", "prompt")
            return prompt
        allowed = "a text, token ids, or a list of texts or of lists of token ids"
        raise RequestError(f"prompt is {prompt!r:.80}; allowed: {allowed}", "prompt")

    def check(self) -> None:
        """RequestError for what contradicts itself."""
        self.check_stream_options()
        if self.max_tokens < 0:
            raise RequestError(f"max_tokens is {self.max_tokens}; allowed: at least 0", "max_tokens")
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError(
                f"best_of is {self.best_of}; allowed: n ({self.n}), as answers are not ranked", "best_of"
            )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) <= {int}

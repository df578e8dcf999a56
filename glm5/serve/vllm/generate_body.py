"""The body of POST /inference/v1/generate, with the fields of vLLM's route.

Sampling is as `sampling_params` say, whatever the checkpoint recommends: who trains on an answer has to know what it
was drawn from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter

from glm5.common.errors import RequestError
from glm5.engine.sampling.params import SamplingParams
from glm5.serve.chat.body import StreamFields
from glm5.serve.generation.openapi_schemas import TOKEN_IDS
from glm5.serve.generation.sampling_fields import structured

_EXPERTS_FROM = "routed_experts_prompt_start"


def _schemas() -> dict[str, Any]:
    """JSON schemas of the sampling parameters, by name. Prompts are never truncated here."""
    known: dict[str, dict[str, Any]] = TypeAdapter(SamplingParams).json_schema()["properties"]
    schemas = {name: {key: part for key, part in schema.items() if key != "title"} for name, schema in known.items()}
    del schemas["truncate_prompt_tokens"]
    schemas["max_tokens"]["default"] = None
    schemas["structured_outputs"] = {"anyOf": [{"type": "object"}, {"type": "null"}], "default": None}
    schemas[_EXPERTS_FROM] = {"type": "integer", "minimum": 0, "default": 0}
    return schemas


_SAMPLING = _schemas()
# What this API calls the parameters of `SamplingParams`, and the prompt.
NAMES = {name: f"sampling_params.{name}" for name in _SAMPLING} | {"prompt": "token_ids"}


class GenerateBody(StreamFields):
    """POST /inference/v1/generate: one prompt, as token ids."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "features": (),
        "content_parts": ([],),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "reasoning_ended": (True,),
        "output_mode": ("tokens",),
        "return_sampling_mask": (False,),
    }
    meaningless: ClassVar[frozenset[str]] = frozenset({"token_offsets", "reasoning_parser_kwargs"})

    token_ids: Annotated[list[Any], Field(json_schema_extra={**TOKEN_IDS, "minItems": 1})]
    sampling_params: Annotated[dict[str, Any], Field(json_schema_extra={"properties": _SAMPLING})] = {}
    """vLLM's names and vLLM's defaults, not the checkpoint's. Without `max_tokens`: all that fit."""
    priority: int = 0
    """Lower is served first."""
    cache_salt: str = ""
    """Prompts share what is cached only with those of the same salt."""

    def check(self) -> None:
        """RequestError for what a prompt cannot be."""
        self.check_stream_options()
        ids = self.token_ids
        if not ids or not set(map(type, ids)) <= {int}:
            raise RequestError(f"token_ids is {ids!r:.80}; allowed: a list of integers, at least one", "token_ids")

    def sampling(self) -> "Sampling":
        """The sampling parameters. Raises RequestError."""
        given = {name: value for name, value in self.sampling_params.items() if value is not None}
        for name in given:
            if name not in _SAMPLING:
                near, where = get_close_matches(name[:60], _SAMPLING, n=1), f"sampling_params.{name:.60}"
                hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(_SAMPLING)}"
                raise RequestError(f"{where} is no sampling parameter; {hint}", where)
        length, start, num_prompt = given.pop("max_tokens", None), given.pop(_EXPERTS_FROM, 0), len(self.token_ids)
        if length is not None and (type(length) is not int or length < 1):
            raise _refusal("max_tokens", length, "at least 1, or null for all that fit")
        if type(start) is not int or not 0 <= start <= num_prompt:
            raise _refusal(_EXPERTS_FROM, start, f"0 to {num_prompt}, the prompt's length")
        return Sampling(given, length, start)


@dataclass(frozen=True)
class Sampling:
    """What `sampling_params` hold. `max_tokens` None: all that fit. `experts_from`: the first token whose experts are
    returned."""

    given: Mapping[str, Any]
    max_tokens: int | None
    experts_from: int

    def params(self, max_tokens: int) -> SamplingParams:
        """For an answer of so many tokens at most. Raises RequestError."""
        given = dict(self.given)
        if (constraint := given.get("structured_outputs")) is not None:
            if not isinstance(constraint, Mapping):
                raise _refusal("structured_outputs", constraint, "an object with json, regex, choice or another kind")
            given["structured_outputs"] = structured(constraint)
        params = SamplingParams(**{**given, "max_tokens": max_tokens})
        # No text is returned: it is made only to look for stop strings.
        return params if params.stop else params.but(detokenize=False)


def _refusal(name: str, got: Any, allowed: str) -> RequestError:
    where = f"sampling_params.{name}"
    return RequestError(f"{where} is {got!r:.60}; allowed: {allowed}", where)

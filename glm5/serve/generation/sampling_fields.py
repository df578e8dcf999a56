"""What requests say of sampling, under vLLM's names and OpenAI's: the same fields in every API that has them.

Values are checked where they are used, by `SamplingParams`, once for all APIs. Here is what takes more than a name:
room in the context, and the many ways to ask for structured output.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, create_model

from glm5.common.errors import RequestError
from glm5.engine.sampling.params import (
    LOGIT_NUMBERS,
    MAX_N,
    Bounds,
    SamplingParams,
    StructuredOutputsParams,
)
from glm5.serve.generation.openapi_schemas import STOP, TOKEN_IDS, WORDS
from glm5.serve.http.body import Body
from glm5.serve.http.errors import ApiError, named
from glm5.serve.service.service import Service

# Fields of vLLM and SGLang that no route of ours honours, with the values that change nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "lora_path": (),
    "session_params": (),
    "return_hidden_states": (False,),
    "service_tier": ("auto", "default"),
    "no_stop_trim": (False,),
}
# Fields that say nothing about the answer: for OpenAI's own service, or choices that this engine does not have.
MEANINGLESS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "add_special_tokens",  # nothing is ever added to a prompt
        "spaces_between_special_tokens",  # byte-level tokens bring their own
        "guided_decoding_backend",
    }
)
# Older names, and SGLang's, of what structured_outputs holds.
_OLDER = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_WITHOUT_EFFECT = {"disable_fallback": None, "disable_additional_properties": False, "whitespace_pattern": None}


_LOGIT_FIELDS: dict[str, Any] = {name: (number.annotated | None, None) for name, number in LOGIT_NUMBERS.items()}


class SamplingFields(create_model("LogitFields", __base__=Body, **_LOGIT_FIELDS)):
    """Defaults are the checkpoint's, then vLLM's."""

    seed: Annotated[int, Bounds(-(2**63), 2**64 - 1)] | None = None
    n: Annotated[int, Bounds(1, MAX_N)] = 1
    stop: Annotated[Any, Field(json_schema_extra=STOP)] = None
    stop_token_ids: Annotated[list[Any], Field(json_schema_extra=TOKEN_IDS)] | None = None
    bad_words: Annotated[list[Any], Field(json_schema_extra=WORDS)] | None = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: Annotated[list[Any], Field(json_schema_extra=TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Bounds(0)] | None = None
    prompt_logprobs: Annotated[int, Bounds(0)] | None = None
    thinking_token_budget: Annotated[int, Bounds(0)] | None = None
    """Tokens of thinking, after which it ends."""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """One of json, regex, choice, grammar, json_object and structural_tag."""
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[Any] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    priority: int = 0
    """Lower is served first."""
    cache_salt: str = ""
    """Prompts share what is cached only with those of the same salt."""

    def params(self, service: Service, **decided: Any) -> SamplingParams:
        """Sampling parameters: what the API decided, what the request says, the defaults. Raises RequestError."""
        given = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        return service.engine.defaults.params(**{**given, **decided})

    def constraint(self) -> "tuple[StructuredOutputsParams | None, str]":
        """What the answer must look like, and the field that says so: tools, where nothing else does. Raises
        RequestError where two do."""
        found: dict[str, StructuredOutputsParams] = {}
        if self.structured_outputs is not None:
            found["structured_outputs"] = structured(self.structured_outputs)
        for name, kind in _OLDER.items():
            if (value := getattr(self, name)) is not None:
                with named({"structured_outputs": name}, kind):
                    found[name] = StructuredOutputsParams(**{kind: value})
        if self.response_format is not None and (wanted := _response_format(self.response_format)) is not None:
            found["response_format"] = wanted
        if len(found) > 1:
            raise RequestError(
                f"{' and '.join(found)} both say what the answer must look like; allowed: one", [*found][1]
            )
        return next(((wanted, name) for name, wanted in found.items()), (None, "tools"))


_SAME_NAME = [
    name for name in SamplingFields.model_fields if hasattr(SamplingParams, name) and name != "structured_outputs"
]


def fit(service: Service, prompt_tokens: int, wanted: int | None, *, prompt: str, limit: str) -> int:
    """Tokens that the answer may have; those wanted, or all that fit, within the checkpoint's default.

    ApiError when prompt and answer do not fit the context. `prompt` and `limit` are the fields to name.
    """
    max_context, requested = service.engine.max_model_len, "" if wanted is None else f" and {limit} is {wanted}"
    room = max_context - prompt_tokens
    if room < 1 or (wanted or 0) > room:
        raise context_exceeded(max_context, f"{prompt_tokens}{requested}", param=prompt if room < 1 else limit)
    return wanted if wanted is not None else min(room, service.engine.defaults.sampling.get("max_tokens", room))


def context_exceeded(max_context: int, found: str, *, param: str) -> ApiError:
    """The refusal of a prompt that is too long, alone or with the requested answer."""
    return ApiError(
        400,
        f"the context holds {max_context} tokens, prompt and answer together; the prompt has {found}; "
        "shorten the prompt or ask for fewer tokens",
        param=param,
        code="context_length_exceeded",
    )


def structured(given: Mapping[str, Any]) -> StructuredOutputsParams:
    """vLLM's `structured_outputs`."""
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        if key in _WITHOUT_EFFECT:
            if value != _WITHOUT_EFFECT[key] and key != "disable_fallback":
                raise RequestError(f"structured_outputs.{key} is not supported by this server", "structured_outputs")
        elif key not in (*_CONSTRAINTS, "disable_any_whitespace"):
            known = ", ".join(_CONSTRAINTS)
            raise RequestError(f"structured_outputs.{key:.60} is not known; allowed: {known}", "structured_outputs")
    known = {key: value for key, value in given.items() if key not in _WITHOUT_EFFECT}
    if known.get("json_object") is False:
        del known["json_object"]
    return StructuredOutputsParams(**known)


def _response_format(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """OpenAI's `response_format`, with the kind that vLLM and SGLang add."""
    kind = given.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            outer = given.get("json_schema")
            schema = outer.get("schema") if isinstance(outer, Mapping) else None
            if not isinstance(schema, Mapping):
                raise RequestError(
                    "response_format.json_schema.schema is missing or no object; allowed: a JSON schema",
                    "response_format",
                )
            return StructuredOutputsParams(json=schema)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=dict(given))
        case _:
            allowed = "text, json_object, json_schema, structural_tag"
            raise RequestError(f"response_format.type is {kind!r:.60}; allowed: {allowed}", "response_format")

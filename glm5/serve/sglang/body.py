"""The bodies of SGLang's own routes: POST /generate and /abort_request.

Defaults of sampling are SGLang's, whatever the checkpoint recommends: who trains on what comes back has to know what it
was drawn from. Token ids go in as they are, and come out as they were drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, create_model
from pydantic.config import JsonDict

from glm5.common.errors import RequestError
from glm5.engine.sampling.params import LOGIT_NUMBERS, SamplingParams, StructuredOutputsParams
from glm5.serve.http.body import Body, checked
from glm5.serve.http.errors import named

MAX_PROMPTS = 1024
DEFAULT_LENGTH = 128
_INTS: JsonDict = {"type": "array", "items": {"type": "integer"}}
_STRINGS: JsonDict = {"type": "array", "items": {"type": "string"}}
_TEXT: JsonDict = {"anyOf": [{"type": "string"}, _STRINGS]}
_IDS: JsonDict = {"anyOf": [_INTS, {"type": "array", "items": _INTS}]}
_FLAG: JsonDict = {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "boolean"}}]}
_NUMBER: JsonDict = {"anyOf": [{"type": "integer"}, _INTS]}

TextOrIds = str | Sequence[int]
_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
# SGLang's names of what SamplingParams has under another.
NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
_LOGIT_FIELDS: dict[str, Any] = {name: (number.types[0], number.default) for name, number in LOGIT_NUMBERS.items()}


class SamplingOptions(create_model("LogitFields", __base__=Body, **_LOGIT_FIELDS)):
    """`sampling_params` of /generate."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {"stop_regex": ([],), "custom_params": ({},), "beam_width": (1,)}
    meaningless: ClassVar[frozenset[str]] = frozenset({"spaces_between_special_tokens", "stream_interval"})

    max_new_tokens: int | None = DEFAULT_LENGTH
    """0: only the prompt is read, for its log-probabilities. null: as many as fit."""
    min_new_tokens: int = 0
    top_k: int = -1
    n: int = 1
    stop: Any = ()
    stop_token_ids: list[Any] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    """Show what stopped the answer at its end."""
    logit_bias: dict[str, Any] | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    def params(self, **decided: Any) -> SamplingParams:
        """As the engine knows them. Raises RequestError."""
        same = {name: getattr(self, name) for name in _SAME_NAME}
        renamed = {ours: getattr(self, theirs) for ours, theirs in NAMES.items()}
        return SamplingParams(**{**same, **renamed, "structured_outputs": self._constraint()[0], **decided})

    def names(self) -> dict[str, str]:
        """What SGLang calls the parameters of `SamplingParams`."""
        named = {ours: f"sampling_params.{theirs}" for ours, theirs in NAMES.items()}
        named |= {name: f"sampling_params.{name}" for name in _SAME_NAME}
        logprobs = dict.fromkeys(("logprobs", "prompt_logprobs"), "top_logprobs_num")
        return named | logprobs | {"structured_outputs": f"sampling_params.{self._constraint()[1]}"}

    def _constraint(self) -> tuple[StructuredOutputsParams | None, str]:
        given = {name: value for name in _CONSTRAINTS if (value := getattr(self, name)) is not None}
        if len(given) > 1:
            where = f"sampling_params.{[*given][1]}"
            raise RequestError(f"{where}: {' and '.join(given)} both say what the answer must look like", where)
        for name, value in given.items():
            with named({"structured_outputs": f"sampling_params.{name}"}, _CONSTRAINTS[name]):
                return StructuredOutputsParams(**{_CONSTRAINTS[name]: value}), name
        return None, "json_schema"


_SAME_NAME = [name for name in SamplingOptions.model_fields if hasattr(SamplingParams, name)]
_SAMPLING: JsonDict = SamplingOptions.model_json_schema()


@dataclass(frozen=True)
class LogprobRange:
    """The log-probabilities that answer one prompt. `start`: the first token of the prompt that has one, -1: none."""

    enabled: bool
    start: int
    num_logprobs: int

    def of_prompt(self, num_tokens: int) -> bool:
        """Whether log-probabilities of the prompt are answered. Raises RequestError."""
        if self.start > num_tokens:
            message = f"logprob_start_len is {self.start}; allowed: -1 to {num_tokens}, the prompt's length"
            raise RequestError(message, "logprob_start_len")
        return self.enabled and self.start >= 0


class GenerateBody(Body):
    """POST /generate: one prompt or many, as text or token ids; what lists may hold for each prompt, one value may say
    for all."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "input_embeds": (),
        "image_data": ([], ""),
        "video_data": ([], ""),
        "audio_data": ([], ""),
        "token_ids_logprob": ([],),
        "session_params": ({},),
        "lora_path": ("", []),
        "custom_logit_processor": (),
        "positional_embed_overrides": (),
        "multi_item_delimiter_indices": (),
        "return_hidden_states": (False,),
        "return_sampling_mask": (False,),
        "return_indexer_topk": (False,),
        "return_flat_raw_top_logprobs": (False,),
        "return_flat_raw_top_logprobs_b64": (False,),
        "return_entropy": (False,),
        "return_bytes": (False,),
        "require_reasoning": (False,),
        "background": (False,),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "kv_router_hint": (),
        "routed_dp_rank": (0,),
        "data_parallel_rank": (0,),
        "disagg_prefill_dp_rank": (0,),
    }
    meaningless: ClassVar[frozenset[str]] = frozenset(
        {
            "log_metrics",
            "no_logs",  # nothing of a text is logged
            "modalities",
            "session_id",
            "conversation_id",
            "routing_key",
            "custom_labels",
            "external_trace_header",
            "received_time",
        }
    )

    text: Annotated[Any, Field(json_schema_extra=_TEXT)] = None
    input_ids: Annotated[Any, Field(json_schema_extra=_IDS)] = None
    sampling_params: Annotated[
        Any, Field(json_schema_extra={"anyOf": [_SAMPLING, {"type": "array", "items": _SAMPLING}]})
    ] = {}
    return_logprob: Annotated[Any, Field(json_schema_extra=_FLAG)] = False
    """Of drawn tokens: of the distribution that they come from, as a trainer needs them. Of the prompt: at the
    temperature."""
    logprob_start_len: Annotated[Any, Field(json_schema_extra=_NUMBER)] = -1
    top_logprobs_num: Annotated[Any, Field(json_schema_extra=_NUMBER)] = 0
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: Annotated[int, Field(ge=0)] = 0
    max_thinking_tokens: int | None = None
    stream: bool = False
    rid: Annotated[Any, Field(json_schema_extra=_TEXT)] = None
    """Name of the request, for /abort_request; of a batch's parts "rid_0" and so on."""
    priority: int = 0
    """Higher is served first."""
    cache_salt: Annotated[Any, Field(json_schema_extra=_TEXT)] = ""
    extra_key: Annotated[Any, Field(json_schema_extra=_TEXT)] = ""

    def prompts(self) -> tuple[list[TextOrIds], bool]:
        """Each prompt by itself, and whether the request has a batch of them. Raises RequestError."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("text and input_ids: exactly one of them is needed", "text")
        name, given = ("text", self.text) if self.input_ids is None else ("input_ids", self.input_ids)
        is_one = isinstance(given, str) if name == "text" else _are_ids(given)
        good = isinstance(given, list) and given and all(isinstance(one, str) for one in given)
        if name == "input_ids":
            good = isinstance(given, list) and given and all(_are_ids(one) for one in given)
        if is_one:
            return [given], False
        if not good:
            allowed = "a text, or a list of texts" if name == "text" else "a list of integers, or a list of such lists"
            raise RequestError(f"{name} is {given!r:.80}; allowed: {allowed}", name)
        if len(given) > MAX_PROMPTS:
            raise RequestError(f"{name} is a list of {len(given)}; allowed: up to {MAX_PROMPTS}", name)
        return given, True

    def options(self, count: int) -> list[SamplingOptions]:
        """Of each prompt. Raises RequestError or ApiError."""
        given = self.sampling_params
        is_list = isinstance(given, list)
        if not all(isinstance(one, Mapping) for one in (given if is_list else [given])):
            message = f"sampling_params is {given!r:.80}; allowed: an object, or one for each prompt"
            raise RequestError(message, "sampling_params")
        read = [_options(one) for one in (given if is_list else [given])]
        found: list[SamplingOptions] = _for_each("sampling_params", read if is_list else read[0], count)
        if len({one.n for one in found}) > 1:
            raise RequestError("sampling_params differ in n; allowed: one n for all prompts", "sampling_params.n")
        return found

    def logprobs(self, count: int) -> list[LogprobRange]:
        """The log-probabilities requested for each prompt. Raises RequestError."""
        flags = self._each("return_logprob", bool, count, "true or false")
        starts = self._each("logprob_start_len", int, count, "-1 (none of the prompt), or the first token of it")
        numbers = self._each("top_logprobs_num", int, count, "a number of tokens")
        if any(start < -1 for start in starts):
            got = min(starts)
            raise RequestError(f"logprob_start_len is {got}; allowed: at least -1", "logprob_start_len")
        return [LogprobRange(*one) for one in zip(flags, starts, numbers, strict=True)]

    def salts(self, count: int) -> list[str]:
        """Cache salts, of each prompt. Raises RequestError."""
        salts = self._each("cache_salt", str, count, "a text")
        keys = self._each("extra_key", str, count, "a text")
        return [f"{key}/{salt}" if key else salt for salt, key in zip(salts, keys, strict=True)]

    def ids(self, count: int, *, is_batch: bool) -> list[str] | None:
        """Names of the requests, None where they have none. Raises RequestError."""
        if self.rid is None:
            return None
        if isinstance(self.rid, str) and is_batch:
            ids = [f"{self.rid}_{number}" for number in range(count)]
        else:
            ids = self._each("rid", str, count, "a text, or one for each prompt")
        if not all(0 < len(one) <= 256 and one.isascii() and one.isprintable() and " " not in one for one in ids):
            raise RequestError(f"rid is {self.rid!r:.80}; allowed: up to 256 visible ASCII characters", "rid")
        if len(set(ids)) < len(ids):
            raise RequestError(f"rid is {self.rid!r:.80}; allowed: another one for each prompt", "rid")
        return ids

    def _each(self, name: str, kind: type, count: int, allowed: str) -> list[Any]:
        value = getattr(self, name)
        if not all(type(one) is kind for one in (value if isinstance(value, list) else [value])):
            raise RequestError(f"{name} is {value!r:.80}; allowed: {allowed}", name)
        return _for_each(name, value, count)


class AbortBody(Body):
    """POST /abort_request: one request of the caller's by its name, or all of them."""

    meaningless: ClassVar[frozenset[str]] = frozenset({"abort_message", "finished_reason"})

    rid: Annotated[str, Field(max_length=256)] | None = None
    abort_all: bool = False


def _options(given: Mapping[str, Any]) -> SamplingOptions:
    options = checked(SamplingOptions, given, "sampling_params.")
    # Not to be said is one thing, and not to be limited another.
    return options.model_copy(update={"max_new_tokens": None}) if given.get("max_new_tokens", 0) is None else options


def _for_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} is a list of {len(value)}; allowed: one for each of the {count} prompts", name)
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) <= {int}

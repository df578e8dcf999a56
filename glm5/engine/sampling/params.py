"""What a request asks of the sampler and of its ending. Field names, defaults and meanings are vLLM's.

`temperature=0` is greedy. `max_tokens=None` means up to the end of the context. All values are checked here, once;
only what needs a model (`check_token_ids`) or a compiler (a grammar's text) is checked later.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from itertools import chain
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from glm5.common.budget import least_chars
from glm5.common.errors import RequestError
from glm5.common.plain import plain, plain_list

GREEDY_BELOW = 1e-5  # a temperature under this is greedy, as in vLLM: dividing by it would overflow
MAX_N = 128
MAX_TOP_K = 2**31 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_ALLOWED_IDS = 1 << 18  # more than any vocabulary
MAX_BIAS = 100.0  # larger ones are clamped, as in vLLM and OpenAI's definition
MAX_CHARS = 1 << 17  # of a grammar
# Sizes of the sampler's tables, per sequence.
MAX_STOP_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256  # token sequences: a word has up to two spellings, at the start of a text and within one
MAX_BAD_WORD_LEN = 32  # tokens

_TRUNCATION = "None, at least 1, or -1 for what the context takes"
_KINDS = {0: "CUMULATIVE", 1: "DELTA", 2: "FINAL_ONLY"}
_HALVES = re.compile("[\ud800-\udfff]")


class Feature:
    """Work of the sampler, as bits of an int: an enum's would take longer than small tensors do."""

    RANDOM = 1
    MIN_P = 2
    HEAD = 4  # top_k or top_p
    PENALTIES = 8
    BIASES = 16  # logit_bias, or stop tokens barred by min_tokens
    BAD_WORDS = 32
    PERMITTED = 64  # a grammar, a budget of thinking or allowed_token_ids
    LOGPROBS = 128
    TEMPERED = 256  # a temperature other than 1, which log-probabilities show
    MASK = 512  # which tokens a draw left


CUTS = Feature.MIN_P | Feature.HEAD  # leave tokens out of a draw
REPORTS = Feature.LOGPROBS | Feature.MASK  # tell of a token, and do not change it


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a number may be, for `Annotated`; `allowed`: in words.

    `feature`: the number acts on logits. Each slot has a column for it, and a value other than the default needs this
    work of the sampler. Pydantic writes the bounds into the OpenAPI document, and checks nothing by them.
    """

    minimum: float
    maximum: float = math.inf
    allowed: str = ""
    feature: int = 0

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        bounds = {"minimum": self.minimum, "maximum": self.maximum}
        return handler(schema) | {name: bound for name, bound in bounds.items() if math.isfinite(bound)}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the answer must look like: exactly one of the first six. Raises RequestError.

    `json`: a JSON schema, as text, parsed, or a pydantic class. `regex`: a pattern of the whole answer. `choice`: one
    of these texts. `grammar`: EBNF as llama.cpp writes it, beginning at `root`. `json_object`: any JSON object.
    `structural_tag`: xgrammar's structural tag, as text or parsed.
    """

    json: Any = None  # str | Mapping[str, Any] | type: no message could hold the last
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    kind: str = field(init=False, repr=False)
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        constraints = {
            "json": self.json,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
            "structural_tag": self.structural_tag,
        }
        kinds = [kind for kind, value in constraints.items() if value is not None]
        if len(kinds) != 1:
            raise RequestError(
                f"structured_outputs has {kinds or 'no constraint'}; allowed: exactly one of {list(constraints)}",
                param="structured_outputs",
            )
        if not isinstance(self.disable_any_whitespace, bool):
            raise _refusal("structured_outputs.disable_any_whitespace", self.disable_any_whitespace, "true or false")
        kind = kinds[0]
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "text", _as_text(kind, constraints[kind]))

    def plain(self) -> StructuredOutputsParams:
        """The same, with nothing in it that only Python could write down: parsed JSON holds numbers and keys of any
        kind."""
        value: Any = json.loads(self.text) if self.kind == "choice" else self.kind == "json_object" or self.text
        return StructuredOutputsParams(**{self.kind: value}, disable_any_whitespace=self.disable_any_whitespace)


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. Raises RequestError naming the field, the value and what is allowed.

    A number is declared here alone: checks, fields of the HTTP bodies and the sampler's columns follow from `Bounds`.
    With `output_kind` FINAL_ONLY what streams yields whole answers, else tokens as they come. The last ones are
    vLLM's, and taken where they ask for nothing else than what is done anyway: no spaces are ever put between special
    tokens.
    """

    n: Annotated[int, Bounds(1, MAX_N)] = 1
    presence_penalty: Annotated[float, Bounds(-2, 2, feature=Feature.PENALTIES)] = 0.0
    frequency_penalty: Annotated[float, Bounds(-2, 2, feature=Feature.PENALTIES)] = 0.0
    repetition_penalty: Annotated[float, Bounds(0.01, 100, "0.01 to 100 (1: none)", Feature.PENALTIES)] = 1.0
    temperature: Annotated[float, Bounds(0, 100, "0 (greedy) to 100", Feature.TEMPERED)] = 1.0
    top_p: Annotated[float, Bounds(0, 1, "above 0, at most 1", Feature.HEAD)] = 1.0
    top_k: Annotated[int, Bounds(-1, allowed=f"-1 or 0 (all), or 1 to {MAX_TOP_K}", feature=Feature.HEAD)] = 0
    min_p: Annotated[float, Bounds(0, 1, feature=Feature.MIN_P)] = 0.0
    seed: Annotated[int, Bounds(-(2**63), 2**64 - 1, "a 64-bit integer")] | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: Annotated[int, Bounds(1, allowed="at least 1, or None for up to the end of the context")] | None = 16
    min_tokens: Annotated[int, Bounds(0)] = 0
    logprobs: Annotated[int, Bounds(0)] | None = None  # of the sampled token, and the k likeliest
    prompt_logprobs: Annotated[int, Bounds(0)] | None = None  # the prompt's first token has none
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: Annotated[int, Bounds(0)] | None = None  # after them only the end tag of thinking may come
    detokenize: bool = True  # False: token ids alone, no text
    truncate_prompt_tokens: Annotated[int, Bounds(-1, allowed=_TRUNCATION)] | None = None  # the last of them are left
    spaces_between_special_tokens: bool = True
    output_kind: str | None = None
    flat_logprobs: bool = False
    extra_args: None = None
    logits_processors: None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if not _is_default(value, _DEFAULTS[name])]
        self._check_numbers([name for name in given if name in NUMBERS])
        for name in given:
            if name in _TUPLES:
                value = getattr(self, name)
                object.__setattr__(self, name, _as_tuple([value] if isinstance(value, str) else value))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        object.__setattr__(self, "output_kind", _as_kind(self.output_kind))
        for name in ("extra_args", "logits_processors"):
            if isinstance(getattr(self, name), Sized) and not len(getattr(self, name)):
                object.__setattr__(self, name, None)
        self._check(self._together(), self._lists(), self._others(given))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def constrained(self) -> bool:
        """Whether what may come next depends on what came before: a mask is made for each step."""
        return self.structured_outputs is not None or self.thinking_token_budget is not None

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p leave tokens out of a draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def but(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        if not changes.keys() <= NUMBERS.keys():
            return replace(self, **changes)
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, **changes)
        copy._check_numbers(changes)
        copy._check(copy._together())
        return copy

    def sequences(self) -> list[SamplingParams]:
        """One set of parameters for each of the n answers, with seeds of their own (`answer_seeds`)."""
        seeds = [None] * self.n if self.seed is None else answer_seeds(self.seed, self.n)
        return [self.but(n=1, seed=seed) for seed in seeds]

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises RequestError where a field names a token that the model does not have."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            beyond = [token_id for token_id in getattr(self, name) or () if token_id >= vocab_size]
            if beyond:
                raise RequestError(
                    f"{name} holds {beyond[0]}; allowed: token ids below the vocabulary's {vocab_size}", param=name
                )

    def check_reports(self, max_logprobs: int, *, sampling_mask: bool) -> None:
        """Raises RequestError where more is to be reported of each token than an engine allows. `sampling_mask`: the
        token ids that were left to draw from (sampler.py)."""
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name) or 0) > max_logprobs:
                raise _refusal(name, count, f"None, or 0 to {max_logprobs} (max_logprobs of the engine)")
        if sampling_mask and self.greedy:
            raise _refusal("temperature", self.temperature, "above 0 with sampling masks: a greedy token is not drawn")

    def _check_numbers(self, names: Iterable[str]) -> None:
        for name in names:
            types, minimum, maximum, allowed = _CHECKS[name]
            value = getattr(self, name)
            if type(value) not in types:
                value = plain(value)
                object.__setattr__(self, name, value)
            if type(value) not in types or not (value is None or minimum <= value <= maximum):
                raise _refusal(name, value, allowed)

    def _check(self, *rules: Iterable[tuple[str, bool, str]]) -> None:
        for name, good, allowed in chain(*rules):
            if not good:
                raise _refusal(name, getattr(self, name), allowed)

    def _together(self) -> Iterator[tuple[str, bool, str]]:
        """What bounds alone do not say."""
        yield "top_p", self.top_p > 0, NUMBERS["top_p"].bounds.allowed
        yield "top_k", self.top_k <= MAX_TOP_K, NUMBERS["top_k"].bounds.allowed
        yield "n", self.n == 1 or not self.greedy, "1 with temperature 0: all answers would be the same"
        longest = self.max_tokens is None or self.min_tokens <= self.max_tokens
        yield "min_tokens", longest, f"0 to max_tokens ({self.max_tokens})"
        yield "truncate_prompt_tokens", self.truncate_prompt_tokens != 0, _TRUNCATION

    def _lists(self) -> Iterator[tuple[str, bool, str]]:
        if (self.stop, self.stop_token_ids, self.bad_words) == ((), (), ()) and (
            self.logit_bias is self.allowed_token_ids is self.structured_outputs is None
        ):
            return  # most often
        few = _few(self.stop, _is_text, MAX_STOP_STRINGS)
        yield "stop", few, f"a non-empty text, or up to {MAX_STOP_STRINGS} of them"
        short = few and all(len(text) <= MAX_STOP_CHARS for text in self.stop)
        yield "stop", short, f"texts of up to {MAX_STOP_CHARS} characters"
        few = _few(self.stop_token_ids, _is_token_id, MAX_STOP_IDS)
        yield "stop_token_ids", few, f"a list of up to {MAX_STOP_IDS} token ids of at least 0"
        few = _few(self.bad_words, _is_text, MAX_BAD_WORDS // 2)
        yield "bad_words", few, f"a list of up to {MAX_BAD_WORDS // 2} non-empty texts"
        biases = self.logit_bias
        few = biases is None or _few(tuple(biases), _is_token_id, MAX_LOGIT_BIASES)
        yield "logit_bias", few, f"a mapping of up to {MAX_LOGIT_BIASES} token ids to numbers"
        allowed = self.allowed_token_ids
        few = allowed is None or (_few(allowed, _is_token_id, MAX_ALLOWED_IDS) and len(allowed) > 0)
        yield "allowed_token_ids", few, f"some token ids, up to {MAX_ALLOWED_IDS}"
        grammar = self.structured_outputs
        right = grammar is None or isinstance(grammar, StructuredOutputsParams)
        yield "structured_outputs", right, "a StructuredOutputsParams"
        yield "stop", self.detokenize or not self.stop, "none without text (detokenize is false)"

    def _others(self, given: Sequence[str]) -> Iterator[tuple[str, bool, str]]:
        for name in filter(_FLAGS.__contains__, given):
            yield name, isinstance(getattr(self, name), bool), "true or false"
        kinds = "DELTA (tokens as they come) or FINAL_ONLY (whole answers)"
        yield "output_kind", self.output_kind in (None, "DELTA", "FINAL_ONLY"), kinds
        yield "flat_logprobs", self.flat_logprobs is False, "false: log-probabilities come by token"
        yield "extra_args", self.extra_args is None, "None: there are none"
        yield "logits_processors", self.logits_processors is None, "None: logit_bias, bad_words, structured_outputs"


class Number(NamedTuple):
    """A number of SamplingParams. `annotated`: its type with the bounds; `types`: those that a value may have."""

    annotated: Any
    types: tuple[type, ...]
    bounds: Bounds
    default: Any

    @property
    def allowed(self) -> str:
        minimum, maximum = self.bounds.minimum, self.bounds.maximum
        words = f"at least {minimum}" if maximum == math.inf else f"{minimum} to {maximum}"
        return self.bounds.allowed or ("None, or " if NoneType in self.types else "") + words


def _numbers() -> Iterator[tuple[str, Number]]:
    for name, hint in _HINTS.items():
        for kind in (hint, *get_args(hint)):
            if get_origin(kind) is Annotated:
                number, bounds = get_args(kind)
                types = (number, *((int,) if number is float else ()), *((NoneType,) if kind is not hint else ()))
                yield name, Number(kind, types, bounds, _DEFAULTS[name])


_HINTS = get_type_hints(SamplingParams, include_extras=True)
_DEFAULTS = {one.name: one.default for one in fields(SamplingParams)}
_FLAGS = {name for name, hint in _HINTS.items() if hint is bool}
_TUPLES = {"stop", "stop_token_ids", "bad_words"}
NUMBERS = dict(_numbers())
LOGIT_NUMBERS = {name: number for name, number in NUMBERS.items() if number.bounds.feature}  # those that act on logits
_CHECKS = {name: (one.types, one.bounds.minimum, one.bounds.maximum, one.allowed) for name, one in NUMBERS.items()}


def _is_default(value: Any, default: Any) -> bool:
    """Whether a value surely is the default, which need not be checked."""
    return value is default or (type(value) is type(default) is float and value == default)


def _as_text(kind: str, value: Any) -> str:
    """The constraint as one text: what is compiled, and what a compiled grammar is known by."""
    param = f"structured_outputs.{kind}"
    if kind == "json_object":
        if value is not True:
            raise _refusal(param, value, "true or false")
        return ""
    if kind == "json" and isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = _schema_of(value)
    if not isinstance(value, str) and least_chars(value, MAX_CHARS) > MAX_CHARS:  # writing it would hold others up
        raise _too_long(param)
    text = _written(kind, value, param)
    if len(text) > MAX_CHARS:
        raise _too_long(param)
    return text


def _written(kind: str, value: Any, param: str) -> str:
    if kind == "choice":
        if not _all(_as_tuple(value), _is_text) or not value:
            raise _refusal(param, value, "a list of non-empty texts")
        return json.dumps(list(value))
    if kind in ("json", "structural_tag") and isinstance(value, Mapping):
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{param} cannot be written as JSON: {error}", param="structured_outputs") from error
    if not _is_text(value):
        raise _refusal(param, value, "a non-empty text")
    return plain(value)


def _too_long(param: str) -> RequestError:
    return RequestError(f"{param} has more than {MAX_CHARS} characters; simplify it", param="structured_outputs")


def _schema_of(model: Any) -> Any:
    """The JSON schema of a pydantic class."""
    try:
        return model.model_json_schema()
    except Exception as error:  # whatever its fields make of it
        raise RequestError(
            f"structured_outputs.json: {model!r:.60} has no JSON schema: {error}", param="structured_outputs"
        ) from error


def _as_tuple(value: Any) -> Any:
    """A list or array as a tuple, None as an empty one; anything else as it is, to be refused."""
    value = () if value is None else plain_list(value)
    return tuple(value) if isinstance(value, list) else value


def _as_kind(value: Any) -> Any:
    """The name of vLLM's RequestOutputKind, which may be given as such, by name or by number."""
    return _KINDS.get(value, value) if type(value) is int else getattr(value, "name", value)


def _as_biases(value: Any) -> dict[int, float]:
    """Token id to a bias within the limits. Ids may come as text: JSON has no other keys."""
    if isinstance(value, Mapping) and len(value) > MAX_LOGIT_BIASES:
        raise _refusal("logit_bias", value, f"a mapping of up to {MAX_LOGIT_BIASES} token ids to numbers")
    try:
        biases = {int(key): float(bias) for key, bias in value.items()}
        if any(bias != bias for bias in biases.values()) or any(isinstance(key, float) for key in value):
            raise ValueError
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise _refusal("logit_bias", value, "a mapping of token ids to numbers") from error
    return {key: max(-MAX_BIAS, min(MAX_BIAS, bias)) for key, bias in biases.items()}


def _refusal(param: str, got: object, allowed: str) -> RequestError:
    shown = repr(list(got) if isinstance(got, tuple) else got)  # as it was given, mostly
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    return RequestError(f"{param} is {shown}; allowed: {allowed}", param=param.partition(".")[0])


def _all(values: Any, good: Any) -> bool:
    return isinstance(values, tuple) and all(good(value) for value in values)


def _few(values: Any, good: Any, most: int) -> bool:
    """Whether there are so many at most, and all are good; what are too many is not looked through."""
    return isinstance(values, tuple) and len(values) <= most and _all(values, good)


def _is_text(value: object) -> bool:
    """Text that has something in it, and no half of a character, which UTF-8 cannot write."""
    return isinstance(value, str) and value != "" and not _HALVES.search(value)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def answer_seeds(seed: int, count: int) -> list[int]:
    """Seeds of 64 bits for the answers to one request: `seed` itself, and then what it hashes to with the answer's
    number. Counting up would share them with requests of neighbouring seeds."""
    seed %= 2**64
    hashed = (blake2b(b"%d %d" % (seed, index), digest_size=8).digest() for index in range(1, count))
    return [seed, *(int.from_bytes(digest, "little") for digest in hashed)]


def check_prompt_masks(masks: Sequence[bytes], num_prompt: int, vocab_size: int) -> None:
    """RequestError unless they are recorded vocabularies (kernels/sampled_logprobs/kept.py), or b"" for all tokens, one
    for each prompt token but the first."""
    if len(masks) != num_prompt - 1:
        allowed = f"{num_prompt - 1}, as many as the prompt has tokens but the first"
        raise RequestError(f"prompt_masks are {len(masks)}; allowed: {allowed}", param="prompt_masks")
    for mask in masks:
        words = memoryview(mask).cast("i") if len(mask) % 4 == 0 else None
        if words is not None and len(words) and words[0] == -1:  # bits follow
            is_good = len(words) == 1 - (-vocab_size // 32)
        else:
            is_good = words is not None and (not words or 0 <= min(words) <= max(words) < vocab_size)
        if not is_good:
            raise _refusal("prompt_masks", mask, f"what sampling_mask reports of a vocabulary of {vocab_size}")

"""Checks a caller's request and builds its message: every invalid value is found here, before anything is sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from glm5.chat.parser import THINK_END
from glm5.chat.template import ends_in_reasoning
from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import MissingExtra, RequestError
from glm5.common.plain import plain, plain_list
from glm5.engine.sampling.params import MAX_STOP_IDS, SamplingParams, answer_seeds, check_prompt_masks
from glm5.engine.sampling.words import bad_word_ids
from glm5.engine.scheduler.config import SchedulerConfig
from glm5.engine.scheduler.messages import Submit
from glm5.engine.transport.wire import AddRequest, EngineInfo

Prompt = str | Sequence[int] | Mapping[str, Any]

_BYTES = (bytes, bytearray, memoryview)  # sequences of integers, but not of token ids
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True)
class Options:
    """Options of a request in addition to its sampling parameters.

    `priority`: lower is served first. `cache_salt`: prompts share cached pages only with those of the same salt.
    `num_speculative_tokens`: the most drafts a step, None for the engine's. `routed_experts`: report which experts
    computed its tokens; `sampling_mask`: which token ids each was drawn from. `starts_after`: a token (the end of
    thinking); structured output applies after it, the thinking budget up to it. `not_before`: tokens that are forbidden
    before it, in addition to end tokens. `keeps_pages`: the salt names a session, whose pages stay when weights are
    updated with the policy "keep-session"; they stay on the device. `prompt_masks`: of each prompt token but the first
    the vocabulary that it was drawn from, as `sampling_mask` reports it, b"" for all tokens: `prompt_logprobs`'
    `tempered` are of the distributions over these.
    """

    priority: int = 0
    cache_salt: str = ""
    num_speculative_tokens: int | None = None
    routed_experts: bool = False
    sampling_mask: bool = False
    starts_after: int | None = None
    not_before: tuple[int, ...] = ()
    keeps_pages: bool = False
    prompt_masks: tuple[bytes, ...] = ()

    def check(self) -> None:
        """RequestError for a wrong type, or a number out of range."""
        depth, after, before = self.num_speculative_tokens, self.starts_after, self.not_before
        masks = self.prompt_masks
        for name, good, allowed in (
            ("priority", type(self.priority) is int and -(2**63) <= self.priority < 2**63, "a 64-bit integer"),
            ("cache_salt", isinstance(self.cache_salt, str), "a text"),
            ("num_speculative_tokens", depth is None or type(depth) is int, "None, or an integer"),
            ("routed_experts", isinstance(self.routed_experts, bool), "true or false"),
            ("sampling_mask", isinstance(self.sampling_mask, bool), "true or false"),
            ("keeps_pages", isinstance(self.keeps_pages, bool), "true or false"),
            ("starts_after", after is None or type(after) is int, "None, or a token id"),
            ("not_before", isinstance(before, tuple) and set(map(type, before)) <= {int}, "a tuple of token ids"),
            ("prompt_masks", isinstance(masks, tuple) and set(map(type, masks)) <= {bytes}, "a tuple of bytes"),
        ):
            if not good:
                raise RequestError(f"{name} is {getattr(self, name)!r:.60}; allowed: {allowed}", param=name)


_OPTIONS = tuple(field.name for field in fields(Options))


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as token ids. `text` is None if it was given as token ids."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""


def listed(prompts: Any, prompt_token_ids: Any = None) -> list[Any]:
    """One or several prompts as a list of unread prompts. `prompt_token_ids` is vLLM's older name for ids."""
    name = "prompts"
    if prompt_token_ids is not None:
        if prompts is not None:
            raise RequestError("prompts and prompt_token_ids are both given; allowed: one of the two", param="prompt")
        name, prompts = "prompt_token_ids", prompt_token_ids
    prompts = plain_list(prompts)
    if isinstance(prompts, _BYTES) or not isinstance(prompts, (str, Mapping, Sequence)):
        raise RequestError(f"{name} are {prompts!r:.60}; allowed: a prompt, or a list of them", param="prompt")
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, name: str) -> ReadPrompt:
    """Read a prompt in any form: text, token ids, or vLLM's {"prompt": ...} and {"prompt_token_ids": ...}, with
    "cache_salt". Names of special tokens in a text become special tokens."""
    salt, allowed = "", "a text or a list of token ids"
    if isinstance(prompt, Mapping):
        if unknown := [key for key, value in prompt.items() if key not in _KEYS and value is not None]:
            raise RequestError(
                f"{name} has the key {unknown[0]!r:.60}; allowed: prompt or prompt_token_ids, and cache_salt",
                param="prompt",
            )
        salt = prompt.get("cache_salt") or ""
        if "prompt_token_ids" in prompt:
            name, prompt, allowed = f"{name}: prompt_token_ids", prompt["prompt_token_ids"], "a list of token ids"
        else:
            prompt = prompt.get("prompt", ())
    if not isinstance(salt, str):
        raise RequestError(f"{name}: cache_salt is {salt!r:.60}; allowed: a text", param="cache_salt")
    if isinstance(prompt, str) and allowed != "a list of token ids":
        if tokenizer is None:
            raise RequestError(
                f"{name} is text and there is no tokenizer; give token ids, or LLM(..., tokenizer=PATH)", param="prompt"
            )
        return ReadPrompt(prompt, tokenizer.encode(prompt), salt)
    ids = _ids(prompt)
    if ids is None:
        raise RequestError(f"{name} is {prompt!r:.60}; allowed: {allowed}", param="prompt")
    return ReadPrompt(None, ids, salt)


def options_of(given: Mapping[str, Any]) -> Options:
    """Options by name. RequestError for one that does not exist."""
    if unknown := [name for name in given if name not in _OPTIONS]:
        raise RequestError(f"{unknown[0]} is no option of a request; allowed: {', '.join(_OPTIONS)}", param=unknown[0])
    return Options(**dict(given) | {"priority": plain(given.get("priority", 0))})


def _ids(prompt: Any) -> list[int] | None:
    """Token ids, or None for any other value."""
    if type(prompt) is list and set(map(type, prompt)) <= {int}:
        return prompt
    prompt = plain_list(prompt)
    if isinstance(prompt, (str, *_BYTES)) or not isinstance(prompt, Sequence):
        return None
    ids = list(prompt)
    return ids if set(map(type, ids)) <= {int} else None


class RequestBuilder:
    """Checks requests against an engine's facts, and builds their messages. Thread-safe."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer | None, eos_ids: Sequence[int]):
        self.info, self.tokenizer, self.eos_ids = info, tokenizer, frozenset(eos_ids)
        self._limits = SchedulerConfig(
            page_size=info.page_size,
            num_pages=info.num_pages,
            max_num_seqs=info.max_num_seqs,
            max_tokens_per_step=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            max_depth=info.max_depth,
        )

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, options: Options) -> list[int]:
        """The prompt's ids, truncated if the parameters say so. RequestError for a request that cannot be served, or
        MissingExtra for a grammar."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {params!r:.60}; allowed: a SamplingParams", param="sampling_params")
        options.check()
        vocab_size = self.info.vocab_size
        ids = _ids(prompt_ids)
        if ids is None:
            raise RequestError(f"the prompt is {prompt_ids!r:.60}; allowed: token ids", param="prompt")
        prompt_ids = self._cut(ids, params.truncate_prompt_tokens)
        num_new, depth = self._max_tokens(prompt_ids, params), options.num_speculative_tokens
        self._limits.check(Submit((), prompt_ids, num_new, max_depth=depth))
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
            least, most = min(prompt_ids), max(prompt_ids)
            found = f"the token id {least}" if least == most else f"token ids {least} to {most}"
            raise RequestError(f"the prompt holds {found}; allowed: 0 to {vocab_size - 1}", param="prompt")
        params.check_token_ids(vocab_size)
        for name, tokens in (("starts_after", (options.starts_after or 0,)), ("not_before", options.not_before)):
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                raise RequestError(f"{name} is {getattr(options, name)}; allowed: below {vocab_size}", param=name)
        if (count := len(self._stop_ids(params))) > MAX_STOP_IDS:
            allowed = f"{MAX_STOP_IDS}, the model's end tokens included"
            raise RequestError(f"stop_token_ids are {count} tokens; allowed: {allowed}", param="stop_token_ids")
        for name, what in (("stop", "stop strings"), ("bad_words", "bad words"), ("structured_outputs", "grammars")):
            if getattr(params, name) and self.tokenizer is None:
                raise RequestError(f"{what} need a tokenizer, and this engine has none", param=name)
        if params.structured_outputs is not None and find_spec("xgrammar") is None:
            raise MissingExtra("structured_outputs need the package 'xgrammar': run  pip install 'glm5[grammar]'")
        params.check_reports(self.info.max_logprobs, sampling_mask=options.sampling_mask)
        if options.prompt_masks:
            check_prompt_masks(options.prompt_masks, len(prompt_ids), vocab_size)
        if options.routed_experts and not self.info.routed_experts:
            raise RequestError(
                "routed_experts are not recorded by this engine; start it with enable_return_routed_experts",
                param="routed_experts",
            )
        return prompt_ids

    def build(
        self, seq_ids: tuple[int, ...], seed: int, prompt_ids: Sequence[int], params: SamplingParams, options: Options
    ) -> AddRequest:
        """The message for a request that was checked. `seed`: see `answer_seeds`."""
        encode = None if self.tokenizer is None else self.tokenizer.encode
        starts_after, not_before = self._starts_after(prompt_ids, params, options), options.not_before
        depth = options.num_speculative_tokens
        if starts_after is not None and params.structured_outputs is not None:
            # An answer that ends before its grammar begins would be empty.
            not_before = tuple(sorted({*not_before, *self.eos_ids}))
        return AddRequest(
            seq_ids=seq_ids,
            prompt_ids=list(prompt_ids),
            params=self._plain(params, prompt_ids),
            seeds=tuple(answer_seeds(seed, params.n)),
            max_tokens=self._max_tokens(prompt_ids, params),
            stop_ids=tuple(sorted(self._stop_ids(params))),
            bad_words=bad_word_ids(params.bad_words, encode) if params.bad_words and encode is not None else (),
            starts_after=starts_after,
            not_before=not_before,
            priority=options.priority,
            salt=options.cache_salt.encode(errors="surrogatepass"),
            max_depth=None if depth is None else min(depth, self.info.max_depth),
            routed_experts=options.routed_experts,
            sampling_mask=options.sampling_mask,
            keeps_pages=options.keeps_pages,
            prompt_masks=options.prompt_masks,
        )

    def _cut(self, ids: list[int], truncate: int | None) -> list[int]:
        most = self.info.max_model_len - 1 if truncate == -1 else truncate
        return ids if most is None else ids[-most:]

    def _plain(self, params: SamplingParams, prompt_ids: Sequence[int]) -> SamplingParams:
        """The parameters for the engine: for one answer, with numbers of tokens limited to the answer's length."""
        changes: dict[str, Any] = {"n": 1} if params.n > 1 else {}
        most = self._max_tokens(prompt_ids, params)
        for name in ("max_tokens", "min_tokens", "thinking_token_budget"):
            if (getattr(params, name) or 0) > most:
                changes[name] = most
        if params.structured_outputs is not None:
            changes["structured_outputs"] = params.structured_outputs.plain()
        return params.but(**changes) if changes else params

    def _starts_after(self, prompt_ids: Sequence[int], params: SamplingParams, options: Options) -> int | None:
        """`starts_after` as given; for a thinking budget alone, the end tag if the answer begins with thinking."""
        has_budget_only = params.thinking_token_budget is not None and params.structured_outputs is None
        if options.starts_after is not None or not has_budget_only or self.tokenizer is None:
            return options.starts_after
        return self.tokenizer.id_of(THINK_END) if ends_in_reasoning(prompt_ids, self.tokenizer) else None

    def _max_tokens(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        room = max(1, self.info.max_model_len - len(prompt_ids))
        return min(room, params.max_tokens or room)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids).union(() if params.ignore_eos else self.eos_ids)

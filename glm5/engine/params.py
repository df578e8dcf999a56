"""What a request asks of the sampler and of its ending. Field names, defaults and meanings are vLLM's.

`temperature=0` is greedy. `max_tokens=None` means up to the end of the context. All values are checked
here, once, so that nothing further down has to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from glm5.common.errors import RequestError

GREEDY_BELOW = 1e-5  # a temperature under this is greedy, as in vLLM: dividing by it would overflow
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. Raises RequestError naming the field, the value and what is allowed."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all tokens
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None  # 0: of the sampled token alone; k: of the k likeliest besides
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = _as_tuple([self.stop] if isinstance(self.stop, str) else self.stop)
        stop_token_ids = _as_tuple(self.stop_token_ids)
        _check("n", self.n, _is_int(self.n) and self.n == 1, "1 (send the request several times for more)")
        _check("temperature", self.temperature, _within(self.temperature, 0.0, 100.0), "0 (greedy) to 100")
        _check("top_p", self.top_p, _within(self.top_p, 0.0, 1.0) and self.top_p > 0, "above 0, at most 1")
        _check("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= -1, "-1 or 0 (all), or at least 1")
        _check("min_p", self.min_p, _within(self.min_p, 0.0, 1.0), "0 to 1")
        _check("seed", self.seed, self.seed is None or _fits_64_bits(self.seed), "a 64-bit integer")
        texts = isinstance(stop, tuple) and all(isinstance(text, str) and text for text in stop)
        few = texts and len(stop) <= MAX_STOP_STRINGS
        _check("stop", self.stop, few, f"a non-empty text, or up to {MAX_STOP_STRINGS} of them")
        ids = isinstance(stop_token_ids, tuple) and all(_is_int(i) and i >= 0 for i in stop_token_ids)
        _check("stop_token_ids", self.stop_token_ids, ids, "a list of token ids of at least 0")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        whole = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _check("max_tokens", self.max_tokens, whole, "at least 1, or None for up to the end of the context")
        limit = self.max_tokens if self.max_tokens is not None else float("inf")
        _check("min_tokens", self.min_tokens, _is_int(self.min_tokens) and 0 <= self.min_tokens <= limit,
               f"0 to max_tokens ({self.max_tokens})")  # fmt: skip
        shown = self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS)
        _check("logprobs", self.logprobs, shown, f"None, or 0 to {MAX_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def but(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


def _as_tuple(value: Any) -> Any:
    """A list as a tuple, None as an empty one; anything else as it is, to be refused."""
    return tuple(value) if isinstance(value, (list, tuple)) else () if value is None else value


def _check(param: str, got: object, good: bool, allowed: str) -> None:
    if not good:
        raise RequestError(f"{param} is {got!r:.200}; allowed: {allowed}", param=param)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _within(value: object, low: float, high: float) -> bool:
    """A number in [low, high]; NaN is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _fits_64_bits(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64

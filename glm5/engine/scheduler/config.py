"""A scheduler's settings: sizes of the cache and of a step, and the cost of loading pages."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from glm5.common.errors import ConfigError, RequestError
from glm5.engine.scheduler.messages import Submit, Tier
from glm5.engine.scheduler.plan import Bucket, StepPlan

DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class RestoreCost:
    """The cost of loading pages from lower tiers, in units of computing one token. Copies overlap with steps, but a
    sequence waits for its own.

    The defaults are for 4 MB a page (GLM-5, fp8, 64 tokens) at 24k tokens/s, 25 GB/s of host and 3 GB/s of disk.
    """

    host_page: float = 4.0
    disk_page: float = 32.0
    fixed: float = 64.0

    def num_pages(self, tiers: Sequence[Tier], page_size: int) -> int:
        """How many of these pages, which continue a prefix, to load; the rest is computed. 0 if loading costs more."""
        best, best_saved, saved = 0, 0.0, -self.fixed
        for number, tier in enumerate(tiers, start=1):
            saved += page_size - (self.host_page if tier == "host" else self.disk_page)
            if saved > best_saved:
                best, best_saved = number, saved
        return best


@dataclass(frozen=True)
class SchedulerConfig:
    """Raises ConfigError for invalid settings."""

    page_size: int
    num_pages: int
    max_num_seqs: int
    max_tokens_per_step: int
    max_model_len: int
    max_depth: int = 0
    """The most tokens drafted for a sequence and step."""
    launch_ahead: bool = True
    """Whether a step is planned before the tokens of the one before it are read."""
    prefix_cache: bool = True
    max_prompt_chunk: int | None = None
    """The most tokens of one prompt in a step, in addition to the half-budget rule."""
    max_prompt_tokens: int | None = None
    """The most prompt tokens in a step in which other sequences decode, until `SetPromptShare` changes it. It
    bounds the time that decoding sequences wait for the step."""
    full_prompt: int = 0
    """Prompts of up to this many tokens are computed in one chunk. They get steps of their own if together they have at
    least half as many tokens: attention is several times as fast in a step that contains only full prompts
    (engine/runner/fused/fused_model.py). 0: no such steps."""
    headroom: float = 0.05
    """Share of the pages that stays available for running sequences to grow when another one is admitted. Compared with
    0, in an overloaded pool: 2 % more steps, but 10 to 25 % fewer rows, as fewer are recomputed after preemption."""
    tiers: bool = False
    """Whether full pages are stored in lower tiers and looked up there."""
    restore_cost: RestoreCost = RestoreCost()
    max_loads: int = 32
    max_stores: int = 32
    """The most concurrent copies from and to the tiers. A page being stored cannot be evicted."""
    batch_buckets: tuple[int, ...] = DEFAULT_BUCKETS
    """Numbers of sequences that a decoding step is padded to; the largest is always `max_num_seqs`."""
    token_buckets: tuple[int, ...] = ()
    """Numbers of tokens that a mixed step is padded to; the largest is always `max_tokens_per_step`."""

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "max_num_seqs", "max_model_len", "max_loads", "max_stores"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _check("max_depth", self.max_depth, self.max_depth >= 0, "at least 0")
        _check("headroom", self.headroom, 0 <= self.headroom < 1, "0 to below 1")
        enough = self.max_tokens_per_step >= self.max_num_seqs
        allowed = f"at least max_num_seqs ({self.max_num_seqs}), so that every sequence can take part in every step"
        _check("max_tokens_per_step", self.max_tokens_per_step, enough, allowed)
        chunk = self.max_prompt_chunk
        _check("max_prompt_chunk", chunk, chunk is None or chunk >= 1, "None or at least 1")
        _check("full_prompt", self.full_prompt, self.full_prompt >= 0, "at least 0")
        limit = self.max_prompt_tokens
        _check("max_prompt_tokens", limit, limit is None or limit >= 1, "None or at least 1")
        _check("tiers", self.tiers, self.prefix_cache or not self.tiers, "only with prefix_cache")

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def prompt_budget(self, limit: int | None) -> int:
        """The most prompt tokens in a step. `limit`: `max_prompt_tokens` if others decode in it, else None."""
        return self.max_tokens_per_step if limit is None else min(limit, self.max_tokens_per_step)

    def full_prompt_limit(self, limit: int | None) -> int:
        """The most tokens of a prompt that is computed in one chunk. `limit`: see `prompt_budget`."""
        most = self.prompt_budget(limit)
        return min(self.full_prompt, most, self.max_prompt_chunk or most)

    def max_len(self, submit: Submit) -> int:
        """The most tokens that a sequence can have. The last one is never computed."""
        return min(len(submit.prompt_ids) + submit.max_tokens, self.max_model_len)

    def check(self, submit: Submit) -> None:
        """RequestError for a request that cannot be served."""
        num_prompt, limit = len(submit.prompt_ids), self.max_model_len
        if not num_prompt:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        if num_prompt >= limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, the context is {limit} and must hold at least one more; shorten "
                "the prompt or raise max_model_len",
                param="prompt",
            )
        if submit.max_tokens < 1:
            raise RequestError(f"max_tokens is {submit.max_tokens}; allowed: at least 1", param="max_tokens")
        if submit.max_depth is not None and submit.max_depth < 0:
            raise RequestError(f"max_depth is {submit.max_depth}; allowed: None or at least 0", param="max_depth")
        need = self.pages_for(self.max_len(submit) - 1)
        if need > self.num_pages:
            raise RequestError(
                f"the prompt's {num_prompt} tokens and max_tokens {submit.max_tokens} need {need} pages of "
                f"{self.page_size} tokens, the cache has {self.num_pages}; lower max_tokens, shorten the prompt or "
                "give the cache more memory",
                param="max_tokens",
            )

    def batch_bucket(self, num_seqs: int) -> int:
        """Sequences that a decoding step of `num_seqs` is padded to."""
        return bucket_of(num_seqs, self.batch_buckets, self.max_num_seqs)

    def bucket(self, plan: StepPlan) -> Bucket:
        """The static shape of a planned step."""
        num_seqs, decodes_only = self.batch_bucket(len(plan.items)), plan.items[-1].kind == "decode"
        num_tokens = num_seqs * (1 + plan.depth) if decodes_only else self.token_bucket(plan.num_tokens)
        return Bucket(num_seqs, plan.depth, num_tokens, decodes_only)

    def token_bucket(self, num_tokens: int) -> int:
        """Tokens that a mixed step of `num_tokens` is padded to."""
        return bucket_of(num_tokens, self.token_buckets, self.max_tokens_per_step)


def bucket_of(count: int, buckets: Sequence[int], largest: int) -> int:
    """The smallest of the sorted `buckets` that holds `count`, at most `largest`."""
    index = bisect_left(buckets, count)
    return min(buckets[index], largest) if index < len(buckets) else largest


def _check(name: str, got: object, good: bool, allowed: str) -> None:
    if not good:
        raise ConfigError(f"{name}: got {got}; allowed: {allowed}")
